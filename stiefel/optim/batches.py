"""Leaves of one manifold, size, dtype and device, joined into one batch.

A thousand matrices of 32 x 16 are stepped by a handful of batched calls, not by a thousand steps.
On the CPU that is done in pieces that stay in the cache, and joined tensors are copied into memory
that is kept from step to step: new memory costs more than the arithmetic of small matrices.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stiefel.manifolds import Manifold, Stiefel
from stiefel.numerics import double_dtype, real_dtype

__all__ = ["Batch", "Joint", "Proposal", "StateKind", "by_pieces", "point_ndim", "write"]

#: Bytes of the points of one piece, on the CPU: its temporaries stay in the cache, and their memory
#: is not returned to the system and asked for again.
_PIECE = 2**19
#: Bytes of a joined tensor up to which its memory is kept from step to step, on the CPU.
_KEPT = 2**25
#: What one state of a leaf is: a tensor like the leaf, a number a matrix, or a number a leaf.
StateKind = Literal["point", "matrix", "leaf"]


def point_ndim(manifold: Manifold) -> int:
    """How many trailing dimensions make a point of a manifold."""
    return int(manifold.ndim)


class Joint:
    """How tensors whose last `ndim` dimensions agree are joined along their leading dimensions.

    A single tensor is taken as it is, tensors of one shape are stacked, others are concatenated
    as ``(k, *sizes)``. Stacks on the CPU of at most 32 MB that are given a slot keep their memory:
    what was joined in a slot before is overwritten.

    Args:
        like: One or more tensors ``(..., *sizes)``.
        ndim: Number of trailing dimensions.
    """

    def __init__(self, like: Sequence[Tensor], ndim: int) -> None:
        self._join_shapes([tensor.shape for tensor in like], ndim)

    def _join_shapes(self, shapes: list[torch.Size], ndim: int) -> Joint:
        self.shapes = shapes
        self.ndim = ndim
        self.uniform = len(set(shapes)) == 1
        self._rooms: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self._homes: dict[str, tuple[Tensor, list[Tensor]]] = {}
        return self

    def settle(self, name: str, joined: Tensor, kind: StateKind) -> Sequence[Tensor]:
        """Makes a state of many leaves views of one tensor: it need not be joined again.

        Args:
            name: Of the state.
            joined: Its value, joined; copied.
            kind: What it is.

        Returns:
            The state of each leaf, in memory of its own or of all of them.
        """
        if not self.many:
            return [part.clone() for part in self.separate(joined, kind)]
        home = joined.clone()
        parts = list(self.separate(home, kind))
        self._homes[name] = (home, parts)
        return parts

    @property
    def many(self) -> bool:
        """Whether several tensors of one shape are joined."""
        return self.uniform and len(self.shapes) > 1

    def is_home(self, name: str, joined: Tensor | None) -> bool:
        """Whether `joined` is the tensor that `settle` made for a state."""
        return name in self._homes and self._homes[name][0] is joined

    def settled(self, name: str, parts: Sequence[Tensor]) -> Tensor | None:
        """The tensor of which `parts` are still the views that `settle` made; else None."""
        home = self._homes.get(name)
        if home is None or not all(map(operator.is_, home[1], parts)):
            return None
        return home[0]

    def piece(self, start: int, stop: int) -> Joint:
        """The joint of a slice of what is joined uniformly, along the first dimension."""
        if len(self.shapes) > 1:
            shapes = self.shapes[start:stop]
        else:
            shapes = [torch.Size((stop - start, *self.shapes[0][1:]))]
        return Joint.__new__(Joint)._join_shapes(shapes, self.ndim)

    def room(self, slot: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for something joined, the same at each call where it is kept; not initialised.

        Args:
            slot: What it is for.
            shape: Its shape; the first dimension counts what is joined.
            like: Gives dtype and device.
        """
        kept = self._rooms.get(slot)
        if kept is not None and kept[0].shape == shape and kept[0].dtype == like.dtype:
            return kept[0]
        room = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._keep(slot, room)
        return room

    def _keep(self, slot: str, room: Tensor) -> None:
        size = room.numel() * room.element_size()
        plain = type(room) is Tensor and not room.is_inference()
        if self.uniform and room.device.type == "cpu" and size <= _KEPT and plain:
            parts = room.unbind(0) if len(self.shapes) > 1 else [room]
            self._rooms[slot] = (room, list(parts))

    def _leading(self, shape: torch.Size) -> torch.Size:
        return shape[: len(shape) - self.ndim]

    def _ones(self, shape: torch.Size) -> tuple[int, ...]:
        return (*self._leading(shape), *(1,) * self.ndim)

    def join(
        self, tensors: Sequence[Tensor], kind: StateKind = "point", slot: str | None = None
    ) -> Tensor:
        """Joins one tensor for each leaf; a single one is not copied.

        Args:
            tensors: What there is of each leaf.
            kind: What that is. ``"leaf"``: numbers, joined so that they broadcast.
            slot: Where to keep the memory of a stack; the tensors then always have the shapes and
                the dtype of the first time.
        """
        if kind == "leaf":
            return self._join_numbers(tensors)
        if len(tensors) == 1:
            return tensors[0].detach()
        if self.uniform:
            if slot is not None and slot in self._rooms:
                room = self._rooms[slot][0]
                torch.cat([*tensors], out=room.flatten(0, 1))
                return room
            joined = torch.stack(list(tensors))
            if slot is not None and joined.ndim > 1:
                self._keep(slot, joined)
            return joined
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
        if self.uniform and kind != "leaf":
            for room, parts in self._rooms.values():
                if room is joined:
                    return parts
        if len(self.shapes) == 1:
            parts: Sequence[Tensor] = [joined]
        elif self.uniform and kind == "leaf" and joined.numel():
            return joined.reshape(len(self.shapes), -1)[:, 0].unbind(0)
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

    def cuts(self, *, whole_leaves: bool) -> list[tuple[int, int]]:
        """Where the first dimension may be cut into pieces that stay in the cache.

        Matrices of `stiefel.Stiefel` on the CPU, many and small, are cut; others are not.

        Args:
            whole_leaves: Whether one leaf must stay in one piece.

        Returns:
            Slices of the first dimension; none where the batch is best taken as a whole.
        """
        X, joint = self.points, self.joint
        if not (joint.uniform and X.ndim > joint.ndim and X.device.type == "cpu"):
            return []
        if not isinstance(self.manifold, Stiefel) or (whole_leaves and len(joint.shapes) == 1):
            return []
        count, size = len(X), X.numel() * X.element_size()
        if size <= 2 * _PIECE or 8 * size > _PIECE * count:
            return []
        step = max(1, count * _PIECE // size)
        return [(k, min(k + step, count)) for k in range(0, count, step)]

    def piece(self, start: int, stop: int) -> Batch:
        """A slice of the batch along the first dimension; the leaves are all still named."""

        def cut(value: Tensor) -> Tensor:  # a number of a single leaf belongs to every piece
            return value[start:stop] if len(value) == len(self.points) else value

        return dataclasses.replace(
            self,
            joint=self.joint.piece(start, stop),
            points=self.points[start:stop],
            gradients=self.gradients[start:stop],
            state={name: cut(value) for name, value in self.state.items()},
        )

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


def by_pieces(
    batch: Batch, cuts: Sequence[tuple[int, int]], propose: Callable[[Batch], Proposal]
) -> Proposal:
    """Applies `propose` to pieces of a batch, one after the other.

    Args:
        batch: The batch.
        cuts: From `Batch.cuts`.
        propose: Treats every matrix by itself; what it gives as a number of a leaf depends on
            such numbers alone.

    Returns:
        What `propose` would have given for the batch, up to rounding.
    """
    joint, points, state = batch.joint, batch.points, {}
    new = joint.room("new", points.shape, points)
    for start, stop in cuts:
        proposal = propose(batch.piece(start, stop))
        new[start:stop] = proposal.points
        for name, value in proposal.state.items():
            if len(joint.shapes) == 1 and len(value) == 1:
                state[name] = value
                continue
            if start == 0:
                state[name] = joint.room(f"new {name}", (len(points), *value.shape[1:]), value)
            state[name][start:stop] = value
    return Proposal(new, state)
