"""Coordinates in 16 bits: the map is computed in float32, and the weight is as good as that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stiefel
from stiefel.geometry import orthonormality_residual
from tests.registry import CHARTS

HALF = [torch.bfloat16, torch.float16]
#: (case, rows, columns) of one square and one tall layer of every real chart that has them.
LAYERS = [
    (case, n, p)
    for case in CHARTS
    for n, p in ((64, 64), (64, 16))
    if torch.float32 in case.dtypes and any((a == b) == (n == p) for _, a, b in case.shapes)
]
every_layer = pytest.mark.parametrize(
    ("case", "n", "p"), LAYERS, ids=[f"{case}-{n}x{p}" for case, n, p in LAYERS]
)


def constrained(case, n, p, dtype, **options):
    layer = nn.Linear(p, n, bias=False).to(dtype)
    return stiefel.orthogonal(layer, via=case.name, init="chart", **options, **case.options)


def residual(weight):
    return float(orthonormality_residual(weight.float()).max())


@every_layer
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_float32_weight_of_16_bit_coordinates(case, n, p, dtype):
    """Below 1e-5, before and after training, and after the whole module was cast."""
    layer = constrained(case, n, p, dtype, weight_dtype=torch.float32)
    optimizer = stiefel.optim.build(layer, lr=0.1, optimizer="sgd")
    assert all(leaf.dtype == dtype for leaf in layer.parameters())
    for _ in range(3):
        assert layer.weight.dtype == torch.float32
        assert residual(layer.weight) < 1e-5
        optimizer.zero_grad()
        layer(torch.randn(8, p)).square().mean().backward()
        optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        assert residual(layer.weight) < 1e-5
    cast = constrained(case, n, p, torch.float32, weight_dtype=torch.float32).to(dtype)
    assert residual(cast.weight) < 1e-5


@every_layer
@pytest.mark.parametrize("dtype", HALF, ids=str)
@torch.no_grad()
def test_a_16_bit_weight_is_the_rounded_float32_one(case, n, p, dtype):
    """The map before the last rounding is below 1e-5; the weight is that, rounded once."""
    layer = constrained(case, n, p, dtype)
    twin = copy.deepcopy(layer)
    storage = twin.parametrizations.weight
    exact = storage.exact_point()
    assert exact.dtype == torch.float32
    assert residual(exact) < 1e-5
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight, exact.to(dtype))
    assert residual(layer.weight) <= stiefel.tolerance(dtype, n, p)


@every_layer
@pytest.mark.parametrize("setting", ["high", "medium"])
@torch.no_grad()
def test_reduced_products_and_autocast_change_no_weight(case, n, p, setting):
    layer = constrained(case, n, p, torch.float32)
    W = layer.weight.detach().clone()
    torch.set_float32_matmul_precision(setting)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer.weight, W)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_point_in_16_bits_gives_an_orthonormal_wide_weight(low):
    linear = nn.Linear(3, 8, dtype=low)
    weight = stiefel.orthogonal(linear, via="rgd-c-c", weight_dtype=torch.float32).weight
    assert weight.dtype == torch.float32
    bound = stiefel.tolerance(torch.float32, 8, 3)
    assert stiefel.geometry.orthonormality_residual(weight) < bound
