"""Charts of the registry as parametrizations of a law, and random coordinates for them."""

from __future__ import annotations

import pytest
import torch

from stiefel.geometry import haar
from stiefel.numerics import compute_dtype, tolerance
from tests.registry import CHARTS, DOUBLE, ChartCase

CASES = [(case, shape) for case in CHARTS for shape in case.shapes]
#: One square and one tall shape of every chart that has them, for what is slow to compile.
SOME = [(c, s) for c, s in CASES if s in (((), 7, 7), ((), 7, 3), ((), 8, 8), ((2,), 4, 4))]

#: The points themselves, for what holds for them and for charts alike.
RIEMANNIAN = [
    ChartCase("riemannian", [], {"inner": inner, "retraction": retraction})
    for inner, retraction in (("canonical", "cayley"), ("euclidean", "qr"))
]


def takes(case, size, dtype):
    """Whether a chart claims a weight of that size and dtype, by the registry."""
    n, p = max(size), min(size)
    if case.name == "riemannian":
        return True
    kinds = {(not batch, rows == columns) for batch, rows, columns in case.shapes}
    fixed = case.options.get("style") == "fft"
    claims = (True, n == p) in kinds and (not fixed or n == 8)
    return claims and any(dtype.is_complex == claimed.is_complex for claimed in case.dtypes)


def reaches(case):
    """Whether a generic point of the right determinant has coordinates there."""
    return case.name == "riemannian" or (case.inverts and (case.onto or case.almost))


def fixed_determinant(case, size):
    """The one determinant that the chart's options allow a real square weight; None for both."""
    if case.name == "riemannian":
        return None
    return case.make(((), max(size), min(size))).fixed_determinant


def over(cases, *dtypes):
    """Parametrizes a law over cases, and over those of `dtypes` that each case claims."""
    if not dtypes:
        return pytest.mark.parametrize(("case", "shape"), cases, ids=[f"{c}-{s}" for c, s in cases])
    with_dtypes = [(c, s, dtype) for c, s in cases for dtype in dtypes if dtype in c.dtypes]
    ids = [f"{c}-{s}-{dtype}" for c, s, dtype in with_dtypes]
    return pytest.mark.parametrize(("case", "shape", "dtype"), with_dtypes, ids=ids)


every = over(CASES)
every_inverting = over([(c, s) for c, s in CASES if c.inverts])
every_batched = over([(c, s) for c, s in CASES if c.batched])
every_real = over([(c, s) for c, s in CASES if torch.float32 in c.dtypes])
every_double = over(CASES, *DOUBLE)


def tuple_of(originals):
    return originals if isinstance(originals, tuple) else (originals,)


def random_originals(chart, dtype, device, scale=1.0):
    """Free coordinates, nothing normalised."""
    empty = tuple_of(chart.empty_originals(dtype, device))
    return tuple(scale * torch.randn_like(original) for original in empty)


def bound_for(chart, dtype):
    """Rounding bound on the entries of a weight."""
    return 2 * tolerance(dtype, chart.n, chart.p)


def random_base(chart, dtype, device, sign=None):
    """Moves the base of a chart that has one to a random point."""
    if chart.has_base:
        kind = compute_dtype(dtype)
        X = haar(chart.n, chart.p, chart.batch, dtype=kind, device=device, determinant=sign)
        chart.set_base(X)


def both_components(case, chart, dtype, device):
    """The chart with each sign of the determinant where it has one, mixed over a batch."""
    random_base(chart, dtype, device)
    yield chart
    if case.component and chart.n == chart.p and not dtype.is_complex:
        for first in (1, -1):
            signs = torch.full(chart.batch, first, device=device)
            if chart.batch:
                signs.view(-1)[1::2] *= -1
            random_base(chart, torch.float64, device)
            chart.set_determinant(signs)
            X = chart(*random_originals(chart, torch.float64, device))
            torch.testing.assert_close(torch.linalg.det(X), signs.to(X))
            random_base(chart, dtype, device, signs)
            yield chart
