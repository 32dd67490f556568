"""What every matrix-free operator can do, and the two primitives it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stiefel.errors import ShapeError

__all__ = ["LinearOperator", "Operator", "Transposed"]


@runtime_checkable
class Operator(Protocol):
    """A matrix ``(*batch, n, p)`` known by its products.

    ``op @ B`` and ``B @ op`` are products with a vector or with matrices ``(..., p, k)``,
    ``(..., k, n)``; ``op.mT`` is the transpose, not conjugated; ``h @ op.mT`` multiplies rows.
    """

    @property
    def shape(self) -> torch.Size:
        """Shape ``(*batch, n, p)``."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        ...

    @property
    def mT(self) -> Operator:
        """The transpose."""
        ...

    def __matmul__(self, other: Tensor) -> Tensor: ...

    def __rmatmul__(self, other: Tensor) -> Tensor: ...

    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(*batch, n, p)``."""
        ...


class LinearOperator(ABC):
    """Makes an `Operator` out of two products: the matrix and its transpose times columns."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape ``(*batch, n, p)``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""

    @abstractmethod
    def apply(self, B: Tensor) -> Tensor:
        """The product with columns ``(..., p, k)``, shape ``(..., n, k)``."""

    @abstractmethod
    def apply_transposed(self, B: Tensor) -> Tensor:
        """The product of the transpose with columns ``(..., n, k)``, shape ``(..., p, k)``."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(*batch, n, p)``."""

    @property
    def mT(self) -> Operator:
        """The transpose, not conjugated, shape ``(*batch, p, n)``."""
        return Transposed(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        """The product ``op @ other`` with a vector ``(p,)`` or columns ``(..., p, k)``."""
        _check_inner(self.shape, other, self.shape[-1], -1 if other.ndim == 1 else -2)
        if other.ndim == 1:
            return self.apply(other.unsqueeze(-1)).squeeze(-1)
        return self.apply(other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """The product ``other @ op`` with a vector ``(n,)`` or rows ``(..., k, n)``."""
        _check_inner(self.shape, other, self.shape[-2], -1)
        if other.ndim == 1:
            return self.apply_transposed(other.unsqueeze(-1)).squeeze(-1)
        return self.apply_transposed(other.mT).mT

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _check_inner(shape: torch.Size, other: Tensor, size: int, dim: int) -> None:
    if other.ndim == 0 or other.shape[dim] != size:
        raise ShapeError(
            f"cannot multiply an operator of shape {tuple(shape)} with a tensor of shape "
            f"{tuple(other.shape)}: dimension {dim} of the tensor must be {size}. Rows multiply as "
            "h @ operator.mT, columns as operator @ h"
        )


class Transposed(LinearOperator):
    """The transpose of an operator; `mT` gives the operator back."""

    def __init__(self, of: LinearOperator) -> None:
        self.of = of

    @property
    def shape(self) -> torch.Size:
        """Shape ``(*batch, p, n)``."""
        *batch, n, p = self.of.shape
        return torch.Size((*batch, p, n))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.of.dtype

    @property
    def mT(self) -> Operator:
        """The operator itself."""
        return self.of

    def apply(self, B: Tensor) -> Tensor:
        """The product with columns ``(..., n, k)``."""
        return self.of.apply_transposed(B)

    def apply_transposed(self, B: Tensor) -> Tensor:
        """The product of the transpose, which is the original operator, with columns."""
        return self.of.apply(B)

    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(*batch, p, n)``."""
        return self.of.to_dense().mT
