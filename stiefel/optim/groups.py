"""The leaves that a Riemannian optimizer holds, and what it refuses to hold."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, DtypeError, unknown
from stiefel.manifolds import Manifold
from stiefel.numerics import compute_dtype
from stiefel.optim.batches import StateKind
from stiefel.optim.checks import lost_manifold_error, place_in_groups
from stiefel.optim.euclidean import EUCLIDEAN_STEPS, fit_state
from stiefel.optim.following import Forms
from stiefel.optim.sorting import Sorting

__all__ = ["LATE_STATES", "GroupedLeaves", "manifold_of"]

#: States that may begin later than others, at zero, by an option that is switched on, and a state
#: of the same shape.
LATE_STATES = {"max_exp_avg_sq": "exp_avg_sq"}

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

    def _kinds_on(self, manifold: Manifold, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        """The same for a leaf on this manifold: other kinds for some, under the same names."""
        return self._state_kinds(group)

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
        self._points: dict[int, Tensor] = {}
        self._manifolds: dict[int, tuple[Manifold, Manifold, int]] = {}
        self._sortings: dict[int, Sorting] = {}
        self._forms = Forms([])
        if not isinstance(params, Tensor):
            params = list(_checked(params, type(self).__name__))
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
        self._remember_points()

    def _remember_points(self) -> None:
        """Notes which leaves are on a manifold, so that losing it does not go unseen.

        The leaves are held: an id is that of another object once its own is gone.
        """
        held = [leaf for group in self.param_groups for leaf in group["params"]]
        self._points = {
            id(leaf): leaf
            for leaf in held
            if manifold_of(leaf) is not None or id(leaf) in self._points
        }

    def _check_group(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        if not (lr.numel() == 1 if isinstance(lr, Tensor) else isinstance(lr, numbers.Real)):
            raise ConfigurationError(
                f"expected lr, a number or a tensor with one entry, got {lr!r}"
            )
        if not 0 <= lr < float("inf"):
            raise ConfigurationError(f"expected a finite lr >= 0, got {group['lr']}")
        for leaf in group["params"]:
            if _shares_memory(leaf):
                raise ConfigurationError(
                    f"expected a parameter with memory of its own for each entry, got "
                    f"{self.describe(leaf)} of shape {tuple(leaf.shape)}, made by expand: no step "
                    "could be written into it. Clone the tensor before it becomes a parameter"
                )
            manifold = manifold_of(leaf)
            if manifold is None:
                self._check_ordinary(leaf)
            else:
                self._check_manifold_leaf(leaf, manifold, group)

    def _check_ordinary(self, leaf: Tensor) -> None:
        name = type(self).__name__
        if id(leaf) in self._points:
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
        self.accept(new, self._group_of(gone))
        self.forget(gone)

    def _group_of(self, ids: set[int]) -> dict[str, Any]:
        """The first group that holds one of the leaves, or the first of all."""
        held = (g for g in self.param_groups if any(id(x) in ids for x in g["params"]))
        return next(held, self.param_groups[0])

    def accept(self, new: Iterable[Tensor], group: dict[str, Any]) -> None:
        """Adds leaves to a group that is there already, after checking them."""
        new = list(new)
        self._check_group({**group, "params": new})
        group.pop("param_names", None)  # they would name the wrong leaves
        group["params"] = [*group["params"], *new]
        self._remember_points()

    def check_exchange(
        self, old: Iterable[Tensor], new: Iterable[Tensor], *, riemannian: bool = True
    ) -> None:
        """Raises what `exchange` would raise for these leaves; changes nothing."""
        group = self._group_of({id(leaf) for leaf in old})
        self._check_group({**group, "params": list(new)})

    def forget(self, gone: set[int]) -> None:
        """Drops the leaves whose ids are given, and their states."""
        for group in self.param_groups:
            for leaf in [x for x in group["params"] if id(x) in gone]:
                self.state.pop(leaf, None)
            group["params"] = [x for x in group["params"] if id(x) not in gone]
        self._remember_points()
        self._sortings.clear()  # it holds them, and so do the forms
        self._forms.release(self.param_groups)

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
        self._points = getattr(self, "_points", {})
        self._remember_points()
        for group in self.param_groups:
            for leaf in group["params"]:
                self._fit_state(leaf, self.state.get(leaf, {}), group)
        self._forms = Forms(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a copy of a state; see `torch.optim.Optimizer.load_state_dict`.

        Raises:
            ConfigurationError: If the state was saved by another optimizer or for other
                parameters; nothing has been changed.
        """
        self.check_loaded(state_dict["param_groups"], state_dict["state"])
        super().load_state_dict({**state_dict, "state": copy.deepcopy(state_dict["state"])})

    def check_loaded(
        self, saved_groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Mapping[str, Any]]
    ) -> None:
        """Raises unless a saved state fits; changes nothing.

        Args:
            saved_groups: Groups of a ``state_dict``.
            states: Its states.
        """
        pairs = list(zip(self.param_groups, saved_groups, strict=False))
        if len(saved_groups) != len(self.param_groups) or any(
            len(group["params"]) != len(saved["params"]) for group, saved in pairs
        ):
            return  # torch's method says so
        for number, (group, saved) in enumerate(pairs):
            missing = sorted(({*self.defaults, "betas"} & set(group)) - set(saved))
            if missing:
                raise ConfigurationError(
                    f"expected the state of a {type(self).__name__}, got group {number} without "
                    f"{', '.join(missing)}: it was saved by another optimizer. Load it into one "
                    "of the same class"
                )
            self._check_group({**saved, "params": group["params"]})
            for key, leaf in zip(saved["params"], group["params"], strict=True):
                if manifold_of(leaf) is not None and states.get(key):
                    self._check_loaded_state(leaf, states[key], saved)

    def _check_loaded_state(
        self, leaf: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        manifold = manifold_of(leaf)
        kinds = {} if manifold is None else self._kinds_on(manifold, group)
        missing = sorted(set(kinds) - set(state) - set(LATE_STATES))
        if missing:
            raise ConfigurationError(
                f"expected the states {', '.join(kinds)} of {self.describe(leaf)}, got "
                f"{', '.join(map(str, state)) or 'none'}: the state is incomplete, or was "
                "saved by another optimizer"
            )
        for name in set(kinds) & set(state):
            shape, whole = tuple(getattr(state[name], "shape", ())), tuple(leaf.shape)
            narrow = len(shape) == len(whole) and all(
                size in (1, most) for size, most in zip(shape, whole, strict=True)
            )
            number, moment = kinds[name] == "leaf", name in ("exp_avg", "momentum_buffer")
            if shape != (() if number else whole) and (number or moment or not narrow):
                raise ConfigurationError(
                    f"expected {name} for {self.describe(leaf)} of shape {whole}, got one of shape "
                    f"{shape}: the state was saved for another model"
                )

    def _fit_state(
        self, leaf: Tensor, state: MutableMapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Gives a state the device and the dtype of its leaf: after loading, and `model.to`."""
        fit_state(leaf, state, group, counted_by_torch=manifold_of(leaf) is None)


def _checked(params: Any, name: str) -> Iterable[Any]:
    """What was given as parameters, unless it is a model or nothing that has any."""
    model = isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList)
    if model or not isinstance(params, Iterable):
        raise ConfigurationError(
            f"{name} takes parameters or groups of them, got "
            f"{'the module ' if model else ''}{type(params).__name__}: use "
            f"stiefel.optim.build(model, lr=...), which finds the points of a model, or "
            f"{name}(model.parameters(), ...)"
        )
    return params


def _shares_memory(leaf: Tensor) -> bool:
    """Whether some entries of a leaf lie in the same place."""
    pairs = zip(leaf.stride(), leaf.shape, strict=True)
    return leaf.numel() > 0 and any(step == 0 and size > 1 for step, size in pairs)
