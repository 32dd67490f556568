"""`convert`, `release` and `attach`: change how weights are trained, and who takes care of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.parameter.constraint import Constraint, constraints
from stiefel.parameter.storage import ConstraintList, coordinates_of, install, make_leaves, nearest
from stiefel.parameter.via import make_chart
from stiefel.parameter.views import MatrixView
from stiefel.parametrizations import Parametrization

__all__ = ["attach", "convert", "release"]

_Module = TypeVar("_Module", bound=nn.Module)


def release(model: _Module) -> _Module:
    """Turns every constrained weight into a plain parameter with today's value.

    Args:
        model: Any module.

    Returns:
        The model, changed in place; it no longer depends on this library.
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
            the old (their moments are reset), or a torch optimizer when `via` is a chart.
        **options: Options of the new chart.

    Returns:
        The model, changed in place.

    Raises:
        RepresentationError: If a chart cannot hold a point; nothing is changed.
        ConfigurationError: If no weight has the name, or the optimizer cannot take the leaves.
    """
    chosen = [
        c for c in constraints(model) if name is None or name in (c.path, c.path.split(".")[-1])
    ]
    if name is not None and not chosen:
        known = ", ".join(c.path for c in constraints(model)) or "none"
        raise ConfigurationError(f"no constrained weight {name!r}: the model has {known}")
    prepared = [(c, _converted(c, via, options)) for c in chosen]
    for constraint, storage in prepared:
        old = constraint.leaves
        if optimizer is not None:
            _exchange(optimizer, old, list(storage.originals), constraint, storage)
        for module, tensor_name in constraint.owners:
            install(module, tensor_name, storage)
    return model


def _converted(
    constraint: Constraint, via: str | Parametrization, options: dict[str, Any]
) -> ConstraintList:
    """The new storage of one constraint, made without touching the old."""
    point, leaf, old = constraint.point, constraint.leaves[0], constraint.storage
    chart = make_chart(via, tuple(point.shape), options).to(point.device)
    determinant = None if old is None else old.determinant
    if old is not None:
        chart.weight_dtype = old.chart.weight_dtype
        point = old.point().detach().as_subclass(Tensor)
    view = MatrixView(point.shape) if old is None else old.view
    coordinates = coordinates_of(chart, nearest(point)[0], determinant)
    return ConstraintList(
        chart, view, make_leaves(chart, coordinates, leaf), determinant=determinant
    )


def _exchange(
    optimizer: torch.optim.Optimizer,
    old: list[Tensor],
    new: list[Tensor],
    constraint: Constraint,
    storage: ConstraintList,
) -> None:
    riemannian = storage.chart.name == "riemannian"
    exchange = getattr(optimizer, "exchange", None)
    if exchange is not None:
        exchange(old, new, riemannian=riemannian)
        return
    if riemannian:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot move {constraint.path} on its manifold: make the "
            "optimizer with stiefel.optim.build(model, ...)"
        )
    place = {id(leaf): k for k, leaf in enumerate(old)}
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if id(p) not in place]
        if len(kept) < len(group["params"]):
            group["params"] = kept + new
    for leaf in old:
        optimizer.state.pop(leaf, None)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer that `stiefel.optim.build` did not make keep the rebase schedules.

    After every K-th ``optimizer.step()`` a chart with ``rebase_every=K`` is rebased, and the
    optimizer's moments are moved along.

    Args:
        model: The model whose constrained weights the optimizer trains.
        optimizer: The optimizer, already holding their leaves.

    Raises:
        ConfigurationError: If a trainable leaf is not in the optimizer, or a torch optimizer
            would move a Riemannian leaf off its manifold.
        LostManifoldError: If a Riemannian leaf has become a plain parameter.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    scheduled: list[Constraint] = []
    for constraint in constraints(model):
        constraint.check()
        if any(leaf.requires_grad and id(leaf) not in held for leaf in constraint.leaves):
            raise ConfigurationError(
                f"{constraint.path} is not trained by this {type(optimizer).__name__}: make the "
                "optimizer after stiefel.orthogonal, from model.parameters()"
            )
        if constraint.is_riemannian and type(optimizer).__module__.startswith("torch.optim"):
            raise ConfigurationError(
                f"torch's {type(optimizer).__name__} would move {constraint.path} off its "
                "manifold: use stiefel.optim.build(model, ...) or stiefel.optim.RGD"
            )
        storage = constraint.storage
        if storage is not None and storage.chart.rebase_every is not None:
            storage.attached = True
            scheduled.append(constraint)
    if scheduled:
        optimizer.register_step_post_hook(_RebaseSchedule(scheduled))


class _RebaseSchedule:
    """A step hook that rebases each chart at its own period."""

    def __init__(self, scheduled: list[Constraint]) -> None:
        self.scheduled = scheduled
        self.steps = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for constraint in self.scheduled:
            storage = constraint.storage
            every = None if storage is None else storage.chart.rebase_every
            if every is not None and self.steps % every == 0:
                constraint.rebase(optimizer)
