"""Products of reflections, one after another: the reference for `stiefel.geometry.compact_wy`.

``F H_1 ... H_L E`` in L successive rank-one updates (Mhammedi, Hellicar, Rahman, Bailey, ICML
2017), the rightmost reflection first, E the first p columns of I. L steps follow one another and
each reads and writes a whole matrix.

The backward pass keeps the result and two numbers a reflection, for reflections can be undone. With
dL = Re tr(G^H dX), X_k = H_k X_(k+1) and G_(k+1) = H_k^H G_k, let K_k = X_k G_k^H - G_k X_k^H; then

    w_k = K_k u_k,   K_(k+1) = H_k^H K_k H_k,
    du_k = -tau_k w_k (and any multiple of u_k),   dphi_k = -Im(u_k^H w_k) / 2,
    dv_k = (du_k - u_k <u_k, du_k>) / |v_k|.

K is n x n and skew-Hermitian; for tall matrices it is kept as its factors [X, G], n x 2p.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.geometry.compact_wy import (
    check_reflections,
    quick_inverse_norms,
    scale_last_row_,
)
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.polish import polish
from stiefel.geometry.wy_factors import phase_factors
from stiefel.numerics import real_dtype, tolerance

__all__ = ["householder_product"]

#: Elements of a part of a batch that stays in a cache, and how few matrices are done singly.
_CACHED, _FEW = 2**18, 16


# --------------------------------------- the batch is last here, M is (n, m) or (n, m, b)


def _factors(U: Tensor, phases: Tensor | None) -> Tensor:
    """tau_k = (1 - e^(i phi_k)) / |u_k|^2, real 2 / |u_k|^2, shape ``(L,)`` or ``(L, b)``.

    Rounded columns have norms that differ from one by 1e-7; with |u|^2 summed in float64, every
    factor is unitary to rounding nevertheless, and a thousand of them in a row too.

    Args:
        U: Columns, one a row, shape ``(L, n)`` or ``(L, n, b)``.
        phases: Shape ``(L,)`` or ``(L, b)``.
    """
    parts = (U.real, U.imag) if U.is_complex() else (U,)
    sums = [part.to(torch.float64, copy=True).square_().sum(1) for part in parts]
    squares = sums[0] if len(sums) == 1 else sums[0] + sums[1]
    squares = squares.masked_fill(squares < 0.5, 1).to(real_dtype(U.dtype))  # u = 0: any will do
    tau = phase_factors(phases, U.dtype)
    return 2 / squares if tau is None else tau / squares


def _row(x: Tensor, M: Tensor, work: Tensor) -> Tensor:
    """x^T M; elementwise for a batch, several times faster than products of small matrices."""
    if M.ndim == 2:
        return M.mT @ x
    return torch.mul(M, x.unsqueeze(1), out=work).sum(0)


def _column(M: Tensor, x: Tensor, work: Tensor) -> Tensor:
    """M x."""
    if M.ndim == 2:
        return M @ x
    return torch.mul(M, x, out=work).sum(1)


def _add_outer_(M: Tensor, x: Tensor, y: Tensor, sign: int) -> None:
    """M <- M + sign x y^T."""
    if M.ndim == 2:
        M.addr_(x, y, alpha=sign)
    else:
        M.addcmul_(x.unsqueeze(1), y.unsqueeze(0), value=sign)


def _reflect_all(U: Tensor, tau: Tensor, columns: int) -> Tensor:
    """X_(L+1) = E, X_k = X_(k+1) - tau_k u_k (u_k^H X_(k+1)) for k = L, ..., 1; returns X_1.

    Args:
        U: Shape ``(L, n)`` or ``(L, n, b)``.
        tau: Shape ``(L,)`` or ``(L, b)``.
        columns: Those of E.
    """
    L, n, *batch = U.shape
    X = torch.zeros(n, columns, *batch, dtype=U.dtype, device=U.device)
    X.diagonal(dim1=0, dim2=1).fill_(1)
    work, Uc, tauU = torch.empty_like(X), U.conj_physical(), tau.unsqueeze(1) * U
    for k in reversed(range(L)):
        _add_outer_(X, tauU[k], _row(Uc[k], X, work), -1)
    return X


def _undo_square(K: Tensor, U: Tensor, tau: Tensor) -> Tensor:
    """w_k = K_k u_k for every k; overwrites K, which is K_1.

    K_(k+1) = K_k - z u^H + u z^H with z = tau w - |tau|^2 (u^H w) u / 2.
    """
    W, work, Uc = torch.empty_like(U), torch.empty_like(K), U.conj_physical()
    for k, u in enumerate(U):
        w = W[k] = _column(K, u, work)
        z = tau[k] * w
        if K.is_complex():
            z = z - (tau[k].abs().square() / 2 * (Uc[k] * w).sum(0)) * u
        _add_outer_(K, z, Uc[k], -1)
        _add_outer_(K, u, z.conj_physical(), 1)
    return W


def _undo_tall(M: Tensor, U: Tensor, tau: Tensor) -> Tensor:
    """w_k = K_k u_k = X_k (G_k^H u_k) - G_k (X_k^H u_k) for every k; overwrites M = [X_1, G_1]."""
    p = M.shape[1] // 2
    W, work, Uc = torch.empty_like(U), torch.empty_like(M), U.conj_physical()
    undo = tau.conj_physical()
    for k, u in enumerate(U):
        row = _row(Uc[k], M, work)
        W[k] = _column(M, torch.cat([row[p:], -row[:p]]).conj_physical(), work)
        _add_outer_(M, u, undo[k] * row, -1)
    return W


def _matrices_at_once(count: int, size: int, cuda: bool) -> int | None:
    """How many matrices of a batch are done at once, None for one after another without a batch.

    Every reflection passes over all matrices. On the CPU parts of the batch that fit a cache are
    faster, single matrices where such a part would be only a few.

    Args:
        count: Matrices of the batch.
        size: Elements of a matrix.
        cuda: Whether they are on a GPU.
    """
    if cuda or count == 0 or _FEW * size <= count * size <= _CACHED:
        return max(count, 1)
    fitting = _CACHED // size
    return None if min(count, fitting) < _FEW else fitting


def _in_parts(
    function: Callable[..., tuple[Tensor, ...]], size: int, *tensors: Tensor | None
) -> list[Tensor]:
    """Calls a function on parts of a batch, or on single matrices.

    Args:
        function: Takes tensors with a batch, in front, or without; returns a tuple of such tensors.
        size: Elements of a matrix.
        tensors: What the function takes, of one batch dimension, the first not None.
    """
    first = tensors[0]
    assert first is not None
    count = first.shape[0]
    step = _matrices_at_once(count, size, first.is_cuda)
    if step is not None and step >= count:
        return list(function(*tensors))
    number = count if step is None else -(-count // step)
    parts = [
        [None] * number if t is None else t.unbind(0) if step is None else t.split(step)
        for t in tensors
    ]
    results = [function(*part) for part in zip(*parts, strict=True)]
    join = torch.stack if step is None else torch.cat
    return [join(pieces) for pieces in zip(*results, strict=True)]


# --------------------------------------------------------------------- batches lead again


def _batch_last(tensor: Tensor, dims: int) -> Tensor:
    """A batch in front of `dims` dimensions as the last dimension, if there is one; contiguous."""
    if tensor.ndim == dims:
        return tensor.contiguous()
    rest = tensor.shape[1:]  # torch is quick at transposing matrices only
    return tensor.reshape(len(tensor), rest.numel()).mT.contiguous().unflatten(0, rest)


def _batch_first(tensor: Tensor, dims: int) -> Tensor:
    """Undoes `_batch_last`."""
    if tensor.ndim == dims:
        return tensor.contiguous()
    rest, count = tensor.shape[:-1], tensor.shape[-1]
    return tensor.reshape(rest.numel(), count).mT.contiguous().view(count, *rest)


def _rows(U: Tensor) -> Tensor:
    """Columns ``(n, L)`` or ``(b, n, L)``, one a row: ``(L, n)`` or ``(L, n, b)``."""
    rows = _batch_last(U, 2).transpose(0, 1)
    return rows.contiguous() if U.ndim == 2 else rows


def _flat(tensor: Tensor | None, batch: torch.Size) -> Tensor | None:
    """The batch in one leading dimension, if there is one."""
    if tensor is None or not batch:
        return tensor
    return tensor.reshape(batch.numel(), *tensor.shape[len(batch) :])


def _drifts(V: Tensor, columns: int) -> bool:
    """Whether the rounding of all steps together can exceed the tolerance.

    Equal vectors of equal entries make every step round in the same direction, by up to
    ``2.4 eps(V.dtype)`` as measured. One Newton-Schulz step removes the sum; to first order it is
    the identity on the manifold and its tangents, so that the derivative stays the same.
    """
    n, L = V.shape[-2:]
    return 2.5 * L * torch.finfo(V.dtype).eps > tolerance(V.dtype, n, columns)


def _fake(V: Tensor, phases: Tensor | None, flip: Tensor | None, columns: int) -> list[Tensor]:
    *batch, n, L = V.shape
    inverse = V.new_empty(*batch, 1, L, dtype=real_dtype(V.dtype))
    return [V.new_empty(*batch, n, columns), inverse, V.new_empty(*batch, L)]


@kernel_op(
    "householder_product",
    "(Tensor V, Tensor? phases, Tensor? flip, int columns) -> Tensor[]",
    fake=_fake,
)
def _forward(V: Tensor, phases: Tensor | None, flip: Tensor | None, columns: int) -> list[Tensor]:
    """Q = F X_1, X_1 without the drift of many steps; keeps 1 / |v| and tau."""
    batch, (n, L) = V.shape[:-2], V.shape[-2:]
    flats = [_flat(tensor, batch) for tensor in (V, phases)]

    def body(V: Tensor, phases: Tensor | None) -> tuple[Tensor, ...]:
        inverse = quick_inverse_norms(V)
        U = _rows(V * inverse)
        tau = _factors(U, None if phases is None else _batch_last(phases, 1))
        return _batch_first(_reflect_all(U, tau, columns), 2), inverse, _batch_first(tau, 1)

    X, inverse, tau = _in_parts(body, n * columns, *flats) if batch else body(*flats)  # pyright: ignore
    X = X.reshape(*batch, n, columns)
    if _drifts(V, columns):
        X = polish(X)
    return [scale_last_row_(X, flip), inverse.reshape(*batch, 1, L), tau.reshape(*batch, L)]


def _gradients(
    V: Tensor,
    G: Tensor,
    Q: Tensor,
    inverse: Tensor,
    tau: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
) -> tuple[Tensor, ...]:
    """dv and dphi of one matrix or of one batch dimension of them."""
    U, tau = _rows(V * inverse), _batch_last(tau, 1)
    if Q.shape[-2] <= 2 * Q.shape[-1]:
        M = _batch_last(Q @ G.mH, 2)
        K = M - M.transpose(0, 1).conj_physical()
        if flip is not None:  # F K F
            K[-1].mul_(flip)
            K[:, -1].mul_(flip)
        W, free = _undo_square(K, U, tau), K if K.shape == U.shape else None
    else:  # flips are for square matrices only
        W, free = _undo_tall(_batch_last(torch.cat([Q, G], dim=-1), 2), U, tau), None
    inner = torch.mul(U.conj_physical(), W, out=free).sum(1)
    dU = W.addcmul_(U, inner.unsqueeze(1), value=-1).mul_(-tau.unsqueeze(1))
    dV = _batch_first(dU.transpose(0, 1), 2).mul_(inverse)
    return (dV,) if phases is None else (dV, _batch_first(inner.imag / -2, 1))


def _backward_fake(G, Q, inverse, tau, V, phases, flip, columns) -> list[Tensor]:
    dV = torch.empty_like(V, memory_format=torch.contiguous_format)
    return [dV] if phases is None else [dV, phases.new_empty(phases.shape)]


@kernel_op(
    "householder_product_backward",
    "(Tensor G, Tensor Q, Tensor inverse, Tensor tau, Tensor V, Tensor? phases, Tensor? flip,"
    " int columns) -> Tensor[]",
    fake=_backward_fake,
)
def _backward(
    G: Tensor,
    Q: Tensor,
    inverse: Tensor,
    tau: Tensor,
    V: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
    columns: int,
) -> list[Tensor]:
    """dv and dphi from w: the formulae of this file, with X_1 = F Q and G_1 = F G."""
    batch, (n, columns) = V.shape[:-2], Q.shape[-2:]
    flats = [_flat(tensor, batch) for tensor in (V, G, Q, inverse, tau, phases, flip)]
    size = n * min(n, 2 * columns)
    dV, *dphi = _in_parts(_gradients, size, *flats) if batch else _gradients(*flats)  # pyright: ignore
    return [dV.reshape(V.shape)] + [d.reshape(V.shape[:-2] + V.shape[-1:]) for d in dphi]


_product = differentiable(_forward, _backward, name="householder", keep_result=True)


def householder_product(
    V: Tensor,
    phases: Tensor | None = None,
    *,
    columns: int | None = None,
    flip: Tensor | None = None,
) -> Tensor:
    """The first columns of ``F H_1 H_2 ... H_L``, F = diag(1, ..., 1, flip), by L updates.

    ``H_k = I - tau_k u_k u_k^H``, u = v / |v|, tau = 1 - e^(i phi) (real reflections: tau = 2):
    X <- X - tau_k u_k (u_k^H X) for k = L, ..., 1, from X = E, the first columns of I. The same
    values and derivatives as `stiefel.geometry.compact_wy.compact_wy`, in L steps instead of a
    few products; the backward pass undoes the reflections and needs O(n p) memory.

    A zero vector acts as the identity and gets a zero gradient.

    Args:
        V: Reflection vectors, shape ``(..., n, L)``, L <= n; their lengths do not matter.
        phases: Real phases, shape ``(..., L)``, for complex V; pi is a reflection. None if real.
        columns: How many columns to compute, at most n; n by default.
        flip: +1 or -1 of each matrix, shape ``(...)``: the factor of the last row; square only.

    Returns:
        Matrices with orthonormal columns, shape ``(..., n, columns)``.

    Raises:
        ShapeError: If sizes disagree or there are more reflections than rows.
        DtypeError: If V is complex and there are no phases, or the reverse.
        DoubleBackwardError: In a second derivative.
    """
    columns = check_reflections(V, phases, columns, flip)
    return _product(V, phases, flip, columns)
