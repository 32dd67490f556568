"""Riemannian Hessians of both metrics, from the ambient gradient and Hessian-vector product.

A Hessian-vector product here is the covariant derivative of the gradient, a tangent vector with
``<Hess[u], v>_X = Hess f(u, v)``; along a geodesic ``f(exp_X(t u)) = f + t <grad f, u> + t^2/2
<Hess[u], u> + O(t^3)``.
"""

from __future__ import annotations

from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.metrics import canonical_gradient
from stiefel.geometry.tangent import sym, tangent_projection

__all__ = ["HESSIANS", "canonical_hessian", "euclidean_hessian"]


@guarded
def euclidean_hessian(X: Tensor, G: Tensor, D: Tensor, u: Tensor) -> Tensor:
    """The Hessian-vector product in the Euclidean metric, ``Proj(D - u sym(X^H G))``.

    Source: Absil, Mahony, Trumpf, "An extrinsic look at the Riemannian Hessian" (2013).

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients (for complex X as torch gives them), same shape.
        D: Ambient Hessian-vector products, the derivative of G along u, same shape.
        u: Tangent vectors, same shape.

    Returns:
        Tangent vectors, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_hessian, haar, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = random_tangent(X)
        >>> H = euclidean_hessian(X, X, u, u)  # of f(X) = |X|^2 / 2, which is constant there
        >>> bool(H.abs().max() < 1e-14)
        True
    """
    return tangent_projection(X, D - u @ sym(X.mH @ G))


@guarded
def canonical_hessian(X: Tensor, G: Tensor, D: Tensor, u: Tensor) -> Tensor:
    """The Hessian-vector product in the canonical metric.

    With S = sym(X^H G), the bilinear form of Edelman, Arias, Smith (1998), section 2.4.1 (for
    complex X the real part of the traces), is ``Re tr(E^H v)`` with
    ``E = D + (X u^H G + G u^H X)/2 - (I - X X^H) u S``, and ``Hess[u] = E - X E^H X``.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients (for complex X as torch gives them), same shape.
        D: Ambient Hessian-vector products, the derivative of G along u, same shape.
        u: Tangent vectors, same shape.

    Returns:
        Tangent vectors, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_hessian, haar, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = random_tangent(X)
        >>> H = canonical_hessian(X, X, u, u)  # of f(X) = |X|^2 / 2, which is constant there
        >>> bool(H.abs().max() < 1e-14)
        True
    """
    XhG, Xhu = X.mH @ G, X.mH @ u
    E = D + (X @ (u.mH @ G) + G @ Xhu.mH) / 2 - (u - X @ Xhu) @ sym(XhG)
    return canonical_gradient(X, E)


#: The Hessian-vector product of each metric.
HESSIANS = {"canonical": canonical_hessian, "euclidean": euclidean_hessian}
