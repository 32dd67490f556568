"""What the initialisers share: sizes of a tensor, filling it, the component of O(n)."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.numerics import compute_dtype

__all__ = ["fill", "sizes"]


def sizes(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Batch, long and short side of a tensor that is to be filled.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        DtypeError: If it holds integers.
    """
    if tensor.ndim < 2:
        raise ShapeError(
            f"expected a tensor of shape (..., n, p) to initialise, got {tuple(tensor.shape)}"
        )
    compute_dtype(tensor.dtype)
    *batch, rows, columns = tensor.shape
    return tuple(batch), max(rows, columns), min(rows, columns)


@torch.no_grad()
def fill(tensor: Tensor, X: Tensor) -> Tensor:
    """Copies a tall X into the tensor, transposed where the tensor is wide."""
    return tensor.copy_(X.mT if tensor.shape[-2] < tensor.shape[-1] else X)
