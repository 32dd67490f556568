"""Is the exponential one? Its speed, its energy, and what logarithm and distance make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.diagnostics.checks.retraction import note_derivative
from stiefel.diagnostics.checks.sample_points import ATOL, SamplePoint
from stiefel.numerics import plain

__all__ = ["note_geodesics"]

_LENGTH = 0.5  # of the geodesics, at most, in the ambient norm and in the metric
_NODES = 14  # Chebyshev nodes on [0, 1]: derivatives of such short geodesics to 1e-10
_BOUND = 1e-6


def note_geodesics(builder: ReportBuilder, point: SamplePoint, manifold: Any) -> None:
    """Notes what is wrong with ``expmap``, ``logmap`` and ``dist`` at a point."""
    x, where = point.x, point.where
    u = point.tangent()
    if builder.call("inner", point.inner, u, u) is None:
        return
    u = point.short(u, _LENGTH)
    y = builder.call("expmap", manifold.expmap, x, u)
    if y is None:
        return
    y = plain(y)
    builder.note(
        "expmap is on the manifold", point.off_manifold(y), "<=", ATOL,
        "the exponential leaves the manifold.", where,
    )  # fmt: skip
    along = note_derivative(builder, point, manifold.expmap, point.tangent(), "expmap")
    if along:
        _check_energy(builder, point, manifold, u)
    back = builder.call("logmap", manifold.logmap, x, y)
    if back is not None:
        builder.note(
            "logmap inverts expmap", float(point.distance(back, u)), "<=", _BOUND,
            "logmap(x, expmap(x, u)) is not u, for a short u.", where,
        )  # fmt: skip
    length = builder.call("dist", manifold.dist, x, y)
    if length is not None:
        speed = point.inner(u, u).clamp_min(0).sqrt()
        defect = (plain(length).reshape(speed.shape) - speed).abs().max()
        builder.note(
            "dist is the length of the geodesic", float(defect), "<=", _BOUND,
            "dist(x, expmap(x, u)) is not |u|_x, for a short u.", where,
        )  # fmt: skip


def _check_energy(builder: ReportBuilder, point: SamplePoint, manifold: Any, u: Tensor) -> None:
    r"""Speed and first variation of the energy E(c) = 1/2 int <c', c'>_c dt of c(t) = exp_x(tu).

    A geodesic keeps its speed, and dE = 0 for every variation projx(c + e sin(pi t) w) that keeps
    the ends.
    """
    t, D, weights = _chebyshev(_NODES)
    curve = torch.stack([plain(manifold.expmap(point.x, float(s) * u)) for s in t])

    def speeds(c: Tensor) -> Tensor:
        velocity = torch.tensordot(D.to(c), c, dims=1)
        pairs = zip(c, velocity, strict=True)
        return torch.stack([point.inner(b, b, a) for a, b in pairs])

    square = speeds(curve)
    scale = square[0].abs().max().clamp_min(1e-12)
    builder.note(
        "expmap keeps its speed", float((square - square[0]).abs().max() / scale), "<=", _BOUND,
        "|d/dt expmap(x, tu)|_x changes along the curve: it is no geodesic of this metric.",
        point.where,
    )  # fmt: skip
    if point.source != "projx":
        return
    w = point.short(point.tangent(), 1.0)
    bump = torch.sin(torch.pi * t)

    def energy(e: float) -> Tensor:
        moved = [
            plain(manifold.projx(c + e * float(b) * w)) for c, b in zip(curve, bump, strict=True)
        ]
        return torch.tensordot(weights.to(square), speeds(torch.stack(moved)), dims=1) / 2

    # The difference at h and 2h, extrapolated: an error of order h^4.
    h = 5e-3
    near, far = energy(h) - energy(-h), energy(2 * h) - energy(-2 * h)
    variation = (8 * near - far) / (12 * h)
    builder.note(
        "expmap makes the energy stationary",
        float(variation.abs().max() / scale.clamp_min(0.01)),
        "<=", _BOUND, "the energy of t -> expmap(x, tu) changes to first order when the curve is "
        "varied between its ends: it is no geodesic of this metric, perhaps one of another.",
        point.where,
    )  # fmt: skip


def _chebyshev(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chebyshev-Gauss-Lobatto nodes of [0, 1], their differentiation matrix and weights."""
    k = np.arange(count)
    nodes = np.cos(np.pi * k / (count - 1))
    basis = np.polynomial.chebyshev.chebvander(nodes, count - 1)
    slopes = np.stack(
        [
            np.polynomial.chebyshev.chebval(nodes, np.polynomial.chebyshev.chebder(row))
            for row in np.eye(count)
        ],
        axis=1,
    )
    integrals = np.where(k % 2 == 0, 2 / (1 - k**2 + (k == 1)), 0.0)
    D = 2 * slopes @ np.linalg.inv(basis)
    weights = integrals @ np.linalg.inv(basis) / 2
    return torch.tensor((nodes + 1) / 2), torch.tensor(D), torch.tensor(weights)
