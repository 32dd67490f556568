"""A Riemannian trust region whose steps are found by truncated conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stiefel.errors import ConfigurationError
from stiefel.optim.solvers.curvature import least_curvature
from stiefel.optim.solvers.problem import Evaluation, Problem, Tangent
from stiefel.optim.solvers.result import Run, Status
from stiefel.optim.solvers.second_order import Hessian

__all__ = ["trust_region"]

#: Values that differ by less than this many rounding errors say nothing about a step.
_ROUNDING = 1e3
#: Rounding errors of the ambient gradient below which a residual is noise.
_GRADIENT_NOISE = 10
#: After so many steps below rounding that do not halve the gradient a run has arrived.
_IDLE = 5
#: A radius below this, relative to the size of the point, is no region.
_SMALLEST = 1e-13


def trust_region(
    problem: Problem,
    start: Evaluation,
    run: Run,
    *,
    hessian: str | Callable[..., Any] = "autograd",
    radius: float | None = None,
    max_radius: float | None = None,
    accept: float = 0.1,
    kappa: float = 0.1,
    theta: float = 1.0,
    max_inner: int | None = None,
) -> None:
    r"""Riemannian trust region of Steihaug and Toint, quadratic near a nondegenerate minimum.

    Every step minimises the model ``m(u) = f + <grad f, u> + <Hess[u], u>/2`` over ``|u| <=
    radius`` by conjugate gradients that stop at the boundary, at negative curvature, and when the
    residual r has ``|r| <= |r_0| min(kappa, (|r_0|/|grad f(X_0)|)^theta)`` (Absil, Baker and
    Gallivan, Found. Comput. Math. 7 (2007)): of order ``min(theta + 1, 2)``. The quotient of
    actual and predicted decrease is regularised by a thousand rounding errors of f (Conn, Gould
    and Toint, Trust-Region Methods (2000), 17.4.2), so that steps are still accepted where f
    cannot tell them apart. An iteration may be a rejected step, which leaves the point.

    Where the run has converged, up to 16 more Hessian products look for negative curvature, from a
    random tangent vector: `MinimizeResult.curvature` and the message tell what they met.

    Args:
        problem: The problem.
        start: f at the start.
        run: Bookkeeping.
        hessian: ``"autograd"``, ``"forward"``, ``"differences"`` or a function of (X, u), see
            `stiefel.optim.hessian_vector_product`.
        radius: First radius; an eighth of `max_radius` by default.
        max_radius: Largest radius; by default the Frobenius norm of the start (sqrt(p) on a
            Stiefel manifold), at least 1.
        accept: A step is taken when actual by predicted decrease exceeds this; in [0, 1/4).
        kappa: Largest relative residual of the inner iteration.
        theta: Exponent of superlinear convergence.
        max_inner: Inner iterations of a step; the number of entries of the point by default.

    Raises:
        ConfigurationError: If f cannot be differentiated twice, a manifold has no
            ``ehess2rhess``, or an option is out of range.
    """
    if not 0 <= accept < 0.25:
        raise ConfigurationError(f"expected 0 <= accept < 0.25, got {accept}")
    size = math.sqrt(sum(float(x.abs().square().sum()) for x in start.X))
    most = max(size, 1.0) if max_radius is None else max_radius
    radius = most / 8 if radius is None else radius
    if not 0 < radius <= most:
        raise ConfigurationError(f"expected 0 < radius <= {most:g} (max_radius), got {radius}")
    inner = sum(x.numel() for x in start.X) if max_inner is None else max_inner
    region = _Region(radius, most, _SMALLEST * max(size, 1.0), accept)
    forcing = _Forcing(start.norm, kappa, theta, inner)
    _iterate(problem, start, run, hessian, region, forcing)


@dataclass
class _Region:
    """The radius, its bounds, and when a step is taken."""

    radius: float
    most: float
    least: float
    accept: float

    def judge(self, rho: float, finite: bool, step: _Step) -> bool:
        """Whether a step whose decrease is rho times the predicted one is taken; new radius."""
        good = finite and rho > self.accept
        if not good or rho < 0.25:
            self.radius = min(self.radius, step.length) / 4
        elif rho > 0.75 and step.boundary:
            self.radius = min(2 * self.radius, self.most)
        return good


@dataclass
class _Forcing:
    """When the inner iteration ends."""

    first: float
    kappa: float
    theta: float
    most: int

    def residual(self, norm: float) -> float:
        """The norm of the residual that is small enough where the gradient has this norm."""
        return norm * min(self.kappa, (norm / self.first) ** self.theta)


def _iterate(
    problem: Problem,
    e: Evaluation,
    run: Run,
    how: str | Callable[..., Any],
    region: _Region,
    forcing: _Forcing,
) -> None:
    second = Hessian(problem, e, how)
    scale, least, idle = abs(e.f), e.norm, 0
    while not run.stop(e):
        noise = _GRADIENT_NOISE * problem.eps * e.scale
        if e.norm <= noise:
            run.fail(e, "the gradient is all rounding")
            return
        wanted = max(forcing.residual(e.norm), 0.1 * run.threshold, noise)
        step = _truncated(problem, second, region.radius, wanted, forcing.most)
        if not math.isfinite(step.decrease):
            run.fail(e, "the Hessian of f is not finite", at_rounding=False)
            return
        new = problem.curve(e, problem.project(e.X, step.u)).at(1.0)
        size = max(abs(e.f), scale)
        slack = _ROUNDING * problem.eps * size
        rho = (e.f - new.f + slack) / (step.decrease + slack)
        finite = math.isfinite(new.f) and (rho <= region.accept or new.finite)
        good = region.judge(rho, finite, step)
        halved = good and new.norm <= least / 2
        idle = 0 if halved or step.decrease > problem.eps * size else idle + 1
        if good:
            e, least = new, min(least, new.norm)
            second = Hessian(problem, e, how)
        if idle >= _IDLE:
            run.stop(e)
            run.fail(e, f"{_IDLE} steps are too short for f to see and do not lessen the gradient")
            return
        if not good and region.radius < region.least:
            run.fail(e, "the trust region has shrunk to nothing", _at_rounding(problem, e))
            return
    if run.status is Status.CONVERGED:
        run.met(least_curvature(second))


@dataclass
class _Step:
    """A minimiser u of the model, its length, the predicted decrease, and why it stopped."""

    u: Tangent
    length: float
    decrease: float
    boundary: bool


def _truncated(
    problem: Problem, hessian: Hessian, radius: float, wanted: float, most: int
) -> _Step:
    """Conjugate gradients on ``Hess[u] = -grad``, truncated (Steihaug, Toint).

    The squares |u|^2, <u, d> and |d|^2 follow from recurrences; only <Hess[d], d> and |r|^2 are
    inner products. With q = Hess[u], kept beside u, the decrease is ``-<grad, u> - <q, u>/2``.
    """
    e = hessian.e
    X, r = e.X, e.gradient
    u = problem.combine(0.0, r)
    q = u
    d = problem.combine(-1.0, r)
    rr = e.squared
    uu, ud, dd = 0.0, 0.0, rr
    boundary = False
    for _ in range(most):
        Hd = hessian(d)
        curvature = problem.inner(X, d, Hd)
        if not math.isfinite(curvature):
            return _Step(u, 0.0, math.nan, False)
        alpha = rr / curvature if curvature > 0 else math.inf
        ahead = uu + 2 * alpha * ud + alpha * alpha * dd
        if curvature <= 0 or ahead >= radius * radius:
            tau = (-ud + math.sqrt(max(ud * ud + dd * (radius * radius - uu), 0.0))) / dd
            u, q = problem.combine(1, u, tau, d), problem.combine(1, q, tau, Hd)
            boundary = True
            break
        u, q = problem.combine(1, u, alpha, d), problem.combine(1, q, alpha, Hd)
        r = problem.combine(1, r, alpha, Hd)
        uu = ahead
        before, rr = rr, problem.inner(X, r, r)
        if not rr > wanted * wanted:
            break
        beta = rr / before
        d = problem.combine(beta, d, -1.0, r)
        ud = beta * (ud + alpha * dd)
        dd = rr + beta * beta * dd
    gu, qu = problem.inners(X, [(e.gradient, u), (q, u)])
    length = radius if boundary else math.sqrt(max(uu, 0.0))
    return _Step(u, length, -gu - qu / 2, boundary)


def _at_rounding(problem: Problem, e: Evaluation) -> bool:
    """Whether the gradient is below the square root of the rounding unit of its scale."""
    return e.norm <= math.sqrt(problem.eps) * max(e.scale, 1e-300)
