"""A unitary matrix of phases, Fourier transforms, reflections and a permutation."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.operators.base import LinearOperator

__all__ = ["FourierReflections"]


def _reflect(u: Tensor, B: Tensor) -> Tensor:
    """``B - 2 u (u^H B)`` for a vector ``(n,)`` and columns ``(..., n, k)``."""
    u = u.unsqueeze(-1)
    return B - 2 * u * (u.conj() * B).sum(-2, keepdim=True)


class FourierReflections(LinearOperator):
    """``W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1``, complex, n x n, without its matrix.

    A product with k columns costs O(k n log n).
    D = diag(phases), R = I - 2 u u^H, F the unitary discrete Fourier transform and Pi B the rows
    of B in the order of a permutation. The transpose, F being symmetric, is
    ``D_1 F R_1^T Pi^T D_2 F^-1 R_2^T D_3`` with R^T = I - 2 conj(u) u^T.

    Args:
        phases: Unit complex numbers, the diagonals of D_1, D_2, D_3 as columns, shape ``(n, 3)``.
        U: Unit (or zero: R = I) complex vectors u_1 and u_2 as columns, shape ``(n, 2)``.
        permutation: Indices of the rows, int64, shape ``(n,)``.

    Raises:
        ShapeError: If sizes disagree.

    Example:
        >>> import torch
        >>> from stiefel.operators import FourierReflections
        >>> theta = torch.randn(4, 3, dtype=torch.float64)
        >>> phases = torch.polar(torch.ones_like(theta), theta)
        >>> U = torch.nn.functional.normalize(torch.randn(4, 2, dtype=torch.complex128), dim=0)
        >>> W = FourierReflections(phases, U, torch.tensor([2, 0, 3, 1]))
        >>> x = torch.randn(4, dtype=torch.complex128)
        >>> torch.allclose(W @ x, W.to_dense() @ x)
        True
        >>> torch.allclose(torch.linalg.vector_norm(W @ x), torch.linalg.vector_norm(x))
        True
    """

    def __init__(self, phases: Tensor, U: Tensor, permutation: Tensor) -> None:
        n = permutation.shape[-1]
        if phases.shape != (n, 3) or U.shape != (n, 2):
            raise ShapeError(
                f"expected phases ({n}, 3) and U ({n}, 2) for a permutation of {n}, got "
                f"{tuple(phases.shape)} and {tuple(U.shape)}"
            )
        self.D = phases.unsqueeze(-1).unbind(-2)
        self.u = U.unbind(-1)
        self.permutation = permutation

    @property
    def shape(self) -> torch.Size:
        """Shape ``(n, n)``."""
        n = self.permutation.shape[-1]
        return torch.Size((n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.u[0].dtype

    def apply(self, B: Tensor) -> Tensor:
        """``W B`` for columns ``(..., n, k)``."""
        (D1, D2, D3), (u1, u2) = self.D, self.u
        B = _reflect(u1, torch.fft.fft(D1 * B, dim=-2, norm="ortho"))
        B = D2 * B.index_select(-2, self.permutation)
        return D3 * _reflect(u2, torch.fft.ifft(B, dim=-2, norm="ortho"))

    def apply_transposed(self, B: Tensor) -> Tensor:
        """``W^T B`` for columns ``(..., n, k)``."""
        (D1, D2, D3), (u1, u2) = self.D, self.u
        B = D2 * torch.fft.ifft(_reflect(u2.conj(), D3 * B), dim=-2, norm="ortho")
        B = _reflect(u1.conj(), B.index_select(-2, self.permutation.argsort()))
        return D1 * torch.fft.fft(B, dim=-2, norm="ortho")

    def to_dense(self) -> Tensor:
        """The matrix itself, shape ``(n, n)``."""
        return self.apply(torch.eye(self.shape[-1], dtype=self.dtype, device=self.u[0].device))
