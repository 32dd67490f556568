"""Riemannian L-BFGS."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.optim.solvers.barzilai_borwein import first_step
from stiefel.optim.solvers.line_search import armijo, strong_wolfe
from stiefel.optim.solvers.problem import Evaluation, Problem, Tangent
from stiefel.optim.solvers.result import Run

__all__ = ["lbfgs"]

_SEARCHES = ("wolfe", "armijo")


@dataclass
class _Pair:
    """Changes of point and gradient, ``rho = 1/<s, y>`` and ``gamma = <s, y>/<y, y>``."""

    s: Tangent
    y: Tangent
    rho: float
    gamma: float


def lbfgs(
    problem: Problem,
    start: Evaluation,
    run: Run,
    *,
    memory: int = 5,
    line_search: str = "wolfe",
    decrease: float = 1e-4,
    curvature: float = 0.9,
    caution: float = 1e-8,
) -> None:
    r"""Riemannian L-BFGS by the two-loop recursion, with a strong Wolfe or an Armijo search.

    ``d = -P H grad`` with the inverse Hessian H of the last `memory` pairs (s, y). On manifolds
    with a metric of their own every pair is carried to each new point (Huang, Gallivan and Absil,
    SIAM J. Optim. 25 (2015)). Where the metric is that of the surrounding space (free tensors,
    ``stiefel.Stiefel("euclidean", ...)``) H is carried as an operator: pairs stay as they are in
    the surrounding space, where H is positive definite, and P, the tangent projection, brings the
    direction back; that costs one projection instead of 2 `memory`, and d is a descent direction
    all the same, for <grad, P H grad> = <grad, H grad> > 0. A pair is kept when
    ``<s, y> > caution |s| |y|``, the cautious update.

    Args:
        problem: The problem.
        start: f at the start.
        run: Bookkeeping.
        memory: Pairs to remember.
        line_search: ``"wolfe"`` or ``"armijo"``.
        decrease: Fraction of the predicted decrease that is demanded.
        curvature: Fraction of the slope that a Wolfe step may leave, in (decrease, 1).
        caution: Threshold of the cautious update.
    """
    if line_search not in _SEARCHES:
        raise unknown("line search", line_search, _SEARCHES)
    if memory < 1 or not 0 < decrease < curvature < 1:
        raise ConfigurationError(
            "expected memory >= 1 and 0 < decrease < curvature < 1, got memory = "
            f"{memory}, decrease = {decrease}, curvature = {curvature}"
        )
    e, t = start, first_step(start)
    pairs: deque[_Pair] = deque(maxlen=memory)
    while not run.stop(e):
        plain = pairs[-1].gamma if pairs else t
        d, slope = _direction(problem, e, pairs)
        t = t if pairs else plain
        path, slack = problem.curve(e, d), problem.slack(e.f)
        if line_search == "armijo":
            new = armijo(path, slope, t, slack=slack, decrease=decrease)
        else:
            new = strong_wolfe(path, slope, t, slack=slack, decrease=decrease, curvature=curvature)
        if new is None and pairs:
            run.retry()
            pairs.clear()
            t = plain
            continue
        if new is None:
            if run.stuck(e):
                return
            continue
        _update(problem, e, d, new, pairs, caution)
        t = 1.0 if pairs else new.t
        e = new


def _direction(problem: Problem, e: Evaluation, pairs: deque[_Pair]) -> tuple[Tangent, float]:
    """``-P H grad`` and the slope along it; minus the gradient where that does not descend.

    The coefficients of the recursion stay on the device: no number is read.
    """
    q = e.gradient
    if pairs:
        factors: list[Tensor] = []
        for pair in reversed(pairs):
            a = pair.rho * problem.dot(e.X, pair.s, q)
            factors.append(a)
            q = problem.combine(1.0, q, -a, pair.y)
        q = problem.combine(pairs[-1].gamma, q)
        for pair, a in zip(pairs, reversed(factors), strict=True):
            b = pair.rho * problem.dot(e.X, pair.y, q)
            q = problem.combine(1.0, q, a - b, pair.s)
        d = problem.project(e.X, problem.combine(-1.0, q))
        slope, square = problem.inners(e.X, [(e.gradient, d), (d, d)])
        if slope < -1e-10 * e.norm * math.sqrt(max(square, 0.0)):
            return d, slope
        pairs.clear()
    return problem.combine(-1.0, e.gradient), -e.squared


def _update(
    problem: Problem,
    e: Evaluation,
    d: Tangent,
    new: Evaluation,
    pairs: deque[_Pair],
    caution: float,
) -> None:
    """Carries the old pairs where they have to be carried, and adds the new one."""
    if not problem.embedded:
        u = problem.combine(new.t, d)
        for pair in pairs:
            pair.s = problem.transport(e.X, u, new.X, pair.s)
            pair.y = problem.transport(e.X, u, new.X, pair.y)
    s, y = problem.difference(e, d, new)
    ss, sy, yy = problem.inners(new.X, [(s, s), (s, y), (y, y)])
    if sy > caution * math.sqrt(max(ss * yy, 0.0)):
        pairs.append(_Pair(s, y, 1.0 / sy, sy / yy))
