"""What `stiefel.optim.minimize` returns, and the bookkeeping of one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from scipy.optimize import OptimizeResult

from stiefel.optim.solvers.curvature import Curvature
from stiefel.optim.solvers.problem import Evaluation, Problem

__all__ = ["Limits", "MinimizeResult", "Run", "Status"]

#: After so many iterations without a better value or gradient norm a run has stagnated.
_PATIENCE = 200
#: Said of a run that has converged without a step.
_AT_ONCE = "; X0 is so already, no step was made"


class Status(IntEnum):
    """Why a run ended; 0 alone is a success."""

    CONVERGED = 0
    MAX_ITERATIONS = 1
    MAX_SECONDS = 2
    STAGNATION = 3
    CALLBACK = 4
    LINE_SEARCH = 5
    NONFINITE = 6


class MinimizeResult(OptimizeResult):
    """The result of `stiefel.optim.minimize`: a `scipy.optimize.OptimizeResult`.

    Attributes:
        x: The point, of the type that was given: a tensor, a `stiefel.ManifoldParameter`, or a
            list or tuple of them.
        fun: f there, a float.
        grad_norm: The norm of the Riemannian gradient there, in the metric of the manifold.
        nit: Iterations.
        nfev: Evaluations of f.
        ngev: Evaluations of its gradient.
        success: Whether `grad_norm` came below the tolerance: x is stationary to first order. A
            minimum is, and so is a saddle or a maximum; descent that starts at one stays there.
        status: 0 converged, 1 iterations used up, 2 time used up, 3 stagnation, 4
            stopped by the callback, 5 no step of the line search decreases f, 6 the gradient is
            not finite.
        message: The same in words.
        curvature: The least ``<u, Hess[u]>`` over the unit tangent vectors u that were tried at x,
            where ``method="trust-region"`` converged; NaN elsewhere. Where it is negative beyond
            rounding x is no minimum; else it may still be none.
        feasibility: The largest entry of |X^H X - I| (0 for free tensors).
        history: Lists ``fun``, ``grad_norm`` and ``seconds`` with an entry for the start and for
            each iteration, and ``feasibility`` (NaN where it was not measured). Printing the
            result tells their length only.
    """

    def __repr__(self) -> str:
        """As of scipy, the history by its length."""
        shown = OptimizeResult(self)
        if "history" in shown:
            entries = len(self["history"].get("fun", ()))
            shown["history"] = f"{', '.join(self['history'])}: {entries} entries each"
        return repr(shown)


@dataclass(frozen=True)
class Limits:
    """When a run ends, and who is told about it."""

    tol: float
    absolute_tol: float = 0.0
    max_iterations: int = 10_000
    max_seconds: float | None = None
    callback: Callable[[MinimizeResult], Any] | None = None
    feasibility_every: int = 50


class Run:
    """The bookkeeping of one run: history, best point, and when to stop.

    A solver calls `stop` with every new iterate, the start first, until it says True. When it finds
    no step it calls `retry` to try another direction from the same iterate, or `stuck` when the
    direction was the gradient, or `fail` to end. The end leaves `status` and `message`.
    """

    def __init__(self, problem: Problem, limits: Limits, wrap: Callable[[Any], Any]) -> None:
        self.problem, self.limits, self.wrap = problem, limits, wrap
        self.status: Status | None = None
        self.message = ""
        self.history: dict[str, list[float]] = {
            name: [] for name in ("fun", "grad_norm", "seconds", "feasibility")
        }
        self.best: Evaluation | None = None
        self.last: Evaluation | None = None
        self._least_norm, self._since = math.inf, 0
        self._scale = 0.0
        self.curvature = math.nan
        self._again = False
        self._began = time.perf_counter()

    @property
    def nit(self) -> int:
        """Iterations made."""
        return max(len(self.history["fun"]) - 1, 0)

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._began

    @property
    def threshold(self) -> float:
        """The gradient norm at which the run has converged."""
        return max(self.limits.tol * self._scale, self.limits.absolute_tol)

    def stop(self, e: Evaluation) -> bool:
        """Takes note of an iterate; says whether it is the last."""
        if self._again:
            self._again = False
            return False
        if not e.finite:
            return self._end(Status.NONFINITE, "the gradient of f is not finite at a point")
        self._scale = max(self._scale, e.scale)
        self._record(e)
        if e.norm <= self.threshold:
            return self._end(
                Status.CONVERGED,
                f"converged: stationary to first order (a saddle is, too), the gradient norm "
                f"{e.norm:.2e} is at most {self.threshold:.2e}{'' if self.nit else _AT_ONCE}",
            )
        if self._told_to_stop(e):
            return self._end(Status.CALLBACK, "stopped by the callback")
        if self._since >= _PATIENCE:
            return self._stagnate(e)
        if self.nit >= self.limits.max_iterations:
            return self._end(
                Status.MAX_ITERATIONS, f"max_iterations = {self.nit} used up; {self._reached(e)}"
            )
        most = self.limits.max_seconds
        if most is not None and self.seconds >= most:
            return self._end(
                Status.MAX_SECONDS, f"max_seconds = {most} used up; {self._reached(e)}"
            )
        return False

    def met(self, found: Curvature) -> None:
        """Takes note of the least curvature that was met where the run has converged."""
        self.curvature = found.least
        if found.least < -found.noise:
            self.message += (
                f"; it is no minimum, a curvature is {found.least:.2e}: start again from a point "
                "beside it"
            )
        elif not math.isnan(found.least):
            self.message += f"; no negative curvature in {found.products} Hessian products"

    def retry(self) -> None:
        """Announces that the same iterate comes again, with another direction."""
        self._again = True

    def stuck(self, e: Evaluation) -> bool:
        """To call when no step along the gradient is accepted; says whether the run has ended.

        It goes on when f turns out to be noisier than was assumed: then `Problem.slack` has grown.
        """
        noise = 4 * self.problem.probe(e)
        if self.problem.slack(e.f) < noise <= self.problem.eps**0.5 * max(abs(e.f), 1e-300):
            self.problem.noise, self._again = noise, True
            return False
        return self.fail(e, "no step along the gradient decreases f", self.problem.at_rounding(e))

    def fail(self, e: Evaluation, reason: str, at_rounding: bool = True) -> bool:
        """Ends a run that can go no further, as stagnation or as a failed search; always True."""
        if at_rounding:
            status, why = Status.STAGNATION, "what is left is at the rounding level of f"
        else:
            status, why = Status.LINE_SEARCH, "is the gradient that of f, and f smooth here?"
        return self._end(status, f"{reason}: {why}; {self._reached(e)}")

    def _stagnate(self, e: Evaluation) -> bool:
        reason = f"f and its gradient have not become smaller in {_PATIENCE} iterations"
        if self.problem.at_rounding(e):
            return self.fail(e, reason)
        return self._end(Status.STAGNATION, f"{reason}; {self._reached(e)}")

    def _reached(self, e: Evaluation) -> str:
        return f"the gradient norm is {e.norm:.2e}, the tolerance {self.threshold:.2e}"

    def _end(self, status: Status, message: str) -> bool:
        self.status, self.message = status, message
        return True

    def _record(self, e: Evaluation) -> None:
        every, nit = self.limits.feasibility_every, len(self.history["fun"])
        measured = every > 0 and nit % every == 0
        self.history["fun"].append(e.f)
        self.history["grad_norm"].append(e.norm)
        self.history["seconds"].append(self.seconds)
        self.history["feasibility"].append(self.problem.feasibility(e.X) if measured else math.nan)
        self.last = e
        better = self.best is None or e.f < self.best.f - self.problem.slack(self.best.f)
        if self.best is None or e.f < self.best.f:
            self.best = e
        if better or e.norm < 0.9 * self._least_norm:
            self._since = 0
        else:
            self._since += 1
        self._least_norm = min(self._least_norm, e.norm)

    def _told_to_stop(self, e: Evaluation) -> bool:
        callback = self.limits.callback
        if callback is None:
            return False
        state = MinimizeResult(
            x=self.wrap(e.X), fun=e.f, grad_norm=e.norm, nit=self.nit, seconds=self.seconds
        )
        try:
            answer = callback(state)
        except StopIteration:
            return True
        if getattr(answer, "dtype", None) in (torch.bool, np.dtype(bool)):
            return bool(answer)
        return answer is True

    def final(self) -> Evaluation:
        """The iterate to return: the last one, or the best if it is better beyond rounding."""
        assert self.last is not None
        assert self.best is not None
        better = self.best.f < self.last.f - self.problem.slack(self.last.f)
        return self.best if better and self.status is not Status.CONVERGED else self.last
