"""POGO: its correction, the bound on the step, its base directions, what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.optim import POGO
from stiefel.optim.near import tangent_field, tangent_part
from stiefel.optim.pogo import correction_bound, normal_correction, spectral_norm_bound
from tests.registry import DOUBLE, SHAPES

NEAR = stiefel.Stiefel(tolerance=0.05)


def residual(X):
    return X.mH @ X - torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def point(*shape, dtype=torch.float64, device="cpu", manifold=NEAR):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, manifold)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_one_step_is_the_formula(shape, dtype, device):
    """M^H M = I + eta^2 Phi^H Phi exactly, and -3/4 E^2 + E^3/4 is left of E = M^H M - I."""
    batch, n, p = shape
    wide = stiefel.Stiefel(tolerance=0.5)
    leaf = point(*batch, n, p, dtype=dtype, device=device, manifold=wide)
    X, G = leaf.detach().clone(), 0.1 * torch.randn_like(leaf.detach())
    W = G @ X.mH
    Phi = (W - W.mH) @ X / 2
    M = X - 0.3 * Phi
    E = 0.09 * Phi.mH @ Phi
    assert (residual(M) - E).abs().max() < 1e-14
    leaf.grad = G.clone()
    POGO([leaf], lr=0.3, max_step=1.0).step()
    assert (leaf.detach() - (M - M @ residual(M) / 2)).abs().max() < 1e-14
    assert (residual(leaf.detach()) - (-3 / 4 * E @ E + E @ E @ E / 4)).abs().max() < 1e-14
    assert torch.equal(leaf.grad, G)


@pytest.mark.parametrize("corrections", [1, 2, 3])
@pytest.mark.parametrize("step", [0.05, 0.3, 1.0])
def test_the_bound_is_met_by_one_step_of_that_length(step, corrections, device):
    X = geometry.haar(6, 1, dtype=torch.float64, device=device)
    Phi = geometry.random_tangent(X)
    M = normal_correction(X - step * Phi / Phi.norm(), corrections)
    bound = correction_bound(step, corrections)
    assert float(residual(M).abs()) == pytest.approx(bound, rel=1e-6, abs=1e-15)
    if corrections == 1 and step < 0.5:
        assert bound == pytest.approx(0.75 * step**4, rel=0.04)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e30])
@pytest.mark.parametrize("shape", [(3, 6, 3), (4, 4), (5, 1)], ids=str)
def test_steps_too_large_are_shortened(size, shape, device):
    """Without it they leave the neighbourhood where the correction converges."""
    leaf = point(*shape, dtype=torch.float32, device=device)
    optimizer = POGO([leaf], lr=100.0)
    for _ in range(20):
        leaf.grad = size * torch.randn_like(leaf.detach())
        before = leaf.detach().clone()
        optimizer.step()
        assert (leaf.detach() - before).abs().max() > 0.01
        assert optimizer.feasibility()[0] < optimizer.bound()[0] + 1e-6
    assert optimizer.feasibility()[0] > 1e-4


@pytest.mark.parametrize("shape", [*SHAPES, ((), 300, 260)], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_spectral_norm_bound(shape, scale, device):
    """From above: at most p^(1/16) times the norm, or 1.15 where it is an estimate."""
    batch, n, p = shape
    X = geometry.haar(n, p, batch, dtype=torch.float32, device=device)
    G = torch.randn_like(X)
    for kind in (G, G[..., :1] @ G[..., :1, :], G * torch.logspace(0, -3, p, device=device)):
        Phi = tangent_field(X, kind)[0]
        norm = torch.linalg.matrix_norm(Phi, 2)[..., None, None]
        ratio = spectral_norm_bound(scale * Phi) / (scale * norm)
        ratio = ratio[norm > 1e-5]
        assert ratio.numel() == 0 or ratio.min() > 1 - 1e-5
        assert ratio.numel() == 0 or ratio.max() < max(p ** (1 / 16), 1.15) + 1e-5
    assert (spectral_norm_bound(torch.zeros_like(X)) == 0).all()


def test_with_three_corrections_points_stay_on_the_manifold(device):
    leaf = point(3, 8, 5, device=device, manifold=stiefel.Stiefel())
    optimizer = POGO([leaf], lr=0.1, corrections=3, max_step=0.1)
    for _ in range(50):
        leaf.grad = torch.randn_like(leaf.detach())
        optimizer.step()
    assert geometry.orthonormality_residual(leaf).max() < 1e-14


@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_adam_by_the_formulas(dtype, device):
    """m, v and the step count of Adam, with |G|_F^2 of the tangent part for the second moment."""
    leaf = point(2, 6, 3, dtype=dtype, device=device)
    b1, b2, eps, lr = 0.8, 0.95, 1e-3, 0.02
    optimizer = POGO([leaf], lr=lr, base="adam", betas=(b1, b2), eps=eps, max_step=None)
    m = torch.zeros_like(leaf.detach())
    v = torch.zeros(2, 1, 1, dtype=torch.float64, device=device)
    for k in range(1, 5):
        G, X = torch.randn_like(m), leaf.detach().clone()
        leaf.grad = G
        u = tangent_part(X, G)
        m = b1 * m + (1 - b1) * u
        v = b2 * v + (1 - b2) * u.abs().square().sum((-2, -1), keepdim=True)
        direction = m / (1 - b1**k) / ((v / (1 - b2**k)).sqrt() + eps)
        W = direction @ X.mH
        expected = normal_correction(X - lr * (W - W.mH) @ X / 2)
        optimizer.step()
        assert (leaf.detach() - expected).abs().max() < 1e-14
    state = optimizer.state[leaf]
    assert (state["exp_avg"] - m).abs().max() < 1e-14
    assert (state["exp_avg_sq"] - v).abs().max() < 1e-13
    assert float(state["step"]) == 4


def test_adam_does_not_see_the_scale_of_gradients(device):
    first = point(6, 3, device=device)
    second = copy.deepcopy(first)
    optimizers = [POGO([leaf], lr=0.1, base="adam", eps=1e-30) for leaf in (first, second)]
    for _ in range(4):
        first.grad = torch.randn_like(first.detach())
        second.grad = 1000 * first.grad
        for optimizer in optimizers:
            optimizer.step()
    assert (first - second).abs().max() < 1e-13


def test_maximize_is_descent_along_minus_the_gradient(device):
    leaf = point(6, 3, device=device)
    G = torch.randn_like(leaf.detach())
    results = []
    for sign, maximize in ((1, True), (-1, False), (1, False)):
        for max_step in (0.5, None):
            twin = copy.deepcopy(leaf)
            twin.grad = sign * G
            POGO([twin], lr=0.01, maximize=maximize, max_step=max_step).step()
            results.append(twin.detach())
    up, down = results[:4], results[4:]
    assert all(torch.equal(up[0], other) for other in up[1:])
    assert not any(torch.allclose(up[0], other) for other in down)


def test_what_it_refuses(device):
    leaf = point(6, 3, device=device)
    for options in (
        {"corrections": 0},
        {"max_step": 0.0},
        {"max_step": 1.1},
        {"max_step": 0.9},  # its bound is above the tolerance of the manifold
        {"base": "adam", "momentum": 0.9},
        {"base": "adam", "eps": 0.0},
        {"base": "adam", "betas": (1.0, 0.9)},
        {"nesterov": True},
    ):
        with pytest.raises(ConfigurationError):
            POGO([leaf], lr=0.1, **options)
    with pytest.raises(UnknownNameError):
        POGO([leaf], lr=0.1, base="adamw")
    with pytest.raises(ConfigurationError, match="tolerance"):
        POGO([point(6, 3, device=device, manifold=stiefel.Stiefel())], lr=0.1)
