"""The row of a monitored step: what is measured of the weights and of the gradient there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.diagnostics import columns as names
from stiefel.diagnostics.columns import MODEL, column
from stiefel.diagnostics.differential import chart_differential
from stiefel.diagnostics.feasibility import Feasibility, feasibility
from stiefel.diagnostics.gradient_noise import NormEstimate
from stiefel.diagnostics.point_gradients import PointGradient
from stiefel.diagnostics.skeleton import coordinate_gradients
from stiefel.diagnostics.stationarity import (
    Stationarity,
    is_of_reflections,
    stationarity,
    total_stationarity,
)
from stiefel.parameter import Constraint, constraints

__all__ = [
    "Seen",
    "differential_figures",
    "feasibility_figures",
    "noise_figures",
    "reflections",
    "stationarity_figures",
    "total_figures",
]

#: The last measurement of a weight, and its step.
Seen = tuple[int, Feasibility]

Figures = dict[str, Any]

#: Below this share of what the chart could make of the gradient, a coordinate gradient is small.
_SMALL = 0.1
#: Below this share of the largest, a singular value of a chart's differential counts as none.
_SINGULAR = 1e-6


def feasibility_figures(step: int, frozen: nn.Module, seen: dict[str, Seen]) -> Figures:
    """Figures of feasibility of every weight and of the model, the worst of them.

    Args:
        step: Number of the step.
        frozen: A `skeleton`.
        seen: Last measurements by path; brought up to date.

    Returns:
        ``"<path>/..."`` the fields of `Feasibility` and ``drift_per_step``, ``"model/..."``.
    """
    found = feasibility(frozen)
    worst = _worst(list(found.values()))
    figures: Figures = {column(MODEL, name): value for name, value in worst.items()}
    for path, now in found.items():
        figures |= _numbers(path, now, ("tolerance",))
        if path in seen and seen[path][0] < step and seen[path][1].shape == now.shape:
            since, before = seen[path]
            figures[column(path, names.DRIFT_PER_STEP)] = now.drift_since(before, step - since)
    seen.clear()
    seen.update({path: (step, now) for path, now in found.items()})
    return figures


def stationarity_figures(
    frozen: nn.Module,
    gradients: Mapping[str, PointGradient],
    used: Mapping[str, Sequence[Tensor | None]],
) -> Figures:
    """Figures of stationarity of every weight and of the model, and words where one is missing.

    Args:
        frozen: A `skeleton`. Its leaves get the gradients of the coordinates as ``.grad``: through
            the chart from that of the point, or, where that is missing, from `used`.
        gradients: Gradients of the points.
        used: The gradients of the leaves that the optimizer used.

    Returns:
        ``"<path>/..."`` and ``"model/..."`` the fields of `Stationarity`. Where a gradient is
        missing its figures are not there; NaN is what a gradient that is not finite gives.
    """
    for constraint in constraints(frozen):
        G = gradients[constraint.path].gradient
        found: Sequence[Tensor | None] = used.get(constraint.path, ())
        if G is not None:
            found = () if constraint.is_riemannian else coordinate_gradients(constraint, G)
        for leaf, gradient in zip(constraint.leaves, found, strict=False):
            leaf.grad = None if gradient is None else gradient.to(leaf).reshape(leaf.shape)
    each = stationarity(frozen, gradients)
    figures = _of(
        total_stationarity(each), MODEL, all(now.missing is not None for now in each.values())
    )
    for path, now in each.items():
        figures |= _of(now, path, now.missing is not None)
        if gradients[path].elsewhere:
            figures[column(path, names.WARNING)] = (
                f"the weight was read {gradients[path].elsewhere} more times at another point, "
                "after a step inside the block: only the gradient at the first point is measured"
            )
    return figures


def total_figures(figures: Mapping[str, Any], ordinary: float | None) -> Figures:
    """The norm of the gradient with respect to all that is trained.

    Args:
        figures: Those of stationarity.
        ordinary: Norm of the gradient of the parameters of no constrained weight; None without.

    Returns:
        ``"model/total_norm"``: the root of the squares of that and of ``model/euclidean_norm``;
        nothing where there is neither.
    """
    parts = [
        p for p in (figures.get(column(MODEL, names.EUCLIDEAN_NORM)), ordinary) if p is not None
    ]
    return {column(MODEL, names.TOTAL_NORM): math.hypot(*parts)} if parts else {}


def differential_figures(frozen: nn.Module, figures: Mapping[str, Any]) -> Figures:
    """Singular values of the charts' differentials, with a warning where a chart hides a gradient.

    Args:
        frozen: A `skeleton`.
        figures: Those of stationarity.

    Returns:
        ``"<path>/differential_smallest"``, ``_largest``, ``_rank`` and ``_dimension`` of every
        weight in a chart, and ``"<path>/warning"``.
    """
    made: Figures = {}
    for constraint in constraints(frozen):
        if constraint.is_riemannian:
            continue
        # a generator of its own: the one that training draws from stays where it is
        generator = torch.Generator(constraint.leaves[0].device).manual_seed(0)
        path, found = constraint.path, chart_differential(constraint, generator=generator)
        sizes = {
            names.DIFFERENTIAL_SMALLEST: found.smallest,
            names.DIFFERENTIAL_LARGEST: found.largest,
            names.DIFFERENTIAL_RANK: found.rank,
            names.DIFFERENTIAL_DIMENSION: found.dimension,
        }
        made |= {column(path, name): size for name, size in sizes.items() if size is not None}
        riemannian = figures.get(column(path, names.EUCLIDEAN_NORM), math.nan)
        squared = figures.get(column(path, names.COORDINATE_NORM_SQUARED))
        if squared is None or not found.dimension or found.smallest > _SINGULAR * found.largest:
            continue
        norm = math.sqrt(squared)
        if not norm > _SMALL * found.largest * riemannian:
            made[column(path, names.WARNING)] = (
                f"the coordinate gradient ({norm:.3g}) is small, which proves nothing here: the "
                f"chart's differential has the singular value {found.smallest:.1g}, beside "
                f"{found.largest:.3g}, so that there are directions in which it cannot move the "
                f"weight. The Riemannian gradient of the point is {riemannian:.3g}"
            )
    return made


def noise_figures(
    found: Mapping[str, NormEstimate], per_batch: int | None, options: Mapping[str, Any]
) -> Figures:
    """Figures of the estimates of squared gradients.

    Args:
        found: What `gradient_noise` gave, from m parts of b samples.
        per_batch: Parts of a batch of training; None for all of them.
        options: ``population=`` N and ``batch_size=`` b, where parts are drawn without replacement.

    Returns:
        Figures by path. The noise of k parts is (1 - k b / N) s^2 / k, with s^2 that of one part.
    """
    population, size = options.get("population"), options.get("batch_size") or 0

    def rest(parts: int) -> float:
        return 1.0 if population is None else 1 - parts * size / population

    made: Figures = {}
    for path, each in found.items():
        floor = each.noise_floor
        if each.count == 0 and each.missing is not None:
            made[column(path, names.MISSING)] = each.missing
            continue
        if per_batch is not None:
            part = floor * each.count / rest(each.count) if rest(each.count) > 0 else math.nan
            floor = max(rest(per_batch), 0.0) * part / per_batch
        made[column(path, names.SQUARED_GRADIENT)] = each.value
        made[column(path, names.SQUARED_GRADIENT_LOW)] = each.low
        made[column(path, names.SQUARED_GRADIENT_HIGH)] = each.high
        made[column(path, names.NOISE_FLOOR)] = floor
    return made


def reflections(
    constraint: Constraint, frozen: Constraint, used: Sequence[Tensor | None] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Reflection vectors before a step, their gradients, and the vectors after the step.

    Args:
        constraint: The weight after the step.
        frozen: The weight before it, with gradients.
        used: The gradients to take instead, those that the optimizer used.

    Returns:
        Three tensors ``(*batch, n, L)``; None for other charts, and where there is no gradient.
    """
    if not is_of_reflections(constraint) or constraint.via != frozen.via:
        return None
    before, after = frozen.leaves[0], constraint.leaves[0]
    gradient = before.grad if used is None else used[0]
    if gradient is None or before.shape != after.shape:
        return None
    return before.detach(), gradient, after.detach().clone()


def _of(found: Stationarity, path: str, nothing: bool) -> Figures:
    """The figures; without those of the point where there is no gradient, and why."""
    words = {} if found.missing is None else {column(path, names.MISSING): found.missing}
    numbers = _numbers(path, found)
    if nothing:
        numbers = {name: value for name, value in numbers.items() if not math.isnan(value)}
    return {**numbers, **words}


def _numbers(path: str, found: Any, without: Sequence[str] = ()) -> Figures:
    """The fields of a dataclass that are numbers."""
    return dict(_fields(path, found, without))


def _fields(path: str, found: Any, without: Sequence[str]) -> Iterator[tuple[str, float | int]]:
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, int | float) and field.name not in without:
            yield column(path, field.name), value


def _worst(found: Sequence[Feasibility]) -> dict[str, float]:
    """The worst of the weights; NaN where one is."""
    residuals = {
        names.MAX_RESIDUAL: [each.max_residual for each in found],
        names.FROBENIUS_RESIDUAL: [each.frobenius_residual for each in found],
    }
    return {
        name: math.nan if any(map(math.isnan, values)) else max(values)
        for name, values in residuals.items()
        if values
    }
