"""Spectral norms of skew matrices, roughly, by products: how far an exponential is to be scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import real_dtype

__all__ = ["gram_norm", "moderate", "norm_and_square", "overestimate", "skew_norm"]

#: Up to these sizes |A^2| and |A^4| bound the norm well, and cost less than the power iteration.
_TINY, _SMALL = 16, 64
#: Vectors and applications of the power iteration, and what is added to its result.
_VECTORS, _APPLICATIONS, _MARGIN = 4, 14, 1.08
#: Matrices of up to 64 rows with entries below this have eighth powers in the range of float32.
_MODERATE = 100.0


def moderate(A: Tensor) -> bool:
    """Whether A is so small, in size and entries, that its powers are taken without scaling."""
    if A.shape[-1] > _SMALL:
        return False
    parts = torch.view_as_real(A.resolve_conj()) if A.is_complex() else A
    least, most = parts.aminmax()
    return float(torch.maximum(-least, most)) < _MODERATE


def norm_and_square(A: Tensor, *, scaled: bool = True) -> tuple[Tensor, Tensor | None]:
    """About the spectral norms of normal matrices: not below 0.9 of them, or not by much above.

    Up to 64 rows ``(|A^k|_F^2 / m)^(1 / 2k)``, an upper bound (m is the multiplicity of the largest
    singular value: 2 for real skew matrices), with k = 2 up to 16 rows and k = 4 above; beyond, a
    power iteration on a fixed block of vectors with a margin.

    Args:
        A: Skew-Hermitian matrices, shape ``(m, n, n)`` or ``(n, n)``.
        scaled: Whether to scale by the largest entry first, so that no power overflows or vanishes;
            False for matrices that are `moderate`, whose norms below 1e-5 may come out as zero.

    Returns:
        The norms, shape ``(m,)`` or ``()``, in the real dtype of A, and A^2 if it was computed.
    """
    if not scaled:
        square = A @ A
        return _moment(square), square
    unit, largest = _unit(A)
    if A.shape[-1] > _SMALL:
        return _MARGIN * _power_iteration(unit) * largest, None
    return _moment(unit @ unit) * largest, None


def _unit(A: Tensor) -> tuple[Tensor, Tensor]:
    """A over its largest entry, and that; a product, since complex division squares the divisor."""
    largest = A.abs().amax((-2, -1)).clamp_min(torch.finfo(A.dtype).tiny)
    return A * largest.reciprocal()[..., None, None], largest


def _moment(square: Tensor) -> Tensor:
    """The bound for A from its square."""
    n = square.shape[-1]
    power, k = (square, 2) if n <= _TINY else (square @ square, 4)
    multiplicity = 1 if square.is_complex() or n == 1 else 2
    moment = torch.linalg.vector_norm(power, dim=(-2, -1)).square() / multiplicity
    return moment ** (0.5 / k)


def _power_iteration(A: Tensor) -> Tensor:
    """The growth of fixed vectors in the last of several applications."""
    n = A.shape[-1]
    k = torch.arange(1, _VECTORS * n + 1, dtype=torch.float64, device=A.device)
    x = torch.sin(k * k).view(_VECTORS, n).to(A.dtype).expand(*A.shape[:-2], _VECTORS, n)
    tiny = torch.finfo(real_dtype(A.dtype)).tiny
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    for _ in range(_APPLICATIONS):
        x = (x / length.clamp_min(tiny)) @ A
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.amax((-2, -1))


def skew_norm(A: Tensor) -> Tensor:
    """The first result of `norm_and_square`."""
    return norm_and_square(A)[0]


def overestimate(n: int, *, complex: bool) -> float:
    """By what factor, at most, `skew_norm` is above the norm of an n x n matrix."""
    if n > _SMALL:
        return _MARGIN
    k = 2 if n <= _TINY else 4
    return max(n if complex else n / 2, 1) ** (0.5 / k)


def gram_norm(S: Tensor) -> Tensor:
    """An upper bound ``|S^2|_F^(1/4)`` of |N|, at most ``p^(1/8)`` times it, from S = N^H N.

    Args:
        S: Positive semidefinite matrices, shape ``(..., p, p)``.

    Returns:
        Shape ``(...)``, in the real dtype of S.
    """
    unit, largest = _unit(S)
    return (torch.linalg.vector_norm(unit @ unit, dim=(-2, -1)).sqrt() * largest).sqrt()
