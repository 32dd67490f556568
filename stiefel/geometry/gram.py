"""Gram matrices, the larger ones without what symmetry makes twice."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gram"]

#: Gram matrices of at least so many columns are computed by halves.
_HALVES_FROM = 512


def gram(X: Tensor, out: Tensor | None = None) -> Tensor:
    """``X^H X``, by halves where it is large: that leaves out a third of the work.

    Args:
        X: Matrices, shape ``(..., n, p)``.
        out: Where to put it, shape ``(..., p, p)``; new by default.

    Returns:
        Shape ``(..., p, p)``, exactly Hermitian from 512 columns on.
    """
    p = X.shape[-1]
    if p < _HALVES_FROM:
        return torch.matmul(X.mH, X, out=out)
    if out is None:
        out = X.new_empty(*X.shape[:-2], p, p)
    h = p // 2
    left, right = X[..., :h], X[..., h:]
    gram(left, out[..., :h, :h])
    gram(right, out[..., h:, h:])
    torch.matmul(left.mH, right, out=out[..., :h, h:])
    out[..., h:, :h] = out[..., :h, h:].mH
    return out
