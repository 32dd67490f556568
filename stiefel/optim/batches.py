"""Leaves of one manifold, size, dtype and device, joined into one batch.

A thousand matrices of 32 x 16 are stepped by a handful of batched calls, not by a thousand steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stiefel.manifolds import Manifold
from stiefel.numerics import double_dtype, real_dtype

__all__ = ["Batch", "Joint", "Proposal", "StateKind", "point_ndim", "write"]

#: What one state of a leaf is: a tensor like the leaf, a number a matrix, or a number a leaf.
StateKind = Literal["point", "matrix", "leaf"]


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

    def _leading(self, shape: torch.Size) -> torch.Size:
        return shape[: len(shape) - self.ndim]

    def _ones(self, shape: torch.Size) -> tuple[int, ...]:
        return (*self._leading(shape), *(1,) * self.ndim)

    def join(self, tensors: Sequence[Tensor], kind: StateKind = "point") -> Tensor:
        """Joins one tensor for each leaf; a single one is not copied.

        Args:
            tensors: What there is of each leaf.
            kind: What that is. ``"leaf"``: numbers, joined so that they broadcast.
        """
        if kind == "leaf":
            return self._join_numbers(tensors)
        if len(tensors) == 1:
            return tensors[0].detach()
        if self.uniform:
            return torch.stack(list(tensors))
        sizes = tensors[0].shape[len(self.shapes[0]) - self.ndim :]
        return torch.cat([tensor.reshape(-1, *sizes) for tensor in tensors])

    def _join_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        ones = (1,) * len(self.shapes[0])
        if len(numbers) == 1:
            return numbers[0].detach().reshape(ones)
        joined = torch.stack(list(numbers))
        if self.uniform:
            return joined.reshape(-1, *ones)
        counts = [self._leading(shape).numel() for shape in self.shapes]
        repeated = [number.expand(count) for number, count in zip(numbers, counts, strict=True)]
        return torch.cat(repeated).reshape(-1, *(1,) * self.ndim)

    def separate(self, joined: Tensor, kind: StateKind = "point") -> Sequence[Tensor]:
        """Views of a joined tensor, one for each of the leaves that were joined."""
        if len(self.shapes) == 1:
            parts: Sequence[Tensor] = [joined]
        elif self.uniform:
            parts = joined.unbind(0)
        else:
            parts = joined.split([self._leading(shape).numel() for shape in self.shapes])
        if kind == "leaf":  # a leaf without matrices has no steps either
            return [p.flatten()[0] if p.numel() else p.new_zeros(()) for p in parts]
        if self.uniform:
            return parts
        return [
            part.reshape(shape if kind == "point" else self._ones(shape))
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def zeros(self, points: Tensor, kind: StateKind) -> Tensor:
        """A joined state of zeros, for leaves whose joined points are given."""
        if kind == "point":
            return torch.zeros_like(points)
        real = real_dtype(points.dtype)
        if kind == "matrix":
            return torch.zeros(self._ones(points.shape), dtype=real, device=points.device)
        return self._join_numbers(
            [torch.zeros((), dtype=real, device=points.device)] * len(self.shapes)
        )

    def each(self, flags: Tensor) -> Tensor:
        """Whether all entries of each joined leaf are true; it broadcasts over the joint.

        Args:
            flags: bool, joined.
        """
        if len(self.shapes) == 1:
            return flags.all()
        if self.uniform:
            return flags.flatten(1).all(1).reshape(-1, *(1,) * len(self.shapes[0]))
        counts = [self._leading(shape).numel() for shape in self.shapes]
        whole = [
            part.all().expand(count)
            for part, count in zip(flags.split(counts), counts, strict=True)
        ]
        return torch.cat(whole).reshape(-1, *(1,) * self.ndim)


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
        state: Their optimizer states joined, by name; empty before their first step. Numbers of
            a matrix or of a leaf broadcast against the points.
    """

    manifold: Manifold
    group: dict[str, Any]
    leaves: list[Tensor]
    joint: Joint
    points: Tensor
    gradients: Tensor
    state: Mapping[str, Tensor]

    @property
    def rate(self) -> float | Tensor:
        """The signed learning rate: ``-lr``, or ``lr`` to ascend; a number or a 0-d tensor."""
        lr = self.group["lr"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        return lr if self.group["maximize"] else -lr

    def zeros(self, kind: StateKind) -> Tensor:
        """A state of zeros, joined."""
        return self.joint.zeros(self.points, kind)

    def choose(self, which: Tensor) -> Batch:
        """The points selected by a mask over the leading dimensions, in double precision."""

        def chosen(value: Tensor) -> Tensor:
            whole = value.expand(*which.shape, *value.shape[value.ndim - self.joint.ndim :])
            return whole[which].to(double_dtype(value.dtype))

        points = chosen(self.points)
        return dataclasses.replace(
            self,
            joint=Joint([points], self.joint.ndim),
            points=points,
            gradients=chosen(self.gradients),
            state={name: chosen(value) for name, value in self.state.items()},
        )


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Where a batch goes: new points and new states, joined, not yet written anywhere."""

    points: Tensor
    state: Mapping[str, Tensor]
