"""`minimize`: a deterministic solver for a smooth function on a product of manifolds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, NonFiniteError, unknown
from stiefel.manifolds import Manifold
from stiefel.numerics import full_precision, plain
from stiefel.optim.checks import all_finite
from stiefel.optim.solvers.barzilai_borwein import barzilai_borwein
from stiefel.optim.solvers.conjugate_gradient import conjugate_gradient
from stiefel.optim.solvers.lbfgs import lbfgs
from stiefel.optim.solvers.problem import Evaluation, Point, Problem
from stiefel.optim.solvers.result import Limits, MinimizeResult, Run, Status
from stiefel.optim.solvers.starts import components_of, unpack
from stiefel.optim.solvers.trust_region import trust_region

__all__ = ["SOLVERS", "minimize"]

#: Every solver by its name: ``solver(problem, start, run, *, options)``. It calls ``run.stop`` with
#: each iterate. A new solver is one function in a file of its own and one line here.
SOLVERS: dict[str, Callable[..., None]] = {
    "barzilai-borwein": barzilai_borwein,
    "conjugate-gradient": conjugate_gradient,
    "lbfgs": lbfgs,
    "trust-region": trust_region,
}

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}


def minimize(
    f: Callable[..., Any],
    X0: Tensor | Sequence[Tensor],
    *,
    manifold: Manifold | str | Sequence[Manifold | str | None] | None = None,
    method: str = "barzilai-borwein",
    gradient: bool | Callable[..., Any] | None = None,
    tol: float | None = None,
    absolute_tol: float = 0.0,
    max_iterations: int = 10_000,
    max_seconds: float | None = None,
    callback: Callable[[MinimizeResult], Any] | None = None,
    feasibility_every: int = 50,
    **options: Any,
) -> MinimizeResult:
    r"""Minimises a smooth real function on a manifold or a product of manifolds.

    f must give the same value for the same point. It runs without autocast, in full precision.

    Args:
        f: Takes the point, or one tensor for each of several points, and returns a real scalar
            tensor, differentiable by autograd. It is given copies.
        X0: The start, not changed: a tensor, a `stiefel.ManifoldParameter`, or a list or tuple of
            them for a product of manifolds; where a wide `tolerance` lets it lie off its manifold,
            the nearest point. On `stiefel.Stiefel` shape ``(..., n, p)``, f couples a batch.
        manifold: For tensors, one or one for each: a `stiefel.Stiefel`, a geoopt manifold, or
            ``"euclidean"``; by default ``Stiefel("euclidean", "cholesky_qr")`` for matrices.
        method: A name of `SOLVERS`.
        gradient: None for autograd; True if f returns ``(value, gradient)``; or a function of what
            f takes. Ambient, one for each point; of complex points dL/dRe + i dL/dIm, as in torch.
        tol: Ends when the norm of the Riemannian gradient is at most `tol` times the largest
            Frobenius norm of the ambient gradient met so far; 1e-8 in float64, 1e-4 in float32.
        absolute_tol: Ends when that norm is at most this.
        max_iterations: Limit of iterations.
        max_seconds: Limit of time, looked at after each iteration.
        callback: Called with a `MinimizeResult` (x, fun, grad_norm, nit, seconds) at the start
            and after each iteration; True or StopIteration ends the run, other errors go through.
        feasibility_every: Iterations between measures of feasibility in the history; 0: never.
        **options: Options of the method, see `stiefel.optim.solvers`.

    Returns:
        A `MinimizeResult`; its point is on the manifold within `stiefel.tolerance`.

    Raises:
        UnknownNameError: If the method, or an option of it, does not exist.
        ConfigurationError: If f is not differentiable, or arguments do not go together.
        ShapeError: If f does not return one number, or a start has the wrong shape.
        DtypeError: If f returns a complex number, or a start is not of 32 or 64 bit precision.
        OffManifoldError: If a start is not on its manifold.
        NonFiniteError: If f, its gradient or the square of that is not finite at the start, or
            the square is too small for the dtype.

    Example:
        >>> import torch, stiefel
        >>> A = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
        >>> X0 = stiefel.geometry.haar(6, 2, dtype=torch.float64)
        >>> result = stiefel.optim.minimize(lambda X: (X.mT @ A @ X).trace(), X0)
        >>> result.success, round(result.fun, 9)  # the two smallest eigenvalues, 1 + 2
        (True, 3.0)
    """
    solver = _solver(method, options)
    starts, wrap = unpack(X0)
    problem = Problem(f, components_of(starts, manifold), gradient)
    limits = _limits(
        starts, tol, absolute_tol, max_iterations, max_seconds, callback, feasibility_every
    )
    with torch.no_grad(), full_precision():
        run = Run(problem, limits, wrap)
        solver(problem, _first(problem, starts), run, **options)
        return _result(problem, run, wrap)


def _solver(method: str, options: dict[str, Any]) -> Callable[..., None]:
    """The solver of a name, its options checked."""
    if method not in SOLVERS:
        raise unknown("method", method, SOLVERS)
    solver = SOLVERS[method]
    _check_options(method, solver, options)
    return solver


def _first(problem: Problem, starts: Sequence[Tensor]) -> Evaluation:
    """f at the starts, which are checked, copied and brought to their manifolds."""
    X = tuple(plain(start).clone() for start in starts)
    for number, (component, part) in enumerate(zip(problem.components, X, strict=True)):
        component.check(part, "X0" if len(X) == 1 else f"X0[{number}]")
    X = tuple(c.start(part) for c, part in zip(problem.components, X, strict=True))
    first = problem.evaluate(X)
    _check_start(first)
    return first


def _check_options(method: str, solver: Callable[..., None], options: dict[str, Any]) -> None:
    parameters = inspect.signature(solver).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise unknown(f"option of {method!r}", name, known)


def _limits(
    starts: tuple[Tensor, ...],
    tol: float | None,
    absolute_tol: float,
    max_iterations: int,
    max_seconds: float | None,
    callback: Callable[[MinimizeResult], Any] | None,
    feasibility_every: int,
) -> Limits:
    if tol is None:
        tol = max(_TOLERANCES[start.real.dtype] for start in starts)
    numbers = {"tol": tol, "absolute_tol": absolute_tol, "max_iterations": max_iterations}
    numbers |= {"max_seconds": max_seconds or 0, "feasibility_every": feasibility_every}
    for name, number in numbers.items():
        if not number >= 0:
            raise ConfigurationError(f"expected {name} >= 0, got {number}")
    return Limits(tol, absolute_tol, max_iterations, max_seconds, callback, feasibility_every)


def _check_start(e: Evaluation) -> None:
    if not e.finite:
        what = f"f = {e.f}" if not abs(e.f) < float("inf") else "a gradient with NaN or infinity"
        if what.startswith("f") or not all_finite(e.G):
            raise NonFiniteError(
                f"expected f and its gradient to be finite at X0, got {what}: start elsewhere, or "
                "look for the operation with torch.autograd.detect_anomaly()"
            )
    most = max((float(G.abs().max()) for G in e.G if G.numel()), default=0.0)
    if not most <= 1.01 * e.scale < float("inf"):  # a norm is at least the largest entry
        raise NonFiniteError(
            f"expected a gradient whose square is within the range of its dtype at X0, got entries "
            f"up to {most:.1e}: multiply f by a number that brings them near 1"
        )


def _result(problem: Problem, run: Run, wrap: Callable[[Point], Any]) -> MinimizeResult:
    """The final point, polished where it has drifted."""
    e = run.final()
    polished = problem.polished(e.X)
    if polished is not None:
        e = problem.evaluate(polished)
    assert run.status is not None
    return MinimizeResult(
        x=wrap(e.X),
        fun=e.f,
        grad_norm=e.norm,
        nit=run.nit,
        nfev=problem.nfev,
        ngev=problem.ngev,
        success=run.status is Status.CONVERGED,
        status=int(run.status),
        message=run.message,
        curvature=run.curvature,
        feasibility=problem.feasibility(e.X),
        history=run.history,
    )
