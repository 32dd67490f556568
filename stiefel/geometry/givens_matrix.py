"""The matrix of layers of real rotations, ``W = F_L ... F_1`` of `stiefel.geometry.givens`.

Large batches of small matrices need no gradient beside the state on the way back: with G the
gradient of W, the derivative by the angle of rows (a, b) after their layer is the entry (b, a) of

    K = G W^T - W G^T,

which the layers turn too: K <- F^T K F. Batches are done in parts that fit a cache, the matrices of
a part along the last dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.givens import rotate
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.rotations import layer_steps, skew_sweep, sweep

__all__ = ["rotation_matrix"]

#: Elements of a part of a batch.
_PART = 2**18


def _identity(theta: Tensor, n: int) -> Tensor:
    E = torch.eye(n, dtype=theta.dtype, device=theta.device)
    return E.expand(*theta.shape[:-1], n, n)


def _parts(theta: Tensor, n: int, *tensors: Tensor) -> list[tuple[Tensor, ...]] | None:
    """Angles ``(count, part)`` and matrices ``(part, n, n)``; None where matrices are few."""
    lanes = theta.shape[:-1].numel()
    if lanes < n:
        return None
    step = lanes if theta.is_cuda else max(_PART // (n * n), n)
    angles = theta.reshape(lanes, -1).split(step)
    flats = [A.reshape(lanes, n, n).split(step) for A in tensors]
    return [(th.mT.contiguous(), *rest) for th, *rest in zip(angles, *flats, strict=True)]


def _joined(results: list[Tensor]) -> Tensor:
    """The parts in one tensor; one part is not copied."""
    return results[0] if len(results) == 1 else torch.cat(results)


@kernel_op(
    "givens_matrix",
    "(Tensor theta, int n, int layers, str style) -> Tensor[]",
    fake=lambda theta, n, layers, style: [theta.new_empty(*theta.shape[:-1], n, n)],
)
def _forward(theta: Tensor, n: int, layers: int, style: str) -> list[Tensor]:
    """W."""
    parts = _parts(theta, n)
    if parts is None:
        W = rotate(_identity(theta, n), theta, layers=layers, style=style)
        return [W.clone(memory_format=torch.contiguous_format)]
    results = []
    for (th,) in parts:
        Z = th.new_zeros(1, 1, n, n, th.shape[-1])
        Z[0, 0].diagonal(dim1=0, dim2=1).fill_(1)
        sweep(Z, layer_steps(n, layers, style), th, along=-2)
        results.append(Z.view(n * n, -1).mT.contiguous())
    return [_joined(results).view(*theta.shape[:-1], n, n)]


@kernel_op(
    "givens_matrix_backward",
    "(Tensor G, Tensor W, Tensor theta, int n, int layers, str style) -> Tensor[]",
    fake=lambda G, W, theta, n, layers, style: [theta.new_empty(theta.shape)],
)
def _backward(G: Tensor, W: Tensor, theta: Tensor, n: int, layers: int, style: str) -> list[Tensor]:
    """The gradient of the angles."""
    parts = _parts(theta, n, G, W)
    if parts is None:
        arguments = (G, W, _identity(theta, n), theta, None, None, layers, style, False)
        return [torch.ops.stiefel.givens_rotate_backward(*arguments)[1]]
    results = []
    for th, g, w in parts:
        P = g @ w.mT
        M = P.flatten(1).mT.contiguous().view(n, n, -1)
        K = torch.sub(M, M.transpose(0, 1), out=P.view(M.shape))  # in the memory of P
        moments = skew_sweep(K, layer_steps(n, layers, style), th)
        results.append(moments.mT.contiguous())
    return [_joined(results).view(theta.shape)]


_matrix = differentiable(_forward, _backward, name="givens", keep_result=True)


def rotation_matrix(theta: Tensor, n: int, *, layers: int, style: str = "tunable") -> Tensor:
    """``F_L ... F_1``: `stiefel.geometry.givens.rotate` of the identity, for real rotations.

    Args:
        theta: Angles, shape ``(..., count)``, count = `rotation_count` (n, layers, style).
        n: Rows.
        layers: L.
        style: ``"tunable"`` or ``"fft"``.

    Returns:
        Orthogonal matrices, shape ``(..., n, n)``; differentiable once.

    Raises:
        DoubleBackwardError: In a second derivative.
    """
    return _matrix(theta, n, layers, style)
