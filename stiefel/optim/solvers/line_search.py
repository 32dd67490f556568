"""Line searches along a curve, made to work down to the rounding level of f."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stiefel.optim.solvers.problem import Evaluation, Path

__all__ = ["Trial", "armijo", "strong_wolfe"]

#: A search that begins with a predicted decrease of so many slacks, and is refused down to one
#: slack, has failed: what f says there is rounding, and would accept anything.
_CLEAR = 1e3


@dataclass
class Trial:
    """A point of the curve: its parameter, f, and the slope of f where it was computed."""

    t: float
    f: float
    slope: float | None
    evaluation: Evaluation


def armijo(
    path: Path,
    slope: float,
    t: float,
    *,
    slack: float,
    reference: float | None = None,
    decrease: float = 1e-4,
    max_trials: int = 40,
) -> Evaluation | None:
    """Backtracking until ``f(t) <= reference + decrease t slope + slack``.

    The next t is the minimum of the parabola through f(0), slope and f(t), within [t/10, t/2]; a
    value or gradient that is not finite divides t by ten.

    Args:
        path: The curve.
        slope: Slope of f at 0, negative.
        t: First trial.
        slack: By how much f may exceed the bound by rounding.
        reference: The value to compare with, f(0) by default; larger for non-monotone searches.
        decrease: The fraction of the predicted decrease that is demanded.
        max_trials: Trials.

    Returns:
        The accepted evaluation, its gradient computed; None if there is none.
    """
    f0 = path.start.f
    reference = f0 if reference is None else max(reference, f0)
    drowned = slack / -slope if -slope * t > _CLEAR * slack else 0.0
    for _ in range(max_trials):
        if t <= drowned:
            return None
        e = path.at(t)
        if math.isfinite(e.f) and e.f <= reference + decrease * t * slope + slack and e.finite:
            return e
        curvature = e.f - f0 - slope * t
        best = -slope * t * t / (2 * curvature) if curvature > 0 else t / 2
        t = min(max(best, t / 10), t / 2) if math.isfinite(e.f) else t / 10
    return None


def strong_wolfe(
    path: Path,
    slope: float,
    t: float,
    *,
    slack: float,
    decrease: float = 1e-4,
    curvature: float = 0.9,
    max_trials: int = 30,
) -> Evaluation | None:
    """A point that satisfies the strong Wolfe conditions, up to rounding of f.

    ``f(t) <= f(0) + decrease t slope + slack`` and ``|slope(t)| <= curvature |slope|``.

    Bracketing and zoom of Nocedal and Wright (2006), algorithms 3.5 and 3.6, by cubic
    interpolation. Where values differ by less than `slack` they say nothing and the slopes decide
    alone, as in the approximate Wolfe conditions of Hager and Zhang (SIAM J. Optim. 16 (2005)); so
    the search works where the decrease of f drowns in rounding. Slopes are exact derivatives of
    ``t -> f(R_X(t d))`` (see `stiefel.optim.solvers.curves`).

    Args:
        path: The curve.
        slope: Slope of f at 0, negative.
        t: First trial.
        slack: By how much values may differ by rounding.
        decrease: Fraction of the predicted decrease.
        curvature: Fraction of the slope that may be left.
        max_trials: Trials.

    Returns:
        The accepted evaluation; when the trials run out the best one that decreases f; None if
        there is none.
    """
    search = _Wolfe(path, slope, slack, decrease, curvature, max_trials)
    return search.run(t)


class _Wolfe:
    """One strong Wolfe search; a class, for bracketing and zoom share all their numbers."""

    def __init__(
        self,
        path: Path,
        slope: float,
        slack: float,
        decrease: float,
        curvature: float,
        max_trials: int,
    ) -> None:
        self.path, self.slope0, self.slack = path, slope, slack
        self.decrease, self.curvature, self.left = decrease, curvature, max_trials
        self.drowned = 0.0
        self.start = Trial(0.0, path.start.f, slope, path.start)

    def run(self, t: float) -> Evaluation | None:
        """Bracketing: moves out until an interval holds an acceptable point."""
        low, most = self.start, math.inf
        if -self.slope0 * t > _CLEAR * self.slack:
            self.drowned = self.slack / -self.slope0
        while self.left > 0:
            trial = self.trial(t)
            if trial is None:  # not finite: come back
                most = t
                t = low.t + (t - low.t) / 10
                continue
            if self.too_high(trial, low):
                return self.zoom(low, trial)
            slope = self.slope(trial)
            if slope is None:
                most = t
                t = low.t + (t - low.t) / 10
                continue
            if abs(slope) <= -self.curvature * self.slope0:
                return trial.evaluation
            if slope >= 0:
                return self.zoom(trial, low)
            low, t = trial, min(self.further(low, trial), (t + most) / 2)
        return self.settled(low)

    def trial(self, t: float) -> Trial | None:
        """f at t; None where it is not finite."""
        self.left -= 1
        e = self.path.at(t)
        return Trial(t, e.f, None, e) if math.isfinite(e.f) else None

    def slope(self, trial: Trial) -> float | None:
        """The slope at a trial; None where it is not finite."""
        if trial.slope is None and trial.evaluation.finite:
            trial.slope = self.path.slope(trial.evaluation)
        return trial.slope if trial.slope is not None and math.isfinite(trial.slope) else None

    def too_high(self, trial: Trial, low: Trial) -> bool:
        """Whether f says that the minimum lies before this trial."""
        allowed = self.start.f + self.decrease * trial.t * self.slope0 + self.slack
        return trial.f > allowed or trial.f > low.f + self.slack

    def further(self, low: Trial, trial: Trial) -> float:
        """A longer step: the cubic's minimum, within 1.5 and 10 times the last stride."""
        stride = trial.t - low.t
        guess = _minimum(low, trial, self.slack)
        if guess is None or guess <= trial.t:
            return trial.t + 4 * stride
        return min(max(guess, trial.t + stride / 2), trial.t + 9 * stride)

    def zoom(self, low: Trial, high: Trial) -> Evaluation | None:
        """Shrinks an interval; `low` is its end that decreases f most."""
        while self.left > 0:
            width = high.t - low.t
            if abs(width) <= 1e-14 * max(abs(low.t), abs(high.t)):
                break
            guess = _minimum(low, high, self.slack)
            t = low.t + width / 2 if guess is None else guess
            margin = 0.1 * width
            least, most = sorted((low.t + margin, high.t - margin))
            t = min(max(t, least), most)
            if t <= self.drowned:
                break
            trial = self.trial(t)
            slope = None
            if trial is not None and not self.too_high(trial, low):
                slope = self.slope(trial)
            if trial is None or slope is None:
                high = trial if trial is not None else Trial(t, math.inf, None, low.evaluation)
                continue
            if abs(slope) <= -self.curvature * self.slope0:
                return trial.evaluation
            if slope * width >= 0:
                high = low
            low = trial
        return self.settled(low)

    def settled(self, low: Trial) -> Evaluation | None:
        """The best point found, if it is not the start."""
        return low.evaluation if low.t > 0 else None


def _minimum(low: Trial, high: Trial, slack: float) -> float | None:
    """Where the interpolation of two trials has its minimum; None where that says nothing.

    By the cubic through both values and slopes, by the zero of the line through the slopes where
    the values differ by no more than rounding, by the parabola where one slope is not known.
    """
    assert low.slope is not None
    h = high.t - low.t
    if not math.isfinite(high.f):
        return low.t + h / 10
    if high.slope is None:
        bend = high.f - low.f - low.slope * h
        return low.t - low.slope * h * h / (2 * bend) if bend > slack else None
    if abs(high.f - low.f) <= slack:
        change = high.slope - low.slope
        return low.t - low.slope * h / change if change * h > 0 else None
    d1 = low.slope + high.slope - 3 * (high.f - low.f) / h
    square = d1 * d1 - low.slope * high.slope
    if square < 0:
        return None
    d2 = math.copysign(math.sqrt(square), h)
    denominator = high.slope - low.slope + 2 * d2
    return high.t - h * (high.slope + d2 - d1) / denominator if denominator != 0 else None
