"""What a check returns: findings with their bounds, what they mean, and curves to look at."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stiefel.errors import DiagnosisError

__all__ = ["Curve", "Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """One number that was measured, and the bound that it has to keep.

    Attributes:
        name: What was measured, such as ``"order of the retraction"``.
        measured: The number; NaN never keeps a bound.
        sense: Whether it has to be at most (``"<="``) or at least (``">="``) the bound.
        bound: The bound.
        meaning: What follows where the bound is not kept, and what to do about it.
    """

    name: str
    measured: float
    sense: Literal["<=", ">="]
    bound: float
    meaning: str

    @property
    def ok(self) -> bool:
        """Whether the bound is kept."""
        if self.sense == "<=":
            return self.measured <= self.bound
        return self.measured >= self.bound

    def __str__(self) -> str:
        verdict = "ok    " if self.ok else "WRONG "
        return f"{verdict} {self.name}: {self.measured:.3g} ({self.sense} {self.bound:.3g})"


@dataclass(frozen=True)
class Curve:
    """An error against a step length, for a picture in logarithmic axes.

    Attributes:
        name: What the error is.
        steps: Step lengths t.
        errors: The error at each of them.
        order: The slope that it should have; None where none is expected.
    """

    name: str
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    order: float | None = None


@dataclass(frozen=True)
class Report:
    """The result of a check. Print it to read it.

    Attributes:
        subject: What was checked.
        findings: What was measured, in the order of the check.
        curves: What `draw` draws.
        skipped: What could not be checked, each with its reason.

    Example:
        >>> from stiefel.diagnostics import Finding, Report
        >>> slow = Finding("order", 1.0, ">=", 1.9, "it is no retraction: scale the vector first.")
        >>> report = Report("retraction of Mine", (slow,))
        >>> report.ok, [finding.name for finding in report.failures]
        (False, ['order'])
        >>> print(report)
        retraction of Mine: 1 of 1 finding is WRONG
          WRONG  order: 1 (>= 1.9)
                 it is no retraction: scale the vector first.
    """

    subject: str
    findings: tuple[Finding, ...]
    curves: tuple[Curve, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was measured and every bound is kept."""
        return bool(self.findings) and not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings whose bounds are not kept."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __getitem__(self, name: str) -> Finding:
        """The finding of that name.

        Raises:
            KeyError: If there is none; the message lists those that are there.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no finding {name!r}: there are {[f.name for f in self.findings]}")

    def __str__(self) -> str:
        count, wrong = len(self.findings), len(self.failures)
        noun, verb = ("finding", "is") if count == 1 else ("findings", "are")
        verdict = f"{wrong} of {count} {noun} {verb} WRONG" if wrong else f"{count} {noun}, all ok"
        lines = [f"{self.subject}: {verdict if count else 'nothing could be checked'}"]
        for finding in self.findings:
            lines.append(f"  {finding}")
            if not finding.ok:
                lines.append(textwrap.indent(textwrap.fill(finding.meaning, 88), " " * 9))
        lines.extend(f"  skipped: {reason}" for reason in self.skipped)
        return "\n".join(lines)

    def raise_for_failures(self) -> Report:
        """Raises what was found wrong.

        Returns:
            The report itself where all is well.

        Raises:
            DiagnosisError: If a bound is not kept, or nothing was measured; the message is the
                report.
        """
        if not self.ok:
            raise DiagnosisError(str(self))
        return self

    def draw(self, file: str | Path | None = None) -> Any:
        """Draws the curves in logarithmic axes, each beside the slope that it should have.

        Args:
            file: Where to write the picture, a PNG or what its name ends in; None writes none.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ConfigurationError: If the report has no curves, or matplotlib is missing.
        """
        from stiefel.diagnostics.plots import draw_curves

        return draw_curves(self, file)
