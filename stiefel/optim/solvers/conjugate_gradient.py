"""Riemannian nonlinear conjugate gradients."""

from __future__ import annotations

import math

from stiefel.errors import ConfigurationError, unknown
from stiefel.optim.solvers.barzilai_borwein import first_step
from stiefel.optim.solvers.line_search import strong_wolfe
from stiefel.optim.solvers.problem import Evaluation, Problem, Tangent
from stiefel.optim.solvers.result import Run

__all__ = ["conjugate_gradient"]

_RULES = ("hybrid", "hestenes-stiefel", "polak-ribiere", "dai-yuan")


def conjugate_gradient(
    problem: Problem,
    start: Evaluation,
    run: Run,
    *,
    rule: str = "hybrid",
    curvature: float = 0.1,
    decrease: float = 1e-4,
    restart: float = math.inf,
) -> None:
    r"""Riemannian conjugate gradients, ``d <- -grad + beta T d``, with a strong Wolfe search.

    With y = grad' - T grad: Hestenes-Stiefel ``<grad', y>/<T d, y>``, Dai-Yuan ``<grad',
    grad'>/<T d, y>``, Polak-Ribiere ``<grad', y>/<grad, grad>``, and ``"hybrid"``, ``max(0,
    min(HS, DY))`` (Dai and Yuan, Ann. Oper. Res. 103 (2001); on manifolds Sato, Riemannian
    Optimization and Its Applications, Springer 2021). HS and PR are cut at 0. T carries by
    projection. The method starts again along the gradient where d is hardly a descent direction
    and, if `restart` is finite, where two gradients in a row are far from orthogonal (Powell).

    Args:
        problem: The problem.
        start: f at the start.
        run: Bookkeeping.
        rule: ``"hybrid"``, ``"hestenes-stiefel"``, ``"polak-ribiere"`` or ``"dai-yuan"``.
        curvature: Fraction of the slope that a step may leave, in (decrease, 1).
        decrease: Fraction of the predicted decrease that is demanded.
        restart: Starts again where ``|<grad', T grad>| >= restart <grad', grad'>``.
    """
    if rule not in _RULES:
        raise unknown("rule", rule, _RULES)
    if not 0 < decrease < curvature < 1:
        raise ConfigurationError(
            f"expected 0 < decrease < curvature < 1, got decrease = {decrease} and curvature = "
            f"{curvature}"
        )
    e, d, slope, fresh = start, None, 0.0, True
    t = plain = first_step(e)
    while not run.stop(e):
        if d is None:
            d, slope, fresh = problem.combine(-1.0, e.gradient), -e.squared, True
        new = strong_wolfe(
            problem.curve(e, d),
            slope,
            t,
            slack=problem.slack(e.f),
            decrease=decrease,
            curvature=curvature,
        )
        if new is None and not fresh:
            run.retry()
            d, t = None, plain
            continue
        if new is None:
            if run.stuck(e):
                return
            continue
        old_slope, step = slope, new.t
        plain = step * math.sqrt(problem.inner(e.X, d, d)) / max(new.norm, 1e-300)
        d, slope = _direction(problem, e, d, new, slope, rule, restart)
        fresh = d is None
        new_slope = slope if d is not None else -new.squared
        t = step * old_slope / new_slope if new_slope < 0 else step  # 0: the end
        e = new


def _direction(
    problem: Problem,
    e: Evaluation,
    d: Tangent,
    new: Evaluation,
    slope: float,
    rule: str,
    restart: float,
) -> tuple[Tangent | None, float]:
    """The next direction and the slope along it; None to start again along the gradient."""
    g = new.gradient
    carried = problem.transport(e.X, problem.combine(new.t, d), new.X, d)
    y = problem.difference(e, d, new)[1]
    gy, gd, gg = problem.inners(new.X, [(g, y), (g, carried), (g, g)])
    dy = gd - slope  # <T d, y>, for <T d, T grad> = <d, grad> up to the transport
    if abs(gg - gy) >= restart * gg or not dy > 0:
        return None, 0.0
    beta = {
        "hestenes-stiefel": lambda: gy / dy,
        "dai-yuan": lambda: gg / dy,
        "polak-ribiere": lambda: gy / e.squared,
        "hybrid": lambda: min(gy, gg) / dy,
    }[rule]()
    beta = max(beta, 0.0)
    new_slope = beta * gd - gg
    if not new_slope <= -1e-3 * gg:
        return None, 0.0
    return problem.combine(beta, carried, -1.0, g), new_slope
