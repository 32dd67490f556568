"""Spectral norms of skew matrices, roughly, by products: how far an exponential is to be scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import real_dtype

__all__ = ["gram_norm", "skew_norm"]

#: Up to this size the moment bound costs less than the power iteration.
_SMALL = 64
#: Vectors and applications of the power iteration, and what is added to its result.
_VECTORS, _APPLICATIONS, _MARGIN = 4, 14, 1.08


def skew_norm(A: Tensor) -> Tensor:
    """About the spectral norms of normal matrices: not below 0.9 of them, or not by much above.

    Up to 64 rows ``(|A^4|_F^2 / m)^(1/8)``, an upper bound (m is the multiplicity of the largest
    singular value: 2 for real skew matrices); above, a power iteration on a fixed block of vectors
    with a margin. A is divided by its largest entry first: nothing overflows.

    Args:
        A: Skew-Hermitian matrices, shape ``(m, n, n)`` or ``(n, n)``.

    Returns:
        Shape ``(m,)`` or ``()``, in the real dtype of A.
    """
    n = A.shape[-1]
    largest = A.abs().amax((-2, -1))
    unit = A / torch.where(largest > 0, largest, 1)[..., None, None]
    if n <= _SMALL:
        A2 = unit @ unit
        moment = torch.linalg.vector_norm(A2 @ A2, dim=(-2, -1)).square()
        multiplicity = 1 if A.is_complex() or n == 1 else 2
        return (moment / multiplicity) ** 0.125 * largest
    k = torch.arange(1, _VECTORS * n + 1, dtype=torch.float64, device=A.device)
    x = torch.sin(k * k).view(_VECTORS, n).to(A.dtype).expand(*A.shape[:-2], _VECTORS, n)
    tiny = torch.finfo(real_dtype(A.dtype)).tiny
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    for _ in range(_APPLICATIONS):
        x = (x / length.clamp_min(tiny)) @ unit
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return _MARGIN * length.amax((-2, -1)) * largest


def gram_norm(S: Tensor) -> Tensor:
    """An upper bound ``|S^2|_F^(1/4)`` of |N|, at most ``p^(1/8)`` times it, from S = N^H N.

    Args:
        S: Positive semidefinite matrices, shape ``(..., p, p)``.

    Returns:
        Shape ``(...)``, in the real dtype of S.
    """
    largest = S.abs().amax((-2, -1))
    unit = S / torch.where(largest > 0, largest, 1)[..., None, None]
    return (torch.linalg.vector_norm(unit @ unit, dim=(-2, -1)).sqrt() * largest).sqrt()
