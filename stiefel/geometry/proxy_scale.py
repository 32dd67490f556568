"""Proxies of any scale and rank: what comes before a polar factor, and what is always right."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import real_dtype

__all__ = ["divided", "double", "gradient_over_scale", "scaled", "svd_pairs"]


def double(Z: Tensor) -> Tensor:
    """Z in float64 or complex128."""
    return Z.to(torch.complex128 if Z.is_complex() else torch.float64)


def scaled(Z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Z with entries whose squares are in range, what it was divided by, and which are not finite.

    Matrices whose Frobenius norm is between 1e-4 and 1e6 are left as they are; matrices with a NaN
    or an infinity become zero.

    Args:
        Z: Matrices, shape ``(..., n, p)``.

    Returns:
        Z ``(..., n, p)``, its divisor and the flag, both ``(..., 1, 1)``; Z itself and None twice
        where all are left as they are.
    """
    size = torch.linalg.vector_norm(Z, dim=(-2, -1), keepdim=True)
    plain = (size > 1e-4) & (size < 1e6)
    if bool(plain.all()):
        return Z, None, None
    least, most = (
        (torch.view_as_real(Z) if Z.is_complex() else Z).flatten(Z.ndim - 2).aminmax(dim=-1)
    )
    largest = torch.maximum(most, -least)[..., None, None]  # entry, or part of a complex one
    bad = ~largest.isfinite()
    scale = torch.where(bad | (largest == 0) | plain, 1, largest)
    return torch.where(bad, 0, divided(Z, scale)), scale, bad


def divided(Z: Tensor, scale: Tensor) -> Tensor:
    """Z / scale for a real scale ``(..., 1, 1)``, in real arithmetic.

    The quotient of complex numbers is infinite where the divisor is below the normal numbers.
    """
    if not Z.is_complex():
        return Z / scale
    return torch.view_as_complex(torch.view_as_real(Z.resolve_conj()) / scale.unsqueeze(-1))


def gradient_over_scale(dZ: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient by Z from that by Z / scale (None: 1); zero where it would overflow.

    That is where Z is zero to rounding for `stiefel.geometry.polar_gradient` too.
    """
    if scale is None:
        return dZ
    limits = torch.finfo(scale.dtype)
    zero = scale <= limits.tiny / limits.eps
    return torch.where(zero, 0, divided(dZ, scale.masked_fill(zero, 1)))


def svd_pairs(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, s and V of the singular value decomposition in float64, whatever the rank of Z."""
    U, s, Vh = torch.linalg.svd(double(Z), full_matrices=False)
    return U.to(Z.dtype), s.to(real_dtype(Z.dtype)), Vh.mH.resolve_conj().to(Z.dtype)
