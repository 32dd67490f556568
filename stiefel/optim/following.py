"""States that follow their parameters when `model.to` changes these between two steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from stiefel.optim.checks import check_kind

__all__ = ["Forms"]

_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
Groups = Sequence[Mapping[str, Any]]


class Forms:
    """The dtypes and devices of the leaves of some groups, as they were when states fitted them.

    Args:
        groups: Parameter groups; their leaves are held.
    """

    def __init__(self, groups: Groups) -> None:
        self.leaves = _leaves(groups)
        self.dtypes = list(map(_DTYPE, self.leaves))
        self.devices = list(map(_DEVICE, self.leaves))

    def follow(
        self,
        groups: Groups,
        states: Mapping[Tensor, MutableMapping[str, Any]],
        fit: Callable[[Tensor, MutableMapping[str, Any], Mapping[str, Any]], None],
        describe: Callable[[Tensor], str],
    ) -> Forms:
        """Fits the states of leaves that are new here, or of another dtype or device now.

        Args:
            groups: The groups as they are now.
            states: The states of an optimizer.
            fit: ``fit(leaf, state, group)`` gives a state the dtype and the device of its leaf.
            describe: How errors call a leaf.

        Returns:
            The forms as they are now; these very ones where nothing has changed.

        Raises:
            ConfigurationError: If a leaf with a state has become complex, or real; nothing has
                been changed.
        """
        leaves = _leaves(groups)
        if (
            len(self.leaves) == len(leaves)
            and all(map(operator.is_, self.leaves, leaves))
            and all(map(operator.is_, self.dtypes, map(_DTYPE, leaves)))
            and all(map(operator.eq, self.devices, map(_DEVICE, leaves)))
        ):
            return self
        before = dict(zip(self.leaves, zip(self.dtypes, self.devices, strict=True), strict=True))
        moved = [
            (leaf, group)
            for group in groups
            for leaf in group["params"]
            if before.get(leaf) != (leaf.dtype, leaf.device) and states.get(leaf)
        ]
        for leaf, _ in moved:
            if leaf in before:
                check_kind(leaf, before[leaf][0], describe)
        for leaf, group in moved:
            fit(leaf, states[leaf], group)
        return Forms(groups)

    def release(self, groups: Groups) -> None:
        """Lets go of the leaves that the groups hold no more."""
        held = set(_leaves(groups))
        rows = zip(self.leaves, self.dtypes, self.devices, strict=True)
        kept = [row for row in rows if row[0] in held]
        self.leaves = [leaf for leaf, _, _ in kept]
        self.dtypes = [dtype for _, dtype, _ in kept]
        self.devices = [device for _, _, device in kept]


def _leaves(groups: Groups) -> list[Tensor]:
    return [leaf for group in groups for leaf in group["params"]]
