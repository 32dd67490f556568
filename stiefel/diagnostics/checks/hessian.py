"""`check_hessian`: is the Riemannian Hessian of a cost its second derivative along geodesics?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.costs import Cost, prepare
from stiefel.diagnostics.checks.directions import bent, length, random_direction, seeded, tangency
from stiefel.diagnostics.checks.expansions import Ray, curvature_findings, slope_findings
from stiefel.diagnostics.checks.gradient import user_vectors
from stiefel.diagnostics.report import Finding, Report
from stiefel.errors import ConfigurationError
from stiefel.numerics import full_precision
from stiefel.optim.solvers import Hessian

__all__ = ["check_hessian"]

_Product = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@torch.inference_mode(False)
@torch.no_grad()
@full_precision()
def check_hessian(
    cost: Callable[..., Any],
    X: Any,
    *,
    manifold: Any = None,
    gradient: bool | Callable[..., Any] | None = None,
    hessian: str | Callable[..., Any] = "autograd",
    riemannian_hessian: Callable[..., Any] | None = None,
    directions: int = 5,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks Hessian-vector products of a cost against the cost itself.

    Along random tangent vectors u of length one, and a curve R(t u) that agrees with the geodesic
    of the metric to second order, ``|f(R(t u)) - f - t <grad, u> - t^2/2 <Hess[u], u>|`` must
    shrink like t^3. The product must be self-adjoint, linear and tangent. On `stiefel.Stiefel` the
    curves are the Cayley retraction (canonical metric) and the polar one (Euclidean metric), on
    other manifolds their ``expmap``. Computed in float64 or complex128.

    Args:
        cost: As for `stiefel.optim.minimize`.
        X: A point ``(..., n, p)``, or several; as for `check_gradient`.
        manifold: As for `stiefel.optim.minimize`.
        gradient: As for `check_gradient`.
        hessian: As for `stiefel.optim.hessian_vector_product`: a name, or your own function
            ``hessian(X, u)`` that returns the derivative of the ambient gradient along u.
        riemannian_hessian: Your own Riemannian Hessian instead: a function ``(X, u)`` (all points,
            then all vectors) that returns ``Hess f(X)[u]``, a tangent vector for each point.
        directions: Random directions.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report with the findings ``"order of the first-order model"``, ``"error of the slope"``
        (of the gradient), ``"order of the second-order model"``, ``"error of the curvature"``,
        and ``"symmetry"``, ``"linearity"`` and ``"tangency of the Hessian"``.

    Raises:
        ConfigurationError: If the cost is random, or cannot be differentiated twice.
        ShapeError: If the cost is no scalar, or a product has the wrong shape.
        OffManifoldError: If X is not on its manifold.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import check_hessian
        >>> A = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
        >>> X = stiefel.geometry.haar(6, 2, dtype=torch.float64)
        >>> f = lambda X: (X.mT @ A @ X).trace()
        >>> check_hessian(f, X, manifold=stiefel.Stiefel("canonical")).ok
        True
        >>> report = check_hessian(f, X, hessian=lambda X, u: A @ u)  # the factor 2 is missing
        >>> [finding.name for finding in report.failures]
        ['order of the second-order model', 'error of the curvature']
    """
    if not isinstance(directions, int) or directions < 2:
        raise ConfigurationError(f"expected directions >= 2, an int, got {directions}")
    at = prepare(cost, X, manifold, gradient)
    points = at.at.X
    product = (
        Hessian(at.problem, at.at, hessian)
        if riemannian_hessian is None
        else _own(riemannian_hessian, points)
    )
    exact = 1e-3 if at.eps > 1e-10 else (1e-5 if hessian == "differences" else 1e-9)
    source = seeded(generator)
    vectors = [random_direction(at.problem, points, source) for _ in range(directions)]
    products = [product(u) for u in vectors]
    report = _second_order(at, vectors, products)
    findings = (*report.findings, *_algebra(at, product, vectors, products, exact))
    return Report(report.subject, findings, report.curves, (*at.notes, *report.skipped))


def _own(riemannian_hessian: Callable[..., Any], X: tuple[Tensor, ...]) -> _Product:
    """A user's Hessian as a function of a tuple."""

    def product(u: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return user_vectors(riemannian_hessian(*(x.clone() for x in X), *u), X)

    return product


def _second_order(
    at: Cost, vectors: list[tuple[Tensor, ...]], products: list[tuple[Tensor, ...]]
) -> Report:
    """The findings that compare with values of the cost."""
    problem, X, f, eps = at.problem, at.at.X, at.at.f, at.eps
    names = ", ".join(str(c.manifold or "free tensors") for c in problem.components)
    subject = f"Hessian of the cost on {names}"
    try:
        bent(problem, X, vectors[0], 0.1)
    except NotImplementedError:
        reason = "second-order model: the manifold has no expmap, so no second-order curve is known"
        return Report(subject, (), (), (reason,))
    rays = [
        Ray(
            lambda t, u=u: at.value(bent(problem, X, u, t)),
            problem.inner(X, at.at.gradient, u),
            problem.inner(X, H, u),
        )
        for u, H in zip(vectors, products, strict=True)
    ]
    findings, curves = slope_findings(rays, f, eps, length(at.at.G), "the gradient", "")
    hint = "Where the findings on the gradient fail too, mend the gradient first."
    second, drawn = curvature_findings(rays, f, eps, max(map(length, products)), hint)
    return Report(subject, (*findings, *second), (*curves, *drawn))


def _algebra(
    at: Cost,
    product: _Product,
    vectors: list[tuple[Tensor, ...]],
    products: list[tuple[Tensor, ...]],
    exact: float,
) -> list[Finding]:
    """Symmetry, linearity and tangency."""
    problem, X = at.problem, at.at.X
    scale = max([length(H) for H in products] + [at.eps * length(at.at.G), 1e-300])
    skew = 0.0
    for i, (u, Hu) in enumerate(zip(vectors, products, strict=True)):
        for v, Hv in zip(vectors[:i], products[:i], strict=True):
            skew = max(skew, abs(problem.inner(X, Hu, v) - problem.inner(X, u, Hv)) / scale)
    u, v = vectors[:2]
    sum_ = product(problem.combine(2.0, u, -3.0, v))
    parts = problem.combine(2.0, products[0], -3.0, products[1])
    bend = length(problem.combine(1.0, sum_, -1.0, parts)) / (5 * scale)
    normal = max(
        tangency(c, x, h) * float(h.abs().max()) / scale
        for H in products
        for c, x, h in zip(problem.components, X, H, strict=True)
        if h.numel()
    )
    return [
        Finding(
            "symmetry of the Hessian",
            skew,
            "<=",
            exact,
            "<Hess u, v> and <u, Hess v> differ, in the metric of the manifold: a term is missing "
            "(the one that bends the gradient, - u sym(X^H G), most often), or belongs to another "
            "metric. manifold.ehess2rhess(X, G, D, u) has all of them.",
        ),
        Finding(
            "linearity of the Hessian",
            bend,
            "<=",
            exact,
            "Hess[2u - 3v] is not 2 Hess[u] - 3 Hess[v]: the product keeps something from call to "
            "call, or normalises its argument.",
        ),
        Finding(
            "tangency of the Hessian",
            normal,
            "<=",
            exact,
            "Hess[u] has a part normal to the manifold: project it last with manifold.proju.",
        ),
    ]
