"""An initialiser gives one weight, whichever way the weight is trained afterwards."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import RepresentationError
from stiefel.init import INITIALIZERS
from stiefel.numerics import real_dtype
from tests.chart_cases import RIEMANNIAN, fixed_determinant, reaches, takes
from tests.registry import CHARTS, DOUBLE

#: Starts in general position, which a chart that reaches all but special points must take.
GENERIC = ("haar", "identity", "orthogonalize")
SIZES = [(8, 8), (7, 7), (7, 3), (3, 7)]
SAME = {torch.float64: 1e-12, torch.float32: 1e-6}


def seeded():
    return torch.Generator().manual_seed(5)


def refusal(layer, case, name, known):
    """Starts the layer's weight there; what the error says if the chart cannot hold it."""
    options = {**case.options, **known}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stiefel.orthogonal(layer, via=case.name, init=name, generator=seeded(), **options)
    except RepresentationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", [*CHARTS, *RIEMANNIAN], ids=str)
@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("determinant", [None, 1, -1])
def test_every_chart_starts_at_the_same_weight(case, name, determinant):
    for size in SIZES:
        for dtype in (torch.float32, *DOUBLE):
            if not takes(case, size, dtype):
                continue
            real_square = not dtype.is_complex and size[0] == size[1]
            if determinant is not None and not (real_square and case.component):
                continue
            torch.manual_seed(0)
            layer = nn.Linear(size[1], size[0], bias=False, dtype=dtype)
            known = {} if determinant is None else {"determinant": determinant}
            expected = layer.weight.detach().clone()
            fixed = fixed_determinant(case, size) if real_square else None
            wanted = {"determinant": fixed} if fixed is not None else known
            INITIALIZERS[name](expected, generator=seeded(), **wanted)
            if refusal(layer, case, name, known) is None:
                assert (layer.weight - expected).abs().max() <= SAME[real_dtype(dtype)]
            else:
                special = case.almost and name not in GENERIC
                assert special or not reaches(case)
