"""The step that takes a nearly orthonormal matrix to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded

__all__ = ["polish"]


@guarded
def polish(X: Tensor, steps: int = 1) -> Tensor:
    """Newton-Schulz steps ``X <- X (3 I - X^H X) / 2 = X + X (I - X^H X) / 2``.

    A residual ``X^H X - I`` of size d becomes 3/4 d^2: the step is for matrices that are on the
    manifold up to rounding (d well below 1), which it moves to the nearest point.

    Args:
        X: Shape ``(..., n, p)``, nearly orthonormal columns.
        steps: How many.

    Returns:
        Same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, orthonormality_residual, polish
        >>> X = haar(6, 2, dtype=torch.float64) + 1e-5
        >>> bool(orthonormality_residual(polish(X, 2)) < 1e-14)
        True
    """
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    for _ in range(steps):
        X = X + X @ (eye - X.mH @ X) / 2
    return X
