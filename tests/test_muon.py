"""StiefelMuon: matrix signs, and the steepest direction against duality and known solutions."""

from __future__ import annotations

import itertools

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.optim import StiefelMuon
from stiefel.optim.steepest import (
    dual_ascent,
    matrix_sign,
    projected_direction,
    steepest_direction,
)
from tests.registry import DOUBLE, SHAPES

TALL = [(6, 3), (16, 5), (5, 4), (7, 1)]


def spectral(Z):
    return torch.linalg.matrix_norm(Z, 2)


def inner(G, A):
    return (G.conj() * A).sum((-2, -1)).real


def gradients(n, p, dtype, device):
    """Gaussian, of rank one, and with columns of falling size."""
    G = torch.randn(n, p, dtype=dtype, device=device)
    fall = torch.logspace(0, -2, p, device=device, dtype=torch.float64)
    return [G, G[:, :1] @ G[:1, :], G * fall]


# ---------------------------------------------------------------------------------- matrix sign
@pytest.mark.parametrize("dtype", [torch.float32, *DOUBLE], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_zero_singular_values_stay_zero(dtype, scale, device):
    U, V = (geometry.haar(n, 4, (2,), dtype=dtype, device=device) for n in (7, 4))
    s = torch.tensor([[3.0, 1.0, 0.01, 0.0], [1.0, 0.0, 0.0, 0.0]], device=device)
    Z = (U * s.unsqueeze(-2).to(dtype)) @ V.mH
    expected = (U * s.sign().unsqueeze(-2).to(dtype)) @ V.mH
    bound = 2e-3 if dtype == torch.float32 else 1e-11
    assert (matrix_sign(scale * Z) - expected).abs().max() < bound
    assert (matrix_sign(0 * Z) == 0).all()


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_skew_matrices_of_odd_order(n, device):
    K = geometry.skew(torch.randn(n, n, dtype=torch.float64, device=device))
    S = matrix_sign(K)
    assert (S + S.mT).abs().max() < 1e-12
    expected = torch.ones(n, dtype=torch.float64, device=device)
    expected[n - n % 2 :] = 0
    assert (torch.linalg.svdvals(S) - expected).abs().max() < 1e-12


# ---------------------------------------------------------------------------- steepest direction
@pytest.mark.parametrize("size", TALL, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_duality_certifies_the_direction(size, dtype, device):
    """<G, A> >= -|G + X (L + L^H)|_* for all A and L: equality says that both are optimal."""
    n, p = size
    X = geometry.haar(n, p, dtype=dtype, device=device)
    for number, G in enumerate(gradients(n, p, dtype, device)):
        duals = []
        for iterations in (1, 4, 16, 400):
            A, Z = dual_ascent(X, G, iterations)
            L = X.mH @ (Z - G)  # L + L^H of the text
            assert (Z - G - X @ L).abs().max() < 1e-12
            assert (L - L.mH).abs().max() < 1e-12
            assert geometry.tangency_residual(X, A).max() < 1e-7
            assert spectral(A) == pytest.approx(1, abs=1e-3)
            duals.append(float(torch.linalg.matrix_norm(Z, "nuc")))
            assert inner(G, A) >= -duals[-1] * (1 + 1e-3)
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(duals))
        gap = 1 + float(inner(G, A)) / duals[-1]
        assert gap < (1e-6 if number == 0 and p < 4 else 0.03)


def test_the_plain_dual_ascent_finds_the_same_value(device):
    """L <- L + a (X^H A + A^H X) with msign by SVD and falling steps, an independent solver."""
    X = geometry.haar(6, 3, dtype=torch.float64, device=device)
    G = torch.randn_like(X)
    L = -(X.mT @ G + G.mT @ X) / 4
    best = torch.inf
    for k in range(2000):
        Z = G + X @ (L + L.mT)
        U, s, Vh = torch.linalg.svd(Z, full_matrices=False)
        best = min(best, float(s.sum()))
        A = -U @ Vh
        L = L + 0.3 / (1 + k) ** 0.5 * (X.mT @ A + A.mT @ X)
    A, Z = dual_ascent(X, G, 100)
    assert float(torch.linalg.matrix_norm(Z, "nuc")) == pytest.approx(best, rel=1e-5)
    assert float(inner(G, A)) == pytest.approx(-best, rel=1e-5)


@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_no_other_tangent_direction_is_steeper(dtype, device):
    for n, p, iterations in [(6, 3, 100), (5, 5, 1), (4, 4, 1)]:
        X = geometry.haar(n, p, dtype=dtype, device=device)
        G = torch.randn_like(X)
        least = inner(G, steepest_direction(X, G, iterations))
        B = geometry.tangent_projection(X, torch.randn(2000, n, p, dtype=dtype, device=device))
        near = geometry.tangent_projection(X, steepest_direction(X, G, iterations) + 0.01 * B)
        for others in (B, near, projected_direction(X, G)[None]):
            values = inner(G, others) / spectral(others)
            assert values.min() >= least - 1e-6 * least.abs()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_square_matrices_have_a_closed_form(shape, dtype, device):
    """The nuclear norm of skew(X^H G) is the dual value there; directions are tangent anywhere."""
    batch, n, p = shape
    X = geometry.haar(n, p, batch, dtype=dtype, device=device)
    G = torch.randn_like(X)
    for A in (steepest_direction(X, G, 3), projected_direction(X, G)):
        assert geometry.tangency_residual(X, A).max() < 1e-13
        assert (inner(G, A) <= 1e-13).all()
        if n == p:
            K = geometry.skew(X.mH @ G)
            value = torch.linalg.matrix_norm(K, "nuc")
            assert (inner(G, A) + value).abs().max() < 1e-11 * value.max() + 1e-14
            assert (spectral(A) <= 1 + 1e-12).all()
        else:
            assert (spectral(A) <= 2 / 3**0.5 + 1e-12).all()


def test_projected_is_not_steepest(device):
    X = geometry.haar(8, 5, (20,), dtype=torch.float64, device=device)
    G = torch.randn_like(X)
    A, B = steepest_direction(X, G, 50), projected_direction(X, G)
    worse = inner(G, B) / spectral(B) - inner(G, A) / spectral(A)
    assert (worse > 0).all()
    assert worse.max() > 0.01


# ------------------------------------------------------------------------------------- optimizer
@pytest.mark.parametrize("options", [{}, {"direction": "projected"}, {"momentum": 0.9}], ids=str)
@pytest.mark.parametrize("size", [(6, 3), (5, 5), (4, 1), (1, 1)], ids=str)
def test_a_step_has_the_length_of_the_rate_and_zero_moves_nothing(options, size, device):
    X = geometry.haar(*size, (4,), dtype=torch.float32, device=device)
    X[3] = torch.eye(*size, device=device)
    leaf = stiefel.ManifoldParameter(X.clone(), stiefel.Stiefel("euclidean", "polar"))
    G = torch.randn_like(X) * torch.tensor([1.0, 1e-20, 1e20, 0.0], device=device)[:, None, None]
    G[3] = X[3] * 2  # normal: no tangent part
    leaf.grad = G
    StiefelMuon([leaf], lr=0.01, **options).step()
    moved = spectral(leaf.detach() - X)
    assert moved[3] < 1e-6
    if size != (1, 1):
        low = 0.0099 if "direction" not in options else 0.005
        assert (moved[:3] > low).all()
        assert (moved[:3] < 0.0117).all()
    leaf.grad = torch.zeros_like(X)
    before = leaf.detach().clone()
    StiefelMuon([leaf], lr=0.1, **options).step()
    assert (leaf.detach() - before).abs().max() < 1e-6


def test_maximize_goes_the_other_way(device):
    leaf = stiefel.ManifoldParameter(geometry.haar(6, 3, dtype=torch.float64, device=device))
    X, G = leaf.detach().clone(), torch.randn(6, 3, dtype=torch.float64, device=device)
    leaf.grad = G
    StiefelMuon([leaf], lr=1e-4, maximize=True).step()
    A = steepest_direction(X, G, 8)
    assert (leaf.detach() - (X - 1e-4 * A)).abs().max() < 1e-7


def test_what_it_refuses(device):
    leaf = stiefel.ManifoldParameter(geometry.haar(6, 3, device=device))
    for options in ({"iterations": 0}, {"momentum": -1}, {"nesterov": True}, {"weight_decay": 1}):
        with pytest.raises(ConfigurationError):
            StiefelMuon([leaf], lr=0.1, **options)
    with pytest.raises(UnknownNameError):
        StiefelMuon([leaf], lr=0.1, direction="muon")
