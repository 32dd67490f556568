"""Many layers of neighbouring rotations as few layers of small orthogonal blocks.

Rotation i of layer k turns rows i and i + 1, i = k mod 2; it waits for rotations i - 1 and i + 1 of
layer k - 1. In the coordinates ``u = (i + k) / 2, v = (i - k) / 2`` it waits for (u - 1, v) and
(u, v + 1), so that the squares ``U h <= u < (U + 1) h, V h <= v < (V + 1) h`` are themselves
bricks of the same kind: square (U, V) turns 2 h rows from row (U + V) h on, in stage K = U - V.
Each square is multiplied out to a 2 h x 2 h matrix, all of them at once, and a stage is a batch of
products.

Rows are counted modulo 2 h ceil(n / (2 h)), where rows from n on and the pair (n - 1, 0) are at
rest: the two halves at the ends of an odd stage are then one block like the others.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stiefel.geometry.rotations import Shears, Step, layer_steps, shears, sweep

__all__ = ["block_size", "blocked", "blocked_backward"]


def block_size(shape: torch.Size, layers: int, style: str, adjoint: bool) -> int:
    """Half the size h of the blocks that are worth while, 0 for none."""
    _, n, p = shape
    if style != "tunable" or adjoint or n < 64 or layers < 16 or 2 * p < n:
        return 0
    return 16 if layers >= 32 else 8


class _Squares(NamedTuple):
    """Where each rotation is: stages, blocks a stage, and the two maps of angles."""

    stages: int
    blocks: int
    gather: np.ndarray  # (h^2, stages, blocks): number of the angle, `count` where at rest
    scatter: np.ndarray  # (count,): number of the place in the flattened gather


def _square_steps(h: int) -> tuple[Step, ...]:
    """The 2 h - 1 layers of a square, a diamond on 2 h rows."""
    steps, offset = [], 0
    for t in range(2 * h - 1):
        first = abs(h - 1 - t)
        steps.append(Step(first, h - first, 1, offset, columns=t < h))
        offset += h - first
    return tuple(steps)


@functools.lru_cache(maxsize=32)
def _squares(n: int, layers: int, h: int) -> _Squares:
    starts = np.array([step.offset for step in layer_steps(n, layers, "tunable")])
    count = sum(step.pairs for step in layer_steps(n, layers, "tunable"))
    stages = (layers + h - 2) // h + 1
    blocks = -(-n // (2 * h))
    gather = np.empty((h * h, stages, blocks), dtype=np.int64)
    stage = np.arange(stages)[:, None]
    corner = (stage % 2 + 2 * np.arange(blocks)) * h
    for t, step in enumerate(_square_steps(h)):
        for r in range(step.pairs):
            i = (corner + step.first + 2 * r) % (2 * h * blocks)
            k = stage * h + t - (h - 1) + 0 * i
            real = (i < n - 1) & (k >= 0) & (k < layers)
            place = starts[np.clip(k, 0, layers - 1)] + i // 2
            gather[step.offset + r] = np.where(real, place, count)
    scatter = np.empty(count + 1, dtype=np.int64)
    scatter[gather.ravel()] = np.arange(gather.size)
    return _Squares(stages, blocks, gather, scatter[:count])


def _gathered(angles: Tensor, squares: _Squares) -> Tensor:
    """Angles ``(lanes, count)`` at their places, ``(h^2, stages * lanes * blocks)``."""
    index = torch.from_numpy(squares.gather).to(angles.device)
    padded = torch.nn.functional.pad(angles, (0, 1)).mT  # (count + 1, lanes)
    return padded[index].movedim(-1, 2).flatten(1)


def _scattered(places: Tensor, squares: _Squares, lanes: int) -> Tensor:
    """Back from the places to ``(lanes, count)``."""
    index = torch.from_numpy(squares.scatter).to(places.device)
    shape = (places.shape[0], squares.stages, lanes, squares.blocks)
    return places.reshape(shape).movedim(2, 0).reshape(lanes, -1)[:, index]


def _places(theta: Tensor, phi: Tensor | None, squares: _Squares) -> list[Tensor]:
    return [_gathered(angle, squares) for angle in (theta, phi) if angle is not None]


def _blocks(angles: list[Tensor], h: int) -> tuple[Tensor, Shears]:
    """The squares multiplied out, a state ``(1, parts, 2 h, 2 h, lanes of all stages)``.

    Returns:
        The state and the tables of the sweep; the angles are overwritten.
    """
    Z = angles[0].new_zeros(1, len(angles), 2 * h, 2 * h, angles[0].shape[-1])
    Z[0, 0].diagonal(dim1=0, dim2=1).fill_(1)
    tables = shears(angles[0], angles[1] if len(angles) == 2 else None, _square_steps(h), 2 * h)
    sweep(Z, _square_steps(h), tables, along=-2)
    return Z, tables


def _products(Z: Tensor, stages: int) -> Tensor:
    """A state of one kind as matrices ``(stages, lanes * blocks, 2 h, 2 h)``."""
    *_, rows, columns, _ = Z.shape
    parts = [part.flatten(0, 1).t().contiguous() for part in Z[0]]
    M = parts[0] if len(parts) == 1 else torch.complex(*parts)
    return M.view(stages, -1, rows, columns)


def _moved(X: Tensor, stage: int, h: int) -> Tensor:
    """Rows ``(lanes, rows, p)`` from the order of the stage before to that of this one."""
    return X if stage == 0 else X.roll(-h if stage % 2 else h, dims=-2)


def blocked(X: Tensor, theta: Tensor, phi: Tensor | None, layers: int, h: int) -> Tensor:
    """``F_L ... F_1 X`` of the tunable style.

    Args:
        X: Columns, shape ``(lanes, n, p)``.
        theta: Angles, shape ``(lanes, count)``.
        phi: Phases, same shape, or None.
        layers: L.
        h: Half the size of a block.

    Returns:
        The product, shape ``(lanes, n, p)``.
    """
    lanes, n, p = X.shape
    squares = _squares(n, layers, h)
    T = _products(_blocks(_places(theta, phi, squares), h)[0], squares.stages)
    rows = 2 * h * squares.blocks
    X = torch.nn.functional.pad(X, (0, 0, 0, rows - n))
    for stage in range(squares.stages):
        X = _moved(X, stage, h)
        X = torch.bmm(T[stage], X.reshape(-1, 2 * h, p)).reshape(lanes, rows, p)
    if squares.stages % 2 == 0:
        X = X.roll(h, dims=-2)
    return X[:, :n].contiguous()


def blocked_backward(
    Y: Tensor, G: Tensor, theta: Tensor, phi: Tensor | None, layers: int, h: int
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of X and the angles from the result and its gradient.

    Stage by stage ``X <- B^H Y`` and ``G <- B^H G``; the gradient of block B is ``G X^H`` with G
    after the stage and X before.
    """
    lanes, n, p = Y.shape
    squares = _squares(n, layers, h)
    angles = _places(theta, phi, squares)
    Z, tables = _blocks(angles, h)
    T = _products(Z, squares.stages)
    rows = 2 * h * squares.blocks
    YG = torch.nn.functional.pad(torch.cat([Y, G], dim=-1), (0, 0, 0, rows - n))
    if squares.stages % 2 == 0:
        YG = YG.roll(-h, dims=-2)
    dT = torch.empty_like(T)
    for stage in reversed(range(squares.stages)):
        after = YG.reshape(-1, 2 * h, 2 * p)
        before = torch.bmm(T[stage].mH, after)
        dT[stage] = torch.bmm(after[..., p:], before[..., :p].mH)
        YG = before.reshape(lanes, rows, 2 * p)
        if stage:
            YG = YG.roll(h if stage % 2 else -h, dims=-2)
    dZ = dT.view(-1, 4 * h * h)
    parts = [dZ.real, dZ.imag] if dZ.is_complex() else [dZ]
    dZ = torch.stack([part.t() for part in parts]).view(Z.shape)
    Z = torch.cat([Z, dZ])
    moments = [torch.empty_like(angle) for angle in angles]
    sweep(Z, _square_steps(h), tables, undo=True, moments=moments, along=-2)
    sums = [_scattered(moment, squares, lanes) for moment in moments]
    return YG[:, :n, p:].contiguous(), sums
