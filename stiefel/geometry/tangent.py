"""Tangent spaces of the Stiefel manifold St(n, p) = {X : X^H X = I}."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded

__all__ = ["random_tangent", "skew", "sym", "tangent_projection"]


def sym(A: Tensor) -> Tensor:
    """Returns the Hermitian part ``(A + A^H) / 2`` of square matrices ``(..., p, p)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import sym
        >>> sym(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        tensor([[1., 1.],
                [1., 3.]])
    """
    return (A + A.mH) / 2


def skew(A: Tensor) -> Tensor:
    """Returns the skew-Hermitian part ``(A - A^H) / 2`` of square matrices ``(..., p, p)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import skew
        >>> skew(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    return (A - A.mH) / 2


@guarded
def tangent_projection(X: Tensor, Z: Tensor) -> Tensor:
    """Projects `Z` orthogonally, in the Euclidean inner product, onto the tangent space at `X`.

    ``Z - X sym(X^H Z)``; a tangent vector u at X satisfies ``X^H u + u^H X = 0``.
    Source: Edelman, Arias, Smith, SIAM J. Matrix Anal. Appl. 20 (1998).

    Args:
        X: Points, shape ``(..., n, p)``, orthonormal columns.
        Z: Ambient matrices, same shape.

    Returns:
        Tangent vectors at `X`, same shape.

    Raises:
        ShapeError: If n < p.
        DtypeError: If the tensors differ in dtype or device.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, tangent_projection
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = tangent_projection(X, torch.ones(5, 2, dtype=torch.float64))
        >>> bool((X.mT @ u + u.mT @ X).abs().max() < 1e-14)
        True
    """
    return Z - X @ sym(X.mH @ Z)


def random_tangent(X: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draws Gaussian tangent vectors at `X`: the projection of a standard normal matrix.

    Args:
        X: Points, shape ``(..., n, p)``.
        generator: Source of randomness.

    Returns:
        Tangent vectors, same shape, dtype and device as `X`.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, random_tangent, tangency_residual
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> bool(tangency_residual(X, random_tangent(X)) < 1e-14)
        True
    """
    Z = torch.randn(X.shape, dtype=X.dtype, device=X.device, generator=generator)
    return tangent_projection(X, Z)
