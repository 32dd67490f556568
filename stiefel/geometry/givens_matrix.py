"""The matrix of layers of real rotations, ``W = F_L ... F_1`` of `stiefel.geometry.givens`.

Large batches of small matrices need no gradient beside the state on the way back: with G the
gradient of W, the derivative by the angle of rows (a, b) after their layer is the entry (b, a) of

    K = G W^T - W G^T,

which the layers turn too: K <- F^T K F. Batches are done in parts that fit a cache, the matrices of
a part along the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stiefel.geometry.compact_wy import scale_last_row_
from stiefel.geometry.givens import rotate
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.rotations import layer_steps, shears, skew_sweep, sweep

__all__ = ["rotation_matrix"]

#: Elements of a part of a batch.
_PART = 2**18


def _identity(theta: Tensor, n: int) -> Tensor:
    E = torch.eye(n, dtype=theta.dtype, device=theta.device)
    return E.expand(*theta.shape[:-1], n, n)


def _parts(theta: Tensor, n: int, *tensors: Tensor | None) -> list[Any] | None:
    """Angles ``(count, part)`` and tensors ``(part, ...)``; None where matrices are few.

    The angles are new tensors.
    """
    lanes = theta.shape[:-1].numel()
    if lanes < n:
        return None
    step = lanes if theta.is_cuda else max(_PART // (n * n), n)
    count, batch = -(-lanes // step), theta.ndim - 1
    flats = [
        [None] * count if A is None else A.reshape(lanes, *A.shape[batch:]).split(step)
        for A in (theta, *tensors)
    ]
    return [
        (th.mT.clone(memory_format=torch.contiguous_format), *rest)
        for th, *rest in zip(*flats, strict=True)
    ]


def _joined(results: list[Tensor]) -> Tensor:
    """The parts in one tensor; one part is not copied."""
    return results[0] if len(results) == 1 else torch.cat(results)


@kernel_op(
    "givens_matrix",
    "(Tensor theta, Tensor? flip, int n, int layers, str style) -> Tensor[]",
    fake=lambda theta, flip, n, layers, style: [theta.new_empty(*theta.shape[:-1], n, n)],
)
def _forward(theta: Tensor, flip: Tensor | None, n: int, layers: int, style: str) -> list[Tensor]:
    """F W."""
    parts = _parts(theta, n)
    if parts is None:
        W = rotate(_identity(theta, n), theta, layers=layers, style=style)
        return [scale_last_row_(W.clone(memory_format=torch.contiguous_format), flip)]
    steps, results = layer_steps(n, layers, style), []
    for (th,) in parts:
        Z = th.new_zeros(1, 1, n, n, th.shape[-1])
        Z[0, 0].diagonal(dim1=0, dim2=1).fill_(1)
        sweep(Z, steps, shears(th, None, steps, n), along=-2)
        results.append(Z.view(n * n, -1).mT.contiguous())
    return [scale_last_row_(_joined(results).view(*theta.shape[:-1], n, n), flip)]


@kernel_op(
    "givens_matrix_backward",
    "(Tensor G, Tensor W, Tensor theta, Tensor? flip, int n, int layers, str style) -> Tensor[]",
    fake=lambda G, W, theta, flip, n, layers, style: [theta.new_empty(theta.shape)],
)
def _backward(
    G: Tensor, W: Tensor, theta: Tensor, flip: Tensor | None, n: int, layers: int, style: str
) -> list[Tensor]:
    """The gradient of the angles, from F W and its gradient."""
    parts = _parts(theta, n, G, W, flip)
    if parts is None:
        G, W = (A if flip is None else scale_last_row_(A.clone(), flip) for A in (G, W))
        arguments = (G, W, _identity(theta, n), theta, None, None, layers, style, False)
        return [torch.ops.stiefel.givens_rotate_backward(*arguments)[1]]
    steps, results = layer_steps(n, layers, style), []
    for th, g, w, f in parts:
        P = g @ w.mT
        M = P.flatten(1).mT.contiguous().view(n, n, -1)
        K = torch.sub(M, M.transpose(0, 1), out=P.view(M.shape))  # in the memory of P
        if f is not None:  # F K F
            K[-1].mul_(f)
            K[:, -1].mul_(f)
        # M is not needed any more; it has no room for the angles of more than 2 n layers
        entries = M.view(n * n, -1)[: len(th)] if len(th) <= n * n else torch.empty_like(th)
        results.append(skew_sweep(K, steps, shears(th, None, steps, n), entries).mT.contiguous())
    return [_joined(results).view(theta.shape)]


_matrix = differentiable(_forward, _backward, name="givens", keep_result=True)


def rotation_matrix(
    theta: Tensor,
    n: int,
    *,
    layers: int,
    style: str = "tunable",
    flip: Tensor | None = None,
) -> Tensor:
    """``F F_L ... F_1``: `stiefel.geometry.givens.rotate` of the identity, for real rotations.

    F is diag(1, ..., 1, flip).

    Args:
        theta: Angles, shape ``(..., count)``, count = `rotation_count` (n, layers, style).
        n: Rows.
        layers: L.
        style: ``"tunable"`` or ``"fft"``.
        flip: +1 or -1 of each matrix, shape ``(...)``: the factor of the last row; None for 1.

    Returns:
        Orthogonal matrices, shape ``(..., n, n)``; differentiable once.

    Raises:
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.
    """
    return _matrix(theta, flip, n, layers, style)
