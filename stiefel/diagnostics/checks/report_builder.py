"""What a check writes its findings into: one line a law, the worst of all points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from stiefel.diagnostics.report import Curve, Finding, Report

__all__ = ["ReportBuilder", "fresh", "in_a_line"]


class ReportBuilder:
    """Collects the findings of a report over many points; of each name the worst is kept.

    Args:
        subject: What is checked.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._findings: dict[str, tuple[Finding, str]] = {}
        self._curves: dict[tuple[str, str], Curve] = {}
        self._skipped: dict[str, None] = {}

    def note(
        self,
        name: str,
        measured: float,
        sense: Literal["<=", ">="],
        bound: float,
        meaning: str,
        where: str = "",
    ) -> None:
        """Notes a number; a worse one of the same name replaces it.

        Args:
            name: What was measured.
            measured: The number; NaN is worse than any other.
            sense: ``"<="`` or ``">="``.
            bound: The bound.
            meaning: What follows where it is not kept.
            where: The point, such as ``"shape (7, 3)"``, added to the meaning.
        """
        self.add(Finding(name, float(measured), sense, bound, meaning), where)

    def add(self, finding: Finding, where: str = "") -> None:
        """Notes a finding, like `note`."""
        held = self._findings.get(finding.name)
        if held is None or _badness(finding) > _badness(held[0]):
            self._findings[finding.name] = (finding, where)

    def curve(self, curve: Curve, where: str = "") -> None:
        """Notes a curve; of one name and place the one with the largest error is kept."""
        held = self._curves.get((curve.name, where))
        if held is None or max(curve.errors) > max(held.errors):
            name = f"{curve.name}, {where}" if where else curve.name
            named = Curve(name, curve.steps, curve.errors, curve.order)
            self._curves[curve.name, where] = named

    def skip(self, reason: str) -> None:
        """Notes once what could not be checked."""
        self._skipped[reason] = None

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that is being checked.

        Returns:
            Its result; None where it is not implemented (noted as skipped) or raised anything
            else (noted as a finding that keeps no bound, with the message). An argument that it
            changed in place is a finding too, and is put back.
        """
        given = [(a, a.clone()) for a in args if isinstance(a, Tensor)]
        try:
            result = function(*args)
            for argument, before in given:
                if not torch.allclose(argument, before, rtol=0, atol=0, equal_nan=True):
                    meaning = f"{name} changes a tensor in place that belongs to its caller."
                    self.note(f"arguments changed by {name}", 1, "<=", 0, meaning)
                    if result is argument:
                        result = result.clone()
                    argument.copy_(before)
            if result is None and not any(a is self for a in args):
                meaning = f"{name} returned None: expected a tensor. Is a return missing?"
                self.note(f"{name} returns a tensor", math.nan, "<=", 0.0, meaning)
            return result
        except NotImplementedError:
            self.skip(f"{name} is not implemented")
        except Exception as error:
            said = in_a_line(error)
            self.note(f"{name} runs", math.nan, "<=", 0.0, f"{name} raised {said}")
        return None

    def report(self) -> Report:
        """The report of everything noted."""
        findings = []
        for finding, where in self._findings.values():
            meaning = f"{finding.meaning} Worst at {where}." if where else finding.meaning
            findings.append(
                Finding(finding.name, finding.measured, finding.sense, finding.bound, meaning)
            )
        curves = tuple(self._curves.values())
        return Report(self.subject, tuple(findings), curves, tuple(self._skipped))


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on copies of its arguments, so that it cannot change them for others."""
    return lambda *args: function(*(a.clone() if isinstance(a, Tensor) else a for a in args))


def in_a_line(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _badness(finding: Finding) -> float:
    if math.isnan(finding.measured):
        return math.inf
    return finding.measured if finding.sense == "<=" else -finding.measured
