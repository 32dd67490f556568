"""Feasibility: planted distances from the manifold are found, in float64."""

from __future__ import annotations

import math
from typing import Any

import geoopt
import numpy as np
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import feasibility
from stiefel.errors import ConfigurationError
from stiefel.geometry import haar
from tests.chart_cases import RIEMANNIAN, over
from tests.registry import CHARTS, DOUBLE

FIRST = [(case, case.shapes[0]) for case in CHARTS] + [(c, ((2,), 5, 3)) for c in RIEMANNIAN]


class Holder(nn.Module):
    """A weight."""

    def __init__(self, shape, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))


def riemannian(X):
    """A Holder whose Riemannian leaf is X, wherever X is."""
    holder: Any = Holder(X.shape, X.dtype)
    stiefel.orthogonal(holder, via="riemannian", init="haar")
    with torch.no_grad():
        holder.parametrizations.weight.original.copy_(X)
    return holder


@over(FIRST, *DOUBLE)
def test_charts_are_on_their_manifold(case, shape, dtype):
    batch, n, p = shape
    holder = Holder((*batch, n, p), dtype)
    via = case.make(shape) if case.name != "riemannian" else "riemannian"
    options = case.options if case.name == "riemannian" else {}
    stiefel.orthogonal(holder, via=via, init="chart", **options)
    found = feasibility(holder)["weight"]
    assert (found.path, found.via, found.shape) == ("weight", case.name, (*batch, n, p))
    assert found.ok
    assert found.tolerance == stiefel.tolerance(dtype, n, p)
    assert found.smallest_singular_value == pytest.approx(1, abs=1e-12)
    assert found.largest_singular_value == pytest.approx(1, abs=1e-12)
    assert (found.determinant is None) == (n != p or dtype.is_complex)


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.9])
@pytest.mark.parametrize(("n", "p"), [(6, 6), (8, 3), (5, 1)])
def test_planted_distances_are_found(n, p, size, dtype):
    """X = U diag(sigma) V^H: singular values and residuals are known."""
    sigma = 1 + size * torch.linspace(-1, 0.5, p, dtype=torch.float64)
    V = haar(p, p, dtype=dtype)
    X = haar(n, p, dtype=dtype) * sigma.to(dtype) @ V.mH
    found = feasibility(riemannian(X))["weight"]
    assert found.smallest_singular_value == pytest.approx(float(sigma.min()), abs=1e-14)
    assert found.largest_singular_value == pytest.approx(float(sigma.max()), abs=1e-14)
    E = X.numpy().conj().T @ X.numpy() - np.eye(p)
    assert found.max_residual == pytest.approx(np.abs(E).max(), abs=1e-14)
    frobenius = float((sigma**2 - 1).square().sum().sqrt())
    assert found.frobenius_residual == pytest.approx(frobenius, abs=1e-14)
    assert not found.ok


def test_of_a_batch_the_worst():
    X = haar(5, 2, (2, 2), dtype=torch.float64)
    X[1, 0] *= 1.1
    X[0, 1] *= 0.8
    found = feasibility(riemannian(X))["weight"]
    assert found.smallest_singular_value == pytest.approx(0.8)
    assert found.largest_singular_value == pytest.approx(1.1)
    assert found.max_residual == pytest.approx(0.36)
    assert found.frobenius_residual == pytest.approx(0.36 * math.sqrt(2))


def test_the_component_of_real_square_weights():
    for sign in (1, -1):
        X = haar(5, 5, dtype=torch.float64, determinant=sign)
        assert feasibility(riemannian(X))["weight"].determinant == sign
    signs = torch.tensor([1.0, -1.0])
    X = torch.stack([haar(4, 4, dtype=torch.float64, determinant=int(s)) for s in signs])
    assert feasibility(riemannian(X))["weight"].determinant == 0


def test_what_is_not_finite_is_not_on_the_manifold():
    X = torch.eye(3, dtype=torch.float64)
    X[0, 1] = math.nan
    found = feasibility(riemannian(X))["weight"]
    assert math.isnan(found.max_residual)
    assert math.isnan(found.smallest_singular_value)
    assert found.determinant == 0
    assert not found.ok


def test_float32_residuals_are_measured_in_float64():
    """Autocast and reduced products would say 1e-3."""
    layer = stiefel.orthogonal(nn.Linear(64, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = feasibility(layer)["weight"]
    W = layer.weight.detach().double().numpy()
    residual = np.abs(W.T @ W - np.eye(64)).max()
    assert found.max_residual == pytest.approx(residual, rel=1e-6)
    assert found.ok


def test_16_bit_weights_are_measured_as_they_are_used():
    layer = stiefel.orthogonal(nn.Linear(64, 32), weight_dtype=torch.bfloat16)
    found = feasibility(layer)["weight"]
    assert 1e-4 < found.max_residual < found.tolerance == stiefel.tolerance(torch.bfloat16, 64, 32)


def test_wide_weights_kernels_and_iterates_near_the_manifold():
    model = nn.ModuleDict({"wide": nn.Linear(9, 4), "kernel": nn.Conv2d(3, 5, 2)})
    stiefel.orthogonal(model["wide"], via="tcwy")
    stiefel.orthogonal(model["kernel"], via="riemannian", tolerance=0.3)
    found = feasibility(model)
    assert found["wide.weight"].shape == (9, 4)
    assert found["kernel.weight"].shape == (12, 5)
    assert found["kernel.weight"].tolerance == 0.3
    assert all(each.ok for each in found.values())


def test_drift_per_step():
    X = haar(4, 2, dtype=torch.float64)
    early = feasibility(riemannian(X))["weight"]
    late = feasibility(riemannian(X * 1.1))["weight"]
    assert late.drift_since(early, 50) == pytest.approx(0.21 / 50)
    assert early.drift_since(late, 50) == pytest.approx(-0.21 / 50)
    with pytest.raises(ConfigurationError, match="at least one step"):
        late.drift_since(early, 0)
    other = feasibility(riemannian(haar(5, 2, dtype=torch.float64)))["weight"]
    with pytest.raises(ConfigurationError, match="drift is that of one weight"):
        late.drift_since(other, 1)


def test_points_of_other_manifolds_of_geoopt():
    model = nn.Module()
    x = torch.tensor([3.0, 4.0], dtype=torch.float64) / 5
    model.x = geoopt.ManifoldParameter(x, geoopt.Sphere())
    model.X = geoopt.ManifoldParameter(torch.eye(4, 2), geoopt.EuclideanStiefel())
    found = feasibility(model)
    assert found["x"].ok
    assert found["X"].ok
    assert found["X"].largest_singular_value == 1
    with torch.no_grad():
        model.x.mul_(2)
    found = feasibility(model)["x"]
    assert found.frobenius_residual == pytest.approx(1)
    assert found.max_residual == pytest.approx(0.8)
    assert math.isnan(found.largest_singular_value)
    assert not found.ok
