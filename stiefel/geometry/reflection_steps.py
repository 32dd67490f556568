"""The steps of `stiefel.geometry.householder`, forward and undone, for a part of a batch.

The matrices of a part are along the last dimension, in c blocks of l: a matrix is (c, n, m, l), a
vector (c, n, l), a stack of vectors (L, c, n, l). Passes over a part are shared out along the first
dimension, and sums run along the third: each core keeps to its blocks, and nothing moves from one
cache to another. All of it is elementwise: products of small matrices are slower, and products of
one large matrix with vectors are shared out in another way than the updates between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.wy_factors import phase_factors
from stiefel.numerics import real_dtype

__all__ = ["factors", "reflect_all", "undo_square", "undo_tall"]

#: Elements that are squared in float64 at once.
_DOUBLES = 2**15


def _squares(U: Tensor) -> Tensor:
    """|u_k|^2 in float64."""
    parts = (U.real, U.imag) if U.is_complex() else (U,)
    sums = [part.to(torch.float64, copy=True).square_().sum(2) for part in parts]
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def factors(U: Tensor, phases: Tensor | None) -> Tensor:
    """tau_k = (1 - e^(i phi_k)) / |u_k|^2, real 2 / |u_k|^2, shape ``(L, c, l)``.

    Rounded columns have norms that differ from one by 1e-7; with |u|^2 summed in float64, every
    factor is unitary to rounding nevertheless, and a thousand of them in a row too.

    Args:
        U: Columns, one a row, shape ``(L, c, n, l)``.
        phases: Shape ``(L, c, l)``.
    """
    few = max(_DOUBLES // max(U[0].numel(), 1), 1)
    squares = torch.cat([_squares(rows) for rows in U.split(few)])
    squares = squares.masked_fill(squares < 0.5, 1).to(real_dtype(U.dtype))  # u = 0: any will do
    tau = phase_factors(phases, U.dtype)
    return 2 / squares if tau is None else tau / squares


def _standing(stack: Tensor) -> tuple[Tensor, ...]:
    """The vectors of a stack as columns ``(c, n, 1, l)``."""
    return stack.unsqueeze(3).unbind(0)


def _lying(stack: Tensor) -> tuple[Tensor, ...]:
    """The vectors of a stack as rows ``(c, 1, n, l)``."""
    return stack.unsqueeze(2).unbind(0)


def _row(x: Tensor, M: Tensor, work: Tensor) -> Tensor:
    """x^T M for a column x."""
    return torch.mul(M, x, out=work).sum(1)


def _column(M: Tensor, x: Tensor, work: Tensor, out: Tensor) -> None:
    """M x^T for a row x."""
    torch.sum(torch.mul(M, x, out=work), 2, out=out)


def reflect_all(
    U: Tensor, tau: Tensor, columns: int, work: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """X_(L+1) = E, X_k = X_(k+1) - tau_k u_k (u_k^H X_(k+1)) for k = L, ..., 1.

    The steps turn rows one by one: those of X^T or, of square matrices, those of
    X <- X - (X u_k) tau_k u_k^H for k = 1, ..., L, which needs no transpose in the end.

    Args:
        U: Shape ``(L, c, n, l)``.
        tau: Shape ``(L, c, l)``.
        columns: Those of E.
        work: Memory of the size of the result to work in; it may take the result.

    Returns:
        X_1, shape ``(c, n, columns, l)``, and memory of that size that is not needed any more.
    """
    L, c, n, lanes = U.shape
    X = torch.zeros(c, columns, n, lanes, dtype=U.dtype, device=U.device)
    X.diagonal(dim1=1, dim2=2).fill_(1)
    work = torch.empty_like(X) if work is None else work.view(X.shape)
    first, second = (U, U.conj_physical()) if columns == n else (U.conj_physical(), U)
    order = list(range(L) if columns == n else reversed(range(L)))
    x, y = _lying(first), _lying(tau.unsqueeze(2) * second)
    product = first[order[0]][:, :columns].clone()  # E times the first vector
    standing = product.unsqueeze(2)
    for k in order:
        if k != order[0]:
            _column(X, x[k], work, product)
        X.addcmul_(standing, y[k], value=-1)
    if columns == n:
        return X, work
    return work.view(c, n, columns, lanes).copy_(X.transpose(1, 2)), X


def undo_square(K: Tensor, U: Tensor, tau: Tensor, work: Tensor) -> Tensor:
    """w_k = K_k u_k for every k; overwrites K, which is K_1, and work, of the same shape.

    K_(k+1) = K_k - z u^H + u z^H with z = tau w - |tau|^2 (u^H w) u / 2; for real K z = 2 w, to the
    rounding of tau.
    """
    W, Uc = torch.empty_like(U), U.conj_physical()
    w, columns, rows = W.unbind(0), _standing(W), _lying(W)
    x, standing, adjoint = _lying(U), _standing(U), _lying(Uc)
    for k in range(len(U)):
        _column(K, x[k], work, w[k])
        if k == len(U) - 1:
            break
        column, row, factor = columns[k], rows[k], 2.0
        if K.is_complex():
            share = tau[k].abs().square() / 2 * (Uc[k] * w[k]).sum(1)
            z = tau[k].unsqueeze(1) * w[k] - share.unsqueeze(1) * U[k]
            column, row, factor = z.unsqueeze(2), z.conj_physical().unsqueeze(1), 1.0
        K.addcmul_(column, adjoint[k], value=-factor)
        K.addcmul_(standing[k], row, value=factor)
    return W


def undo_tall(M: Tensor, U: Tensor, tau: Tensor) -> Tensor:
    """w_k = K_k u_k = X_k (G_k^H u_k) - G_k (X_k^H u_k) for every k; overwrites M = [X_1, G_1]."""
    p = M.shape[2] // 2
    W, work = torch.empty_like(U), torch.empty_like(M)
    standing, adjoint, undo = _standing(U), _standing(U.conj_physical()), tau.conj_physical()
    for k, w in enumerate(W):
        row = _row(adjoint[k], M, work)
        turned = torch.cat([row[:, p:], -row[:, :p]], 1).conj_physical()
        _column(M, turned.unsqueeze(1), work, w)
        M.addcmul_(standing[k], (undo[k].unsqueeze(1) * row).unsqueeze(1), value=-1)
    return W
