"""Distances from stationarity: the figures against slow float64 ones, in all charts."""

from __future__ import annotations

import dataclasses
import math

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import point_gradients, stationarity, stationarity_at, total_stationarity
from stiefel.errors import ShapeError
from stiefel.geometry import canonical_gradient, euclidean_gradient, haar
from stiefel.models import ConvNERU, OrthogonalRNN
from tests.chart_cases import CASES, RIEMANNIAN, over, random_base, random_originals
from tests.registry import DOUBLE, SHAPES
from tests.stationarity_oracle import assert_figures, batch_figures, plain_gradients

POINTS = [(case, shape) for case in RIEMANNIAN for shape in SHAPES]
every_via = over(CASES + POINTS, *DOUBLE)


class Holder(nn.Module):
    """A loss of a weight (*batch, n, p)."""

    A: torch.Tensor
    C: torch.Tensor

    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))
        self.register_buffer("A", torch.randn(shape[-1], 3, dtype=dtype))
        self.register_buffer("C", torch.randn(shape, dtype=dtype))

    def forward(self):
        W = self.weight
        return (self.C.conj() * W).sum().abs() + (W @ self.A).abs().pow(4).sum()


def held(case, shape, dtype):
    """A Holder in a generic point of a chart of the registry."""
    batch, n, p = shape
    holder = Holder((*batch, n, p), dtype)
    if case.name == "riemannian":
        return stiefel.orthogonal(holder, via="riemannian", init="haar", **case.options)
    chart = case.make(shape)
    stiefel.orthogonal(holder, via=chart, init="chart")
    random_base(chart, dtype, "cpu")
    (constraint,) = stiefel.constraints(holder)
    with torch.no_grad():
        values = random_originals(chart, dtype, "cpu")
        for leaf, value in zip(constraint.leaves, values, strict=True):
            leaf.copy_(value)
    return holder


@every_via
def test_the_figures_are_those_of_a_plain_weight_and_of_autograd(case, shape, dtype):
    holder = held(case, shape, dtype)
    X, G = plain_gradients(holder, lambda model: model())["weight"]
    with point_gradients(holder) as gradients:
        holder().backward()
    found = stationarity(holder, gradients)["weight"]
    torch.testing.assert_close(gradients["weight"].point, X, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradients["weight"].gradient, G, rtol=1e-9, atol=1e-10)
    assert_figures(found, X, G)
    if case.name == "riemannian":
        assert found.coordinate_norm_squared is None
        return
    (constraint,) = stiefel.constraints(holder)
    grads = torch.autograd.grad(holder(), constraint.leaves)
    squares = [float(g.abs().square().sum()) for g in grads]
    assert found.coordinate_norm_squared == pytest.approx(sum(squares), rel=1e-9)
    if case.name not in ("cwy", "tcwy", "householder"):
        assert found.scale_free_coordinate_norm_squared is None
        return
    V, g = constraint.leaves[0].detach(), grads[0]
    scaled = sum(squares[1:])
    for v, grad in zip(V.unbind(-1), g.unbind(-1), strict=True):
        scaled += float((v.abs().square().sum(-1) * grad.abs().square().sum(-1)).sum())
    assert found.scale_free_coordinate_norm_squared == pytest.approx(scaled, rel=1e-9)


@pytest.mark.parametrize("dtype", DOUBLE)
def test_the_scale_free_norm_is_the_norm_after_a_rebase(dtype):
    layer = stiefel.orthogonal(Holder((7, 7), dtype), via="cwy", reflections=4, init="chart")
    (constraint,) = stiefel.constraints(layer)
    before = observed(layer)
    constraint.rebase()
    layer.zero_grad()
    after = observed(layer)
    scale_free = before.scale_free_coordinate_norm_squared
    assert after.coordinate_norm_squared == pytest.approx(scale_free, rel=1e-9)
    assert after.euclidean_norm == pytest.approx(before.euclidean_norm, rel=1e-9)
    with torch.no_grad():
        constraint.leaves[0].mul_(10)
    layer.zero_grad()
    scaled = observed(layer)
    assert scaled.scale_free_coordinate_norm_squared == pytest.approx(scale_free, rel=1e-9)
    assert scaled.coordinate_norm_squared is not None
    assert after.coordinate_norm_squared is not None
    assert scaled.coordinate_norm_squared < 0.9 * after.coordinate_norm_squared


def observed(model):
    """The figures of the weight of a Holder."""
    with point_gradients(model) as gradients:
        model().backward()
    return stationarity(model, gradients)["weight"]


def train(model, loss, steps):
    """Trains with figures at every step; yields them with what the plain twin says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        expected = plain_gradients(model, lambda twin, step=step: loss(twin, step))
        with point_gradients(model) as gradients:
            loss(model, step).backward()
            found = stationarity(model, gradients)
            optimizer.step()
        yield found, expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_matrix_free_recurrent_network_in_training(dtype):
    rnn = OrthogonalRNN(3, 8, num_layers=2, via="cwy", reflections=3, dtype=dtype)
    x = torch.randn(3, 9, 5, 3, dtype=torch.float64)

    def loss(model, step):
        return (model(x[step])[0] - 1).abs().square().mean()

    for found, expected in train(rnn, loss, 3):
        assert set(found) == set(expected)
        for path, (X, G) in expected.items():
            assert_figures(found[path], X, G)


def test_a_convolutional_network_in_training():
    model = ConvNERU(2, 3, 3, via="cwy", dtype=torch.float64)
    x = torch.randn(3, 4, 2, 2, 6, 6, dtype=torch.float64)

    def loss(model, step):
        return (model(x[step])[0] - 1).square().mean()

    for found, expected in train(model, loss, 3):
        for path, (X, G) in expected.items():
            assert X.shape == (27, 3)
            assert_figures(found[path], X, G)


def test_float32_training_to_its_rounding():
    rnn = OrthogonalRNN(3, 16, via="cwy", reflections=4)
    x = torch.randn(2, 20, 5, 3)
    for found, expected in train(rnn, lambda m, step: (m(x[step])[0] - 1).square().mean(), 2):
        for path, (X, G) in expected.items():
            assert_figures(found[path], X, G, tolerance=2e-5)


@pytest.mark.parametrize("dtype", DOUBLE)
def test_units_of_square_weights(dtype):
    X, G = haar(6, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype)
    K = torch.linalg.matrix_norm(G @ X.mH - X @ G.mH).item()
    found = stationarity_at(X, G)
    assert found.euclidean_norm == pytest.approx(K / 2, rel=1e-12)
    assert found.canonical_norm == pytest.approx(K / math.sqrt(2), rel=1e-12)
    assert found.kkt_residual == pytest.approx(K, rel=1e-12)


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize(("n", "p"), [(7, 3), (5, 1), (4, 4)])
def test_all_figures_vanish_together_at_stationary_points(n, p, dtype):
    X = haar(n, p, dtype=dtype)
    A = torch.randn(n, n, dtype=dtype)
    A = A + A.mH
    N = torch.arange(1.0, p + 1, dtype=torch.float64)  # f(X) = tr(N X^H A X) / 2
    U = torch.linalg.eigh(A).eigenvectors[:, :p]
    stationary, generic = stationarity_at(U, A @ U * N), stationarity_at(X, A @ X * N)
    for name in ("euclidean_norm", "canonical_norm", "kkt_residual"):
        assert getattr(stationary, name) < 1e-12 < 1e-2 < getattr(generic, name)
    assert stationary.symmetry_residual < 1e-12
    assert stationary.gradient_norm > 1e-2
    nothing = stationarity_at(X, torch.zeros_like(X))
    assert nothing.euclidean_norm == 0
    assert math.isnan(nothing.relative)


def test_a_batch_counts_as_one_point():
    X, G = haar(5, 2, (2, 3), dtype=torch.float64), torch.randn(2, 3, 5, 2, dtype=torch.float64)
    whole = stationarity_at(X, G)
    for key, value in batch_figures(X, G).items():
        assert getattr(whole, key) == pytest.approx(value, rel=1e-10)
    wrong = torch.randn(5, 3)
    with pytest.raises(ShapeError, match=r"\(2, 3, 5, 2\), got \(5, 3\)"):
        stationarity_at(X, wrong)


def test_half_precision_and_autocast_do_not_reach_the_figures():
    X, G = haar(16, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    X, G = X.float(), G.float()
    expected = stationarity_at(X, G)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stationarity_at(X, G) == expected
    assert expected.canonical_norm == pytest.approx(
        stationarity_at(X.double(), G.double()).canonical_norm
    )


def test_the_whole_model_is_one_point():
    model = nn.ModuleDict({"a": Holder((6, 6), torch.float64), "b": Holder((5, 2), torch.float64)})
    stiefel.orthogonal(model["a"], via="cwy")
    stiefel.orthogonal(model["b"], via="riemannian")
    with point_gradients(model) as gradients:
        (model["a"]() + model["b"]()).backward()
    found = stationarity(model, gradients)
    whole = total_stationarity(found)
    assert whole.path == "model"
    assert whole.via == "cwy, riemannian"
    for key in ("euclidean_norm", "canonical_norm", "kkt_residual", "symmetry_residual"):
        parts = [getattr(each, key) for each in found.values()]
        assert getattr(whole, key) == pytest.approx(math.hypot(*parts), rel=1e-12)
    assert whole.relative == pytest.approx(whole.euclidean_norm / whole.gradient_norm)
    assert whole.coordinate_norm_squared == found["a.weight"].coordinate_norm_squared
    assert whole.missing is None


def test_a_total_says_what_is_not_in_it():
    model = nn.ModuleDict({"a": Holder((6, 6), torch.float64), "b": Holder((5, 2), torch.float64)})
    stiefel.orthogonal(model["a"], via="cwy")
    stiefel.orthogonal(model["b"], via="matrix_exp")
    with point_gradients(model) as gradients:
        model["a"]().backward()
    found = stationarity(model, gradients)
    whole = total_stationarity(found)
    assert math.isnan(found["b.weight"].euclidean_norm)
    assert "b.weight" in str(whole.missing)
    assert "not read" in str(whole.missing)
    assert whole.euclidean_norm == pytest.approx(found["a.weight"].euclidean_norm)
    only_b = total_stationarity({"b.weight": found["b.weight"]})
    assert math.isnan(only_b.euclidean_norm)
    assert math.isnan(only_b.kkt_residual)
    assert "no constrained weight" in str(total_stationarity({}).missing)


def test_scale_free_norms_add_up_only_if_all_charts_have_them():
    model = nn.ModuleDict({"a": Holder((6, 6), torch.float64), "b": Holder((5, 2), torch.float64)})
    stiefel.orthogonal(model["a"], via="cwy")
    stiefel.orthogonal(model["b"], via="tcwy")
    with point_gradients(model) as gradients:
        (model["a"]() + model["b"]()).backward()
    found = stationarity(model, gradients)
    parts = [each.scale_free_coordinate_norm_squared for each in found.values()]
    assert total_stationarity(found).scale_free_coordinate_norm_squared == pytest.approx(
        math.fsum(parts)
    )
    mixed = found | {
        "b.weight": dataclasses.replace(found["b.weight"], scale_free_coordinate_norm_squared=None)
    }
    assert total_stationarity(mixed).scale_free_coordinate_norm_squared is None


class Free(nn.Module):
    """Two bare points of geoopt."""

    def __init__(self):
        super().__init__()
        sphere, frames = geoopt.Sphere(), geoopt.CanonicalStiefel()
        x = torch.randn(5, dtype=torch.float64)
        self.x = geoopt.ManifoldParameter(x / x.norm(), sphere)
        self.X = geoopt.ManifoldParameter(haar(6, 3, dtype=torch.float64), frames)


def test_points_of_geoopt():
    model = Free()
    a, A = torch.randn(5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with point_gradients(model) as gradients:
        ((model.x * a).sum() + (model.X * A).sum()).backward()
    found = stationarity(model, gradients)
    x, X = model.x.detach(), model.X.detach()
    norm = (a - x * (x @ a)).norm().item()
    assert found["x"].euclidean_norm == pytest.approx(norm, rel=1e-12)
    assert found["x"].canonical_norm == pytest.approx(norm, rel=1e-12)
    assert math.isnan(found["x"].kkt_residual)
    assert math.isnan(found["x"].symmetry_residual)
    assert math.isnan(found["x"].relative)
    assert found["X"].euclidean_norm == pytest.approx(euclidean_gradient(X, A).norm().item())
    assert found["X"].kkt_residual == pytest.approx(canonical_gradient(X, A).norm().item())
    assert total_stationarity(found).kkt_residual == found["X"].kkt_residual
    assert math.isnan(total_stationarity(found).relative)
