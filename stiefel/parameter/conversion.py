"""`convert`, `release` and `attach`: change how weights are trained, and who takes care of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, naming
from stiefel.manifolds import is_stiefel
from stiefel.parameter.constraint import Constraint, check_module, constraints
from stiefel.parameter.points import coordinates_of, make_leaves, nearest
from stiefel.parameter.riemannian import Riemannian
from stiefel.parameter.storage import ConstraintList, install
from stiefel.parameter.via import NAMED_OPTIMIZERS, SHORT_FORMS, check_via, make_chart
from stiefel.parameter.views import MatrixView
from stiefel.parametrizations import Parametrization

__all__ = ["RebaseSchedule", "attach", "convert", "release"]

_Module = TypeVar("_Module", bound=nn.Module)


def release(model: _Module) -> _Module:
    """Turns every constrained weight into a plain parameter with today's value.

    Args:
        model: Any module.

    Returns:
        The model, changed in place; it no longer depends on this library.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4))
        >>> before = layer.weight.detach().clone()
        >>> type(stiefel.release(layer).weight).__name__, torch.equal(layer.weight, before)
        ('Parameter', True)
    """
    for constraint in list(constraints(model)):
        constraint.release()
    return model


def convert(
    model: _Module,
    via: str | Parametrization,
    *,
    name: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> _Module:
    """Trains the same weights another way: another chart or metric, the same point.

    All or nothing: every new chart is made before the first weight is changed.

    Args:
        model: Any module.
        via: As in `stiefel.orthogonal`.
        name: Only the weights of this dotted path, or of this last name; all by default.
        optimizer: An optimizer of `stiefel.optim.build`, which takes the new leaves in place of
            the old (their moments are reset), or a torch optimizer when `via` is a chart. A short
            form that names an optimizer (``"landing"``, ``"rgd-adam"``, ...) goes with that one
            alone.
        **options: Options of the new chart.

    Returns:
        The model, changed in place.

    Raises:
        RepresentationError: If a chart cannot hold a point; nothing is changed.
        ConfigurationError: If the model has no constrained weight, or none of that name, or the
            optimizer cannot take the leaves or is not the one that `via` names.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4), via="cwy")
        >>> before = layer.weight.detach().clone()
        >>> layer = stiefel.convert(layer, "rgd-c-c")
        >>> [c.via for c in stiefel.constraints(layer)]
        ['riemannian']
        >>> bool((layer.weight - before).abs().max() < stiefel.tolerance(torch.float32, 4, 4))
        True
    """
    check_via(via)
    if optimizer is not None:
        _check_optimizer(optimizer)
    prepared: list[tuple[Constraint, ConstraintList]] = []
    for constraint in _chosen(model, name):
        with naming(constraint.path):
            storage = _converted(constraint, via, options)
            if optimizer is not None:
                _check_exchange(optimizer, constraint, storage)
        prepared.append((constraint, storage))
    for constraint, storage in prepared:
        if optimizer is not None:
            _exchange(optimizer, constraint.leaves, list(storage.originals), storage)
        for module, tensor_name in constraint.owners:
            install(module, tensor_name, storage)
    attend = getattr(optimizer, "attend", None)
    if attend is not None:
        attend()
    return model


def _chosen(model: nn.Module, name: str | None) -> list[Constraint]:
    """The weights that `convert` is to change, at least one."""
    every = list(constraints(model))
    if not every:
        plain = [k for k, v in model.named_parameters() if v.ndim > 1]
        more = ", ..." if len(plain) > 4 else ""
        raise ConfigurationError(
            f"expected a model with constrained weights, got {type(model).__name__} with none "
            f"(ordinary matrices in it: {', '.join(plain[:4]) or 'none'}{more}): convert changes "
            "how a constrained weight is trained; constrain one with stiefel.orthogonal(layer, "
            "via=...)"
        )
    chosen = [c for c in every if name is None or name in (c.path, c.path.split(".")[-1])]
    if not chosen:
        known = ", ".join(c.path for c in every)
        raise ConfigurationError(
            f"no constrained weight {name!r}: the model has {known}. Give one of these paths, or "
            "the last part of one as name="
        )
    return chosen


def _converted(
    constraint: Constraint, via: str | Parametrization, options: dict[str, Any]
) -> ConstraintList:
    """The new storage of one constraint, made without touching the old."""
    if not is_stiefel(constraint.manifold):
        raise ConfigurationError(
            f"{constraint.path} is on {constraint.manifold}: only matrices with orthonormal "
            "columns have charts. Say which weights to convert by name="
        )
    leaf, old = constraint.leaves[0], constraint.storage
    dtype = leaf.dtype if old is None else old.dtype
    point = constraint.point if old is None else old.exact_point()
    chart = make_chart(via, tuple(point.shape), options, point.device)
    chart.weight_dtype = None if old is None else old.chart.weight_dtype
    determinant = None if old is None else old.determinant
    if point.is_meta:
        empty = chart.empty_originals(dtype, point.device)
        coordinates = (empty,) if isinstance(empty, Tensor) else tuple(empty)
    else:
        coordinates = coordinates_of(chart, nearest(point)[0], determinant)
    return ConstraintList(
        chart,
        MatrixView(point.shape) if old is None else old.view,
        make_leaves(chart, coordinates, leaf, dtype),
        determinant=determinant,
        projected_distance=constraint.projected_distance,
    )


def _check_optimizer(optimizer: object) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ConfigurationError(
            f"expected an optimizer, got {type(optimizer).__name__}: make one with "
            "stiefel.optim.build(model, lr=...) and pass it"
        )


def _check_exchange(
    optimizer: torch.optim.Optimizer, constraint: Constraint, storage: ConstraintList
) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(leaf.requires_grad and id(leaf) not in held for leaf in constraint.leaves):
        raise ConfigurationError(
            f"{constraint.path} is not trained by the {type(optimizer).__name__} that was given: "
            "pass the optimizer that holds it, or none and make a new one"
        )
    if isinstance(storage.chart, Riemannian):
        if _moves_straight(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot move {constraint.path} on its manifold: "
                "convert without optimizer=, and make one with stiefel.optim.build(model, ...)"
            )
        _check_named(optimizer, storage.chart.made_for)
    accepts = getattr(optimizer, "check_exchange", None)
    if accepts is not None:
        riemannian = isinstance(storage.chart, Riemannian)
        accepts(constraint.leaves, storage.originals, riemannian=riemannian)
    elif isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"LBFGS keeps its own list of parameters and cannot take new leaves for "
            f"{constraint.path}: convert without optimizer=, and make a new one"
        )


def _check_named(optimizer: torch.optim.Optimizer, named: str | None) -> None:
    """Refuses an optimizer other than the one that the short form names."""
    moving = type(getattr(optimizer, "riemannian", optimizer))
    if named is None or NAMED_OPTIMIZERS[named] in [kind.__name__ for kind in moving.__mro__]:
        return
    manifold = ", ".join(f"{key}={value!r}" for key, value in SHORT_FORMS[named][1].items())
    raise ConfigurationError(
        f"via={named!r} names the optimizer {NAMED_OPTIMIZERS[named]}, got one that moves points "
        f"by {moving.__name__}: convert without optimizer= and make a new one, "
        f"stiefel.optim.build(model, ...); or, to go on with {moving.__name__} on that manifold, "
        f"convert with via='riemannian', {manifold}"
    )


def _exchange(
    optimizer: torch.optim.Optimizer,
    old: list[Tensor],
    new: list[Tensor],
    storage: ConstraintList,
) -> None:
    exchange = getattr(optimizer, "exchange", None)
    if exchange is not None:
        exchange(old, new, riemannian=isinstance(storage.chart, Riemannian))
        return
    gone = {id(leaf) for leaf in old}
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # they would name the wrong leaves
        kept = [p for p in group["params"] if id(p) not in gone]
        if len(kept) < len(group["params"]):  # the first group that held one takes them
            group["params"], new = kept + new, []
    for leaf in old:
        optimizer.state.pop(leaf, None)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer that `stiefel.optim.build` did not make keep the rebase schedules.

    After every K-th ``optimizer.step()`` a chart with ``rebase_every=K`` is rebased, and the
    optimizer's moments are moved along. The count begins now; it is not part of a state_dict.
    Attaching twice is attaching once.

    Args:
        model: The model whose constrained weights the optimizer trains.
        optimizer: The optimizer, already holding their leaves.

    Raises:
        ConfigurationError: If a trainable leaf is not in the optimizer, or a torch optimizer
            would move a Riemannian leaf off its manifold.
        LostManifoldError: If a Riemannian leaf has become a plain parameter.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4), via="dtriv")
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> stiefel.attach(layer, optimizer)
        >>> [c.storage.attached for c in stiefel.constraints(layer)]
        [True]
    """
    check_module(model)
    _check_optimizer(optimizer)
    schedule = RebaseSchedule(model, optimizer)
    if schedule.scheduled:
        optimizer.register_step_post_hook(schedule)


class RebaseSchedule:
    """Rebases each chart that asks for it after every K-th step; a step hook of torch.

    Args:
        model: The model.
        optimizer: The optimizer that trains it; checked as `attach` says.
        steps: How many steps have been taken.
        renew: Whether to take over charts that this optimizer attends to already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int = 0,
        renew: bool = False,
    ) -> None:
        self.steps = steps
        self.scheduled: list[Constraint] = []
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for constraint in constraints(model):
            _check_held(constraint, optimizer, held)
            storage = constraint.storage
            if storage is None or storage.chart.rebase_every is None:
                continue
            if renew or not storage.is_attached_to(optimizer):
                storage.attach(optimizer)
                self.scheduled.append(constraint)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Counts a step, and rebases the charts whose turn it is."""
        self.steps += 1
        for constraint in self.scheduled:
            storage = constraint.storage
            every = None if storage is None else storage.chart.rebase_every
            if every is not None and self.steps % every == 0:
                constraint.rebase(optimizer)


def _check_held(constraint: Constraint, optimizer: torch.optim.Optimizer, held: set[int]) -> None:
    constraint.check()
    if any(leaf.requires_grad and id(leaf) not in held for leaf in constraint.leaves):
        raise ConfigurationError(
            f"{constraint.path} is not trained by this {type(optimizer).__name__}: make the "
            "optimizer after stiefel.orthogonal, from model.parameters()"
        )
    if constraint.is_riemannian and _moves_straight(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} would move {constraint.path} in a straight line, off its "
            "manifold: use stiefel.optim.build(model, ...) or stiefel.optim.RGD"
        )


def _moves_straight(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's, or derived from one; geoopt's follow manifolds."""
    families = [base.__module__.split(".")[0] for base in type(optimizer).__mro__]
    torchs = [
        base
        for base in type(optimizer).__mro__
        if base.__module__.startswith("torch.optim.") and base is not torch.optim.Optimizer
    ]
    return bool(torchs) and "geoopt" not in families
