"""Is it a vector transport? Tangency at the other end, linearity, and what zero does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.batches import note_batch, two_points
from stiefel.diagnostics.checks.report_builder import ReportBuilder, fresh
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

__all__ = ["check_transport"]

_EPS = torch.finfo(torch.float64).eps
_STEP = 0.5  # length of u where the other end of a transport is looked at

Transport = Callable[[Tensor, Tensor, Tensor], Any]
Move = Callable[[Tensor, Tensor], Any]


@torch.no_grad()
@full_precision()
def check_transport(
    transport: Manifold | Transport | None = None,
    manifold: Manifold | None = None,
    *,
    retraction: Move | None = None,
    between_points: bool = False,
    isometric: bool = False,
    X: Tensor | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    points: int = 3,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks that a map carries tangent vectors along the retraction of u, T_u: T_x -> T_y.

    With y = R(x, u): T_u z is tangent at y, linear in z, equal to z where u = 0, and tends to z,
    |T_{tu} z - z| = O(t). How far it is from an isometry is measured, and required on demand. Of a
    manifold every transport is checked that it has: ``transp``, ``transp_follow_retr``,
    ``retr_transp``, ``transp_follow_expmap`` and ``expmap_transp``; those that return a point too
    must return that of ``retr`` or ``expmap``, and the vector of their twin.

    Args:
        transport: A function ``T(X, u, z)`` that carries z along the retraction of u, or a
            manifold.
        manifold: The manifold of the points; for a function by default that of `X`, where it has
            the attribute, else `stiefel.Stiefel`.
        retraction: The retraction ``R(X, u)`` that a function goes with; the manifold's by
            default.
        between_points: The function is ``T(X, Y, z)``, with the other point in place of u.
        isometric: Require <T_u z, T_u w>_y = <z, w>_x.
        X: A point to check at, or a batch of them, in place of random ones.
        shapes: Shapes of random points; by default a few that the manifold accepts.
        points: How many random points of each shape.
        dtype: Of the random points, ``torch.float64`` (default) or ``torch.complex128``.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report with the curves of |T_{tu} z - z|.

    Raises:
        ConfigurationError: If there is neither a function nor a manifold, or the options do not go
            together.
        ShapeError: If the manifold refuses one of `shapes`, or `X`.
        OffManifoldError: If `X` is not on the manifold.

    Example:
        >>> from stiefel import geometry
        >>> from stiefel.diagnostics import check_transport
        >>> R = geometry.cayley_retraction
        >>> check_transport(geometry.cayley_transport, retraction=R, isometric=True).ok
        True
        >>> stays = check_transport(lambda X, u, z: z, retraction=R)
        >>> [finding.name for finding in stays.failures]
        ['transport is tangent at the other point']
    """
    kinds, manifold, named = _resolve(transport, manifold, retraction, between_points, X)
    builder = ReportBuilder(named)
    found = sample_points(
        builder, manifold, X, shapes, points=points, dtype=dtype, generator=generator
    )
    for point in found:
        for name, R, T in kinds:
            builder.call(name, _check, builder, point, name, R, T, isometric)
        if len(kinds) > 1:
            _check_pairs(builder, point, manifold)
    return builder.report()


def _resolve(
    transport: Manifold | Transport | None,
    manifold: Manifold | None,
    retraction: Move | None,
    between_points: bool,
    X: Tensor | None,
) -> tuple[list[tuple[str, Move, Transport]], Manifold, str]:
    """The transports to check, their manifold, and what to call them."""
    if transport is None or isinstance(transport, Manifold) or not callable(transport):
        if retraction is not None or between_points or (transport is not None and manifold):
            raise ConfigurationError(
                "retraction=, between_points= and a manifold beside it go with a function "
                f"T(X, u, z), got {type(transport).__name__}: of a manifold its own transports are "
                "checked along its own retraction and exponential"
            )
        manifold = require_manifold(manifold if transport is None else transport)
        return _kinds(manifold), manifold, f"transports of {name_of(manifold)}"
    manifold = default_manifold(X) if manifold is None else require_manifold(manifold)
    R = manifold.retr if retraction is None else retraction
    T = _between(transport, R) if between_points else transport
    name = getattr(transport, "__name__", type(transport).__name__)
    return [("transport", R, T)], manifold, f"transport {name} on {name_of(manifold)}"


def _kinds(manifold: Any) -> list[tuple[str, Move, Transport]]:
    """The transports of a manifold, each with the curve that it follows, as T(x, u, z)."""
    retr, exp = manifold.retr, manifold.expmap
    return [
        ("transp", retr, _between(manifold.transp, retr)),
        ("transp_follow_retr", retr, manifold.transp_follow_retr),
        ("retr_transp", retr, lambda x, u, z: manifold.retr_transp(x, u, z)[1]),
        ("transp_follow_expmap", exp, manifold.transp_follow_expmap),
        ("expmap_transp", exp, lambda x, u, z: manifold.expmap_transp(x, u, z)[1]),
    ]


def _between(transport: Transport, R: Move) -> Transport:
    return lambda x, u, z: transport(x, plain(R(x, u)), z)


def _check(
    builder: ReportBuilder, point: SamplePoint, name: str, R: Move, T: Transport, isometric: bool
) -> None:
    x, where = point.x, point.where
    u, z, w = point.tangent(), point.tangent(), point.tangent()
    step, there = _other_end(point, R, u)
    if (first := builder.call(name, T, x, step, z)) is None:
        return
    T = fresh(T)
    carried, other = plain(first), plain(T(x, step, w))
    if carried.shape != x.shape:
        builder.note(
            f"shape of {name}", math.nan, "<=", 0, f"{name} gives shape {tuple(carried.shape)} for "
            f"vectors of shape {tuple(x.shape)}.", where,
        )  # fmt: skip
        return
    builder.note(
        f"{name} is tangent at the other point", there.off_tangent(carried), "<=", ATOL,
        "the vector that arrives has a normal part there: momentum carried like this leaves the "
        "tangent space. Project it at the other point.", where,
    )  # fmt: skip
    sums = T(x, step, 2 * z - 3 * w)
    builder.note(
        f"{name} is linear", float(point.distance(sums, 2 * carried - 3 * other)), "<=", ATOL,
        "T(2z - 3w) is not 2 T(z) - 3 T(w).", where,
    )  # fmt: skip
    start = float(point.distance(T(x, torch.zeros_like(x), z), z))
    builder.note(
        f"{name} along zero is the identity", start, "<=", ATOL,
        "a vector that goes nowhere is changed: the vector is rescaled, or projected by a wrong "
        "projection.", where,
    )  # fmt: skip
    errors = [float(point.distance(T(x, t * u, z), z)) for t in STEPS]
    floor = max(8 * _EPS, min(start, ATOL))
    curve = f"|{name}(tu) z - z|"
    meaning = (
        f"{curve} falls like t to this power: below 1 the transport does not tend to the identity "
        "for short steps."
    )
    builder.add(
        order_finding(f"order of {curve}", STEPS, errors, floor, order=1, meaning=meaning), where
    )
    builder.curve(Curve(curve, STEPS, tuple(errors), 1), where)
    _check_isometry(builder, point, there, name, (z, w), (carried, other), isometric)
    if point.item:
        pairs = [[at.x, at.tangent() / 4, at.tangent()] for at in two_points(point)]
        note_batch(builder, name, T, pairs, where)


def _other_end(point: SamplePoint, R: Move, u: Tensor) -> tuple[Tensor, SamplePoint]:
    """A step along u, shortened while its end is on an edge of the manifold's domain."""
    step = _STEP * u
    there = point.at(plain(R(point.x, step)))
    for _ in range(8):
        if there.source == point.source:
            break
        step = step / 4
        there = point.at(plain(R(point.x, step)))
    return step, there


def _check_isometry(
    builder: ReportBuilder,
    point: SamplePoint,
    there: SamplePoint,
    name: str,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    required: bool,
) -> None:
    defect = 0.0
    if builder.call("inner", point.inner, *before) is None:
        return
    for i, j in ((0, 0), (0, 1), (1, 1)):
        change = there.inner(after[i], after[j]) - point.inner(before[i], before[j])
        defect = max(defect, float(change.abs().max()))
    bound = ATOL if required else math.inf
    builder.note(
        f"{name} changes inner products by", defect, "<=", bound,
        f"<T z, T w>_y is not <z, w>_x along a step of length {_STEP} or less: it is no isometry "
        "of this metric.", point.where,
    )  # fmt: skip


def _check_pairs(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    """`retr_transp` is (retr, transp_follow_retr), and the same along the exponential."""
    x, u, z = point.x, _STEP * point.tangent(), point.tangent()
    for move, follow, both in (
        ("retr", "transp_follow_retr", "retr_transp"),
        ("expmap", "transp_follow_expmap", "expmap_transp"),
    ):
        pair = builder.call(both, getattr(manifold, both), x, u, z)
        for part, name, args in ((0, move, (x, u)), (1, follow, (x, u, z))):
            alone = builder.call(name, getattr(manifold, name), *args)
            if pair is None or alone is None:
                continue
            builder.note(
                f"{both} agrees with {name}", float(point.distance(pair[part], plain(alone))),
                "<=", ATOL, f"{both} gives another {'point' if part == 0 else 'vector'} than "
                f"{name}.", point.where,
            )  # fmt: skip
