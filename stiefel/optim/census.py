"""Where the constrained leaves of a model were when an optimizer last looked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.optim.checks import lost_manifold_error
from stiefel.optim.groups import manifold_of
from stiefel.parameter import constraints

__all__ = ["Census"]


class _Place(NamedTuple):
    """A leaf: the module that holds it, under which name, and what kind of leaf it was."""

    module: nn.Module
    name: str
    leaf: Tensor
    constrained: bool
    on_manifold: bool


class Census:
    """The places of all leaves of a model.

    Making one checks that every trainable leaf of the model's constraints is held in the right
    group; `settled` says cheaply, at every step, whether all is as it was.

    Args:
        model: The model.
        roles: Role of the group of each leaf, by its id.
        earlier: The census before this one, if any: its leaves must still be there.

    Raises:
        LostManifoldError: If a point has become an ordinary parameter.
        ConfigurationError: If a leaf is missing, in the wrong group, or gone from the model.
    """

    def __init__(
        self, model: nn.Module, roles: Mapping[int, str], earlier: Census | None = None
    ) -> None:
        if earlier is not None:
            earlier._look_for_lost(model, roles)
        _check_constraints(model, roles)
        self.places = [
            _Place(module, name, leaf, _constrained(leaf, roles), manifold_of(leaf) is not None)
            for module in model.modules()
            for name, leaf in module._parameters.items()
            if leaf is not None
        ]
        self.links = _links(model, {id(place.module) for place in self.places if place.constrained})

    def settled(self) -> bool:
        """Whether no leaf, and no module on the way to one, has been replaced."""
        return all(
            place.module._parameters.get(place.name) is place.leaf
            and (not place.on_manifold or manifold_of(place.leaf) is not None)
            for place in self.places
        ) and all(parent._modules.get(name) is child for parent, name, child in self.links)

    def _look_for_lost(self, model: nn.Module, roles: Mapping[int, str]) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        present = {id(parameter) for parameter in model.parameters()}
        for place in self.places:
            if not place.constrained or id(place.leaf) not in roles:
                continue  # of torch's business, or exchanged
            path = ".".join(filter(None, (paths.get(id(place.module), ""), place.name)))
            now = place.module._parameters.get(place.name)
            lost = now is not None and manifold_of(now) is None
            if place.on_manifold and lost and id(place.module) in paths:
                raise lost_manifold_error(path)
            if id(place.leaf) not in present:
                raise ConfigurationError(
                    f"a leaf of shape {tuple(place.leaf.shape)} ({path}) that the optimizer holds "
                    "is no longer in the model: its weight was released, converted or replaced "
                    "after the optimizer was made. Build it afterwards, or pass optimizer= to "
                    "stiefel.convert"
                )


def _constrained(leaf: Tensor, roles: Mapping[int, str]) -> bool:
    return roles.get(id(leaf), "free") != "free"


def _check_constraints(model: nn.Module, roles: Mapping[int, str]) -> None:
    for constraint in constraints(model):
        constraint.check()
        role = "manifold" if constraint.is_riemannian else "chart"
        for leaf in constraint.leaves:
            got = roles.get(id(leaf))
            if got != role and (got is not None or leaf.requires_grad):
                raise ConfigurationError(
                    f"expected the leaves of {constraint.path or constraint.name} in a group "
                    f"{role!r}, got {'no group' if got is None else repr(got)}: the weight was "
                    "constrained, converted or replaced after the optimizer was made. Build it "
                    "afterwards, or pass optimizer= to stiefel.convert"
                )


def _links(model: nn.Module, wanted: set[int]) -> list[tuple[nn.Module, str, nn.Module]]:
    """The links (parent, name, child) on the ways from a model to some of its modules."""
    links: list[tuple[nn.Module, str, nn.Module]] = []

    def descend(module: nn.Module, seen: set[int]) -> bool:
        seen.add(id(module))
        found = id(module) in wanted
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen and descend(child, seen):
                links.append((module, name, child))
                found = True
        return found

    descend(model, set())
    return links
