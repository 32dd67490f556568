"""Which order do the retractions have, and is geoopt's canonical retraction one at all?

A retraction R of order k stays within O(t^k) of a geodesic: the slope of log |R(tu) - exp(tu)|
against log t is k. Every true retraction has k >= 2 for every metric, which says that R leaves X
in the direction u. Expected: Cayley 3 for the canonical exponential and 2 for the Euclidean one,
polar the other way round, QR and Cholesky-QR 2 and 2; on square matrices Cayley and polar 3 and 3.
A map that leaves in another direction has slope 1. Nothing is timed here.
"""

from __future__ import annotations

import math
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
        x: Points ``(k, n, p)``, float64.
        u: Tangent vectors of unit norm ``(k, n, p)``.

    Returns:
        The median over the points of the least-squares slope, over the steps whose distance is
        above rounding at every point; infinity when fewer than two are.
    """
    t = torch.tensor(_STEPS, dtype=x.dtype, device=x.device)
    points = x[:, None].expand(-1, len(t), -1, -1)
    steps = t[:, None, None] * u[:, None]
    distance = (retraction(points, steps) - exponential(points, steps)).flatten(-2).norm(dim=-1)
    usable = (distance > _ROUNDING).all(0)
    if int(usable.sum()) < 2:
        return math.inf
    log_t, log_distance = t[usable].log(), distance[:, usable].log()
    log_t = log_t - log_t.mean()
    slopes = (log_distance @ log_t) / log_t.square().sum()
    return slopes.median().item()


def first_order_defect(retraction: Retraction, x: Tensor, u: Tensor) -> float:
    """Median of |(R(tu) - X)/t - u| / |u| at t = 1e-5: zero up to O(t) for a retraction."""
    t = 1e-5
    defect = (retraction(x, t * u) - x) / t - u
    return (defect.flatten(-2).norm(dim=-1) / u.flatten(-2).norm(dim=-1)).median().item()


def _section(n: int, p: int, asked: dict[tuple[str, str], int], settings: Settings) -> Section:
    """Measures all retractions at random points of one shape."""
    count = 2 if settings.quick else 9
    generator = torch.Generator().manual_seed(0)
    x = haar(n, p, batch=(count,), dtype=torch.float64, generator=generator)
    u = random_tangent(x, generator=generator)
    u = (u / u.flatten(-2).norm(dim=-1)[:, None, None]).to(settings.device)
    x = x.to(settings.device)
    candidates: dict[str, Retraction] = {
        **RETRACTIONS,
        _GEOOPT: geoopt.CanonicalStiefel().retr,
        "geoopt Euclidean retr (QR)": geoopt.EuclideanStiefel().retr,
    }
    rows = []
    for name, retraction in candidates.items():
        values: dict[str, float | None] = {}
        for metric, exponential in EXPONENTIALS.items():
            values[f"slope, {metric} exp"] = slope(retraction, exponential, x, u)
        values["first-order defect"] = first_order_defect(retraction, x, u)
        rows.append(Row(name, values))
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
    return Section(f"slopes at {count} points of {n} x {p}, float64", rows, goals)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device and number of points; sizes are always small.
    """
    yield _section(12, 5, _TALL, settings)
    yield _section(6, 6, _SQUARE, settings)
