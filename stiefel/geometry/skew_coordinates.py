"""Free coordinates of skew-Hermitian matrices, orthonormal in the canonical metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel.geometry.linear import adjoint

__all__ = ["skew_from_coordinates", "skew_to_coordinates"]


def skew_from_coordinates(V: Tensor, work: Tensor | None = None) -> Tensor:
    """A = T - T^H, T the strict upper triangle of V; complex: plus i sqrt(2) Im(V_kk).

    The coordinates that count are orthonormal in the canonical metric ``tr(A^H A) / 2``; all the
    others (the lower triangle, the diagonal, for complex V its real part) are ignored.

    Args:
        V: Coordinates, shape ``(..., n, n)``.
        work: Memory like V to work in.

    Returns:
        Skew-Hermitian matrices, same shape.
    """
    T = V.triu(1)
    A = T.sub_(adjoint(T, work))
    if V.is_complex():
        diagonal = V.diagonal(dim1=-2, dim2=-1).imag * math.sqrt(2)
        A.diagonal(dim1=-2, dim2=-1).imag.copy_(diagonal)
    return A


def skew_to_coordinates(A: Tensor, out: Tensor | None = None) -> Tensor:
    """Coordinates of `skew_from_coordinates`, zero where they do not count.

    This map is also the adjoint of `skew_from_coordinates`: with dA = Z^H - Z made of the
    cotangent -Z of A, it gives the gradient of the coordinates.

    Args:
        A: Skew-Hermitian matrices, shape ``(..., n, n)``.
        out: Memory like A for the result, which may be A itself.

    Returns:
        Coordinates, same shape.
    """
    diagonal = A.diagonal(dim1=-2, dim2=-1).imag / math.sqrt(2) if A.is_complex() else None
    V = torch.triu(A, 1, out=out)
    if diagonal is not None:
        V.diagonal(dim1=-2, dim2=-1).imag.copy_(diagonal)
    return V
