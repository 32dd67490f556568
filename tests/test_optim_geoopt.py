"""RGD on geoopt's manifolds, and geoopt's optimizers on ours."""

from __future__ import annotations

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import RGD


def point(*shape, dtype=torch.float64, device="cpu", inner="canonical", retraction="cayley"):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, stiefel.Stiefel(inner, retraction))


def with_gradient(leaf, scale=1.0):
    leaf.grad = scale * torch.randn_like(leaf.detach().as_subclass(torch.Tensor))
    return leaf


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "manifold",
    [geoopt.EuclideanStiefel(), geoopt.CanonicalStiefel()],
    ids=lambda m: type(m).__name__,
)
def test_runs_on_geoopts_stiefel_manifolds(manifold, momentum, device):
    C = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64, device=device))
    leaves = [
        geoopt.ManifoldParameter(geometry.haar(6, 2, dtype=torch.float64), manifold=manifold)
        for _ in range(2)
    ]
    optimizer = RGD(leaves, lr=0.05 * (1 - momentum), momentum=momentum)
    for _ in range(600):
        optimizer.zero_grad()
        sum((leaf * (C @ leaf)).sum() for leaf in leaves).backward()
        optimizer.step()
    for leaf in leaves:
        assert float((leaf * (C @ leaf)).sum().detach()) == pytest.approx(3.0, abs=1e-4)
        assert geometry.orthonormality_residual(leaf) < 1e-7


def test_runs_on_manifolds_of_vectors_and_of_numbers(device):
    sphere = geoopt.ManifoldParameter(torch.eye(3)[:2].clone(), manifold=geoopt.Sphere())
    ball = geoopt.ManifoldParameter(torch.zeros(4), manifold=geoopt.PoincareBall())
    flat = geoopt.ManifoldParameter(torch.ones(2, 3), manifold=geoopt.Euclidean())
    before = flat.detach().clone()
    optimizer = RGD([sphere, ball, flat], lr=0.1, momentum=0.5)
    for _ in range(3):
        for leaf in (sphere, ball, flat):
            leaf.grad = torch.ones_like(leaf)
        optimizer.step()
    assert (sphere.norm(dim=-1) - 1).abs().max() < 1e-6
    assert 0 < ball.norm() < 1
    assert torch.allclose(flat, before - 0.1 * (1 + 1.5 + 1.75))


@pytest.mark.parametrize("kind", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam])
@pytest.mark.parametrize("retraction", ["cayley", "qr"])
def test_geoopts_optimizers_run_on_our_manifold(kind, retraction, device):
    leaf = point(6, 2, device=device, retraction=retraction)
    C = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64, device=device))
    optimizer = kind([leaf], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (leaf * (C @ leaf)).sum().backward()
        optimizer.step()
    assert float((leaf * (C @ leaf)).sum().detach()) == pytest.approx(3.0, abs=5e-3)
    assert geometry.orthonormality_residual(leaf) < 1e-10


def test_without_momentum_it_equals_geoopts_sgd_where_the_retraction_is_the_same(device):
    ours = point(6, 2, inner="euclidean", retraction="qr")
    theirs = geoopt.ManifoldParameter(ours.detach().clone(), manifold=geoopt.EuclideanStiefel())
    first, second = RGD([ours], lr=0.2), geoopt.optim.RiemannianSGD([theirs], lr=0.2)
    for _ in range(5):
        with_gradient(ours)
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
    assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_manifold_that_writes_into_what_it_is_given_does_not_reach_the_gradient(momentum, device):
    """geoopt's Lorentz manifold flips the sign of the first coordinate of its argument."""
    manifold = geoopt.Lorentz()
    leaf = geoopt.ManifoldParameter(manifold.random_normal(5, 4).to(device), manifold=manifold)
    leaf.grad = torch.randn(5, 4, device=device)
    before = leaf.grad.clone()
    RGD([leaf], lr=0.1, momentum=momentum).step()
    assert torch.equal(leaf.grad, before)
