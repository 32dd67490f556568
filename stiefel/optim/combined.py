"""One torch optimizer made of two: a Riemannian one for points, any torch one for the rest."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.optim.base import Plan, RiemannianOptimizer
from stiefel.optim.census import Census
from stiefel.optim.checks import all_finite, non_finite_error, place_in_groups
from stiefel.optim.euclidean import fit_state, untouched_where_non_finite
from stiefel.optim.following import Forms
from stiefel.optim.groups import manifold_of
from stiefel.parameter import RebaseSchedule, constraints

__all__ = ["CombinedOptimizer"]


class CombinedOptimizer(torch.optim.Optimizer):
    """What `stiefel.optim.build` returns: a `torch.optim.Optimizer` over a whole model.

    Its `param_groups` are the very groups of the two optimizers inside, in the order ``"free"``
    (ordinary parameters), ``"chart"`` (coordinates of charts), ``"manifold"`` (points), the name
    being ``group["role"]``; all three are there even when one has no parameters, so that a
    checkpoint has the same groups however the weights are trained. Its `state` is the state of
    both. Schedulers, ``state_dict``, closures, hooks and `add_param_group` work as in torch.

    Before a step it checks that every trainable leaf of `stiefel.constraints` is held in the
    group where it belongs and is still on its manifold. After ``model.double()``, ``.float()`` or
    ``.to(device)`` the states follow their parameters.

    Args:
        model: The model.
        ordinary: Optimizer of the groups ``"free"`` and ``"chart"``.
        riemannian: Optimizer of the group ``"manifold"``.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error.
    """

    def __init__(
        self,
        model: nn.Module,
        ordinary: torch.optim.Optimizer,
        riemannian: torch.optim.Optimizer,
        *,
        skip_nonfinite: bool = False,
    ) -> None:
        self.model = model
        self.ordinary = ordinary
        self.riemannian = riemannian
        self.skip_nonfinite = skip_nonfinite
        groups = [*ordinary.param_groups, *riemannian.param_groups]
        self._ready = False
        super().__init__(groups, {})
        self._ready = True
        ordinary.state.update(riemannian.state)
        defaults = _shared_defaults(ordinary, groups)
        self.__setstate__({"state": ordinary.state, "param_groups": groups, "defaults": defaults})

    # -- one list of groups, one state ------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """What torch keeps, and the two optimizers and the model."""
        kept = ("model", "ordinary", "riemannian", "skip_nonfinite")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores, and makes the two optimizers share the groups and the state again."""
        super().__setstate__(state)
        for part, manifold in ((self.ordinary, False), (self.riemannian, True)):
            groups = [g for g in self.param_groups if (g["role"] == "manifold") == manifold]
            part.__setstate__({"state": self.state, "param_groups": groups})
        self._ready = True
        self._census: Census | None = getattr(self, "_census", None)
        self._schedule: RebaseSchedule | None = None
        self._surveyed = False
        self._forms = Forms(self._others())
        self.attend()

    def attend(self) -> None:
        """Takes charge of rebase schedules that nobody keeps; steps see to them all the same."""
        for constraint in constraints(self.model):
            storage = constraint.storage
            if storage is not None and not storage.attached:
                storage.attach(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; see `torch.optim.Optimizer.load_state_dict`.

        Raises:
            ConfigurationError: If the state was saved by another optimizer or for another model;
                nothing has been changed.
        """
        here = [group["role"] for group in self.param_groups]
        saved = [group.get("role") for group in state_dict["param_groups"]]
        if here != saved:
            raise ConfigurationError(
                f"expected groups with roles {here}, got {saved}: was the state saved by an "
                "optimizer of stiefel.optim.build for the same model?"
            )
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        ]
        if sizes[0] != sizes[1]:
            raise ConfigurationError(
                f"expected {sizes[0]} parameters in the groups {here}, got {sizes[1]}: the state "
                "was saved with weights trained another way; stiefel.convert the model first"
            )
        if isinstance(self.riemannian, RiemannianOptimizer):
            points = [g for g in state_dict["param_groups"] if g["role"] == "manifold"]
            self.riemannian.check_loaded(points, state_dict["state"])
        held = [p for group in self.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, leaf in zip(keys, held, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and not _fits(value.shape, leaf.shape):
                    raise ConfigurationError(
                        f"expected {name} of shape {tuple(leaf.shape)} for {self.describe(leaf)}, "
                        f"got {tuple(value.shape)}: the state was saved for another model"
                    )
        super().load_state_dict({**state_dict, "state": copy.deepcopy(state_dict["state"])})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer that its parameters belong to.

        Args:
            param_group: As for torch. All parameters are on manifolds, or none is.

        Raises:
            ConfigurationError: If the group mixes both kinds.
        """
        if not self._ready:  # torch's __init__ lists the groups of the two optimizers
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        kinds = {manifold_of(p[1] if isinstance(p, tuple) else p) is not None for p in params}
        if len(kinds) > 1:
            raise ConfigurationError(
                "expected a group of manifold parameters or one of ordinary parameters, got a "
                "mixture: add two groups"
            )
        held = {id(p) for group in self.param_groups for p in group["params"]}
        if any(id(p[1] if isinstance(p, tuple) else p) in held for p in params):
            raise ConfigurationError("expected new parameters, got some that a group holds already")
        part = self.riemannian if kinds == {True} else self.ordinary
        role = "manifold" if kinds == {True} else param_group.get("role", "free")
        part.add_param_group({**param_group, "params": params, "role": role})
        self.param_groups.append(part.param_groups[-1])
        self._surveyed = False

    def exchange(self, old: Iterable[Tensor], new: Iterable[Tensor], *, riemannian: bool) -> None:
        """Takes new leaves in place of old ones; `stiefel.convert` calls it.

        The new leaves join the first group of their role, with its rates; the states of the old
        ones are dropped.

        Args:
            old: Leaves that the optimizer holds (others are ignored).
            new: Leaves that take their place.
            riemannian: Whether the new leaves are points, or coordinates of a chart.
        """
        role = "manifold" if riemannian else "chart"
        group = next(g for g in self.param_groups if g["role"] == role)
        gone, new = {id(leaf) for leaf in old}, list(new)
        for other in self.param_groups:
            other.pop("param_names", None)  # they would name the wrong leaves
        moving = self.riemannian if isinstance(self.riemannian, RiemannianOptimizer) else None
        if riemannian and moving is not None:
            moving.accept(new, group)
        else:
            group["params"] = [*group["params"], *new]
        for other in self.param_groups:
            for leaf in [x for x in other["params"] if id(x) in gone]:
                self.state.pop(leaf, None)
            other["params"] = [x for x in other["params"] if id(x) not in gone]
        if moving is not None:
            moving.forget(gone)
        self._forms.release(self._others())
        self._surveyed = False

    def check_exchange(
        self, old: Iterable[Tensor], new: Iterable[Tensor], *, riemannian: bool
    ) -> None:
        """Raises what `exchange` would raise for these leaves; changes nothing."""
        if riemannian and isinstance(self.riemannian, RiemannianOptimizer):
            self.riemannian.check_exchange((), new)  # they join its first group

    # -- checks -----------------------------------------------------------------------------------
    def check(self) -> None:
        """Checks that the optimizer and the model agree; called by every step.

        Raises:
            LostManifoldError: If a point has become an ordinary parameter.
            ConfigurationError: If a trainable leaf of a constraint is missing, or in the wrong
                group.
        """
        if self._census is not None and self._surveyed and self._census.settled():
            return
        roles = {id(p): group["role"] for group in self.param_groups for p in group["params"]}
        self._census = Census(self.model, roles, self._census)
        steps = self.param_groups[0]["steps"]
        self._schedule = RebaseSchedule(self.model, self, steps=steps, renew=True)
        self._surveyed = True

    def _others(self) -> list[dict[str, Any]]:
        """The groups of parameters whose states are not ours: ours follow `model.to` themselves."""
        ours = isinstance(self.riemannian, RiemannianOptimizer)
        return self.ordinary.param_groups if ours else self.param_groups

    def describe(self, leaf: Tensor) -> str:
        """How errors call a parameter: by its name in the model."""
        for name, parameter in self.model.named_parameters():
            if parameter is leaf:
                return name
        return place_in_groups(leaf, self.param_groups)

    # -- the step ---------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient, all or none.

        Args:
            closure: Evaluates the model again and returns the loss; called once.

        Returns:
            What the closure returned, or None.

        Raises:
            NonFiniteError: If a gradient is not finite; nothing has been changed.
            LostManifoldError: If a point has become an ordinary parameter.
            ConfigurationError: See `check`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check()
        self._forms = self._forms.follow(self._others(), self.state, fit_state, self.describe)
        ordinary = _with_gradients(self.ordinary)
        if isinstance(self.riemannian, RiemannianOptimizer):
            plan = self.riemannian.gather()
        else:
            plan = Plan([], [({}, _with_gradients(self.riemannian))])
        if not self.skip_nonfinite:
            grads = [leaf.grad for leaf in ordinary if leaf.grad is not None]
            if not all_finite([*plan.gradients(), *grads]):
                raise non_finite_error([*ordinary, *plan.leaves()], self.describe)
        if isinstance(self.riemannian, RiemannianOptimizer):
            proposals = self.riemannian.propose(plan)
            self._step_part(self.ordinary, ordinary)
            self.riemannian.commit(plan, proposals)
        else:
            self._step_part(self.ordinary, ordinary)
            self._step_part(self.riemannian, plan.leaves())
        assert self._schedule is not None
        self._schedule(self, (), {})
        self.param_groups[0]["steps"] = self._schedule.steps  # saved: schedules resume exactly
        return loss

    def _step_part(self, part: torch.optim.Optimizer, leaves: list[Tensor]) -> None:
        guard = (
            untouched_where_non_finite(leaves, self.state)
            if self.skip_nonfinite
            else contextlib.nullcontext()
        )
        with guard:
            part.step()


def _fits(shape: torch.Size, leaf: torch.Size) -> bool:
    """Whether a state of that shape can be one of the leaf: a number, of its shape, or a factor.

    Factored moments (Adafactor) keep sums over one dimension, whose size is 1.
    """
    if not shape or shape == leaf:
        return True
    return len(shape) == len(leaf) and all(
        size in (1, whole) for size, whole in zip(shape, leaf, strict=True)
    )


def _with_gradients(part: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in part.param_groups for p in group["params"] if p.grad is not None]


def _shared_defaults(
    ordinary: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Defaults that every group has, so that schedulers which cycle them find them everywhere.

    Momentum that some group does not use is left out: a scheduler that cycles momentum then says
    that it cannot, instead of switching it on for the manifold parameters.
    """
    shared = {k: v for k, v in ordinary.defaults.items() if all(k in g for g in groups)}
    if any(group.get("momentum", 1) == 0 for group in groups):
        shared.pop("momentum", None)
    return shared
