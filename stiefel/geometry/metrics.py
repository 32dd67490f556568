"""The two classical metrics of the Stiefel manifold and the gradients that they define.

Both gradients satisfy ``<gradient(X, G), v>_X = Re tr(G^H v)`` for every tangent v, in their own
inner product. Source: Edelman, Arias, Smith (1998), sections 2.2.1, 2.4.1 and 2.5.1.
"""

from __future__ import annotations

from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.tangent import tangent_projection

__all__ = ["canonical_gradient", "canonical_inner", "euclidean_gradient", "euclidean_inner"]


def _real_inner(U: Tensor, V: Tensor) -> Tensor:
    """``Re tr(U^H V)`` over the last two dimensions."""
    product = U.conj() * V
    return (product.real if product.is_complex() else product).sum((-2, -1))


@guarded
def euclidean_inner(X: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The Euclidean (embedded) inner product ``<u, v> = Re tr(u^H v)``.

    Args:
        X: Points, shape ``(..., n, p)`` (only its shape matters).
        u: Tangent vectors, same shape.
        v: Tangent vectors, same shape.

    Returns:
        Real tensor of shape ``(...)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_inner, haar, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = random_tangent(X)
        >>> torch.allclose(euclidean_inner(X, u, u), u.square().sum())
        True
    """
    return _real_inner(u, v)


@guarded
def canonical_inner(X: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The canonical inner product ``<u, v>_X = Re tr(u^H (I - X X^H / 2) v)``.

    On square matrices it is half of the Euclidean one.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape.
        v: Tangent vectors, same shape.

    Returns:
        Real tensor of shape ``(...)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_inner, euclidean_inner, haar, random_tangent
        >>> X = haar(4, dtype=torch.float64)
        >>> u, v = random_tangent(X), random_tangent(X)
        >>> torch.allclose(canonical_inner(X, u, v), euclidean_inner(X, u, v) / 2)
        True
    """
    return _real_inner(u, v) - _real_inner(X.mH @ u, X.mH @ v) / 2


def euclidean_gradient(X: Tensor, G: Tensor) -> Tensor:
    """The gradient in the Euclidean metric, ``G - X sym(X^H G)``: the tangent projection.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients dL/dX (for complex X as torch gives them), same shape.

    Returns:
        Tangent vectors, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_gradient, euclidean_inner, haar, random_tangent
        >>> X, G = haar(5, 2, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
        >>> v = random_tangent(X)
        >>> torch.allclose(euclidean_inner(X, euclidean_gradient(X, G), v), (G * v).sum())
        True
    """
    return tangent_projection(X, G)


@guarded
def canonical_gradient(X: Tensor, G: Tensor) -> Tensor:
    """The gradient in the canonical metric, ``G - X G^H X``.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients dL/dX (for complex X as torch gives them), same shape.

    Returns:
        Tangent vectors, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_gradient, canonical_inner, haar, random_tangent
        >>> X, G = haar(5, 2, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
        >>> v = random_tangent(X)
        >>> torch.allclose(canonical_inner(X, canonical_gradient(X, G), v), (G * v).sum())
        True
    """
    return G - X @ (G.mH @ X)
