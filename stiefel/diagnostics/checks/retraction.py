"""Is it a retraction? R_x(0) = x, dR_x(0) = id, and its order, by slopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.batches import note_batch, two_points
from stiefel.diagnostics.checks.report_builder import ReportBuilder, fresh, in_a_line
from stiefel.diagnostics.checks.sample_points import (
    ATOL,
    SamplePoint,
    default_manifold,
    name_of,
    require_manifold,
    sample_points,
)
from stiefel.diagnostics.checks.slopes import STEPS, order_finding
from stiefel.diagnostics.report import Curve, Report
from stiefel.errors import ConfigurationError
from stiefel.manifolds import Manifold
from stiefel.numerics import full_precision, plain

__all__ = ["check_retraction"]

_EPS = torch.finfo(torch.float64).eps
_DERIVATIVE = 1e-7  # bound on |dR(0) u - u| for |u| = 1; the difference is good to 1e-10

Retraction = Callable[[Tensor, Tensor], Any]


@torch.no_grad()
@full_precision()
def check_retraction(
    retraction: Manifold | Retraction | None = None,
    manifold: Manifold | None = None,
    *,
    X: Tensor | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    points: int = 3,
    order: int = 2,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks that a map R(X, u) is a retraction of a manifold, and measures its order.

    A retraction has R(X, 0) = X, gives points, and starts along u: R(X, tu) = X + tu + O(t^2). An
    optimizer with a map that fails the last one takes steps in the wrong direction, however small
    they are. Its order is the slope of the distance to the exponential, |R(X, tu) - exp_X(tu)|: 2
    for every retraction, 3 for one whose curves have no acceleration within the manifold at t = 0.
    Without an exponential, and where the inner product is that of the ambient space, the slope of
    the tangential part of R(X, tu) - X - tu is measured instead, which is the same number.

    Everything is computed in float64 or complex128, with tangent vectors of norm one that are
    taken from the differential of ``manifold.projx``, not from a ``proju`` that may be wrong.

    Args:
        retraction: A function ``R(X, u)`` of points and tangent vectors of shape ``(..., n, p)``
            (or whatever shape the manifold has), or a manifold, whose ``retr`` is checked.
        manifold: The manifold of the points; for a function by default that of `X`, where it has
            the attribute, else `stiefel.Stiefel`.
        X: A point to check at, or a batch of them, in place of random ones.
        shapes: Shapes of random points; by default a few that the manifold accepts.
        points: How many random points of each shape.
        order: The order that is claimed, 2 or 3.
        dtype: Of the random points, ``torch.float64`` (default) or ``torch.complex128``.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report with the curves of |R(X, tu) - X - tu| and of the distance to the exponential.

    Raises:
        ConfigurationError: If there is neither a function nor a manifold, or the options do not go
            together.
        ShapeError: If the manifold refuses one of `shapes`, or `X`.
        OffManifoldError: If `X` is not on the manifold.

    Example:
        >>> from stiefel import geometry
        >>> from stiefel.diagnostics import check_retraction
        >>> check_retraction(geometry.cayley_retraction, order=3).ok
        True
        >>> wrong = check_retraction(lambda X, u: geometry.polar_retraction(X, 1.01 * u))
        >>> [finding.name for finding in wrong.failures][:2]
        ['derivative at zero is the identity', 'order of |R(tu) - x - tu|']
    """
    function, manifold, named = _resolve(retraction, manifold, X)
    if order not in (2, 3):
        raise ConfigurationError(f"expected order 2 or 3 (mathematics of retractions), got {order}")
    builder = ReportBuilder(f"retraction {named}")
    found = sample_points(
        builder, manifold, X, shapes, points=points, dtype=dtype, generator=generator
    )
    for point in found:
        builder.call("R(x, tu)", _check, builder, point, function, manifold, order)
    return builder.report()


def _resolve(
    retraction: Manifold | Retraction | None, manifold: Manifold | None, X: Tensor | None
) -> tuple[Retraction, Manifold, str]:
    if retraction is None or isinstance(retraction, Manifold) or not callable(retraction):
        if retraction is not None and manifold is not None:
            raise ConfigurationError(
                f"expected a function R(X, u) and a manifold, got {type(retraction).__name__} and "
                "a manifold: give one manifold to check its retr"
            )
        manifold = require_manifold(manifold if retraction is None else retraction)
        return manifold.retr, manifold, f"retr of {name_of(manifold)}"
    if isinstance(retraction, type):
        require_manifold(retraction)
    manifold = default_manifold(X) if manifold is None else require_manifold(manifold)
    name = getattr(retraction, "__name__", type(retraction).__name__)
    return retraction, manifold, f"{name} on {name_of(manifold)}"


def _check(
    builder: ReportBuilder, point: SamplePoint, R: Retraction, manifold: Manifold, order: int
) -> None:
    x, where = point.x, point.where
    u = point.tangent()
    zero = builder.call("R(x, 0)", R, x, torch.zeros_like(x))
    if zero is None:
        return
    if plain(zero).shape != x.shape:
        builder.note(
            "shape of R(x, u) is that of x", math.nan, "<=", 0.0,
            f"R(x, u) has shape {tuple(plain(zero).shape)} where x has {tuple(x.shape)}.", where,
        )  # fmt: skip
        return
    start = float(point.distance(zero, x))
    builder.note(
        "R(x, 0) = x", start, "<=", ATOL,
        "a retraction leaves the point alone where the vector is zero. An error of the size of x "
        "often comes from a QR decomposition whose diagonal was not made positive: columns of x "
        "change their sign.", where,
    )  # fmt: skip
    if not _note_landing(builder, point, R, u):
        return
    R = fresh(R)
    if point.item:
        pairs = [[at.x, at.tangent() / 4] for at in two_points(point)]
        note_batch(builder, "R", R, pairs, where)
    note_derivative(builder, point, R, u, "R", start)
    _note_order(builder, point, R, u, manifold, order, start)


def _note_landing(builder: ReportBuilder, point: SamplePoint, R: Retraction, u: Tensor) -> bool:
    for t in (0.1, 0.5):
        y = builder.call("R(x, u)", R, point.x, t * u)
        if y is None:
            return False
        builder.note(
            "R(x, u) is on the manifold", point.off_manifold(plain(y)), "<=", ATOL,
            "the map leaves the manifold: finish it with manifold.projx or an exact factor.",
            point.where,
        )  # fmt: skip
    return True


def note_derivative(
    builder: ReportBuilder,
    point: SamplePoint,
    R: Retraction,
    u: Tensor,
    name: str,
    start: float = 0.0,
) -> bool:
    """Notes |dR(0) u - u| and the slope of |R(tu) - x - tu|.

    Returns:
        Whether R starts along u.
    """
    x = point.x
    derivative = _derivative_error(point, R, u)
    builder.note(
        "derivative at zero is the identity" if name == "R" else f"{name} starts along u",
        derivative, "<=", _DERIVATIVE,
        f"{name} is no {'retraction' if name == 'R' else 'exponential'}: to first order it moves "
        f"by another vector than u, so that |({name}(x, tu) - x)/t - u| / |u| tends to "
        f"{derivative:.2g} and not to 0. Membership tests cannot see it; a gradient step goes in "
        "the wrong direction, or too far. Look for a missing factor, or, in a Cayley transform, "
        "for a missing projector I - x x^H / 2.",
        point.where,
    )  # fmt: skip
    errors = [float(point.distance(R(x, t * u), x + t * u)) for t in STEPS]
    curve = f"|{name}(tu) - x - tu|"
    meaning = (
        f"|{name}(tu) - x - tu| falls like t to this power, and like t^2 for a retraction: at 1 "
        "the first derivative is not u."
    )
    floor = _floor(point, start)
    finding = order_finding(f"order of {curve}", STEPS, errors, floor, order=2, meaning=meaning)
    builder.add(finding, point.where)
    builder.curve(Curve(curve, STEPS, tuple(errors), 2), point.where)
    return derivative <= _DERIVATIVE


def _derivative_error(point: SamplePoint, R: Retraction, u: Tensor) -> float:
    """|dR(0) u - u| by central differences at t and 2t, extrapolated: an error of order t^4."""

    def difference(t: float) -> Tensor:
        return (plain(R(point.x, t * u)) - plain(R(point.x, -t * u))) / (2 * t)

    return min(
        float(point.distance((4 * difference(t) - difference(2 * t)) / 3, u))
        for t in (2.0**-8, 2.0**-12, 2.0**-16)
    )


def _floor(point: SamplePoint, start: float) -> float:
    """Rounding of one evaluation: a few eps |x|, or what R(x, 0) - x shows, at most 1e-9."""
    return max(4 * _EPS * float(point.norm(point.x).max().clamp_min(1)), min(start, ATOL))


def _note_order(
    builder: ReportBuilder,
    point: SamplePoint,
    R: Retraction,
    u: Tensor,
    manifold: Any,
    order: int,
    start: float,
) -> None:
    x = point.x
    reference, curve = _reference(builder, point, u, manifold)
    if reference is None:
        if order == 3:
            builder.note(
                "order", math.nan, ">=", 2.9,
                f"order 3 could not be measured: {curve}.", point.where,
            )  # fmt: skip
        else:
            builder.skip(f"order of the retraction: {curve}")
        return
    errors = [float(reference(t, plain(R(x, t * u)))) for t in STEPS]
    meaning = f"{curve} falls like t to this power where order {order} was expected: " + (
        "every retraction has 2."
        if order == 2
        else "its curves have an acceleration within the manifold. Claim order=2, or correct it."
    )
    name = f"order of {curve}"
    finding = order_finding(name, STEPS, errors, _floor(point, start), order=order, meaning=meaning)
    builder.add(finding, point.where)
    builder.curve(Curve(curve, STEPS, tuple(errors), order), point.where)


def _reference(
    builder: ReportBuilder, point: SamplePoint, u: Tensor, manifold: Any
) -> tuple[Callable[[float, Tensor], Tensor] | None, str]:
    """What the order is measured against and its name, or None and the reason."""
    x = point.x
    try:
        if _derivative_error(point, manifold.expmap, u) <= _DERIVATIVE:
            return (
                lambda t, y: point.distance(y, plain(manifold.expmap(x, t * u))),
                "|R(tu) - exp(tu)|",
            )
        builder.skip("manifold.expmap does not start along u: it is no exponential")
    except NotImplementedError:
        pass
    except Exception as error:
        builder.skip(f"manifold.expmap raised {in_a_line(error)}")
    v = point.tangent()
    try:
        embedded = float((point.inner(u, v) - point.dot(u, v)).abs().max()) <= ATOL
    except Exception as error:
        return None, f"there is no exponential, and manifold.inner raised {in_a_line(error)}"
    if not embedded:
        return None, "there is no exponential, and the metric is not that of the ambient space"
    return (
        lambda t, y: point.norm(point.project(y - x - t * u)).max(),
        "tangential |R(tu) - x - tu|",
    )
