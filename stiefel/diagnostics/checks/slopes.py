"""The order of an error: its slope against the step length in logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stiefel.diagnostics.report import Finding
from stiefel.errors import ConfigurationError, ShapeError

__all__ = ["STEPS", "fitted_order", "order_finding"]

#: Step lengths of the checks, 1/4 down to 2^-21, each half of the one before.
STEPS: tuple[float, ...] = tuple(2.0**-k for k in range(2, 22))

_MARGIN = 10.0  # an error within this factor of the floor still carries rounding
_FEWEST = 3  # with fewer errors above the floor the step from the last of them to it is taken
_WINDOW = 6  # so many of the smallest steps above the floor are fitted


def fitted_order(steps: Sequence[float], errors: Sequence[float], floor: float) -> float:
    """Fits the order k of ``error = c t^k`` as t falls to zero.

    The slope of log(error) against log(t) by least squares over the six smallest steps whose
    errors are above ten times `floor`: below it is rounding, and at large steps terms of higher
    order weigh in. An error that is not finite at the largest steps (outside a map's domain) is
    left out.

    Args:
        steps: Step lengths t > 0, at least three different ones.
        errors: The error at each of them, not negative.
        floor: The size of the rounding errors in `errors`.

    Returns:
        The order; where fewer than three errors are above ten times the floor, a lower bound, the
        slope from the last of them to the next error. NaN where none is, or fewer than three are
        and those barely: the error is rounding and the law holds to every order. ``-inf`` where no
        error is finite, or one is not while that of a larger step is.

    Raises:
        ShapeError: If there are not as many errors as steps.
        ConfigurationError: If there are fewer than three steps, or one is not positive, or the
            floor is not.

    Example:
        >>> from stiefel.diagnostics.checks.slopes import fitted_order
        >>> t = [2.0**-k for k in range(2, 12)]
        >>> round(fitted_order(t, [3 * s**2 + s**3 for s in t], floor=1e-16), 2)
        2.0
        >>> fitted_order(t, [1e-16] * 10, floor=1e-16)
        nan
    """
    t, e = np.asarray(steps, dtype=float), np.asarray(errors, dtype=float)
    if t.ndim != 1 or t.shape != e.shape:
        raise ShapeError(
            f"expected one error for each step, got {e.shape} errors and {t.shape} steps"
        )
    if len(set(t.tolist())) < 3 or not (np.isfinite(t) & (t > 0)).all() or not floor > 0:
        raise ConfigurationError(
            "expected three or more different steps, all positive, and a positive floor, got "
            f"{len(t)} steps and floor {floor}: take steps over a few decades, such as 2^-2 ... "
            "2^-20, and for the floor the rounding of one evaluation"
        )
    falling = np.argsort(-t)
    t, e = t[falling], e[falling]
    finite = np.isfinite(e)
    first = int(finite.argmax())
    if not finite[first:].all() or not finite[first]:
        return -math.inf
    above = np.flatnonzero((e > _MARGIN * floor) & finite)
    if len(above) < _FEWEST and (e[above] < _MARGIN**2 * floor).all():
        return math.nan
    kept = above[-_WINDOW:]
    if len(above) < _FEWEST and above[-1] + 1 < len(t):  # it falls to rounding within one step
        kept = np.array([above[-1], above[-1] + 1])
    return float(np.polyfit(np.log(t[kept]), np.log(np.maximum(e[kept], floor)), 1)[0])


def order_finding(
    name: str,
    steps: Sequence[float],
    errors: Sequence[float],
    floor: float,
    *,
    order: float,
    meaning: str,
) -> Finding:
    """The finding that an error has at least the order that is expected of it.

    Args:
        name: What was measured.
        steps: Step lengths.
        errors: The error at each of them.
        floor: The size of the rounding errors in `errors`.
        order: The expected order; the bound is 0.1 below it.
        meaning: What follows where the order is lower, and what to do.

    Returns:
        The finding; it measures infinity where the error is rounding at every step.
    """
    fitted = fitted_order(steps, errors, floor)
    return Finding(name, math.inf if math.isnan(fitted) else fitted, ">=", order - 0.1, meaning)
