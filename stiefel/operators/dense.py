"""A matrix as an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.operators.base import LinearOperator, Operator

__all__ = ["Dense"]


class Dense(LinearOperator):
    """A matrix, held as it is.

    Args:
        W: Matrix, shape ``(*batch, n, p)``.

    Example:
        >>> import torch
        >>> from stiefel.operators import Dense
        >>> op = Dense(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        >>> op @ torch.tensor([1.0, 2.0])
        tensor([-2.,  1.])
    """

    def __init__(self, W: Tensor) -> None:
        self.W = W

    @property
    def shape(self) -> torch.Size:
        """Shape ``(*batch, n, p)``."""
        return self.W.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.W.dtype

    @property
    def mT(self) -> Operator:
        """The transposed matrix, a view."""
        return Dense(self.W.mT)

    def apply(self, B: Tensor) -> Tensor:
        """``W B``."""
        return self.W @ B

    def apply_transposed(self, B: Tensor) -> Tensor:
        """``W^T B``."""
        return self.W.mT @ B

    def to_dense(self) -> Tensor:
        """The matrix that was given."""
        return self.W
