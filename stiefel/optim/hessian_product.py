"""Riemannian Hessian-vector products of a function of points on manifolds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import DtypeError, ShapeError
from stiefel.manifolds import Manifold
from stiefel.numerics import full_precision, plain
from stiefel.optim.solvers.problem import Problem
from stiefel.optim.solvers.second_order import Hessian
from stiefel.optim.solvers.starts import components_of, unpack

__all__ = ["hessian_vector_product"]


def hessian_vector_product(
    f: Callable[..., Any],
    X: Tensor | Sequence[Tensor],
    u: Tensor | Sequence[Tensor],
    *,
    manifold: Manifold | str | Sequence[Manifold | str | None] | None = None,
    gradient: bool | Callable[..., Any] | None = None,
    hessian: str | Callable[..., Any] = "autograd",
) -> Any:
    r"""The Riemannian Hessian of f at X applied to a tangent vector u.

    The covariant derivative of the Riemannian gradient along u, in the metric of the manifold: for
    ``stiefel.Stiefel("euclidean")`` ``Proj(D^2 f[u] - u sym(X^H G))``, for ``"canonical"`` see
    `stiefel.geometry.canonical_hessian`. It is self-adjoint in that metric, and
    ``f(exp_X(t u)) = f + t <grad f, u> + t^2/2 <Hess[u], u> + O(t^3)``.

    Args:
        f: Takes the point, or one tensor for each of several points, and returns a real scalar
            tensor; see `minimize`.
        X: The point or points, shape ``(..., n, p)``.
        u: Tangent vectors, of the same shapes; normal parts are dropped.
        manifold: As in `minimize`: by default ``stiefel.Stiefel("euclidean", "cholesky_qr")``.
        gradient: As in `minimize`.
        hessian: ``"autograd"`` (double backward), ``"forward"`` (forward over reverse,
            `torch.func`), ``"differences"`` (central differences of gradients, for an f that can be
            differentiated once only), or a function ``hessian(X, u)`` (all points, then all
            vectors) that returns the derivative of the ambient gradient along u.

    Returns:
        A tangent vector, or a list or tuple of them as X is, without a gradient.

    Raises:
        ConfigurationError: If f cannot be differentiated twice (``hessian="differences"`` needs
            the gradient only), or a manifold has no ``ehess2rhess``.
        ShapeError: If u does not fit X.
        DtypeError: If u has another dtype than X.

    Example:
        >>> import torch, stiefel
        >>> A = torch.diag(torch.arange(1.0, 5.0, dtype=torch.float64))
        >>> X = torch.eye(4, 1, dtype=torch.float64)  # the smallest eigenvector
        >>> u = torch.eye(4, dtype=torch.float64)[:, 1:2]
        >>> H = stiefel.optim.hessian_vector_product(lambda X: (X.mT @ A @ X).trace(), X, u)
        >>> H.squeeze()  # 2 (2 - 1) u
        tensor([0., 2., 0., 0.], dtype=torch.float64)
    """
    points, _ = unpack(X)
    several = isinstance(X, (list, tuple))
    vectors: tuple[Any, ...] = tuple(u) if isinstance(u, (list, tuple)) else (u,)
    if [v.shape for v in vectors] != [x.shape for x in points]:
        raise ShapeError(
            f"expected vectors of the shapes {[tuple(x.shape) for x in points]} of the points, got "
            f"{[tuple(v.shape) for v in vectors]}"
        )
    if [v.dtype for v in vectors] != [x.dtype for x in points]:
        raise DtypeError(
            f"expected vectors of the dtypes {[x.dtype for x in points]} of the points, got "
            f"{[v.dtype for v in vectors]}: convert them with .to(X.dtype)"
        )
    problem = Problem(f, components_of(points, manifold), gradient)
    at = tuple(map(plain, points))
    with torch.no_grad(), full_precision():
        e = problem.evaluate(at)
        tangent = problem.project(at, tuple(map(plain, vectors)))
        products = Hessian(problem, e, hessian)(tangent)
    if not several:
        return products[0]
    return list(products) if isinstance(X, list) else products
