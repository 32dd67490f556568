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

_SHAPE, _DTYPE, _DEVICE = (operator.attrgetter(name) for name in ("shape", "dtype", "device"))
#: A manifold, one object for all equal ones, and the dimensions of a point; None: no manifold.
Met = tuple[Manifold | None, int]


class Facts:
    """What decides how the leaves of a group are sorted, as it was when they were.

    Args:
        leaves: The parameters of the group.
        gradients: Their gradients, None for those that are not stepped.
        states: Their states; empty if the optimizer keeps none.
        known_by: A state that leaves have from their first step on; None if there are no states.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Mapping[str, Any]],
        known_by: str | None,
    ) -> None:
        self.leaves = list(leaves)
        self.manifolds = [getattr(leaf, "manifold", None) for leaf in leaves]
        self.missing = [gradient is None for gradient in gradients]
        self.shapes = [leaf.shape for leaf in leaves]
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.devices = [leaf.device for leaf in leaves]
        self.known_by = known_by
        self.fresh = _fresh(states, known_by)

    def hold(
        self,
        leaves: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Mapping[str, Any]],
        known_by: str | None,
    ) -> bool:
        """Whether these are the same leaves, on the same manifolds, and nothing else differs.

        Attributes are compared one by one as they are read: a thousand objects that are made and
        kept at each step would set the garbage collector to work.
        """
        manifolds = [getattr(leaf, "manifold", None) for leaf in leaves]
        return (
            len(self.leaves) == len(leaves)
            and self.known_by == known_by
            and all(map(operator.is_, self.leaves, leaves))
            and all(map(operator.is_, self.manifolds, manifolds))
            and self.missing == [gradient is None for gradient in gradients]
            and all(map(operator.eq, self.shapes, map(_SHAPE, leaves)))
            and all(map(operator.is_, self.dtypes, map(_DTYPE, leaves)))
            and all(map(operator.eq, self.devices, map(_DEVICE, leaves)))
            and self.fresh == _fresh(states, known_by)
        )


def _fresh(states: Sequence[Mapping[str, Any]], known_by: str | None) -> list[bool]:
    """Whether each leaf has no states yet; nothing where none are kept."""
    return [] if known_by is None else [known_by not in known for known in states]


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
    shapes, dtypes, devices = facts.shapes, facts.dtypes, facts.devices
    for place, leaf in enumerate(facts.leaves):
        manifold, ndim = meet(leaf)
        if facts.missing[place]:
            continue
        if manifold is None:
            ordinary.append(leaf)
            continue
        sizes = shapes[place][len(shapes[place]) - ndim :]
        new = bool(facts.fresh) and facts.fresh[place]
        key = (id(manifold), sizes, dtypes[place], devices[place], new)
        alike.setdefault(key, (manifold, ndim, []))[2].append(place)
    parts = []
    for key, (manifold, ndim, places) in alike.items():
        leaves = [facts.leaves[place] for place in places]
        parts.append(Part(manifold, places, leaves, Joint(leaves, ndim), key[-1]))
    return Sorting(facts, parts, ordinary)
