"""The sign of a determinant, by reflections."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import compute_dtype

__all__ = ["determinant_sign"]


def determinant_sign(X: Tensor) -> Tensor:
    """Signs of the determinants of real square matrices, from a Householder QR.

    X = H_1 ... H_k R: each reflection counts -1, each negative diagonal entry of R too. Batched LU
    (and with it `torch.linalg.slogdet`) is avoided on purpose: in torch 2.13 with MKL it returns
    wrong factors for batches of matrices larger than about 128, without an error, once
    `torch.set_num_threads` has been called.

    Args:
        X: Shape ``(..., n, n)``, real.

    Returns:
        +1 or -1 (0 for a singular matrix), shape ``(...)``, in float32 or better.
    """
    A, tau = torch.geqrf(X.detach().to(compute_dtype(X.dtype)))
    reflections = (tau != 0).sum(-1)
    signs = A.diagonal(dim1=-2, dim2=-1).sgn().prod(-1)
    return torch.where(reflections % 2 == 1, -signs, signs)
