"""Leaves of one manifold, size, dtype and device, joined into one batch.

A thousand matrices of 32 x 16 are stepped by a handful of batched calls, not by a thousand steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.manifolds import Manifold

__all__ = ["Batch", "Proposal", "join", "point_ndim", "separate", "write"]


def point_ndim(manifold: Manifold) -> int:
    """How many trailing dimensions make a point of a manifold."""
    return int(manifold.ndim)  # pyright: ignore[reportArgumentType]


def join(tensors: Sequence[Tensor], ndim: int) -> Tensor:
    """Joins tensors whose last `ndim` dimensions agree along their leading dimensions.

    Args:
        tensors: One or more tensors ``(..., *sizes)``. A single tensor is returned as it is,
            tensors of one shape are stacked, others are concatenated as ``(k, *sizes)``.
        ndim: Number of trailing dimensions.

    Returns:
        A tensor ``(..., *sizes)``; `separate` undoes it.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach()
    if _one_shape(tensors):
        return torch.stack(list(tensors))
    sizes = first.shape[first.ndim - ndim :]
    return torch.cat([tensor.reshape(-1, *sizes) for tensor in tensors])


def separate(joined: Tensor, like: Sequence[Tensor], ndim: int) -> Sequence[Tensor]:
    """Views of a tensor made by `join`, one for each of the tensors that were joined.

    Args:
        joined: The joined tensor.
        like: The tensors that were joined.
        ndim: Number of trailing dimensions, as for `join`.

    Returns:
        Views with the shapes of `like`.
    """
    if len(like) == 1:
        return [joined]
    if _one_shape(like):
        return joined.unbind(0)
    counts = [tensor.shape[: tensor.ndim - ndim].numel() for tensor in like]
    parts = joined.split(counts)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _one_shape(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def write(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies `values` into `targets`, in place."""
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(targets), list(values)
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one batched step needs to know.

    Attributes:
        manifold: The manifold of all leaves.
        group: Their parameter group (learning rate, momentum, ...).
        leaves: The parameters themselves.
        points: Their values joined, ``(..., *sizes)``; never written to.
        gradients: Their Euclidean gradients joined, the same shape; never written to.
        state: Their optimizer states joined, by name; empty before their first step.
    """

    manifold: Manifold
    group: dict[str, Any]
    leaves: list[Tensor]
    points: Tensor
    gradients: Tensor
    state: Mapping[str, Tensor]

    def finite(self) -> Tensor:
        """Which leaves have finite gradients: a mask that broadcasts over `gradients`."""
        good, like = torch.isfinite(self.gradients), self.leaves
        if len(like) == 1:
            return good.all()
        if _one_shape(like):
            return good.flatten(1).all(1).reshape(-1, *(1,) * like[0].ndim)
        parts = separate(good, like, point_ndim(self.manifold))
        whole = torch.cat([part.all().expand_as(part).reshape(-1) for part in parts])
        return whole.reshape(good.shape)

    def choose(self, which: Tensor, dtype: torch.dtype) -> Batch:
        """The points selected by a mask over the leading dimensions, in another dtype."""
        return dataclasses.replace(
            self,
            points=self.points[which].to(dtype),
            gradients=self.gradients[which].to(dtype),
            state={name: value[which].to(dtype) for name, value in self.state.items()},
        )


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Where a batch goes: new points and new states, not yet written anywhere."""

    points: Tensor
    state: Mapping[str, Tensor]
