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

import math
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
from stiefel.geometry.reflection_steps import factors, reflect_all, undo_square, undo_tall
from stiefel.numerics import real_dtype, tolerance

__all__ = ["householder_product"]

#: Elements of a part of a batch that stays in a cache, and how few matrices are done singly.
_CACHED, _FEW = 2**18, 16
#: Blocks of a part, and how many matrices a block has at least.
_BLOCKS, _WIDTH = 4, 128


# --------------------------------------------------------- parts of a batch, and their layout


def _matrices_at_once(count: int, size: int, cuda: bool) -> int:
    """How many matrices of a batch are done at once.

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
    return 1 if min(count, fitting) < _FEW else fitting


def _in_parts(
    function: Callable[..., tuple[Tensor, ...]], size: int, *tensors: Tensor | None
) -> list[Tensor]:
    """Calls a function on parts of a batch.

    Args:
        function: Takes tensors with a batch in front, or None; returns a tuple of such tensors.
        size: Elements of a matrix.
        tensors: What the function takes, the first not None.
    """
    first = tensors[0]
    assert first is not None
    count = first.shape[0]
    step = _matrices_at_once(count, size, first.is_cuda)
    if step >= count:
        return list(function(*tensors))
    parts = [[None] * -(-count // step) if t is None else t.split(step) for t in tensors]
    results = [function(*part) for part in zip(*parts, strict=True)]
    return [torch.cat(pieces) for pieces in zip(*results, strict=True)]


def _blocks(count: int) -> tuple[int, int]:
    """c and l of that many matrices."""
    blocks = _BLOCKS if count % _BLOCKS == 0 and count >= _BLOCKS * _WIDTH else 1
    return blocks, count // blocks


def _laid_out(A: Tensor) -> Tensor:
    """Matrices ``(b, n, m)`` as ``(c, n, m, l)``, a new tensor."""
    count, *sizes = A.shape
    c, lanes = _blocks(count)  # torch is quick at transposing matrices only
    rows = A.reshape(c, lanes, math.prod(sizes)).mT.clone(memory_format=torch.contiguous_format)
    return rows.view(c, *sizes, lanes)


def _gathered(A: Tensor, out: Tensor | None = None) -> Tensor:
    """Undoes `_laid_out`; contiguous, in the memory of `out` where its size is right."""
    c, *sizes, lanes = A.shape
    rows = A.reshape(c, math.prod(sizes), lanes).mT
    if out is None or out.numel() != A.numel():
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return out.view(rows.shape).copy_(rows).view(c * lanes, *sizes)


def _unit_rows(V: Tensor, inverse: Tensor) -> Tensor:
    """Columns ``(b, n, L)`` times ``inverse (b, 1, L)`` as a stack of vectors, a new tensor."""
    if len(V) == 1:
        stack = V[0].mT.clone(memory_format=torch.contiguous_format)[:, None, :, None]
    else:
        stack = _laid_out(V).permute(2, 0, 1, 3)
    return stack.mul_(_laid_out(inverse).permute(2, 0, 1, 3))


def _columns(stack: Tensor, out: Tensor) -> Tensor:
    """A stack of vectors as columns ``(b, n, L)``, in the memory of `out` as in `_gathered`."""
    return _gathered(stack.permute(1, 2, 0, 3), out)


def _numbers(A: Tensor) -> Tensor:
    """Numbers ``(b, L)`` as ``(L, c, l)``."""
    return A.reshape(*_blocks(len(A)), A.shape[1]).permute(2, 0, 1).contiguous()


def _gathered_numbers(A: Tensor) -> Tensor:
    """Undoes `_numbers`."""
    return A.movedim(0, -1).flatten(0, 1).contiguous()


def _flat(tensor: Tensor | None, batch: torch.Size) -> Tensor | None:
    """The batch in one leading dimension."""
    return None if tensor is None else tensor.reshape(batch.numel(), *tensor.shape[len(batch) :])


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
        work = torch.empty_like(V, memory_format=torch.contiguous_format)
        inverse = quick_inverse_norms(V, work)
        U = _unit_rows(V, inverse)
        tau = factors(U, None if phases is None else _numbers(phases))
        X, free = reflect_all(U, tau, columns, work if columns == L else None)
        return _gathered(X, free), inverse, _gathered_numbers(tau)

    X, inverse, tau = _in_parts(body, n * columns, *flats)
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
    """dv and dphi of one batch dimension of matrices."""
    U, tau = _unit_rows(V, inverse), _numbers(tau)
    if Q.shape[-2] <= 2 * Q.shape[-1]:
        P = Q @ G.mH
        M = _laid_out(P)
        K = torch.sub(M, M.transpose(1, 2).conj_physical(), out=P.view(M.shape))
        if flip is not None:  # F K F
            signs = flip.reshape(*_blocks(len(flip))).unsqueeze(1)
            K[:, -1].mul_(signs)
            K[:, :, -1].mul_(signs)
        W = undo_square(K, U, tau, M)
    else:  # flips are for square matrices only
        P = torch.cat([Q, G], dim=-1)
        M = _laid_out(P)
        W = undo_tall(M, U, tau)
    free = M.as_strided(U.shape, U.stride()) if M.numel() == U.numel() else None
    inner = torch.mul(U.conj_physical(), W, out=free).sum(2)
    dU = W.addcmul_(U, inner.unsqueeze(2), value=-1).mul_(-tau.unsqueeze(2))
    dV = _columns(dU, P).mul_(inverse)
    return (dV,) if phases is None else (dV, _gathered_numbers(inner.imag / -2))


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
    dV, *dphi = _in_parts(_gradients, size, *flats)
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
        ForwardModeError: In forward mode.
    """
    columns = check_reflections(V, phases, columns, flip)
    return _product(V, phases, flip, columns)
