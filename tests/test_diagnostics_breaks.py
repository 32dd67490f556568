"""Diagnostics far from home: scales, empty and meta tensors, modes, wrong arguments."""

from __future__ import annotations

import math
import pickle

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import (
    SideConditions,
    chart_differential,
    check_gradient,
    check_hessian,
    check_manifold,
    check_optimizer,
    check_parametrization,
    check_retraction,
    check_transport,
    feasibility,
    gradient_noise,
    judge_rate,
    point_gradients,
    squared_norm_estimate,
    stationarity,
    stationarity_at,
)
from stiefel.errors import ConfigurationError, DtypeError, NonFiniteError, ShapeError
from stiefel.experiments.theorem4 import theorem4
from stiefel.geometry import haar, polar_retraction
from stiefel.parametrizations import CWY

D = torch.float64
A = torch.diag(torch.arange(1.0, 7.0, dtype=D))


def cost(X):
    return (X.mT @ A @ X).trace()


def point():
    return haar(6, 2, dtype=D, generator=torch.Generator().manual_seed(1))


def cwy_layer(scale=1.0, dtype=D, n=4):
    layer = stiefel.orthogonal(nn.Linear(n, n, bias=False), via="cwy").to(dtype)
    with torch.no_grad():
        next(stiefel.constraints(layer)).leaves[0].mul_(scale)
    return layer


def names(report):
    return [finding.name for finding in report.failures]


# --------------------------------------------------------------------------- scales
@pytest.mark.parametrize("scale", [1e-120, 1e-45, 1e45, 1e120])
def test_squared_norms_of_any_scale_have_the_same_interval(scale):
    noise = torch.randn(16, 30, dtype=D) + 0.5
    one, other = squared_norm_estimate(noise), squared_norm_estimate(scale * noise)
    for name in ("value", "low", "high", "standard_error", "noise_floor"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) * scale**2, rel=1e-9)
    assert other.standard_error > 0
    assert other.is_noise == one.is_noise


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200])
def test_stationarity_of_any_scale(scale):
    X, G = point(), torch.randn(6, 2, dtype=D)
    one, other = stationarity_at(X, G), stationarity_at(X, scale * G)
    for name in ("euclidean_norm", "canonical_norm", "kkt_residual", "gradient_norm"):
        assert getattr(other, name) == pytest.approx(scale * getattr(one, name), rel=1e-12)
    assert other.relative == pytest.approx(one.relative)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200])
def test_side_conditions_of_any_scale(scale):
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=D)).Q * scale
    V, g = Q[:, :3], Q[:, 3:]
    for factor, broken in ((1.0, []), (0.5, ["step identity"])):
        conditions = SideConditions()
        conditions.note(1, [V], [g], [V - factor * g])
        assert names(conditions.report()) == broken


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e-4, 1.0, 1e4, 1e200])
def test_a_model_passes_whatever_the_length_of_its_reflection_vectors(scale):
    layer, x = cwy_layer(scale), torch.randn(8, 4, dtype=D)
    report = check_gradient(lambda: (layer(x) ** 3).sum(), model=layer)
    assert report.ok, str(report)
    assert report["error of the slope of weight (cwy)"].bound < 1e-5
    next(stiefel.constraints(layer)).leaves[0].register_hook(lambda g: 1.01 * g)
    report = check_gradient(lambda: (layer(x) ** 3).sum(), model=layer)
    assert "error of the slope of weight (cwy)" in names(report)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_a_chart_passes_at_reflection_vectors_of_any_length(scale):
    report = check_parametrization(cwy_layer(scale), "weight")
    assert report.ok, str(report)


def test_a_hessian_of_a_tiny_cost_passes_and_a_wrong_one_does_not():
    assert check_hessian(lambda X: 1e-200 * cost(X), point()).ok
    wrong = check_hessian(lambda X: 1e-200 * cost(X), point(), hessian=lambda X, u: 1e-200 * A @ u)
    assert names(wrong) == ["order of the second-order model", "error of the curvature"]
    assert "Along every direction" in wrong.failures[0].meaning or "term" in str(wrong)


# --------------------------------------------------------------------------- modes
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_checks_run_in_blocks_without_gradients(mode):
    layer, x = cwy_layer(), torch.randn(4, 8, 4, dtype=D)
    X = point()
    (constraint,) = stiefel.constraints(layer)
    with mode():
        assert check_gradient(cost, X).ok
        assert check_gradient(lambda: (layer(x[0]) ** 3).sum(), model=layer).ok
        assert check_hessian(cost, X).ok
        assert check_parametrization(CWY(3)).ok
        assert check_optimizer(stiefel.optim.RGD, steps=3).ok
        assert check_manifold(stiefel.Stiefel(), shapes=[(4, 2)], points=1).ok
        assert chart_differential(constraint).rank == 6
        found = gradient_noise(layer, [lambda b=b: (layer(b) ** 3).sum() for b in x])
        assert found["model"].count == 4
        assert len(theorem4(400, 1, n=3, p=2, control_steps=5).controls) == 3
        assert torch.is_grad_enabled() is False


def test_the_estimate_of_a_differential_leaves_random_numbers_alone():
    (constraint,) = stiefel.constraints(cwy_layer())
    before = torch.get_rng_state()
    first = chart_differential(constraint, exact_below=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert chart_differential(constraint, exact_below=0) == first


def test_a_start_that_the_weight_was_made_from_is_no_start():
    """The polar factor X of the numbers Z drawn first: Z = X S has no tangent part."""
    Z = torch.randn(5, 5, dtype=D, generator=torch.Generator().manual_seed(0))
    layer = cwy_layer(n=5)
    (constraint,) = stiefel.constraints(layer)
    constraint.assign(Z)
    exact = chart_differential(constraint)
    found = chart_differential(constraint, exact_below=0)
    assert exact.smallest * (1 - 1e-9) <= found.smallest <= found.largest
    assert found.largest <= exact.largest * (1 + 1e-9)


def test_buffers_of_a_checked_model_stay():
    model = nn.Sequential(cwy_layer(), nn.BatchNorm1d(4).double())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4, dtype=D)
    assert check_gradient(lambda: (model(x) ** 3).sum(), model=model).ok
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_of_several_dtypes_is_checked_as_the_coarsest():
    a, b = cwy_layer(), cwy_layer(dtype=torch.float32)
    x, model = torch.randn(8, 4, dtype=D), nn.Sequential(a, b)
    report = check_gradient(lambda: b(a(x).float()).double().pow(3).sum(), model=model)
    assert report.ok, str(report)
    assert "float32" in report.skipped[0]
    b.half()
    with pytest.raises(DtypeError, match=r"got torch\.float16"):
        check_gradient(lambda: b(a(x).half()).double().pow(3).sum(), model=model)


def test_side_conditions_can_be_pickled():
    V = torch.randn(4, 3, dtype=D)
    conditions = SideConditions()
    conditions.note(1, [V], [V], [V])
    assert str(pickle.loads(pickle.dumps(conditions)).report()) == str(conditions.report())


# --------------------------------------------------------------------------- records
def test_a_record_that_ends_in_one_zero_is_not_stationary():
    rising = [float(k) for k in range(1, 100)]
    assert judge_rate(range(1, 101), [*rising, 0.0]).verdict.value == "diverging"
    assert judge_rate(range(1, 103), [*rising, 0.0, 0.0, 0.0]).verdict.value == "decreasing"


def test_a_window_ends_the_record():
    values = [1 / k for k in range(1, 98)] + [math.nan] * 3
    assert judge_rate(range(1, 101), values).verdict.value == "diverging"
    assert judge_rate(range(1, 101), values, window=(10, 90)).verdict.value == "decreasing"


def test_noise_floors_that_are_none():
    values = [1 + 0.01 * math.sin(k) for k in range(1, 101)]
    unknown = judge_rate(range(1, 101), values)
    assert judge_rate(range(1, 101), values, noise_floor=math.nan) == unknown
    for floor in (-1.0, math.inf):
        with pytest.raises(ConfigurationError, match="noise floor"):
            judge_rate(range(1, 101), values, noise_floor=floor)


# --------------------------------------------------------------------------- nothing there
class Bare(nn.Module):
    """A point of a manifold of geoopt."""

    def __init__(self, manifold, *shape):
        super().__init__()
        self.point = geoopt.ManifoldParameter(manifold.random(*shape), manifold=manifold)


def test_an_empty_batch_of_another_manifold_is_feasible():
    assert feasibility(Bare(geoopt.Sphere(), 0, 5))["point"].ok


def test_a_complex_inner_product_of_another_manifold_is_measured():
    model = Bare(geoopt.UpperHalf(), 1, 3, 3)
    with point_gradients(model) as gradients:
        model.point.abs().square().sum().backward()
    assert stationarity(model, gradients)["point"].euclidean_norm > 0


def test_weights_without_values_are_refused():
    layer = cwy_layer().to("meta")
    (constraint,) = stiefel.constraints(layer)
    for call in (
        lambda: feasibility(layer),
        lambda: chart_differential(constraint),
        lambda: point_gradients(layer).__enter__(),
        lambda: check_parametrization(layer, "weight"),
    ):
        with pytest.raises(ConfigurationError, match="meta device"):
            call()


def test_points_without_entries_are_refused():
    for X in (torch.zeros(6, 0, dtype=D), torch.zeros(0, 6, 2, dtype=D)):
        for check in (check_gradient, check_hessian):
            with pytest.raises(ShapeError, match="with entries"):
                check(cost, X)
    with pytest.raises(ShapeError, match="with entries"):
        check_manifold(stiefel.Stiefel(), X=torch.zeros(0, 4, 2))
    with pytest.raises(ShapeError, match="with entries"):
        check_retraction(polar_retraction, shapes=[(5, 0)])
    with pytest.raises(ConfigurationError, match="without zeros"):
        check_optimizer(stiefel.optim.RGD, shape=(0, 4, 2))
    with pytest.raises(ShapeError, match="not empty"):
        SideConditions().note(1, *[[torch.zeros(4, 0)]] * 3)


def test_a_single_number_has_no_first_step_and_passes():
    report = check_optimizer(stiefel.optim.RGD, shape=(1, 1), steps=5, options={"momentum": 0.9})
    assert report.ok, str(report)
    assert any("gradient is zero at every point" in reason for reason in report.skipped)


# --------------------------------------------------------------------------- wrong arguments
def test_losses_that_are_none_are_refused():
    layer, x = cwy_layer(), torch.randn(8, 4, dtype=D)
    for loss in (
        lambda: layer(x),
        lambda: 3.0,
        lambda: layer(x).sum().detach(),
        layer(x).sum(),
    ):
        with pytest.raises(ConfigurationError, match="expected functions without arguments"):
            gradient_noise(layer, [loss] * 4)
    for gradients in ([], [torch.zeros(3), torch.zeros(4)], [1.0, 2.0]):
        with pytest.raises(ShapeError, match="one shape"):
            squared_norm_estimate(gradients)


def test_arguments_of_checks_that_are_none_are_refused():
    X = point()
    with pytest.raises(ConfigurationError, match=r"torch\.Generator"):
        check_gradient(cost, X, generator=3)
    with pytest.raises(ConfigurationError, match=r"torch\.Generator"):
        check_manifold(stiefel.Stiefel(), generator=3)
    with pytest.raises(ConfigurationError, match="directions"):
        check_gradient(cost, X, directions=2.5)
    with pytest.raises(ConfigurationError, match="points"):
        check_manifold(stiefel.Stiefel(), points=1.5)
    with pytest.raises(ConfigurationError, match="a list of shapes"):
        check_manifold(stiefel.Stiefel(), shapes=(4, 2))
    with pytest.raises(ConfigurationError, match="steps >= 1"):
        check_optimizer(stiefel.optim.RGD, steps=0)
    with pytest.raises(ConfigurationError, match="a function of the step number"):
        SideConditions(0.1)
    with pytest.raises(DtypeError, match="floating point"):
        SideConditions().note(1, *[[torch.ones(3, 2, dtype=torch.long)]] * 3)


def test_a_function_that_returns_nothing_is_named():
    assert names(check_retraction(lambda X, u: None)) == ["R(x, 0) returns a tensor"]
    assert "transport returns a tensor" in names(check_transport(lambda X, u, z: None))


def test_costs_that_are_not_finite_say_so():
    layer = cwy_layer(math.nan)
    x = torch.randn(8, 4, dtype=D)
    with pytest.raises(NonFiniteError, match="finite cost"):
        check_gradient(lambda: layer(x).sum(), model=layer)
    X = point()
    report = check_gradient(
        lambda Y: cost(Y) + torch.where((Y - X).norm() > 1e-3, math.nan, 0.0), X
    )
    assert "not finite close to the point" in report["error of the slope"].meaning
