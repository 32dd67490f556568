"""What a judgement of a record holds: the verdict, its grounds, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stiefel.diagnostics.rates import RateFit

__all__ = ["Advice", "Judgement", "Verdict"]


class Advice(StrEnum):
    """What to do, for who calls from Python; `Judgement.advising` puts other words in its place."""

    BELOW_NOISE = "Take larger batches, or judge the estimates of squared_norm_estimate"
    UNKNOWN_NOISE = "noise_floor= tells the noise of a batch from a plateau"
    FEW_RECORDS = "record more often, train longer, or give another window"
    LONG_STEP = "the step is too long"
    OVERFLOW = "the step is too long, or a loss overflowed"


class Verdict(StrEnum):
    """What a record of squared gradient norms shows."""

    DECREASING = "decreasing"
    NOISE_FLOOR = "noise floor"
    DIVERGING = "diverging"
    TOO_EARLY = "too early to say"


@dataclass(frozen=True)
class Judgement:
    """A verdict and its grounds.

    Attributes:
        verdict: What holds.
        confidence: One-sided confidence of the verdict; of the likeliest other verdict where it is
            too early to say.
        fit: The line through the end of the record; None where none could be fitted.
        explanation: The grounds in words, and what to do.
        advice: The end of the explanation, where it says what to do.
    """

    verdict: Verdict
    confidence: float
    fit: RateFit | None
    explanation: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.value} ({100 * self.confidence:.1f} %): {self.explanation}"

    def advising(self, advice: str) -> Judgement:
        """The same judgement with other words on what to do."""
        grounds = self.explanation.removesuffix(self.advice)
        return replace(self, explanation=grounds + advice, advice=advice)
