"""`build`: one optimizer for a model with constrained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, unknown
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.combined import CombinedOptimizer
from stiefel.optim.groups import manifold_of
from stiefel.optim.landing import Landing
from stiefel.optim.muon import StiefelMuon
from stiefel.optim.pogo import POGO
from stiefel.optim.rgd import RGD
from stiefel.optim.rgd_adam import RGDAdam
from stiefel.optim.riemannian_adam import RiemannianAdam
from stiefel.parameter import constraints

__all__ = ["OPTIMIZERS", "RIEMANNIAN", "build"]

#: Names that ``optimizer=`` takes.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
#: Names that ``riemannian=`` takes.
RIEMANNIAN: dict[str, type[RiemannianOptimizer]] = {
    "rgd": RGD,
    "rgd-adam": RGDAdam,
    "adam": RiemannianAdam,
    "landing": Landing,
    "pogo": POGO,
    "stiefel-muon": StiefelMuon,
}


def build(
    model: nn.Module,
    *,
    lr: float | Tensor,
    lr_orthogonal: float | Tensor | None = None,
    lr_riemannian: float | Tensor | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adam",
    optimizer_options: Mapping[str, Any] | None = None,
    riemannian: str | type[torch.optim.Optimizer] | None = None,
    riemannian_options: Mapping[str, Any] | None = None,
    skip_nonfinite: bool = False,
) -> CombinedOptimizer:
    """Makes one optimizer over all parameters of a model.

    Points on manifolds go to the Riemannian optimizer; everything else, the coordinates of charts
    included, to a torch optimizer. Coordinates never get weight decay: it would not decay the
    weight but change its effective learning rate. Frozen parameters (``requires_grad=False``)
    are included: without a gradient they are not stepped, and unfreezing them just works. Charts
    with ``rebase_every=K`` are rebased after every K-th step.

    Args:
        model: A model, its weights constrained by `stiefel.orthogonal` or as bare
            `stiefel.ManifoldParameter` attributes (or geoopt's); without any it works as well.
        lr: Learning rate of ordinary parameters.
        lr_orthogonal: Learning rate of chart coordinates, ``lr / 10`` by default.
        lr_riemannian: Learning rate of points, `lr_orthogonal` by default.
        optimizer: ``"adam"``, ``"adamw"``, ``"rmsprop"``, ``"sgd"``, or a torch optimizer's class.
        optimizer_options: Further options of that optimizer.
        riemannian: ``"rgd"``, ``"rgd-adam"``, ``"adam"`` (`RiemannianAdam`), ``"landing"``,
            ``"pogo"``, ``"stiefel-muon"``, or a class; geoopt's work as well. By default it is the
            one that the short form of `stiefel.orthogonal` names (``via="rgd-adam"``,
            ``"landing"``, ``"pogo"``, ``"stiefel-muon"``), for all other points ``"rgd"``.
        riemannian_options: Further options of it.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, decided
            on its device, instead of a `NonFiniteError` that leaves all untouched.

    Returns:
        A `torch.optim.Optimizer`; see `CombinedOptimizer` for its groups.

    Raises:
        UnknownNameError: If the name of an optimizer is unknown.
        ConfigurationError: If the model has no parameters, its short forms name several
            optimizers and `riemannian` none, or the optimizer evaluates its closure several times.
        LostManifoldError: If a Riemannian weight has lost its manifold.

    Example:
        >>> import torch, stiefel
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> _ = stiefel.orthogonal(model[0], via="rgd-c-c")
        >>> optimizer = stiefel.optim.build(model, lr=1e-3, lr_riemannian=1e-2)
        >>> [(g["role"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
        [('free', 0.001, 3), ('chart', 0.0001, 0), ('manifold', 0.01, 1)]
    """
    free, charts, points = _leaves_by_role(model)
    lr_orthogonal = lr / 10 if lr_orthogonal is None else lr_orthogonal
    lr_riemannian = _copy(lr_orthogonal) if lr_riemannian is None else lr_riemannian
    kind = _riemannian_class(_named_by(model) if riemannian is None else riemannian)
    further = _riemannian_options(kind, riemannian_options, skip_nonfinite)
    ordinary = _make(
        _optimizer_class(optimizer),
        {"params": free, "lr": lr, "role": "free", "steps": 0},
        {"params": charts, "lr": lr_orthogonal, "role": "chart", "weight_decay": 0},
        lr=lr,
        **_checked(optimizer_options, "optimizer_options"),
    )
    points_group = {"params": points, "lr": lr_riemannian, "role": "manifold"}
    moving = _make(kind, points_group, lr=lr_riemannian, **further)
    combined = CombinedOptimizer(model, ordinary, moving, skip_nonfinite=skip_nonfinite)
    combined.check()
    return combined


def _riemannian_options(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any] | None, skip_nonfinite: bool
) -> dict[str, Any]:
    """The options given, and `skip_nonfinite` where the optimizer is one of ours."""
    further = _checked(options, "riemannian_options")
    if issubclass(kind, RiemannianOptimizer):
        further.setdefault("skip_nonfinite", skip_nonfinite)
    return further


def _make(
    kind: Callable[..., torch.optim.Optimizer], /, *groups: dict[str, Any], **options: Any
) -> torch.optim.Optimizer:
    return kind(list(groups), **options)


def _copy(lr: float | Tensor) -> float | Tensor:
    """A rate of its own: schedulers change tensors in place."""
    return lr.clone() if isinstance(lr, Tensor) else lr


def _optimizer_class(optimizer: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise unknown("optimizer", optimizer, OPTIMIZERS)
        return OPTIMIZERS[optimizer]
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigurationError(
            f"expected the name or the class of a torch optimizer, got {optimizer!r}: pass the "
            "class, such as torch.optim.NAdam, and its options as optimizer_options"
        )
    if issubclass(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "expected an optimizer that evaluates its closure once, got LBFGS: its line search "
            "evaluates it several times and moves along straight lines, off the manifold. Use "
            "torch.optim.LBFGS alone on a model whose weights are all parametrized"
        )
    return optimizer


def _named_by(model: nn.Module) -> str:
    """The optimizer that the short forms of all Riemannian weights name, ``"rgd"`` by default."""
    points = [constraint for constraint in constraints(model) if constraint.is_riemannian]
    names = {constraint.made_for or "rgd": constraint.path for constraint in points}
    if len(names) > 1:
        found = ", ".join(f"{name!r} ({path})" for name, path in names.items())
        raise ConfigurationError(
            f"expected Riemannian weights for one optimizer, got weights for {found}: choose it "
            "with riemannian=, or make the weights with one short form"
        )
    return next(iter(names), "rgd")


def _riemannian_class(riemannian: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    if isinstance(riemannian, str):
        if riemannian not in RIEMANNIAN:
            raise unknown("Riemannian optimizer", riemannian, RIEMANNIAN)
        return RIEMANNIAN[riemannian]
    if not (isinstance(riemannian, type) and issubclass(riemannian, torch.optim.Optimizer)):
        raise ConfigurationError(
            f"expected the name or the class of a Riemannian optimizer, got {riemannian!r}: pass "
            "the class, and its options as riemannian_options"
        )
    return riemannian


def _checked(options: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    taken = {"lr", "params"} & set(options or {})
    if taken:
        raise ConfigurationError(
            f"expected no {sorted(taken)} in {name}: use lr, lr_orthogonal and lr_riemannian"
        )
    return dict(options or {})


def _leaves_by_role(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Ordinary parameters, chart coordinates and points, each in the order of the model."""
    constrained = list(constraints(model))  # says so if that is no model
    parameters: list[Tensor] = list(model.parameters())
    if not parameters:
        raise ConfigurationError(
            f"expected a model with parameters, got {type(model).__name__} with none: build the "
            "optimizer after the model is complete"
        )
    charts = {id(x) for c in constrained if not c.is_riemannian for x in c.leaves}
    for constraint in constrained:
        constraint.check()
    points = [p for p in parameters if manifold_of(p) is not None]
    rest = [p for p in parameters if manifold_of(p) is None]
    return (
        [p for p in rest if id(p) not in charts],
        [p for p in rest if id(p) in charts],
        points,
    )
