"""The leaves that a Riemannian optimizer holds, and what it refuses to hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, DtypeError, unknown
from stiefel.manifolds import Manifold
from stiefel.numerics import compute_dtype
from stiefel.optim.batches import StateKind
from stiefel.optim.checks import lost_manifold_error, place_in_groups
from stiefel.optim.euclidean import EUCLIDEAN_STEPS
from stiefel.optim.sorting import Sorting

__all__ = ["GroupedLeaves", "manifold_of"]

#: Group entries that torch's SGD and Adam need for ordinary parameters.
_EUCLIDEAN_DEFAULTS = {"weight_decay": 0, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}


def manifold_of(leaf: Tensor) -> Manifold | None:
    """The manifold that a parameter carries, None for an ordinary parameter."""
    manifold = getattr(leaf, "manifold", None)
    return manifold if isinstance(manifold, Manifold) else None


class GroupedLeaves(torch.optim.Optimizer):
    """Parameter groups of points and, where allowed, of ordinary parameters, all checked.

    Args:
        params: Parameters or groups, as for torch.
        defaults: Defaults of the groups; ``lr`` and ``maximize`` at least.
        euclidean: What to do with ordinary parameters: None refuses them.
        skip_nonfinite: Whether leaves with a non-finite gradient stay where they are.
    """

    #: Whether the steps of points use ``betas``. These are in `defaults`, where schedulers that
    #: cycle momentum look for what to cycle, only if points or ordinary parameters use them.
    _points_have_betas = False

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        """The tensors that are kept for each manifold leaf, by name, and what they are.

        ``"point"``: of the shape and dtype of the leaf. ``"matrix"``: one real number for each
        matrix, shape ``(*batch, 1, 1)``. ``"leaf"``: one number for each leaf, a 0-d tensor.
        """
        return {}

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        euclidean: str | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        if euclidean is not None and euclidean not in EUCLIDEAN_STEPS:
            raise unknown("euclidean step", euclidean, EUCLIDEAN_STEPS)
        self.euclidean = euclidean
        self.skip_nonfinite = skip_nonfinite
        self._manifold_leaves: set[int] = set()
        self._manifolds: dict[int, tuple[Manifold, Manifold, int]] = {}
        self._sortings: dict[int, Sorting] = {}
        if not isinstance(params, Tensor):
            params = list(params)
            if not params:
                raise ConfigurationError(
                    "expected at least one parameter, got an empty list: was model.parameters() "
                    "used up by an earlier loop, or does the model have none?"
                )
        super().__init__(params, {**_EUCLIDEAN_DEFAULTS, **defaults})
        if euclidean != "adam" and not self._points_have_betas:
            self.defaults.pop("betas", None)

    # -- groups -----------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after checking it; see `torch.optim.Optimizer.add_param_group`."""
        if "betas" not in self.defaults:  # taken out of them after the first groups
            param_group = {"betas": _EUCLIDEAN_DEFAULTS["betas"], **param_group}
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        self._remember(self.param_groups[-1]["params"])

    def _remember(self, leaves: Iterable[Tensor]) -> None:
        """Notes which leaves are on a manifold, so that losing it does not go unseen."""
        self._manifold_leaves.update(id(x) for x in leaves if manifold_of(x) is not None)

    def _check_group(self, group: dict[str, Any]) -> None:
        if not 0 <= group["lr"] < float("inf"):
            raise ConfigurationError(f"expected a finite lr >= 0, got {group['lr']}")
        for leaf in group["params"]:
            manifold = manifold_of(leaf)
            if manifold is None:
                self._check_ordinary(leaf)
            else:
                self._check_manifold_leaf(leaf, manifold, group)

    def _check_ordinary(self, leaf: Tensor) -> None:
        name = type(self).__name__
        if id(leaf) in self._manifold_leaves:
            raise lost_manifold_error(f"{self.describe(leaf)} of shape {tuple(leaf.shape)}")
        if self.euclidean is None:
            raise ConfigurationError(
                f"{name} moves parameters that are on a manifold, got an ordinary one, "
                f"{self.describe(leaf)}, shape {tuple(leaf.shape)}. Use "
                "stiefel.optim.build(model, lr=...), which gives it to Adam or any torch "
                f"optimizer, or {name}(..., euclidean='sgd' or 'adam'), which does as torch does"
            )

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        if group["weight_decay"] != 0:
            raise ConfigurationError(
                f"expected weight_decay=0 for a parameter on a manifold, got "
                f"{group['weight_decay']} for {self.describe(leaf)}: decay pulls towards zero, "
                "which is no point of the manifold. Put ordinary parameters in a group of their own"
            )
        if compute_dtype(leaf.dtype) != leaf.dtype:
            raise DtypeError(
                f"expected a point in float32 or better, got {leaf.dtype} for "
                f"{self.describe(leaf)}: 16-bit rounding moves it off the manifold at every step. "
                "Keep the parameter in float32 and emit the weight in 16 bits "
                "(stiefel.orthogonal(..., weight_dtype=torch.bfloat16))"
            )

    def describe(self, leaf: Tensor) -> str:
        """How errors call a parameter."""
        return place_in_groups(leaf, self.param_groups)

    def exchange(
        self, old: Iterable[Tensor], new: Iterable[Tensor], *, riemannian: bool = True
    ) -> None:
        """Replaces leaves by others in the group of the first one; states are dropped.

        Args:
            old: Leaves that the optimizer holds.
            new: Leaves that take their place.
            riemannian: Whether the new leaves are on a manifold; ordinary ones need
                ``euclidean=``.
        """
        gone = {id(leaf) for leaf in old}
        group = next(
            (g for g in self.param_groups if any(id(x) in gone for x in g["params"])),
            self.param_groups[0],
        )
        self.accept(new, group)
        self.forget(gone)

    def accept(self, new: Iterable[Tensor], group: dict[str, Any]) -> None:
        """Adds leaves to a group that is there already, after checking them."""
        new = list(new)
        self._check_group({**group, "params": new})
        group.pop("param_names", None)  # they would name the wrong leaves
        group["params"] = [*group["params"], *new]
        self._remember(new)

    def check_exchange(self, new: Iterable[Tensor], *, riemannian: bool = True) -> None:
        """Raises what `exchange` would raise for these leaves; changes nothing."""
        self._check_group({**self.param_groups[0], "params": list(new)})

    def forget(self, gone: set[int]) -> None:
        """Drops the leaves whose ids are given, and their states."""
        for group in self.param_groups:
            for leaf in [x for x in group["params"] if id(x) in gone]:
                self.state.pop(leaf, None)
            group["params"] = [x for x in group["params"] if id(x) not in gone]
        self._manifold_leaves -= gone
        self._sortings.clear()  # it holds them

    # -- pickling ---------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Options besides torch's own."""
        options = {"euclidean": self.euclidean, "skip_nonfinite": self.skip_nonfinite}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores, and notes the manifold leaves of a copy."""
        super().__setstate__(state)
        self._manifolds = {}
        self._sortings = {}
        if "_manifold_leaves" not in self.__dict__:
            self._manifold_leaves = set()
            self._remember(x for group in self.param_groups for x in group["params"])
        for group in self.param_groups:
            self._place_counts(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a copy of a state; see `torch.optim.Optimizer.load_state_dict`."""
        super().load_state_dict({**state_dict, "state": copy.deepcopy(state_dict["state"])})

    def _place_counts(self, group: Mapping[str, Any]) -> None:
        """Puts the counts of a loaded state on the devices of their leaves; torch leaves them."""
        counts = [name for name, kind in self._state_kinds(group).items() if kind == "leaf"]
        for leaf in group["params"] if counts else ():
            state = self.state.get(leaf, {})
            for name in counts:
                if isinstance(state.get(name), Tensor):
                    state[name] = state[name].to(leaf.device)
