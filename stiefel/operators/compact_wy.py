"""A product of few reflections, applied without being formed."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.numerics import full_precision
from stiefel.operators.base import LinearOperator

__all__ = ["CompactWY"]


class CompactWY(LinearOperator):
    """The first p columns of ``Q = F (I - Y U^H)``, F = diag(1, ..., 1, flip).

    A product with k columns costs two thin products, 4 n L k operations instead of 2 n^2 k.
    Columns multiply as ``Q B = F (E B - Y (U_1^H B))``, U_1 the first p rows of U; rows as
    ``Hb Q^T = Hb - (Hb conj(U)) Y^T``, which is ``Hb @ op.mT``.

    Args:
        U: Unit reflection vectors, shape ``(*batch, n, L)``.
        Y: ``U (I + D N)^-1 D``, same shape (`stiefel.geometry.wy_factors.compact_wy_factors`).
        columns: p; n by default.
        flip: +1 or -1 of each matrix, shape ``(*batch)``, square matrices only.
    """

    def __init__(
        self, U: Tensor, Y: Tensor, *, columns: int | None = None, flip: Tensor | None = None
    ) -> None:
        if U.shape != Y.shape:
            raise ShapeError(
                f"expected U and Y of one shape (*batch, n, L), got {tuple(U.shape)} and "
                f"{tuple(Y.shape)}"
            )
        self.U, self.Y = U, Y
        self.columns = U.shape[-2] if columns is None else columns
        self.flip = None if flip is None else flip.to(U.dtype)[..., None, None]

    @property
    def shape(self) -> torch.Size:
        """Shape ``(*batch, n, p)``."""
        return torch.Size((*self.U.shape[:-1], self.columns))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.U.dtype

    def apply(self, B: Tensor) -> Tensor:
        """``Q B`` for columns ``(..., p, k)``."""
        image = self.Y @ (self.U[..., : self.columns, :].mH @ B)
        rows = self.U.shape[-2] - self.columns
        padded = torch.nn.functional.pad(B, (0, 0, 0, rows)) if rows else B
        return self._flip_last_row(padded - image)

    def apply_transposed(self, B: Tensor) -> Tensor:
        """``Q^T B`` for columns ``(..., n, k)``."""
        B = self._flip_last_row(B)
        top = self.U[..., : self.columns, :].conj()
        return B[..., : self.columns, :] - top @ (self.Y.mT @ B)

    def _flip_last_row(self, B: Tensor) -> Tensor:
        if self.flip is None:
            return B
        return torch.cat([B[..., :-1, :], B[..., -1:, :] * self.flip], dim=-2)

    @full_precision()
    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(*batch, n, p)``."""
        n, p = self.U.shape[-2], self.columns
        E = torch.eye(n, p, dtype=self.dtype, device=self.U.device)
        return self._flip_last_row(E - self.Y @ self.U[..., :p, :].mH)
