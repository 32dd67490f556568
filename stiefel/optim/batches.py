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

__all__ = ["Batch", "Joint", "Proposal", "point_ndim", "write"]


def point_ndim(manifold: Manifold) -> int:
    """How many trailing dimensions make a point of a manifold."""
    return int(manifold.ndim)


class Joint:
    """How tensors whose last `ndim` dimensions agree are joined along their leading dimensions.

    A single tensor is taken as it is, tensors of one shape are stacked, others are concatenated
    as ``(k, *sizes)``.

    Args:
        like: One or more tensors ``(..., *sizes)``.
        ndim: Number of trailing dimensions.
    """

    def __init__(self, like: Sequence[Tensor], ndim: int) -> None:
        self.shapes = [tensor.shape for tensor in like]
        self.ndim = ndim
        self.uniform = len(set(self.shapes)) == 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Joins tensors with the shapes of `like`; a single one is not copied."""
        if len(tensors) == 1:
            return tensors[0].detach()
        if self.uniform:
            return torch.stack(list(tensors))
        sizes = self.shapes[0][len(self.shapes[0]) - self.ndim :]
        return torch.cat([tensor.reshape(-1, *sizes) for tensor in tensors])

    def separate(self, joined: Tensor) -> Sequence[Tensor]:
        """Views of a joined tensor, one for each of the tensors that were joined."""
        if len(self.shapes) == 1:
            return [joined]
        if self.uniform:
            return joined.unbind(0)
        parts = joined.split([shape[: len(shape) - self.ndim].numel() for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def each(self, flags: Tensor) -> Tensor:
        """Whether all entries of each joined tensor are true; it broadcasts over the joint.

        Args:
            flags: bool, the shape of the joint.
        """
        if len(self.shapes) == 1:
            return flags.all()
        if self.uniform:
            return flags.flatten(1).all(1).reshape(-1, *(1,) * len(self.shapes[0]))
        whole = [part.all().expand_as(part).reshape(-1) for part in self.separate(flags)]
        return torch.cat(whole).reshape(flags.shape)


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
        joint: How they are joined.
        points: Their values joined, ``(..., *sizes)``; never written to.
        gradients: Their Euclidean gradients joined, the same shape; never written to.
        state: Their optimizer states joined, by name; empty before their first step.
    """

    manifold: Manifold
    group: dict[str, Any]
    leaves: list[Tensor]
    joint: Joint
    points: Tensor
    gradients: Tensor
    state: Mapping[str, Tensor]

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
