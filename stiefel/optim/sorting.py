"""How the leaves of a group are sorted into batches, remembered while nothing it rests on changes.

To look at a thousand parameters one by one takes as long as to step them. What decides the
batches is read by a few list comprehensions and compared with what it was at the step before.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from stiefel.manifolds import Manifold
from stiefel.optim.batches import Joint

__all__ = ["Facts", "Part", "Sorting", "sort"]

_NONE: Mapping[str, Any] = {}
#: A manifold, one object for all equal ones, and the dimensions of a point; None: no manifold.
Met = tuple[Manifold | None, int]


class Facts:
    """What decides how the leaves of a group are sorted.

    Args:
        leaves: The parameters of the group.
        gradients: Their gradients, None for those that are not stepped.
        state: The states of the optimizer.
        known_by: A state that leaves have from their first step on; None if there are no states.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        state: Mapping[Tensor, Mapping[str, Any]],
        known_by: str | None,
    ) -> None:
        self.leaves = list(leaves)
        self.states = [state.get(leaf, _NONE) for leaf in leaves] if known_by else []
        self.manifolds = [getattr(leaf, "manifold", None) for leaf in leaves]
        self.equal = (
            [gradient is None for gradient in gradients],
            [leaf.shape for leaf in leaves],
            [leaf.dtype for leaf in leaves],
            [leaf.device for leaf in leaves],
            [known_by not in known for known in self.states] if known_by else None,
        )

    def same(self, other: Facts) -> bool:
        """Whether these are the same leaves, on the same manifolds, and nothing else differs."""
        return (
            len(self.leaves) == len(other.leaves)
            and all(map(operator.is_, self.leaves, other.leaves))
            and all(map(operator.is_, self.manifolds, other.manifolds))
            and self.equal == other.equal
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """Leaves that make one batch.

    Attributes:
        manifold: Their manifold.
        places: Where they are in the group.
        leaves: They themselves.
        joint: How they are joined.
        fresh: Whether they have no states yet.
    """

    manifold: Manifold
    places: list[int]
    leaves: list[Tensor]
    joint: Joint
    fresh: bool


@dataclasses.dataclass(frozen=True)
class Sorting:
    """The leaves of a group that have gradients: by batches, and the ordinary ones."""

    facts: Facts
    parts: list[Part]
    ordinary: list[Tensor]


def sort(facts: Facts, meet: Callable[[Tensor], Met]) -> Sorting:
    """Sorts leaves by manifold, size, dtype, device, and whether they have been stepped before.

    Args:
        facts: What is known of them.
        meet: The manifold of a leaf; it raises for leaves that may not be there, and is called
            for those without a gradient too.
    """
    alike: dict[Any, tuple[Manifold, int, list[int]]] = {}
    ordinary = []
    missing, shapes, dtypes, devices, fresh = facts.equal
    for place, leaf in enumerate(facts.leaves):
        manifold, ndim = meet(leaf)
        if missing[place]:
            continue
        if manifold is None:
            ordinary.append(leaf)
            continue
        sizes = shapes[place][len(shapes[place]) - ndim :]
        new = fresh is not None and fresh[place]
        key = (id(manifold), sizes, dtypes[place], devices[place], new)
        alike.setdefault(key, (manifold, ndim, []))[2].append(place)
    parts = []
    for key, (manifold, ndim, places) in alike.items():
        leaves = [facts.leaves[place] for place in places]
        parts.append(Part(manifold, places, leaves, Joint(leaves, ndim), key[-1]))
    return Sorting(facts, parts, ordinary)
