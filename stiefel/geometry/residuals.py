"""How far a matrix is from the manifold, and a vector from the tangent space: in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import double_dtype, full_precision

__all__ = ["orthonormality_residual", "tangency_residual"]


def _double(X: Tensor) -> Tensor:
    return X.to(double_dtype(X.dtype))


def _largest(A: Tensor) -> Tensor:
    """Largest absolute entry of each matrix; zero for an empty matrix."""
    if A.shape[-1] == 0 or A.shape[-2] == 0:
        return A.new_zeros(A.shape[:-2], dtype=torch.float64)
    return A.abs().amax((-2, -1))


@full_precision()
def orthonormality_residual(X: Tensor) -> Tensor:
    """The largest entry of ``|X^H X - I|`` of each matrix, computed in float64.

    Compare it with ``stiefel.tolerance(X.dtype, n, p)``. Wide matrices are measured as they are:
    transpose them first.

    Args:
        X: Matrices, shape ``(..., n, p)``, any floating point or complex dtype.

    Returns:
        float64 tensor of shape ``(...)``; NaN where X is not finite.

    Example:
        >>> import torch
        >>> from stiefel.geometry import orthonormality_residual
        >>> orthonormality_residual(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
        tensor(3., dtype=torch.float64)
    """
    X = _double(X.detach())
    gram = X.mH @ X
    return _largest(gram - torch.eye(X.shape[-1], dtype=X.dtype, device=X.device))


@full_precision()
def tangency_residual(X: Tensor, u: Tensor) -> Tensor:
    """The largest entry of ``|X^H u + u^H X|`` of each matrix, computed in float64.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Vectors that should be tangent at X, same shape.

    Returns:
        float64 tensor of shape ``(...)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import tangency_residual
        >>> X, u = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> tangency_residual(X, u), tangency_residual(X, X)
        (tensor(0., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    S = _double(X.detach()).mH @ _double(u.detach())
    return _largest(S + S.mH)
