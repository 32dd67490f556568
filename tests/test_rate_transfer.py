"""The table of docs/optimizers.md that says how a learning rate carries over: each row, checked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.optim import POGO, RGD, Landing, RGDAdam, RiemannianAdam, StiefelMuon

ETA = 1e-5


def step(kind, manifold, X, G, lr, **options):
    """How far one step moves a point, ``X_1 - X``."""
    leaf = stiefel.ManifoldParameter(X.clone(), manifold)
    leaf.grad = G.clone()
    kind([leaf], lr=lr, **options).step()
    return leaf.detach().as_subclass(torch.Tensor) - X


def pair(n, p, device, dtype=torch.float64):
    X = geometry.haar(n, p, dtype=dtype, device=device)
    return X, torch.randn(n, p, dtype=dtype, device=device)


def assert_same_to_first_order(a, b):
    """Steps of about ETA agree up to its square."""
    assert a.norm() > ETA / 10
    assert (a - b).norm() < 100 * ETA**2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_square_weights_take_half_the_step_in_the_euclidean_metric(dtype, device):
    X, G = pair(6, 6, device, dtype)
    canonical = step(RGD, stiefel.Stiefel("canonical"), X, G, 0.3)
    euclidean = step(RGD, stiefel.Stiefel("euclidean"), X, G, 0.6)
    assert (canonical - euclidean).abs().max() < 1e-13


def test_tall_weights_take_another_direction(device):
    X, G = pair(7, 3, device)
    canonical = step(RGD, stiefel.Stiefel("canonical"), X, G, ETA)
    euclidean = step(RGD, stiefel.Stiefel("euclidean"), X, G, ETA)
    assert (canonical - euclidean).norm() > 0.1 * ETA
    assert (canonical - 2 * euclidean).norm() > 0.1 * ETA
    G = G - X @ (X.mT @ G)  # orthogonal to the columns: there both are the gradient
    for metric in ("canonical", "euclidean"):
        assert_same_to_first_order(step(RGD, stiefel.Stiefel(metric), X, G, ETA), -ETA * G)


@pytest.mark.parametrize("sizes", [(6, 6), (7, 3)], ids=str)
@pytest.mark.parametrize(("kind", "tolerance"), [(Landing, 0.5), (POGO, 0.05)])
def test_landing_and_pogo_take_twice_the_canonical_rate(kind, tolerance, sizes, device):
    X, G = pair(*sizes, device)
    near = step(kind, stiefel.Stiefel(tolerance=tolerance), X, G, 2 * ETA)
    assert_same_to_first_order(near, step(RGD, stiefel.Stiefel("canonical"), X, G, ETA))


@pytest.mark.parametrize(
    ("via", "rgd_rate", "retraction", "sizes"),
    [
        ("cayley", 4.0, "cayley", (6, 6)),
        ("matrix_exp", 1.0, "exp", (6, 6)),
        ("matrix_exp", 1.0, "exp", (7, 3)),
    ],
)
def test_charts_of_angles_at_their_base_under_sgd(via, rgd_rate, retraction, sizes, device):
    layer = nn.Linear(sizes[1], sizes[0], bias=False, dtype=torch.float64, device=device)
    stiefel.orthogonal(layer, via=via, rebase_every=1, init="haar")
    (constraint,) = stiefel.constraints(layer)
    X = constraint.point.clone()
    G = torch.randn_like(layer.weight)
    optimizer = stiefel.optim.build(layer, lr=1.0, lr_orthogonal=ETA, optimizer="sgd")
    (layer.weight * G).sum().backward()
    optimizer.step()
    moved = constraint.point - X
    manifold = stiefel.Stiefel("canonical", retraction)
    assert_same_to_first_order(moved, step(RGD, manifold, X, G, rgd_rate * ETA))


@pytest.mark.parametrize("via", ["cwy", "tcwy", "householder", "own", "polar"])
def test_scale_free_charts_take_a_step_that_falls_with_the_square_of_their_scale(via, device):
    layer = nn.Linear(3, 7, bias=False, dtype=torch.float64, device=device)
    stiefel.orthogonal(layer, via=via, init="haar")
    (constraint,) = stiefel.constraints(layer)
    (leaf,), X = constraint.leaves, constraint.point.clone()
    V, G, moved = leaf.detach().clone(), torch.randn(7, 3, dtype=torch.float64, device=device), []
    for scale in (1.0, 3.0):
        with torch.no_grad():
            leaf.copy_(scale * V)
        assert (constraint.point - X).abs().max() < 1e-12
        layer.zero_grad()
        (layer.weight * G).sum().backward()
        torch.optim.SGD([leaf], lr=ETA).step()
        moved.append(constraint.point - X)
    assert_same_to_first_order(moved[0], 9 * moved[1])


def test_kernels_take_a_step_that_falls_with_the_square_of_q(device):
    """The point is Om = q K, q = sqrt(kh kw): dL/dOm = (1/q) dL/dK, and K moves by 1/q of Om."""
    layer = nn.Conv2d(2, 5, (3, 2), bias=False, dtype=torch.float64, device=device)
    stiefel.orthogonal(layer, via="riemannian", inner="euclidean")
    q = math.sqrt(6)
    K = layer.weight.detach().clone()
    dK = torch.randn_like(K)
    (constraint,) = stiefel.constraints(layer)
    X = constraint.point.clone()
    (layer.weight * dK).sum().backward()
    ours = constraint.leaves[0].grad
    matrix = dK.permute(2, 3, 1, 0).reshape(-1, 5)
    assert float(ours.norm() * q) == pytest.approx(float(matrix.norm()), rel=1e-12)
    RGD(constraint.leaves, lr=ETA).step()
    assert float((layer.weight.detach() - K).norm() * q) == pytest.approx(
        float((constraint.point - X).norm()), rel=1e-6
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("sizes", [(6, 6), (9, 4)], ids=str)
def test_lengths_of_steps_that_the_rate_sets(sizes, scale, device):
    """The first step of each, whatever the size of the gradient."""
    X, G = pair(*sizes, device)
    G, lr = scale * geometry.tangent_projection(X, G), 1e-4
    euclidean, canonical = stiefel.Stiefel("euclidean"), stiefel.Stiefel("canonical")
    length = step(RGDAdam, euclidean, X, G, lr, eps=1e-30).norm()
    assert length == pytest.approx(lr, rel=1e-3)
    for manifold in (euclidean, canonical):
        moved = step(RiemannianAdam, manifold, X, G, lr, eps=1e-30)
        assert manifold.inner(X, moved).sqrt() == pytest.approx(lr, rel=1e-3)
    moved = step(StiefelMuon, stiefel.Stiefel("euclidean", "polar"), X, G, lr)
    assert torch.linalg.matrix_norm(moved, 2) == pytest.approx(lr, rel=1e-3)
    if sizes == (6, 6):  # an even order: all singular values of a step are equal
        assert moved.norm() == pytest.approx(6**0.5 * lr, rel=1e-3)
