"""Landing: the field and its safe step, against the formulas of the papers in n x n matrices."""

from __future__ import annotations

import copy

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError
from stiefel.optim import RGD, Landing
from stiefel.optim.landing import landing_field, safe_rate
from stiefel.optim.near import largest_part, tangent_field, tangent_part
from tests.registry import DOUBLE, SHAPES

NEAR = stiefel.Stiefel(tolerance=0.5)


def eye_of(X):
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def distance(X):
    return torch.linalg.matrix_norm(X.mH @ X - eye_of(X))


def near(batch, n, p, dtype, device, off=0.05):
    X = geometry.haar(n, p, batch, dtype=dtype, device=device)
    return X + off * torch.randn_like(X) / (n * p) ** 0.5


def point(*shape, dtype=torch.float64, device="cpu", manifold=NEAR):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, manifold)


def step_once(leaf, gradient, kind=Landing, **options):
    twin = copy.deepcopy(leaf)
    twin.grad = gradient.clone()
    kind([twin], **options).step()
    return twin.detach()


# ------------------------------------------------------------------------------------ the field
@pytest.mark.parametrize("halves_from", [2, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_field_is_the_dense_formula(halves_from, shape, dtype, device, monkeypatch):
    """skew(G X^H) X + lambda X (X^H X - I); large Gram matrices are made by halves."""
    monkeypatch.setattr("stiefel.geometry.gram._HALVES_FROM", halves_from)
    batch, n, p = shape
    X = near(batch, n, p, dtype, device)
    G = torch.randn_like(X)
    W = G @ X.mH
    Phi, N = (W - W.mH) @ X / 2, X @ (X.mH @ X - eye_of(X))
    bound = 1e-13 * n
    assert (tangent_field(X, G)[0] - Phi).abs().max() < bound
    for sign in (1, -1):
        F, d = landing_field(X, G, 0.7, 0.5, sign)
        assert (F - (sign * Phi + 0.7 * N)).abs().max() < bound
    assert (d.squeeze((-2, -1)) - distance(X)).abs().max() < bound
    outside, _ = landing_field(X, G, 0.7, 0.0)
    assert (outside - 0.7 * N).abs().max() < bound


@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_the_two_terms_are_orthogonal_and_the_first_keeps_the_level_set(dtype, device):
    X = near((3,), 7, 4, dtype, device, off=0.5)
    Phi = tangent_field(X, torch.randn_like(X))[0]
    N = X @ (X.mH @ X - eye_of(X))
    assert (X.mH @ Phi + Phi.mH @ X).abs().max() < 1e-14
    assert (N.conj() * Phi).sum((-2, -1)).real.abs().max() < 1e-14


def test_rates_transfer_from_both_metrics(device):
    """Twice the rate of the canonical metric; for square matrices that of the Euclidean one."""
    for (n, p), inner, factor in [((7, 3), "canonical", 2), ((5, 5), "euclidean", 1)]:
        leaf = point(n, p, device=device)
        G, rate = torch.randn_like(leaf.detach()), 1e-6
        other = stiefel.ManifoldParameter(leaf.detach().clone(), stiefel.Stiefel(inner))
        ours = step_once(leaf, G, lr=factor * rate)
        theirs = step_once(other, G, RGD, lr=rate)
        moved = (theirs - leaf.detach()).abs().max()
        assert moved > 1e-7
        assert (ours - theirs).abs().max() < 1e-4 * moved


# -------------------------------------------------------------------------------- the safe step
@pytest.mark.parametrize("attraction", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_safe_steps_stay_within_the_radius(attraction, dtype, device):
    """500 matrices at all distances, gradients of sizes 1e-3 to 1e3; some end near the radius."""
    X = geometry.haar(6, 3, (500,), dtype=dtype, device=device)
    off = torch.logspace(-4, -0.9, 500, device=device, dtype=torch.float64)[:, None, None]
    X = X + off * torch.randn_like(X)
    X = X[distance(X) <= 0.5]
    G = torch.randn_like(X) * 10 ** (6 * torch.rand(len(X), 1, 1, device=device).double() - 3)
    F, d = landing_field(X, G, attraction, 0.5)
    g = torch.linalg.vector_norm(F, dim=(-2, -1), keepdim=True)
    safe = safe_rate(d, g, attraction, 0.5)
    assert (safe > 0).all()
    for part in (1, 0.5, 0.1):
        assert distance(X - part * safe * F).max() <= 0.5 * (1 + 1e-12)
    assert distance(X - safe * F).max() > 0.4
    pull = attraction * d * (1 - d)
    formula = (pull + (pull**2 + g**2 * (0.5 - d)).sqrt()) / g**2
    assert torch.allclose(safe, formula.clamp_max(1 / (2 * attraction)), rtol=1e-12)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e3, 1e18, 1e30])
def test_any_gradient_leaves_the_points_within_the_radius(size, device):
    leaves = [point(n, p, dtype=torch.float32, device=device) for n, p in [(6, 3), (4, 4), (3, 1)]]
    optimizer = Landing(leaves, lr=0.1, momentum=0.5)
    for _ in range(5):
        for leaf in leaves:
            leaf.grad = size * torch.randn_like(leaf.detach())
        optimizer.step()
    assert optimizer.feasibility()[0] <= optimizer.bound()[0] == 0.5
    if size == 0:
        assert optimizer.feasibility()[0] < 1e-6


def test_without_a_gradient_the_distance_shrinks_by_the_known_factor(device):
    leaf = point(6, 3, device=device)
    leaf.data *= 1 + 1e-4
    before = distance(leaf.detach())
    after = step_once(leaf, torch.zeros_like(leaf.detach()), lr=0.1, attraction=0.8)
    assert distance(after) / before == pytest.approx(1 - 2 * 0.1 * 0.8, rel=1e-3)


def test_a_matrix_outside_of_the_radius_comes_back_before_it_descends(device):
    leaf = point(8, 6, device=device)
    leaf.data *= 1.2  # entries of X^H X - I are 0.44, its norm is 1.08
    optimizer = Landing([leaf], lr=0.1)
    distances = [float(distance(leaf.detach()))]
    for _ in range(40):
        leaf.grad = 100 * torch.randn_like(leaf.detach())
        optimizer.step()
        distances.append(float(distance(leaf.detach())))
    assert distances[0] > 1
    out = [d for d in distances if d > 0.5]
    assert len(out) > 2
    assert out == sorted(out, reverse=True)
    assert all(d <= 0.5 for d in distances[len(out) :])


def test_a_small_radius_is_kept_too(device):
    thin = stiefel.Stiefel(tolerance=0.01)
    leaf = point(5, 6, 3, dtype=torch.float32, device=device, manifold=thin)
    optimizer = Landing([leaf], lr=0.1, radius=0.01)
    for _ in range(50):
        leaf.grad = torch.randn_like(leaf.detach())
        optimizer.step()
        assert distance(leaf.detach()).max() < 0.01
    assert 1e-4 < optimizer.feasibility()[0] < 0.01


# --------------------------------------------------------------------------------------- options
def test_maximize_is_descent_along_minus_the_gradient(device):
    leaf = point(6, 3, device=device)
    leaf.data *= 1.01
    G = torch.randn_like(leaf.detach())
    up = step_once(leaf, G, lr=0.1, maximize=True)
    assert torch.equal(up, step_once(leaf, -G, lr=0.1))
    assert not torch.allclose(up, step_once(leaf, G, lr=0.1))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_torch_on_tangent_parts(nesterov, device):
    leaf = point(6, 3, device=device)
    optimizer = Landing([leaf], lr=0.01, momentum=0.9, nesterov=nesterov)
    plain = torch.nn.Parameter(torch.zeros_like(leaf.detach()))
    sgd = torch.optim.SGD([plain], lr=1.0, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        G, X = torch.randn_like(plain), leaf.detach().clone()
        leaf.grad, plain.grad = G, tangent_part(X, G)
        last = plain.detach().clone()
        sgd.step()
        optimizer.step()
        F, _ = landing_field(X, last - plain.detach(), 1.0, 0.5)
        assert (leaf.detach() - (X - 0.01 * F)).abs().max() < 1e-15
    buffers = (optimizer.state[leaf]["momentum_buffer"], sgd.state[plain]["momentum_buffer"])
    assert torch.equal(*buffers)


def test_normal_parts_of_gradients_do_not_move_averages(device):
    """On the manifold tr(X^H X) is constant: it may be added to the loss, with momentum too."""
    C = torch.randn(8, 8, dtype=torch.float64, device=device)
    first = point(8, 3, device=device)
    second = copy.deepcopy(first)
    for leaf, more in ((first, 0.0), (second, 20.0)):
        optimizer = Landing([leaf], lr=0.002, momentum=0.9, attraction=20.0)
        for _ in range(100):
            optimizer.zero_grad()
            ((leaf * (C @ leaf)).sum() + more * leaf.square().sum()).backward()
            optimizer.step()
    assert (first - second).abs().max() < 0.02


def test_what_it_refuses(device):
    leaf = point(6, 3, device=device)
    for options in (
        {"radius": 1.0},
        {"radius": 0.0},
        {"attraction": 0.0},
        {"momentum": -0.1},
        {"nesterov": True},
        {"radius": 0.6},
        {"weight_decay": 0.1},
    ):
        with pytest.raises(ConfigurationError):
            Landing([leaf], lr=0.1, **options)
    with pytest.raises(ConfigurationError, match=r"tolerance=0\.5[0-9]"):
        Landing([point(6, 3, device=device, manifold=stiefel.Stiefel())], lr=0.1)
    with pytest.raises(TypeError):
        Landing([leaf], lr=0.1, lamda=1.0)  # pyright: ignore[reportCallIssue]


def test_ordinary_parameters_and_non_finite_gradients(device):
    leaf, bad = point(6, 3, device=device), point(6, 3, device=device)
    plain = torch.nn.Parameter(torch.ones(3, device=device))
    twin = torch.nn.Parameter(torch.ones(3, device=device))
    rate = torch.tensor(0.1, device=device)
    optimizer = Landing([leaf, bad, plain], lr=rate, euclidean="sgd", skip_nonfinite=True)
    before = [leaf.detach().clone(), bad.detach().clone()]
    leaf.grad, bad.grad = torch.randn_like(before[0]), torch.full_like(before[0], torch.nan)
    plain.grad = twin.grad = torch.randn(3, device=device)
    optimizer.step()
    torch.optim.SGD([twin], lr=0.1).step()
    assert torch.equal(plain, twin)
    assert torch.equal(bad.detach(), before[1])
    assert not torch.equal(leaf.detach(), before[0])
    assert optimizer.feasibility()[0] < 0.5


def test_feasibility_is_a_number_for_each_group(device):
    far = point(6, 3, device=device)
    far.data *= 1.1
    plain = torch.nn.Parameter(torch.ones(3, device=device))
    groups = [{"params": [point(4, 4, device=device), far]}, {"params": [plain]}]
    optimizer = Landing(groups, lr=0.1, euclidean="adam")
    assert optimizer.feasibility() == [pytest.approx(0.21), 0.0]
    assert optimizer.bound() == [0.5, 0.5]


def test_largest_part_scales_any_matrix(device):
    Z = torch.tensor([[0.0, 0.0], [-3.0, 2.0]], device=device)
    assert float(largest_part(Z)) == 3.0
    assert float(largest_part(torch.complex(Z, 5 * Z.abs()))) == 15.0
    assert torch.equal(Z[:1] / largest_part(Z[:1]), Z[:1])
