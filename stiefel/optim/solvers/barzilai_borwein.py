"""Barzilai-Borwein gradient descent with a non-monotone line search."""

from __future__ import annotations

import math
from collections import deque

from stiefel.errors import ConfigurationError, unknown
from stiefel.optim.solvers.line_search import armijo
from stiefel.optim.solvers.problem import Evaluation, Problem
from stiefel.optim.solvers.result import Run

__all__ = ["barzilai_borwein", "first_step"]

_STEPS = ("adaptive", "alternating", "long", "short")


def barzilai_borwein(
    problem: Problem,
    start: Evaluation,
    run: Run,
    *,
    step: str = "adaptive",
    memory: float = 0.85,
    decrease: float = 1e-4,
    ratio: float = 0.2,
    window: int = 3,
) -> None:
    r"""Riemannian Barzilai-Borwein gradient descent, ``X <- R_X(-t grad f(X))``.

    With s and y the changes of point and gradient, the steps are ``t_long = <s, s>/|<s, y>|`` and
    ``t_short = |<s, y>|/<y, y>`` (Wen and Yin, Math. Program. 142 (2013); Iannazzo and Porcelli,
    IMA J. Numer. Anal. 38 (2018)). ``step="adaptive"`` takes the smallest of the last `window`
    short steps where ``t_short < ratio t_long`` and t_long elsewhere (ABBmin, Frassoldati, Zanni
    and Zanghirati, J. Ind. Manag. Optim. 4 (2008)); ``"alternating"`` takes long and short steps
    in turn. A step is accepted when f falls sufficiently below the weighted mean of the values
    before it (Zhang and Hager, SIAM J. Optim. 14 (2004)), so f need not fall at each step.

    Args:
        problem: The problem.
        start: f at the start.
        run: Bookkeeping.
        step: ``"adaptive"``, ``"alternating"``, ``"long"`` or ``"short"``.
        memory: Weight of the past in the mean, in [0, 1); 0 makes the search monotone.
        decrease: Fraction of the predicted decrease that is demanded.
        ratio: For ``"adaptive"``.
        window: For ``"adaptive"``.
    """
    if step not in _STEPS:
        raise unknown("step", step, _STEPS)
    if window < 1:
        raise ConfigurationError(f"expected window >= 1, got {window}")
    if not 0 <= memory < 1:
        raise ConfigurationError(f"expected 0 <= memory < 1, got {memory}")
    e, mean, weight = start, start.f, 1.0
    shorts: deque[float] = deque(maxlen=window)
    t, good = first_step(e), 0.0
    while not run.stop(e):
        path = problem.descent(e)
        slack = problem.slack(mean)
        new = armijo(path, -e.squared, t, slack=slack, reference=mean, decrease=decrease)
        if new is None and t > good > 0:  # a wild step; the last one that was taken is not
            t, good = good, 0.0
            run.retry()
            continue
        if new is None:
            if run.stuck(e):
                return
            continue
        long, short, convex = _steps(problem, e, new)
        if step == "adaptive":
            if convex:
                shorts.append(short)
            else:
                shorts.clear()
            t = min(shorts) if convex and short < ratio * long else long
        elif step == "alternating":
            t = short if run.nit % 2 else long
        else:
            t = long if step == "long" else short
        good = new.t
        if not (math.isfinite(t) and t > 0):
            t = good
        weight, old = memory * weight + 1, memory * weight
        mean = (old * mean + new.f) / weight
        e = new


def first_step(e: Evaluation) -> float:
    """A first t: a tenth of the size of the point, or of 1 at the origin."""
    size = math.sqrt(sum(float(x.abs().square().sum()) for x in e.X))
    return 0.1 * (size if size > 0 else 1.0) / e.norm if e.norm > 0 else 1.0


def _steps(problem: Problem, e: Evaluation, new: Evaluation) -> tuple[float, float, bool]:
    """The long and the short step, NaN where the gradient has not changed, and if <s, y> > 0."""
    direction = tuple(-g for g in e.gradient)
    s, y = problem.difference(e, direction, new)
    ss, sy, yy = problem.inners(new.X, [(s, s), (s, y), (y, y)])
    size = abs(sy)
    long, short = (ss / size if size > 0 else math.nan), (size / yy if yy > 0 else math.nan)
    return long, short, sy > 0
