"""How fast does a record fall? Log-log slopes with honest intervals, and what they say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import matmul_toeplitz
from scipy.special import stdtr, stdtrit

from stiefel.diagnostics.judgements import Advice, Judgement, Verdict
from stiefel.diagnostics.turns import lasts, turn
from stiefel.errors import ConfigurationError, DataError, ShapeError

__all__ = ["RateFit", "fit_rate", "judge_rate"]

#: Waves that carry the estimate of the noise, and so the degrees of freedom of the interval.
_WAVES = 8
#: Points below which no line is fitted.
_FEWEST = 8
#: A level up to this many noise floors counts as at the floor: half of it or more is noise.
_AT_FLOOR = 2.0
#: NaNs, or zeros, at the end of a record that are no gap any more.
_LOST = 3
#: Points below which a rise is no divergence: three for each wave of the noise.
_RISE = 3 * _WAVES
#: Points below which neither part of a record that turns is judged.
_PART = 2 * _WAVES
#: Share of a planned training in which a rise is its beginning.
_EARLY = 0.2


@dataclass(frozen=True)
class RateFit:
    """The line log value = a + slope log k, and how well its slope is known.

    Attributes:
        slope: The slope.
        low: Lower end of its interval.
        high: Upper end of its interval.
        confidence: Of the interval.
        window: First and last step that were used.
        count: Points that were used; those that are not finite and positive are left out.
        standard_error: Of the slope.
        degrees: Degrees of freedom of the interval.
        level: exp of the mean of log value: the middle level in the window.
        level_error: Standard error of log level.
    """

    slope: float
    low: float
    high: float
    confidence: float
    window: tuple[float, float]
    count: int
    standard_error: float
    degrees: int
    level: float
    level_error: float

    def below(self, slope: float) -> float:
        """The confidence, one-sided, with which the slope is at most that number."""
        return _one_sided(slope - self.slope, self.standard_error, self.degrees)

    def __str__(self) -> str:
        first, last = self.window
        return (
            f"slope {self.slope:.2f} [{self.low:.2f}, {self.high:.2f}] over steps {first:g} to "
            f"{last:g}, {self.count} points"
        )


def fit_rate(
    steps: Sequence[float],
    values: Sequence[float],
    *,
    window: tuple[float, float] | None = None,
    confidence: float = 0.95,
) -> RateFit:
    """Fits log value = a + slope log k by least squares, with an interval for correlated noise.

    Neighbouring values of a training run resemble each other, so least squares knows its slope less
    well than it believes. What counts is the power of the noise in slow waves. It is read from the
    residuals: from their projections onto the 8 slowest cosines of the record that a line cannot
    explain, each scaled by what noise of the lag-1 correlation of the residuals would have there,
    as against the direction of the slope. The interval is Student's with that many degrees of
    freedom. It keeps its coverage where the window spans ten correlation lengths,
    (1 + r) / (1 - r) points at a lag-1 correlation r; a bend in the record widens it.

    Sources: Lazarus, Lewis, Stock, Watson, J. Bus. Econ. Stat. 36 (2018), for the cosines; Kendall,
    Biometrika 41 (1954), for the bias of the lag-1 correlation.

    Args:
        steps: Step numbers k > 0, increasing, evenly spaced in k or in log k.
        values: The record, one a step.
        window: First and last step to use; None for the last half, [k/2, k].
        confidence: Of the interval.

    Returns:
        The fit.

    Raises:
        ShapeError: If there are not as many steps as values.
        DataError: If fewer than 8 values in the window are finite and positive, or steps do not
            increase.
        ConfigurationError: If `confidence` is not in (0, 1).

    Example:
        >>> from stiefel.diagnostics import fit_rate
        >>> fit_rate(range(1, 101), [3 / k for k in range(1, 101)]).slope
        -1.0
    """
    if not 0 < confidence < 1:
        raise ConfigurationError(f"expected a confidence between 0 and 1, got {confidence}")
    k, y = _record(steps, values)
    first, last = window if window is not None else (k[-1] / 2 if len(k) else 0.0, math.inf)
    used = (k >= first) & (k <= last) & np.isfinite(y) & (y > 0)
    k, y = k[used], y[used]
    if len(k) < _FEWEST:
        where = f"from step {first:g} on" if math.isinf(last) else f"of steps {first:g} to {last:g}"
        raise DataError(
            f"expected at least {_FEWEST} finite positive values {where}, got {len(k)}: "
            f"{Advice.FEW_RECORDS}"
        )
    x, log_y = np.log(k), np.log(y)
    slope, error, level_error, waves = _line(x, log_y)
    slope = round(slope, 12) + 0.0  # rounding of the logarithms
    half = float(stdtrit(waves, (1 + confidence) / 2)) * error
    return RateFit(
        slope, slope - half, slope + half, confidence, (float(k[0]), float(k[-1])), len(k), error,
        waves, float(np.exp(log_y.mean())), level_error,
    )  # fmt: skip


def _record(steps: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    k, y = np.asarray(list(steps), dtype=float), np.asarray(list(values), dtype=float)
    if k.shape != y.shape or k.ndim != 1:
        raise ShapeError(f"expected one value a step, got {k.shape} steps and {y.shape} values")
    if len(k) and not ((k > 0).all() and (np.diff(k) > 0).all()):
        raise DataError("expected step numbers k > 0 that increase: count steps from one")
    return k, y


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, int]:
    """Slope, its standard error, that of the mean, and degrees of freedom; see `fit_rate`."""
    n = len(x)
    waves = min(_WAVES, n - 2)
    t = (np.arange(n) + 0.5) / n
    shapes = [np.ones(n), x - x.mean(), *(np.cos(np.pi * j * t) for j in range(1, waves + 1))]
    Q = np.linalg.qr(np.stack(shapes, 1))[0]  # level, slope, and waves that no line explains
    run = x - x.mean()
    slope = float(run @ y / (run @ run))
    residual = y - y.mean() - slope * run
    power = residual @ residual
    if power <= (1e-13 * max(1.0, float(np.abs(y).max()))) ** 2 * n:
        return slope, 0.0, 0.0, waves
    r = residual[1:] @ residual[:-1] / power
    r = min(max((n * r + 2) / (n - 4), 0.0), 1 - 1 / n)  # E r = r - (2 + 4 r) / n beside a line
    spectrum = (Q * matmul_toeplitz((r ** np.arange(n),) * 2, Q)).sum(0)  # q^T Gamma(r) q
    noise = float(((Q[:, 2:].T @ residual) ** 2 / spectrum[2:]).mean())
    error = math.sqrt(noise * spectrum[1] / (run @ run))
    return slope, error, math.sqrt(noise * spectrum[0] / n), waves


def _one_sided(distance: float, error: float, degrees: int) -> float:
    if error == 0:
        return float(distance >= 0)
    return float(stdtr(degrees, distance / error))


def judge_rate(
    steps: Sequence[float],
    values: Sequence[float],
    *,
    noise_floor: float | None = None,
    required: float = -0.45,
    confidence: float = 0.95,
    window: tuple[float, float] | None = None,
    planned: float | None = None,
) -> Judgement:
    """Says which holds of the end of a record: falling, at a floor, rising, or unknown.

    *Decreasing*: the log-log slope over [k/2, k] is at most `required`, as the convergence theorem
    promises of the squared gradient, k^(-1/2 + eps). *Noise floor*: the record is at most twice
    the given floor, or, where none is given, flat (the slope lies between `required` / 2 and
    -`required` / 2). *Diverging*: the slope is positive over 24 points or more, and still is over
    the last half of them; or the record ends in an infinity or in three NaNs. Three exact zeros at
    the end are *decreasing*. Each needs the confidence asked for, one-sided, by the interval of
    `fit_rate`. Else it is *too early to say*. So is a true gradient that falls more slowly than
    promised, and a rise of few points, or early in a training whose length is `planned`.

    A record that turns inside the window, where two lines fit it best, is judged by what follows.

    Args:
        steps: Step numbers k > 0, increasing.
        values: Squared gradient norms, one a step; NaN for a missing one.
        noise_floor: Level of the gradient noise in these values, such as
            `NormEstimate.noise_floor`; None or NaN if unknown.
        required: The slope that counts as decreasing.
        confidence: That a verdict needs.
        window: First and last step to use, as if the record ended there; None for the last half,
            [k/2, k].
        planned: Steps of the whole training: in the first fifth a rise is no divergence.

    Returns:
        The verdict, its confidence and grounds. Records with gaps, zeros or few points are no
        error: the explanation says what is wrong with them.

    Raises:
        ShapeError: If there are not as many steps as values.
        DataError: If the steps do not increase.
        ConfigurationError: If `required` is not negative, `noise_floor` negative or infinite, or
            `confidence` not in (0, 1).

    Example:
        >>> from stiefel.diagnostics import judge_rate
        >>> steps = range(50, 5001, 50)
        >>> judge_rate(steps, [2 * k**-0.8 for k in steps]).verdict.value
        'decreasing'
    """
    noise_floor = _checked(required, noise_floor)
    k, y = _record(steps, values)
    if window is not None:
        k, y = k[k <= window[1]], y[k <= window[1]]
    early = _without_fit(k, y)
    if early is not None:
        return early
    try:
        fit = fit_rate(k.tolist(), y.tolist(), window=window, confidence=confidence)
    except DataError as error:
        return Judgement(Verdict.TOO_EARLY, 0.0, None, str(error), Advice.FEW_RECORDS)
    if fit.standard_error == 0 and fit.slope == 0:
        words = f"every value in the window is {fit.level:.3g}: nothing moves. Are the weights "
        words += "frozen, or was one number recorded again and again?"
        return Judgement(Verdict.TOO_EARLY, 0.0, fit, words)
    fit, rise, since = _since_turn(k, y, fit, confidence)
    if planned is not None and k[-1] < _EARLY * planned:
        rise = rise or f"in the first {k[-1] / planned:.0%} of the training, as many do: train on"
    found = _by_slope(fit, noise_floor, required, confidence, rise)
    return dataclasses.replace(found, explanation=since + found.explanation)


def _checked(required: float, noise_floor: float | None) -> float | None:
    """The noise floor, None where it is not known; refuses what cannot be."""
    if not required < 0:
        raise ConfigurationError(f"expected a negative required slope, got {required}")
    if noise_floor is not None and math.isnan(noise_floor):
        noise_floor = None
    if noise_floor is not None and not 0 <= noise_floor < math.inf:
        raise ConfigurationError(
            f"expected a finite noise floor, zero or more, got {noise_floor}: leave it out where "
            "it is unknown"
        )
    return noise_floor


def _since_turn(
    k: np.ndarray, y: np.ndarray, fit: RateFit, confidence: float
) -> tuple[RateFit, str, str]:
    """The fit after a turn, if there is one; why a rise there is no divergence; where it was."""
    first, last = fit.window
    used = (k >= first) & (k <= last) & np.isfinite(y) & (y > 0)
    k, y = k[used], y[used]

    def line(k: np.ndarray, y: np.ndarray) -> RateFit:
        return fit_rate(k.tolist(), y.tolist(), confidence=confidence, window=(k[0], k[-1]))

    since, rise = "", ""
    found = turn(k, y, line, fewest=_PART, confidence=confidence)
    if found is not None:
        at, rose = found
        since = f"it {'rose' if rose else 'fell'} until step {k[at - 1]:g}; since then "
        k, y = k[at:], y[at:]
        fit = line(k, y)
    if len(k) < _RISE:
        rise = f"but {len(k)} points are too few to call a rise divergence: train on"
    elif not lasts(k, y):
        rise = "but no longer at the end: train on"
    return fit, rise, since


def _without_fit(k: np.ndarray, y: np.ndarray) -> Judgement | None:
    """The verdict where the end of the record alone decides; None elsewhere."""
    if len(y) == 0:
        return Judgement(Verdict.TOO_EARLY, 0.0, None, "the record is empty")
    if np.isnan(y).all():
        words = "every value is NaN: the gradient was never available, or was NaN from the start"
        return Judgement(Verdict.TOO_EARLY, 0.0, None, words)
    if (y == 0).all():
        words = "every value is zero: no gradient reaches the weights, or they cannot move"
        return Judgement(Verdict.TOO_EARLY, 0.0, None, words)
    bad = int(np.argmax(np.isfinite(y[::-1]))) if np.isfinite(y).any() else len(y)
    if bad >= _LOST or math.isinf(y[-1]):
        words = f"the record ends in {y[-1]:g}, from step {k[len(y) - bad]:g} on: {Advice.OVERFLOW}"
        return Judgement(Verdict.DIVERGING, 1.0, None, words, Advice.OVERFLOW)
    if (y[-_LOST:] == 0).all():
        words = "the record ends in exact zeros: the point is stationary to rounding, or the "
        words += "loss no longer sees the weights"
        return Judgement(Verdict.DECREASING, 1.0, None, words)
    return None


def _by_slope(
    fit: RateFit, noise_floor: float | None, required: float, confidence: float, rise: str
) -> Judgement:
    """The verdict on a line; `rise` says why a rise is no divergence, if it is none."""
    falling = fit.below(required)
    rises = 1 - fit.below(0.0) >= confidence
    rising = 0.0 if rise else 1 - fit.below(0.0)
    flat = min(1 - fit.below(required / 2), fit.below(-required / 2))
    level = f"level {fit.level:.3g}"
    if noise_floor is not None:
        above = math.log(_AT_FLOOR * noise_floor / fit.level) if noise_floor > 0 else -math.inf
        at_floor = _one_sided(above, fit.level_error, fit.degrees)
        level += f", {fit.level / noise_floor if noise_floor else math.inf:.3g} noise floors"
    else:
        at_floor = flat

    said = f"{fit}, {level}: "
    if falling >= confidence:
        words = f"{said}it falls at least like k^{required:g}, as the theorem promises"
        return Judgement(Verdict.DECREASING, falling, fit, words)
    if noise_floor is not None and at_floor >= confidence:
        words = f"{said}half of this or more is noise, so a smaller gradient cannot be seen. "
        advice = Advice.BELOW_NOISE
        return Judgement(Verdict.NOISE_FLOOR, at_floor, fit, words + advice, advice)
    if rising >= confidence:
        words = f"{said}it rises; {Advice.LONG_STEP}"
        return Judgement(Verdict.DIVERGING, rising, fit, words, Advice.LONG_STEP)
    if noise_floor is None and flat >= confidence:
        words = f"{said}it is flat; {Advice.UNKNOWN_NOISE}"
        return Judgement(Verdict.NOISE_FLOOR, flat, fit, words, Advice.UNKNOWN_NOISE)
    if noise_floor is not None and flat >= confidence:
        words = f"{said}it is flat, but above the noise: a plateau of the loss, which may pass"
    elif rises:
        words = f"{said}it rises, {rise}"
    elif 1 - fit.below(required) >= confidence and fit.below(0.0) >= confidence:
        words = f"{said}it falls, but more slowly than k^{required:g} so far"
    else:
        words = f"{said}the interval leaves more than one answer open; train longer"
    return Judgement(Verdict.TOO_EARLY, max(falling, rising, at_floor), fit, words)
