"""Gap against time of one run, measured outside the time that counts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.harness import Settings
from benchmarks.problems import KnownMinimum
from stiefel.geometry import orthonormality_residual, polar_factor
from stiefel.numerics import tolerance

__all__ = ["Finished", "Trace"]

#: A run ends at this relative gap, which is rounding.
_ENOUGH = 1e-14
#: Points are measured at the first iterations and whenever the time has grown by this factor.
_FIRST, _GROWTH = 20, 1.02


class Finished(Exception):
    """The run has used up its time, or reached the minimum."""


@dataclass
class Trace:
    """The clock of a run that stands still while a point is measured.

    A method calls `start`, then `mark` with every iterate. A point off the manifold is moved to
    the nearest point before f is evaluated, and counted as moved: an infeasible point can lie
    below the minimum.

    Attributes:
        problem: What is minimised.
        settings: Device and clock.
        limit: Seconds after which `mark` raises `Finished`.
        seconds: When points were measured.
        gaps: Their relative gaps.
        residual: The largest entry of |X^T X - I| met.
        moved: How many of the measured points were off the manifold.
        iterations: How many iterates there were, the start not counted.
        note: What a method says about its end.
    """

    problem: KnownMinimum
    settings: Settings
    limit: float
    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    residual: float = 0.0
    moved: int = 0
    iterations: int = -1
    note: str = ""
    _elapsed: float = 0.0
    _since: float = 0.0

    def _now(self) -> float:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.settings.clock == "process" else time.perf_counter()

    def start(self) -> None:
        """Sets the clock going, at the start of the problem."""
        self._elapsed, self._since = 0.0, self._now()
        self.mark(self.problem.start)

    def check(self) -> None:
        """Raises `Finished` when the time is used up; for long work between two points."""
        if self._elapsed + self._now() - self._since > self.limit:
            raise Finished

    def mark(self, X: Tensor) -> None:
        """Takes note of an iterate."""
        self._elapsed += self._now() - self._since
        self.iterations += 1
        late = self._elapsed > self.limit
        due = late or self.iterations < _FIRST or self._elapsed > _GROWTH * self.seconds[-1]
        if due and not self._measure(X.detach()):
            self.note = self.note or "diverged"
            raise Finished
        if late or (due and self.gaps[-1] <= _ENOUGH):
            raise Finished
        self._since = self._now()

    def _measure(self, X: Tensor) -> bool:
        residual = float(orthonormality_residual(X).max())
        if not math.isfinite(residual):
            return False
        self.residual = max(self.residual, residual)
        if residual > tolerance(X.dtype, *X.shape):
            self.moved += 1
            X = polar_factor(X)
        gap = self.problem.gap(X)
        if not math.isfinite(gap):
            return False
        self.seconds.append(self._elapsed)
        self.gaps.append(gap)
        return True

    def finish(self, X: Tensor) -> None:
        """Measures the last point of a method that ended by itself."""
        self._elapsed += self._now() - self._since
        self._measure(X.detach())

    @property
    def best(self) -> float:
        """The least gap."""
        return min(self.gaps, default=math.inf)

    def reached(self, gap: float) -> float | None:
        """When the gap was first at most `gap`; None if never."""
        pairs = zip(self.seconds, self.gaps, strict=True)
        return next((t for t, g in pairs if g <= gap), None)

    def at(self, seconds: float) -> float:
        """The least gap up to that time."""
        pairs = zip(self.seconds, self.gaps, strict=True)
        return min((g for t, g in pairs if t <= seconds), default=math.inf)
