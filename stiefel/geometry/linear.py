"""Linear systems that are right in batches, and read nothing back to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["inverse", "solve"]

#: Batched LU on the CPU is trusted up to this size. With torch 2.13 and MKL it returns wrong
#: factors, without an error, for batches of matrices larger than about 128 once
#: `torch.set_num_threads` has been called; single matrices are right at any size.
_TRUSTED = 64


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
