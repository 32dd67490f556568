"""Which order do the retractions have, and is geoopt's canonical retraction one at all?

A retraction R of order k stays within O(t^k) of a geodesic: the slope of log |R(tu) - exp(tu)|
against log t is k. Every true retraction has k >= 2 for every metric, which says that R leaves X
in the direction u. Expected: Cayley 3 for the canonical exponential and 2 for the Euclidean one,
polar the other way round, QR and Cholesky-QR 2 and 2; on square matrices Cayley and polar 3 and 3.
A map that leaves in another direction has slope 1. Nothing is timed here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import geoopt
import torch
from torch import Tensor

from benchmarks.harness import Row, Section, Settings, Verdict
from stiefel.geometry import EXPONENTIALS, RETRACTIONS, haar, random_tangent

__all__ = ["first_order_defect", "sections", "slope"]

Retraction = Callable[[Tensor, Tensor], Tensor]

_STEPS = tuple(2.0**-k for k in range(2, 8))
_ROUNDING = 1e-13
_GEOOPT = "geoopt canonical retr"

#: Least orders asked of the tall case: retraction, exponential, order.
_TALL = {
    ("cayley", "canonical"): 3,
    ("cayley", "euclidean"): 2,
    ("polar", "canonical"): 2,
    ("polar", "euclidean"): 3,
    ("qr", "canonical"): 2,
    ("qr", "euclidean"): 2,
    ("cholesky_qr", "canonical"): 2,
    ("cholesky_qr", "euclidean"): 2,
}
_SQUARE = {key: 3 if key[0] in ("cayley", "polar") else 2 for key in _TALL}


def slope(retraction: Retraction, exponential: Retraction, x: Tensor, u: Tensor) -> float:
    """Fits the slope of log distance to the exponential against log step.

    Args:
        retraction: The map to judge.
        exponential: The geodesic.
        x: One point ``(n, p)``, float64.
        u: A tangent vector of unit norm ``(n, p)``.

    Returns:
        The least-squares slope over the steps whose distance is above rounding; infinity when
        fewer than two are.
    """
    points = []
    for t in _STEPS:
        distance = (retraction(x, t * u) - exponential(x, t * u)).norm().item()
        if distance > _ROUNDING:
            points.append((math.log(t), math.log(distance)))
    if len(points) < 2:
        return math.inf
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def first_order_defect(retraction: Retraction, x: Tensor, u: Tensor) -> float:
    """Returns |(R(tu) - X)/t - u| / |u| at t = 1e-5: zero up to O(t) for a retraction."""
    t = 1e-5
    return ((((retraction(x, t * u) - x) / t) - u).norm() / u.norm()).item()


def _section(n: int, p: int, asked: dict[tuple[str, str], int], settings: Settings) -> Section:
    """Measures all retractions at random points of one shape."""
    generator = torch.Generator().manual_seed(0)
    points = []
    for _ in range(2 if settings.quick else 8):
        x = haar(n, p, dtype=torch.float64, generator=generator)
        u = random_tangent(x, generator=generator)
        points.append((x.to(settings.device), (u / u.norm()).to(settings.device)))
    candidates: dict[str, Retraction] = {
        **RETRACTIONS,
        _GEOOPT: geoopt.CanonicalStiefel().retr,
        "geoopt Euclidean retr (QR)": geoopt.EuclideanStiefel().retr,
    }
    rows = []
    for name, retraction in candidates.items():
        values: dict[str, float | None] = {}
        for metric, exponential in EXPONENTIALS.items():
            found = statistics.median(slope(retraction, exponential, x, u) for x, u in points)
            values[f"slope, {metric} exp"] = found
        defects = [first_order_defect(retraction, x, u) for x, u in points]
        rows.append(Row(name, {**values, "first-order defect": statistics.median(defects)}))
    slopes = {row.name: row.values for row in rows}
    goals = []
    for (name, metric), order in asked.items():
        value = slopes[name][f"slope, {metric} exp"]
        assert value is not None
        text = f"{name} is of order {order} for the {metric} exponential"
        goals.append(Verdict(text, value, order - 0.1, value >= order - 0.1))
    value = slopes[_GEOOPT]["slope, canonical exp"]
    assert value is not None
    goals.append(Verdict(f"{_GEOOPT} fails the law of order 2", value, 1.5, value <= 1.5))
    return Section(f"slopes at {len(points)} points of {n} x {p}, float64", rows, goals)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device and number of points; sizes are always small.
    """
    yield _section(12, 5, _TALL, settings)
    yield _section(6, 6, _SQUARE, settings)
