"""Adjoints, sums with products, and linear systems that are right in batches; no host reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["add_product", "add_product_", "adjoint", "inverse", "saturated", "solve"]

#: Batched LU on the CPU is trusted up to this size. With torch 2.13 and MKL it returns wrong
#: factors, without an error, for batches of matrices larger than about 128 once
#: `torch.set_num_threads` has been called; single matrices are right at any size.
_TRUSTED = 64


def adjoint(A: Tensor) -> Tensor:
    """A^H, a new contiguous tensor: sums with it are several times faster than with a view."""
    transposed = A.mT.clone(memory_format=torch.contiguous_format)  # never A itself
    return transposed.conj_physical_() if A.is_complex() else transposed


def saturated(A: Tensor, most: float) -> Tensor:
    """A with entries (real and imaginary parts) of at most `most`; NaN where they are infinite."""
    parts = torch.view_as_real(A.resolve_conj()) if A.is_complex() else A
    parts = parts.clamp(-most, most) + (parts - parts)
    return torch.view_as_complex(parts) if A.is_complex() else parts


def add_product_(C: Tensor, A: Tensor, B: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """C <- beta C + alpha A B in place, without a temporary for matrices or one batch of them."""
    if C.ndim == 2:
        return C.addmm_(A, B, beta=beta, alpha=alpha)
    if C.ndim == 3:
        return C.baddbmm_(A, B, beta=beta, alpha=alpha)
    return C.mul_(beta).add_(A @ B, alpha=alpha)


def add_product(C: Tensor, A: Tensor, B: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta C + alpha A B, for matrices or one batch of them."""
    function = torch.addmm if C.ndim == 2 else torch.baddbmm
    return function(C, A, B, beta=beta, alpha=alpha)


def _each(function: Callable[..., Tensor], M: Tensor, *rest: Tensor) -> Tensor:
    """Applies `function` to a batch: at once where that is right, matrix by matrix elsewhere."""
    if M.ndim == 2 or M.device.type != "cpu" or M.shape[-1] <= _TRUSTED or M.numel() == 0:
        return function(M, *rest)
    flat = [A.flatten(0, -3).unbind(0) for A in (M, *rest)]
    results = [function(*matrices) for matrices in zip(*flat, strict=True)]
    return torch.stack(results).unflatten(0, M.shape[:-2])


def inverse(M: Tensor) -> Tensor:
    """Inverses of well-conditioned matrices, shape ``(..., k, k)``.

    Products with an inverse are several times faster than `torch.linalg.solve` on many small
    matrices, and as accurate where the Hermitian part of M is at least the identity.
    """
    return _each(lambda A: torch.linalg.inv_ex(A).inverse, M)


def solve(M: Tensor, B: Tensor) -> Tensor:
    """``M^-1 B`` for matrices ``(..., k, k)`` and right-hand sides ``(..., k, m)``."""
    return _each(lambda A, b: torch.linalg.solve_ex(A, b).result, M, B)
