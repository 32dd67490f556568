"""Where a record turns: from a rise to what follows it, or from a fall to a rise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

if TYPE_CHECKING:
    from stiefel.diagnostics.rates import RateFit

__all__ = ["lasts", "turn"]


def turn(
    k: np.ndarray,
    y: np.ndarray,
    line: Callable[[np.ndarray, np.ndarray], RateFit],
    *,
    fewest: int,
    confidence: float,
) -> tuple[int, bool] | None:
    """Where the log-log record y(k) turns, if it does.

    The record is cut into the two parts that two separate lines fit best, by least squares. It
    turns where the first part rises and the second rises less or not at all (with the confidence
    asked for it cannot be said to rise), or where the first falls and the second rises. The place
    of the cut is chosen from the record, which makes chance turns likelier than a confidence says:
    "rises", "less" and "falls" are said with an eighth of what is left to one.

    Args:
        k: Steps ``(m,)``, increasing.
        y: Positive values ``(m,)``.
        line: Fits a line to such a pair.
        fewest: Points that each part has at least; and each has a quarter of them.
        confidence: One-sided.

    Returns:
        The index at which the second part begins, and whether the first part rose; None where the
        record does not turn.
    """
    fewest = max(fewest, math.ceil(len(k) / 4))
    if len(k) < 2 * fewest:
        return None
    at = _cut(np.log(k), np.log(y), fewest)
    first, second = line(k[:at], y[:at]), line(k[at:], y[at:])
    sure = 1 - (1 - confidence) / 8
    error = math.hypot(first.standard_error, second.standard_error)
    reach = float(stdtrit(min(first.degrees, second.degrees), sure)) * error
    less = first.slope - second.slope > reach and 1 - second.below(0.0) < confidence
    if less and 1 - first.below(0.0) >= sure:
        return at, True
    if first.slope < 0 < second.slope and min(first.below(0.0), 1 - second.below(0.0)) >= sure:
        return at, False
    return None


def lasts(k: np.ndarray, y: np.ndarray) -> bool:
    """Whether the last half of the points rises too, by the slope of log y in log k."""
    half = len(k) // 2
    x, z = np.log(k[half:]), np.log(y[half:])
    return bool((x - x.mean()) @ z > 0)


def _cut(x: np.ndarray, y: np.ndarray, fewest: int) -> int:
    """The index that leaves the least squares to two lines, one through each part."""
    x, y = x - x.mean(), y - y.mean()
    left = _residuals(x, y)[fewest - 1 : len(x) - fewest]
    right = _residuals(x[::-1], y[::-1])[fewest - 1 : len(x) - fewest][::-1]
    return fewest + int(np.argmin(left + right))


def _residuals(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sums of squares that a line leaves of the first 1, 2, ... points.

    S_yy - S_xy^2 / S_xx, with S_ab = sum a b - sum a sum b / m over the first m points.
    """
    m = np.arange(1, len(x) + 1)
    a, b = np.cumsum(x), np.cumsum(y)
    S_xx, S_xy, S_yy = (
        np.cumsum(u * v) - s * t / m for u, v, s, t in ((x, x, a, a), (x, y, a, b), (y, y, b, b))
    )
    return S_yy - S_xy**2 / np.where(S_xx > 0, S_xx, 1.0)
