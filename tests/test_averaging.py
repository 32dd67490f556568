"""`stiefel.optim.AveragedModel`: averages that are points, whichever way a weight is trained."""

from __future__ import annotations

import copy
import io
import warnings

import geoopt
import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError
from stiefel.optim import AveragedModel, build
from tests.mixed_model import Model, equal, residuals, train

WAYS = ["cwy", "tcwy", "matrix_exp", "own", "polar", "rgd-c-c", "rgd-e-qr"]


def close_to(point, size=0.3):
    """A point near another."""
    noise = torch.randn(point.shape, dtype=point.dtype, device=point.device)
    return geometry.polar_factor(point + size * noise)


def constraint_of(model):
    (constraint,) = stiefel.constraints(model)
    return constraint


def averages(model, points, **options):
    average = AveragedModel(model, **options)
    for X in points:
        constraint_of(model).assign(X)
        average.update_parameters(model)
    return average


def weighted(points, decay):
    """The weights of the points in their running mean, by unrolling its definition."""
    if decay is None:
        return [1 / len(points)] * len(points)
    return [decay ** (len(points) - 1)] + [
        (1 - decay) * decay ** (len(points) - 1 - t) for t in range(1, len(points))
    ]


def nearest(M):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


CASES = [
    (via, make, dtype)
    for via in WAYS
    for make, dtype in [
        ("tall", torch.float64),
        ("wide", torch.float32),
        ("convolution", torch.float64),
        ("complex", torch.complex128),
        ("blocks", torch.float64),
    ]
]


def module_for(kind, dtype, device):
    if kind == "convolution":
        return nn.Conv2d(3, 5, 2, dtype=dtype, device=device), None
    if kind == "blocks":
        return nn.Linear(4, 24, dtype=dtype, device=device), ("blocks", 3)
    rows, columns = (4, 7) if kind == "wide" else (7, 4)
    return nn.Linear(columns, rows, bias=False, dtype=dtype, device=device), None


@pytest.mark.parametrize(("via", "kind", "dtype"), CASES)
@pytest.mark.parametrize("decay", [None, 0.7])
def test_average_is_the_nearest_point_to_the_exact_mean(via, kind, dtype, decay, device):
    module, view = module_for(kind, dtype, device)
    model = stiefel.orthogonal(module, via=via, view=view, init="haar")
    start = constraint_of(model).point
    points = [close_to(start) for _ in range(5)]
    average = averages(model, points, decay=decay)
    weights = weighted(points, decay)
    expected = nearest(sum(w * X for w, X in zip(weights, points, strict=True)))
    bound = 20 * stiefel.tolerance(dtype, *start.shape[-2:])
    assert (constraint_of(average.module).point - expected).abs().max() < bound
    assert residuals(average.module) < stiefel.tolerance(dtype, *start.shape[-2:])
    assert constraint_of(average.module).via == constraint_of(model).via
    assert int(average.n_averaged) == 5


def test_the_naive_average_is_off_the_manifold_and_this_one_is_not(device):
    """Points far from each other; torch's average of points loses their length."""
    model = stiefel.orthogonal(nn.Linear(8, 8, device=device), via="rgd-c-c")
    ours, theirs = AveragedModel(model), swa_utils.AveragedModel(model)
    for _ in range(6):
        constraint_of(model).assign(geometry.haar(8, 8, determinant=1, device=device))
        ours.update_parameters(model)
        theirs.update_parameters(model)
    assert residuals(theirs.module) > 0.5
    assert residuals(ours.module) < stiefel.tolerance(torch.float32, 8, 8)


@pytest.mark.parametrize("via", WAYS)
@pytest.mark.parametrize("decay", [None, 0.9])
def test_average_of_a_constant_is_the_constant(via, decay, device):
    model = stiefel.orthogonal(nn.Linear(4, 7, device=device), via=via, init="haar")
    average = AveragedModel(model, decay=decay)
    average.update_parameters(model)
    assert equal(average.module, model)  # the first update copies, coordinates too
    for _ in range(10):
        average.update_parameters(model)
    bound = stiefel.tolerance(torch.float32, 7, 4)
    assert (average.module.weight - model.weight).abs().max() < bound
    assert torch.equal(average.mean0, constraint_of(model).point)


@pytest.mark.parametrize("kind", ["swa", "ema", "avg_fn"])
def test_ordinary_parameters_and_buffers_are_torchs_bit_for_bit(kind, device):
    options = {
        "swa": ({}, {}),
        "ema": ({"decay": 0.8}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)}),
        "avg_fn": ({"avg_fn": lambda a, b, n: 0.5 * a + 0.5 * b},) * 2,
    }[kind]
    model = nn.Sequential(Model(device), nn.BatchNorm1d(2, device=device))
    for use_buffers in (False, True):
        ours = AveragedModel(model, use_buffers=use_buffers, **options[0])
        theirs = swa_utils.AveragedModel(model, use_buffers=use_buffers, **options[1])
        optimizer = build(model, lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 6, device=device)).square().mean().backward()
            model[1].running_mean += step
            optimizer.step()
            ours.update_parameters(model)
            theirs.update_parameters(model)
        for name in ("0.head.weight", "0.layers.1.bias", "1.running_mean", "1.weight"):
            a, b = ours.module.state_dict()[name], theirs.module.state_dict()[name]
            assert torch.equal(a, b)
        assert residuals(ours.module) < 1e-5


def test_a_model_in_training_and_a_saved_average_that_goes_on(device):
    model = Model(device, via=("cwy", "rgd-c-c", "own"))
    optimizer = build(model, lr=0.05)
    average = AveragedModel(model, decay=0.9)
    for seed in range(3):
        train(model, optimizer, 1, seed=seed)
        average.update_parameters(model)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    resumed = AveragedModel(Model(device, via=("cwy", "rgd-c-c", "own")), decay=0.9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(average)
    for seed in range(3, 6):
        train(model, optimizer, 1, seed=seed)
        for one in (average, resumed, copied):
            one.update_parameters(model)
    assert equal(average, resumed)
    assert equal(average, copied)
    assert residuals(average.module) < 1e-5
    assert not equal(average.module, model)
    model.load_state_dict(average.module.state_dict())  # the average is a state of the model
    assert equal(average.module, model)


def test_tied_weights_are_averaged_once(device):
    first, second = nn.Linear(5, 5, device=device), nn.Linear(5, 5, device=device)
    stiefel.orthogonal(first, via="cwy")
    second.parametrizations = first.parametrizations
    second.__class__ = first.__class__
    del second._parameters["weight"]
    model = nn.Sequential(first, second)
    assert len(list(stiefel.constraints(model))) == 1
    average = averages(model, [geometry.haar(5, 5, determinant=1, device=device) for _ in range(3)])
    assert [name for name, _ in average.named_buffers() if "mean" in name] == ["mean0"]
    assert torch.equal(average.module[0].weight, average.module[1].weight)


@pytest.mark.parametrize("via", ["rgd-c-c", "cwy", "own"])
def test_a_singular_mean_keeps_the_average_and_recovers(via, device):
    """X and -X have no mean; a third point makes one again."""
    model = stiefel.orthogonal(nn.Linear(4, 4, dtype=torch.float64, device=device), via=via)
    X = constraint_of(model).point.clone()
    average = averages(model, [X])
    constraint_of(model).assign(-X)
    with pytest.warns(UserWarning, match="the averaged weight weight stays .* lost a rank"):
        average.update_parameters(model)
    assert (constraint_of(average.module).point - X).abs().max() < 1e-12
    assert average.mean0.abs().max() < 1e-12
    Y = close_to(X, 0.1)
    constraint_of(model).assign(Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average.update_parameters(model)
    assert (constraint_of(average.module).point - Y).abs().max() < 1e-9


def test_two_points_of_opposite_determinant_have_no_mean(device):
    """X + Y = X (I + X^H Y), and X^H Y, of determinant -1, has the eigenvalue -1."""
    model = stiefel.orthogonal(nn.Linear(5, 5, dtype=torch.float64, device=device), via="rgd-c-c")
    points = [
        geometry.haar(5, 5, determinant=d, dtype=torch.float64, device=device) for d in (1, -1)
    ]
    with pytest.warns(UserWarning, match="lost a rank"):
        average = averages(model, points)
    assert (constraint_of(average.module).point - points[0]).abs().max() < 1e-12


def test_only_the_singular_matrix_of_a_batch_is_kept(device):
    model = nn.Module()
    model.point = stiefel.ManifoldParameter(
        geometry.haar(5, 2, (2,), dtype=torch.float64, device=device)
    )
    X = model.point.detach().as_subclass(torch.Tensor).clone()
    Y = torch.stack([-X[0], close_to(X[1])])
    with pytest.warns(UserWarning, match="averaged weight point stays"):
        average = averages(model, [X, Y])
    now = constraint_of(average.module).point
    assert (now[0] - X[0]).abs().max() < 1e-12
    assert (now[1] - nearest((X[1] + Y[1]) / 2)).abs().max() < 1e-12


def test_a_chart_that_cannot_hold_the_mean_says_so(device):
    """Two reflections of seven: means need more."""
    model = stiefel.orthogonal(
        nn.Linear(7, 7, device=device), via="cwy", reflections=2, init="chart"
    )
    average = AveragedModel(model)
    average.update_parameters(model)
    before = copy.deepcopy(average.module)
    stiefel.orthogonal(model, via="cwy", reflections=2, init="chart")
    with pytest.warns(UserWarning, match=r"stays what it was.*stiefel\.convert"):
        average.update_parameters(model)
    assert torch.equal(average.module.weight, before.weight)
    stiefel.convert(model, "riemannian")
    whole = AveragedModel(model)
    for _ in range(2):
        whole.update_parameters(model)
    assert residuals(whole.module) < 1e-5


def test_points_on_other_manifolds_are_projected(device):
    model = nn.Module()
    model.point = geoopt.ManifoldParameter(
        torch.tensor([1.0, 0.0], device=device), manifold=geoopt.Sphere()
    )
    average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        model.point.copy_(torch.tensor([0.0, 1.0]))
    average.update_parameters(model)
    torch.testing.assert_close(
        average.module.point.detach().as_subclass(torch.Tensor),
        torch.full((2,), 0.5**0.5, device=device),
    )


def test_rows_in_sixteen_bits_are_averaged_in_float32(device):
    model = stiefel.orthogonal(
        nn.Linear(6, 6, bias=False, device=device), via="rgd-c-c", weight_dtype=torch.bfloat16
    )
    average = averages(model, [close_to(constraint_of(model).storage.exact_point(), 0.1)] * 3)
    assert average.mean0.dtype == torch.float32
    assert geometry.orthonormality_residual(average.mean0) < 1e-5


def test_what_is_refused(device):
    model = Model(device)
    with pytest.raises(ConfigurationError, match="one way to average"):
        AveragedModel(model, avg_fn=lambda a, b, n: b, decay=0.9)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        AveragedModel(model, decay=1.5)
    average = AveragedModel(model)
    stiefel.convert(model.layers[0], "rgd-c-c")
    with pytest.raises(ConfigurationError, match=r"layers\.0\.weight.*riemannian"):
        average.update_parameters(model)
    assert int(average.n_averaged) == 0
