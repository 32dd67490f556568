"""`check_parametrization`: does a chart do what `stiefel.orthogonal` and its users rely on?"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stiefel.diagnostics.checks.chart_laws import (
    as_tuple,
    largest,
    note_batch,
    note_determinant,
    note_operator,
    note_rank,
    random_coordinates,
)
from stiefel.diagnostics.checks.directions import length, reaches, seeded
from stiefel.diagnostics.checks.expansions import Ray, slope_findings
from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.diagnostics.report import Report
from stiefel.errors import ConfigurationError, DtypeError, RepresentationError
from stiefel.geometry import orthonormality_residual
from stiefel.numerics import double_dtype, full_precision, in_double, tolerance
from stiefel.parameter.storage import storage_of
from stiefel.parametrizations import Parametrization

__all__ = ["check_parametrization"]

#: Factors of random coordinates, N(0, 1).
_SCALES = {"random": 1.0, "zero": 0.0, "tiny": 1e-8, "huge": 1e6}
#: Where slopes and rank are looked at.
_GENERIC = ("the start", "the present coordinates", "random coordinates")


@torch.inference_mode(False)
@full_precision()
def check_parametrization(
    chart: Parametrization | nn.Module,
    name: str | None = None,
    *,
    directions: int = 3,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks a chart: coordinates of any size are a point, with the right gradient, and back.

    Run on a copy in float64 (complex128 for a chart that says ``complex = True``): the weight of
    random, zero, tiny and huge coordinates is on the manifold; ``forward(right_inverse(X))`` is X;
    the backward pass of ``Re <C, forward(v)>`` is its slope along random directions, to second
    order; gradients are finite; the operator is the weight; matrices of a batch do not mix; the
    determinant is the one that is claimed.

    Args:
        chart: A `stiefel.parametrizations.Parametrization`, or a module with a constrained weight.
        name: The weight of the module; leave it out for a chart.
        directions: Random directions of the slopes.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report. Findings (some only where the chart claims what they measure): ``"forward on the
        manifold"``, ``"shape of the weight"``, ``"right inverse"``, ``"right inverse near the
        base"``, ``"order of the first-order model"`` and ``"error of the slope"`` (of the
        backward pass), ``"finite gradients"``, ``"operator"``, ``"gradient of the operator"``,
        ``"batch"``, ``"determinant"``, ``"rank of the differential"`` (the smallest found; the
        name of the finding states the dimension of the manifold).

    Raises:
        ConfigurationError: If `chart` is neither a chart nor a module with such a weight, or the
            weight has no values.

    Example:
        >>> from stiefel.diagnostics import check_parametrization
        >>> from stiefel.parametrizations import CWY
        >>> report = check_parametrization(CWY(5, 5))
        >>> report.ok
        True
    """
    found, kept = _chart_of(chart, name)
    builder = ReportBuilder(f"chart {found.name!r}, {found.extra_repr()}")
    source = seeded(generator)
    kinds = [torch.float64] + [torch.complex128] * found.complex
    if kept is not None:
        kinds = [double_dtype(found.point_dtype(kept))]
    done = 0
    for dtype in kinds:
        work = _double(found, dtype)
        try:
            originals = random_coordinates(work, dtype, source)
        except DtypeError as error:
            builder.skip(f"{dtype}: {error}")
            continue
        done += 1
        _check_all(builder, work, dtype, originals, kept, directions, source)
    if not done:
        builder.skip("the chart takes neither float64 nor complex128")
    return builder.report()


def _double(chart: Parametrization, dtype: torch.dtype) -> Parametrization:
    """A copy on the CPU in double precision."""
    with warnings.catch_warnings():  # torch says that complex modules are new
        warnings.simplefilter("ignore", UserWarning)
        work = copy.deepcopy(chart).to("cpu", dtype)
    work.weight_dtype = None
    return work


def _chart_of(
    chart: Parametrization | nn.Module, name: str | None
) -> tuple[Parametrization, tuple[Tensor, ...] | None]:
    """The chart, and the coordinates that a module holds."""
    if isinstance(chart, Parametrization) and name is None:
        return chart, None
    if isinstance(chart, nn.Module) and name is not None:
        storage = storage_of(chart, name)
        if storage is not None:
            if storage.originals[0].is_meta:
                raise ConfigurationError(
                    f"{name!r} is on the meta device, where it has no values: move the module with "
                    ".to_empty(device=...) and initialise it first"
                )
            if not isinstance(storage.chart, Parametrization) or storage.chart.name == "riemannian":
                raise ConfigurationError(
                    f"{name!r} has no chart: the point itself is the parameter. "
                    "check_optimizer and check_manifold are for such weights"
                )
            return storage.chart, storage.originals
    got = chart.__name__ if isinstance(chart, type) else type(chart).__name__
    raise ConfigurationError(
        f"expected a chart, such as stiefel.parametrizations.CWY(5), or a module and the name of "
        f"a weight that stiefel.orthogonal has constrained, got {got}"
        + (f" and {name!r}" if name is not None else "")
    )


def _check_all(
    builder: ReportBuilder,
    chart: Parametrization,
    dtype: torch.dtype,
    originals: tuple[Tensor, ...],
    kept: tuple[Tensor, ...] | None,
    directions: int,
    generator: torch.Generator,
) -> None:
    bound = 2 * tolerance(dtype, chart.n, chart.p)
    where = str(dtype).removeprefix("torch.")
    coordinates = {}
    if kept is not None:
        coordinates["the present coordinates"] = tuple(in_double(v.cpu()) for v in kept)
    else:
        start = builder.call("starting_originals", chart.starting_originals, dtype, None, generator)
        if start is not None:
            coordinates["the start"] = as_tuple(start)
    for word, scale in _SCALES.items():
        coordinates[f"{word} coordinates"] = tuple(scale * v for v in originals)
    shaped = [
        _check_forward(builder, chart, v, bound, f"{w}, {where}") for w, v in coordinates.items()
    ]
    if not all(shaped):
        builder.skip("all else: forward fails, or has not the shape that the chart says")
        return
    generic = {word: coordinates[word] for word in _GENERIC if word in coordinates}
    _check_inverse(builder, chart, coordinates, bound, where)
    call = builder.call
    call("the backward pass", _check_slopes, builder, chart, generic, directions, generator, where)
    call("the operator", note_operator, builder, chart, originals, 20 * bound, generator, where)
    call("the batch", note_batch, builder, chart, originals, generator, bound, where)
    call("set_determinant", note_determinant, builder, chart, dtype, generator, where)
    call("the differential", note_rank, builder, chart, generic, where)


def _check_forward(
    builder: ReportBuilder, chart: Parametrization, v: Sequence[Tensor], bound: float, where: str
) -> bool:
    """Notes where the weight is; whether it has the right shape."""
    leaves = tuple(part.detach().clone().requires_grad_() for part in v)
    X = builder.call("forward", chart, *leaves)
    if X is None:
        return False
    same = float(X.shape == chart.shape)
    builder.note(
        "shape of the weight",
        same,
        ">=",
        1.0,
        f"forward gave {tuple(X.shape)}, the chart says {tuple(chart.shape)}: return "
        "(*batch, n, p).",
        where,
    )
    if not same:
        return False
    builder.note(
        "forward on the manifold",
        largest(orthonormality_residual(X.detach())),
        "<=",
        bound,
        "the largest entry of |X^H X - I|: the map leaves the manifold. A proxy must be "
        "normalised, a series or an iteration be run to rounding, and zeros and large numbers "
        "be caught.",
        where,
    )
    C = torch.ones_like(X)
    gradients = torch.autograd.grad((C.conj() * X).real.sum(), leaves, allow_unused=True)
    lost = sum(int((~g.isfinite()).sum()) for g in gradients if g is not None)
    builder.note(
        "finite gradients",
        lost,
        "<=",
        0,
        "entries of the gradient that are NaN or infinite. An optimizer that starts there, or "
        "comes there, loses the weight: look for a division by a norm, an SVD with repeated "
        "singular values, a square root at zero.",
        where,
    )
    return True


def _check_inverse(
    builder: ReportBuilder,
    chart: Parametrization,
    coordinates: dict[str, tuple[Tensor, ...]],
    bound: float,
    where: str,
) -> None:
    """``forward(right_inverse(X)) = X``, through the base where there is one."""
    if not chart.inverts:
        builder.skip("right inverse: the chart says that it finds no coordinates of a given point")
        return
    meaning = (
        "forward(right_inverse(X)) is not X: a weight that is given, loaded or converted would "
        "be another one. right_inverse has to invert forward, as the buffers are set."
    )
    refused, tried = "", 0
    for word, v in coordinates.items():
        twin = copy.deepcopy(chart)
        try:
            X = chart(*v).detach()
            twin.set_base(X)
            back = twin(*as_tuple(twin.right_inverse(X))).detach()
        except RepresentationError as error:
            refused = f"right inverse of {word}: refused ({error})"
            builder.skip(refused)
            continue
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            builder.note(
                "right inverse", math.nan, "<=", bound, f"it raised {said}.", f"{word}, {where}"
            )
            continue
        tried += 1
        error = largest((back - X).abs())
        builder.note("right inverse", error, "<=", bound, meaning, f"{word}, {where}")
    if not tried and refused:
        said = f"every point that forward reaches was refused: {refused}"
        builder.note("right inverse", math.nan, "<=", bound, said, where)
    if chart.has_base and "random coordinates" in coordinates:
        near = tuple(0.05 * part for part in coordinates["random coordinates"])
        X = chart(*near).detach()
        back = builder.call("right_inverse near the base", chart.right_inverse, X)
        if back is not None:
            error = largest((chart(*as_tuple(back)).detach() - X).abs())
            name = "right inverse near the base"
            builder.note(name, error, "<=", 10 * bound, meaning, where)


def _check_slopes(
    builder: ReportBuilder,
    chart: Parametrization,
    coordinates: dict[str, tuple[Tensor, ...]],
    directions: int,
    generator: torch.Generator,
    where: str,
) -> None:
    """The backward pass against the slopes of ``Re <C, forward(v)>``."""
    for word, v in coordinates.items():
        X = chart(*v).detach()
        C = torch.randn(X.shape, dtype=X.dtype, generator=generator)

        def cost(parts: Sequence[Tensor], C: Tensor = C) -> Tensor:
            return (C.conj() * chart(*parts)).real.sum()

        leaves = tuple(part.detach().clone().requires_grad_() for part in v)
        loss = cost(leaves)
        if not loss.requires_grad:
            gradients = tuple(torch.zeros_like(part) for part in v)
        else:
            answer = torch.autograd.grad(loss, leaves, allow_unused=True)
            gradients = tuple(
                torch.zeros_like(part) if g is None else g
                for g, part in zip(answer, v, strict=True)
            )
        with torch.no_grad():
            reach = reaches(chart, v)
        rays = [_ray(cost, v, gradients, reach, generator) for _ in range(directions)]
        # a chart that is flat there has no slopes but rounding: C is what they are measured by
        size = length([r * g for r, g in zip(reach, gradients, strict=True)])
        scale = max(size, 1e-6 * float(C.norm()))
        eps = torch.finfo(v[0].dtype).eps
        with torch.no_grad():
            found, curves = slope_findings(
                rays, float(loss.detach()), eps, scale, "the backward pass", ""
            )
        for finding in found:
            builder.add(finding, f"{word}, {where}")
        for curve in curves:
            builder.curve(curve, f"{word}, {where}")


def _ray(
    cost: Callable[[Sequence[Tensor]], Tensor],
    v: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    reach: Sequence[float],
    generator: torch.Generator,
) -> Ray:
    d = tuple(torch.randn(part.shape, dtype=part.dtype, generator=generator) for part in v)
    size = length(d) or 1.0
    d = tuple(r / size * part for r, part in zip(reach, d, strict=True))
    slope = sum(float((g.conj() * a).real.sum()) for g, a in zip(gradients, d, strict=True))

    def value(t: float) -> float:
        return float(cost([part + t * a for part, a in zip(v, d, strict=True)]))

    return Ray(value, slope)
