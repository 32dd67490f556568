"""Few layers of plane rotations, applied without being formed."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.givens import rotate
from stiefel.numerics import complex_dtype
from stiefel.operators.base import LinearOperator

__all__ = ["Rotations"]


class Rotations(LinearOperator):
    """``Q = F D F_L ... F_1``, layers of disjoint plane rotations, F = diag(1, ..., 1, flip).

    A product with k columns costs O(L n k) operations instead of 2 n^2 k. The transpose is
    ``Q^T B = conj(F_1^H ... F_L^H D^H conj(F B))``.

    Args:
        n: Rows.
        theta: Angles, shape ``(*batch, count)`` (`stiefel.geometry.givens.rotate`).
        phi: Phases of the blocks, same shape, for a complex matrix.
        omega: Phases of the rows, shape ``(*batch, n)``, for a complex matrix.
        layers: L.
        style: ``"tunable"`` or ``"fft"``.
        flip: +1 or -1 of each matrix, shape ``(*batch)``.

    Example:
        >>> import torch
        >>> from stiefel.operators import Rotations
        >>> quarter = torch.tensor([torch.pi / 2])
        >>> Q = Rotations(2, quarter, layers=1)
        >>> (Q @ torch.tensor([1.0, 0.0])).round(decimals=5) + 0.0
        tensor([0., 1.])
        >>> Q.to_dense().round(decimals=5) + 0.0
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """

    def __init__(
        self,
        n: int,
        theta: Tensor,
        phi: Tensor | None = None,
        omega: Tensor | None = None,
        *,
        layers: int,
        style: str = "tunable",
        flip: Tensor | None = None,
    ) -> None:
        self.n, self.layers, self.style = n, layers, style
        self.angles = tuple(angle for angle in (theta, phi, omega) if angle is not None)
        self.flip = None if flip is None else flip.to(theta.dtype)[..., None, None]

    @property
    def shape(self) -> torch.Size:
        """Shape ``(*batch, n, n)``."""
        return torch.Size((*self.angles[0].shape[:-1], self.n, self.n))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        dtype = self.angles[0].dtype
        return complex_dtype(dtype) if len(self.angles) > 1 else dtype

    def apply(self, B: Tensor) -> Tensor:
        """``Q B`` for columns ``(..., n, k)``."""
        return self._flip_last_row(self._rotate(B, adjoint=False))

    def apply_transposed(self, B: Tensor) -> Tensor:
        """``Q^T B`` for columns ``(..., n, k)``."""
        B = self._flip_last_row(B)
        if self.dtype.is_complex:
            return self._rotate(B.conj_physical(), adjoint=True).conj_physical()
        return self._rotate(B, adjoint=True)

    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(*batch, n, n)``."""
        return self.apply(torch.eye(self.n, dtype=self.dtype, device=self.angles[0].device))

    def _rotate(self, B: Tensor, *, adjoint: bool) -> Tensor:
        """Columns turned; those of a batch side by side where there is one matrix only."""
        B = B.to(torch.promote_types(B.dtype, self.dtype))
        batch, leading = self.shape[:-2], B.shape[:-2]
        if not batch and leading:
            B = B.movedim(-2, 0)
            turned = self._turn(B.flatten(1), self.angles, adjoint)
            return turned.unflatten(1, B.shape[1:]).movedim(0, -2)
        common = torch.broadcast_shapes(batch, leading)
        angles = tuple(angle.expand(*common, -1) for angle in self.angles)
        return self._turn(B.expand(*common, *B.shape[-2:]), angles, adjoint)

    def _turn(self, B: Tensor, angles: tuple[Tensor, ...], adjoint: bool) -> Tensor:
        return rotate(B, *angles, layers=self.layers, style=self.style, adjoint=adjoint)

    def _flip_last_row(self, B: Tensor) -> Tensor:
        if self.flip is None:
            return B
        *_, n, k = B.shape
        flipped = B[..., -1:, :] * self.flip
        rest = B[..., :-1, :].expand(*flipped.shape[:-2], n - 1, k)
        return torch.cat([rest, flipped], dim=-2)
