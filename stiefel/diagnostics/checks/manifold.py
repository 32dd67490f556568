"""Do the methods of a manifold do what their names say?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.batches import note_batch, two_points
from stiefel.diagnostics.checks.geodesics import note_geodesics
from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.diagnostics.checks.sample_points import (
    ATOL,
    SamplePoint,
    name_of,
    require_manifold,
    sample_points,
)
from stiefel.diagnostics.report import Report
from stiefel.manifolds import Manifold
from stiefel.numerics import full_precision, plain

__all__ = ["check_manifold"]

_DIRECTIONS = 8  # tangent vectors whose Gram matrix in the inner product must be positive
_OFF = 0.1  # how far from the manifold, or the tangent space, a checker must say no


@torch.no_grad()
@full_precision()
def check_manifold(
    manifold: Manifold,
    *,
    X: Tensor | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    points: int = 3,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks the methods of a manifold: yours, geoopt's, or ours.

    - points: ``random`` gives points, ``projx`` gives points and leaves them where they are,
      ``check_point_on_manifold`` accepts them and refuses others;
    - tangent vectors: ``proju`` is linear, idempotent and self-adjoint (in the ambient inner
      product, or in the manifold's), its values are tangent and tangent vectors stay as they are;
      ``check_vector_on_tangent`` accepts and refuses;
    - metric: ``inner`` is symmetric, bilinear and positive on tangent vectors; ``egrad2rgrad`` is
      tangent and <egrad2rgrad(g), v>_x = Re tr(g^H v) for every tangent v;
    - geodesics: ``expmap`` starts along u, keeps its speed, stays on the manifold and makes the
      energy stationary among curves with the same ends; ``logmap`` inverts it; ``dist`` is |u|_x;
    - batches: every method gives for a batch what it gives for its members one by one.

    The retraction and the transports have their own checks, `check_retraction` and
    `check_transport`. What a manifold does not implement is listed in ``Report.skipped``.

    Tangent vectors come from the differential of ``projx``, which is a projection onto the tangent
    space wherever projx keeps points and gives points; where it does not, from ``proju``, and the
    report says so.

    Args:
        manifold: A `geoopt.Manifold`.
        X: A point to check at, or a batch of them, in place of random ones.
        shapes: Shapes of random points; by default a few that the manifold accepts.
        points: How many random points of each shape.
        dtype: Of the random points, ``torch.float64`` (default) or ``torch.complex128``.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report; each finding is the worst over the points.

    Raises:
        ConfigurationError: If `manifold` is none, or has no random point of the default shapes.
        ShapeError: If the manifold refuses one of `shapes`, or `X`.
        OffManifoldError: If `X` is not on the manifold.

    Example:
        >>> import geoopt, stiefel
        >>> from stiefel.diagnostics import check_manifold
        >>> check_manifold(stiefel.Stiefel("euclidean")).ok
        True
        >>> theirs = check_manifold(geoopt.CanonicalStiefel(), points=1)
        >>> [finding.name for finding in theirs.failures][:2]
        ['proju is idempotent', 'proju keeps tangent vectors']
    """
    manifold = require_manifold(manifold)
    builder = ReportBuilder(f"manifold {name_of(manifold)}")
    found = sample_points(
        builder, manifold, X, shapes, points=points, dtype=dtype, generator=generator
    )
    for point in found:
        if X is None:
            builder.call("check_point_on_manifold", _check_random, builder, point, manifold)
        builder.call("points", _check_points, builder, point, manifold)
        builder.call("proju", _check_projection, builder, point, manifold)
        builder.call("inner", _check_metric, builder, point, manifold)
        builder.call("expmap", note_geodesics, builder, point, manifold)
        builder.call("batches", _check_batches, builder, point, manifold)
    return builder.report()


def _check_random(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    refused = float(not manifold.check_point_on_manifold(point.x))
    builder.note(
        "random points refused", refused, "<=", 0,
        "random() gives what check_point_on_manifold refuses.", point.where,
    )  # fmt: skip


def _check_points(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    x, where = point.x, point.where
    accepts = manifold.check_point_on_manifold
    kept = builder.call("projx", manifold.projx, x)
    if kept is None:
        return
    builder.note(
        "projx keeps points", float(point.distance(kept, x)), "<=", ATOL,
        "projx moves a point of the manifold (or random gives none): it is no projection.", where,
    )  # fmt: skip
    z = x + _OFF * point.vector()
    y = builder.call("projx", manifold.projx, z)
    if y is None or plain(y).shape != x.shape:
        return
    builder.note(
        "points of projx refused", float(not accepts(plain(y))), "<=", 0,
        "projx gives what check_point_on_manifold refuses.", where,
    )  # fmt: skip
    builder.note(
        "projx is idempotent", float(point.distance(manifold.projx(plain(y)), plain(y))),
        "<=", ATOL, "projecting twice is not projecting once.", where,
    )  # fmt: skip
    if float(point.norm(plain(y) - z).min()) > 1e-3:
        builder.note(
            "other points accepted", float(accepts(z)), "<=", 0,
            f"check_point_on_manifold accepts x + z with |z| = {_OFF}, which projx moves: "
            "its tolerance is too wide, or it checks less than membership.", where,
        )  # fmt: skip


def _check_projection(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    x, where = point.x, point.where
    u, w, v = point.vector(), point.vector(), point.tangent()
    once, other, sums, kept = (
        builder.call("proju", manifold.proju, x, z) for z in (u, w, 2 * u - 3 * w, v)
    )
    if once is None or other is None or sums is None or kept is None:
        return
    once, other = plain(once), plain(other)
    builder.note(
        "proju is linear", float(point.distance(sums, 2 * once - 3 * other)), "<=", ATOL,
        "proju(2u - 3w) is not 2 proju(u) - 3 proju(w).", where,
    )  # fmt: skip
    builder.note(
        "proju is idempotent", float(point.distance(manifold.proju(x, once), once)), "<=", ATOL,
        "projecting twice is not projecting once: momentum that is projected at every step grows "
        "without a gradient. A Riemannian gradient (egrad2rgrad) is no projection.", where,
    )  # fmt: skip
    builder.note(
        "proju keeps tangent vectors", float(point.distance(kept, v)), "<=", ATOL,
        "proju changes a vector that is tangent already: it is not the projection onto the "
        "tangent space.", where,
    )  # fmt: skip
    if point.source == "projx":
        builder.note(
            "proju gives tangent vectors", point.off_tangent(once), "<=", ATOL,
            "proju leaves a normal part: to first order such a vector leads off the manifold.",
            where,
        )  # fmt: skip
    builder.note(
        "proju is self-adjoint", _asymmetry(point, once, other, u, w), "<=", ATOL,
        "<proju(u), w> is not <u, proju(w)>, neither in the ambient inner product nor in the "
        "manifold's: the projection is oblique, and the steepest direction is not the projected "
        "gradient.", where,
    )  # fmt: skip
    _check_tangency_test(builder, point, manifold, v, u)


def _asymmetry(point: SamplePoint, once: Tensor, other: Tensor, u: Tensor, w: Tensor) -> float:
    """|<P u, w> - <u, P w>| in the ambient inner product or the manifold's, whichever is less."""
    ambient = float((point.dot(once, w) - point.dot(u, other)).abs().max())
    try:
        left, right = point.inner(once, w), point.inner(u, other)
    except Exception:
        return ambient
    return min(ambient, float((left - right).abs().max()))


def _check_tangency_test(
    builder: ReportBuilder, point: SamplePoint, manifold: Any, v: Tensor, u: Tensor
) -> None:
    if point.source != "projx":
        return
    accepts, x = manifold.check_vector_on_tangent, point.x
    builder.note(
        "tangent vectors refused", float(not accepts(x, v, atol=ATOL, rtol=ATOL)), "<=", 0,
        "check_vector_on_tangent refuses the velocity of a curve on the manifold.", point.where,
    )  # fmt: skip
    normal = u - point.project(u)
    if float(point.norm(normal).min()) > _OFF:
        builder.note(
            "other vectors accepted", float(accepts(x, v + normal)), "<=", 0,
            "check_vector_on_tangent accepts a vector that leads off the manifold.", point.where,
        )  # fmt: skip


def _check_metric(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    x, where = point.x, point.where
    u, v, w, g = point.tangent(), point.tangent(), point.tangent(), point.vector()
    inner = point.inner
    if (first := builder.call("inner", manifold.inner, x, u, v)) is None:
        return
    batch = x.shape[: x.ndim - point.item]
    builder.note(
        "shape of inner is not that of the batch", float(first.shape != batch), "<=", 0,
        f"inner(x, u, v) has shape {tuple(first.shape)} where one number for each point has "
        f"{tuple(batch)}: what is divided by it broadcasts wrongly.", where,
    )  # fmt: skip
    if first.is_complex():
        builder.skip("inner is complex: its real part is checked")
    size = (inner(u, u) * inner(v, v)).abs().sqrt().clamp_min(1)
    builder.note(
        "inner is symmetric", _largest((inner(u, v) - inner(v, u)) / size), "<=", ATOL,
        "<u, v> is not <v, u>.", where,
    )  # fmt: skip
    sums = inner(2 * u - 3 * w, v) - 2 * inner(u, v) + 3 * inner(w, v)
    builder.note(
        "inner is bilinear", _largest(sums / (size + inner(w, w).abs())), "<=", ATOL,
        "<2u - 3w, v> is not 2<u, v> - 3<w, v>.", where,
    )  # fmt: skip
    builder.note(
        "inner is positive", _least_stretch(point), ">=", ATOL,
        "the least <v, v>_x / |v|^2 over tangent vectors v: where it is not positive, inner is no "
        "metric.", where,
    )  # fmt: skip
    gradient = builder.call("egrad2rgrad", manifold.egrad2rgrad, x, g)
    if gradient is None:
        return
    gradient = plain(gradient)
    if point.source == "projx":
        builder.note(
            "egrad2rgrad gives tangent vectors", point.off_tangent(gradient), "<=", ATOL,
            "the Riemannian gradient has a normal part.", where,
        )  # fmt: skip
    got, wanted = inner(gradient, v), point.dot(g, v)
    builder.note(
        "egrad2rgrad represents the derivative", _largest((got - wanted) / (1 + wanted.abs())),
        "<=", ATOL, f"<egrad2rgrad(g), v>_x is not Re tr(g^H v) but, for one tangent v, "
        f"{_ratio(got, wanted):.3g} times it: inner and egrad2rgrad belong to different metrics, "
        "or one of them lacks a factor.", where,
    )  # fmt: skip


def _ratio(got: Tensor, wanted: Tensor) -> float:
    i = wanted.abs().flatten().argmax()
    denominator = float(wanted.flatten()[i])
    return float(got.flatten()[i]) / denominator if denominator else float("nan")


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _least_stretch(point: SamplePoint) -> float:
    """The least <v, v>_x / |v|^2 over the span of random tangent vectors; 1 where there is none."""
    V = [point.tangent() for _ in range(_DIRECTIONS)]
    least, K = 1.0, _DIRECTIONS
    G = torch.stack([torch.stack([point.inner(a, b) for b in V]) for a in V])
    E = torch.stack([torch.stack([point.dot(a, b) for b in V]) for a in V])
    G, E = G.reshape(K, K, -1), E.reshape(K, K, -1)
    for index in range(E.shape[-1]):
        metric, gram = G[..., index], E[..., index]
        values, vectors = torch.linalg.eigh(gram)
        keep = values > 1e-6 * max(float(values.max()), 1e-300)
        if float(values.max()) < ATOL:
            continue
        B = vectors[:, keep] / values[keep].sqrt()
        least = min(least, float(torch.linalg.eigvalsh(B.T @ ((metric + metric.T) / 2) @ B)[0]))
    return least


def _check_batches(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    if point.item == 0:
        return
    pair = two_points(point)
    xs = [at.x for at in pair]
    us = [at.tangent() / 4 for at in pair]
    for name in ("projx", "proju", "inner", "egrad2rgrad", "retr", "expmap"):
        vectors = {"projx": 0, "inner": 2}.get(name, 1)
        pairs = [[x, *[u] * vectors] for x, u in zip(xs, us, strict=True)]
        note_batch(builder, name, getattr(manifold, name), pairs, point.where)
