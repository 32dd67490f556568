"""The laws of a chart beyond its map: operator, batches, determinant; and its rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.diagnostics.differential import exact_differential
from stiefel.parametrizations import Parametrization

__all__ = [
    "as_tuple",
    "largest",
    "note_batch",
    "note_determinant",
    "note_operator",
    "note_rank",
    "random_coordinates",
]

#: Matrices of at most so many entries get the rank of their chart's differential.
_RANKED = 64


def random_coordinates(
    chart: Parametrization, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Free coordinates, N(0, scale^2)."""
    empty = as_tuple(chart.empty_originals(dtype))
    return tuple(
        scale * torch.randn(original.shape, dtype=original.dtype, generator=generator)
        for original in empty
    )


def as_tuple(originals: Any) -> tuple[Tensor, ...]:
    """Originals as a tuple."""
    return originals if isinstance(originals, tuple) else (originals,)


def largest(values: Tensor) -> float:
    """The largest entry; infinite where one is NaN."""
    if values.numel() == 0:
        return 0.0
    return float(values.max()) if bool(values.isfinite().all()) else math.inf


def note_operator(
    builder: ReportBuilder,
    chart: Parametrization,
    v: tuple[Tensor, ...],
    bound: float,
    generator: torch.Generator,
    where: str,
) -> None:
    """Holds the operator, and gradients through it, to the matrix of forward."""
    leaves = tuple(part.detach().clone().requires_grad_() for part in v)
    operator = builder.call("operator", chart.operator, *leaves)
    if operator is None:
        return
    X = chart(*leaves)
    h = torch.randn((*chart.batch, chart.p, 2), dtype=X.dtype, generator=generator)
    k = torch.randn((*chart.batch, chart.n, 2), dtype=X.dtype, generator=generator)
    dense, right, left = operator.to_dense(), operator @ h, operator.mT @ k
    worst = max(
        largest((a - b).detach().abs()) for a, b in ((dense, X), (right, X @ h), (left, X.mT @ k))
    )
    builder.note(
        "operator",
        worst,
        "<=",
        bound,
        "operator(*originals) is not the matrix of forward(*originals): a model that multiplies "
        "through the operator has another weight than the one that is read, saved and checked.",
        where,
    )
    ours = torch.autograd.grad(right.abs().square().sum() + left.real.sum(), leaves)
    theirs = torch.autograd.grad((X @ h).abs().square().sum() + (X.mT @ k).real.sum(), leaves)
    worst = max(largest((a - b).abs()) for a, b in zip(ours, theirs, strict=True))
    builder.note(
        "gradient of the operator",
        worst / max(1.0, *(largest(g.abs()) for g in theirs)),
        "<=",
        bound,
        "gradients through the operator are not those through forward.",
        where,
    )


def note_batch(
    builder: ReportBuilder,
    chart: Parametrization,
    v: tuple[Tensor, ...],
    generator: torch.Generator,
    bound: float,
    where: str,
) -> None:
    """New coordinates of all matrices but the first leave the first as it was."""
    if math.prod(chart.batch) < 2:
        return
    first = (0,) * len(chart.batch)
    if any(part.shape[: len(chart.batch)] != chart.batch for part in v):
        builder.skip("batch: the coordinates do not lead with the batch")
        return
    others = tuple(torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in v)
    for other, part in zip(others, v, strict=True):
        other[first] = part[first]
    leaves = tuple(part.detach().clone().requires_grad_() for part in others)
    X, Y = chart(*v).detach(), chart(*leaves)
    gradients = torch.autograd.grad(Y[first].abs().sum(), leaves, allow_unused=True)
    leak = 0.0
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.clone()
            gradient[first] = 0
            leak = max(leak, largest(gradient.abs()))
    builder.note(
        "batch",
        max(largest((X - Y.detach())[first].abs()), leak),
        "<=",
        bound,
        "the first matrix of a batch, or its gradient, depends on the coordinates of the others: "
        "a reduction runs over a batch dimension.",
        where,
    )


def note_determinant(
    builder: ReportBuilder,
    chart: Parametrization,
    dtype: torch.dtype,
    generator: torch.Generator,
    where: str,
) -> None:
    """The determinants of random weights are the one that an option, or the caller, fixed."""
    if dtype.is_complex or chart.n != chart.p:
        return
    fixed = chart.fixed_determinant
    if fixed is None and type(chart).set_determinant is Parametrization.set_determinant:
        return
    wrong = 0
    for sign in (1, -1) if fixed is None else (fixed,):
        twin = copy.deepcopy(chart)
        if fixed is None:
            twin.set_determinant(torch.full(chart.batch, sign))
            if twin.has_base:
                twin.set_base(twin.start(dtype, None, generator))
        for scale in (0.3, 1.0, 3.0):
            X = twin(*random_coordinates(twin, dtype, generator, scale)).detach()
            wrong += int((torch.linalg.det(X) * sign <= 0).sum())
    builder.note(
        "determinant",
        wrong,
        "<=",
        0,
        "weights whose determinant has not the sign that fixed_determinant or set_determinant "
        "says: flip the last row, as stiefel.parametrizations.OneComponent does.",
        where,
    )


def note_rank(
    builder: ReportBuilder,
    chart: Parametrization,
    coordinates: dict[str, tuple[Tensor, ...]],
    where: str,
) -> None:
    """The smallest rank of the chart's differential, for small weights."""
    if chart.n * chart.p > _RANKED:
        builder.skip(f"rank: only for weights of at most {_RANKED} entries")
        return
    for word, v in coordinates.items():
        found = exact_differential(chart, v)
        if found.dimension == 0:
            return
        builder.note(
            f"rank of the differential, of {found.dimension} ({where})",
            found.rank or 0,
            ">=",
            1,
            "no motion of the coordinates moves the weight: training cannot leave this place. "
            "Start elsewhere.",
            word,
        )
