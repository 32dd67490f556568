"""`stiefel.optim.clip_grad_norm_`: the norm on the manifolds, one factor for all gradients."""

from __future__ import annotations

import copy

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import (
    ConfigurationError,
    LostManifoldError,
    NonFiniteError,
    UnknownNameError,
)
from stiefel.optim import clip_grad_norm_
from tests.mixed_model import Model
from tests.registry import DOUBLE, MANIFOLDS, SHAPES

every_manifold = pytest.mark.parametrize(
    "manifold", [m for m in MANIFOLDS if m.retraction in ("cayley", "qr")], ids=repr
)


def with_noise(leaf):
    leaf.grad = torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaf


def leaf_on(manifold, batch, n, p, dtype, device):
    value = geometry.haar(n, p, batch, dtype=dtype, device=device)
    return with_noise(stiefel.ManifoldParameter(value, manifold))


def slow_square(leaf):
    """The squared norm by the definition: the largest slope of <G, u> over tangent |u|_X = 1.

    It is <G, P G> for the metric's own gradient: sum over an orthonormal basis of the tangent
    space of the squared slopes.
    """
    n, p = leaf.shape[-2:]
    square = 0.0
    for X, G in zip(leaf.detach().reshape(-1, n, p), leaf.grad.reshape(-1, n, p), strict=True):
        basis = []
        units = [1.0, 1j] if X.is_complex() else [1.0]
        for i in range(n):
            for j in range(p):
                for unit in units:
                    E = torch.zeros_like(X)
                    E[i, j] = unit
                    basis.append(geometry.tangent_projection(X, E))
        V = torch.stack(basis)
        gram = torch.stack([leaf.manifold.inner(X, v.expand_as(V), V) for v in V])
        slopes = (V.conj() * G).sum((1, 2)).real
        square += float(slopes @ torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ slopes)
    return square


@every_manifold
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_total_is_the_largest_slope_over_tangent_directions(manifold, dtype, device):
    """Two sizes, a batch, and an ordinary parameter; every gradient is multiplied by one number."""
    leaves = [leaf_on(manifold, *shape, dtype, device) for shape in SHAPES]
    bias = with_noise(nn.Parameter(torch.randn(7, device=device)))
    before = [p.grad.clone() for p in (*leaves, bias)]
    expected = (sum(map(slow_square, leaves)) + float(bias.grad.double().norm()) ** 2) ** 0.5
    total = clip_grad_norm_([*leaves, bias], 0.5)
    assert float(total) == pytest.approx(expected, rel=1e-6)
    for leaf, gradient in zip((*leaves, bias), before, strict=True):
        factor = 0.5 / (float(total) + 1e-6)
        torch.testing.assert_close(leaf.grad, gradient * factor)
    assert float(clip_grad_norm_([*leaves, bias], 0.5)) == pytest.approx(0.5, rel=1e-5)


def test_small_gradients_are_left_alone_bit_for_bit(device):
    model = Model(device)
    for p in model.parameters():
        with_noise(p)
    before = [p.grad.clone() for p in model.parameters()]
    total = clip_grad_norm_(model, 1e6)
    assert 1 < float(total) < 1e6
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert torch.equal(total, clip_grad_norm_(model.parameters(), 1e6))


def test_ordinary_parameters_alone_are_torchs_bit_for_bit(device):
    ours = [with_noise(nn.Parameter(torch.randn(k, 3, device=device))) for k in (2, 5, 9)]
    ours.append(nn.Parameter(torch.zeros(2, device=device)))  # without a gradient
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        b.grad = a.grad.clone()
    first = clip_grad_norm_(ours, 0.3)
    second = torch.nn.utils.clip_grad_norm_(theirs, 0.3)
    assert torch.equal(first, second)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(a.grad, b.grad)
    assert ours[3].grad is None


def test_euclidean_norm_is_torchs(device):
    model = Model(device)
    for p in model.parameters():
        with_noise(p)
    gradients = [p.grad.clone() for p in model.parameters()]
    assert torch.equal(
        clip_grad_norm_(model, 1e6, norm="euclidean"), torch.nn.utils.get_total_norm(gradients)
    )
    assert float(clip_grad_norm_(model, 1e6)) < float(torch.nn.utils.get_total_norm(gradients))


def test_a_normal_gradient_has_norm_zero(device):
    X = stiefel.ManifoldParameter(geometry.haar(6, 3, dtype=torch.float64, device=device))
    S = torch.randn(3, 3, dtype=torch.float64, device=device)
    X.grad = (X @ (S + S.mT)).detach().as_subclass(torch.Tensor)
    assert float(clip_grad_norm_(X, 1.0)) < 1e-14


def test_square_weights_have_a_norm_larger_by_the_root_of_two_in_the_canonical_metric(device):
    value = geometry.haar(6, 6, dtype=torch.float64, device=device)
    canonical = with_noise(stiefel.ManifoldParameter(value, stiefel.Stiefel("canonical")))
    euclidean = stiefel.ManifoldParameter(value, stiefel.Stiefel("euclidean"))
    euclidean.grad = canonical.grad.clone()
    ratio = clip_grad_norm_(canonical, 1e9) / clip_grad_norm_(euclidean, 1e9)
    assert float(ratio) == pytest.approx(2**0.5, rel=1e-12)


def test_clipping_shortens_the_step_and_keeps_its_direction(device):
    manifold = stiefel.Stiefel("canonical", "cayley")
    leaf = leaf_on(manifold, (), 7, 3, torch.float64, device)
    X = leaf.detach().clone()
    whole = manifold.egrad2rgrad(X, leaf.grad)
    clip_grad_norm_(leaf, 1e-3)
    clipped = manifold.egrad2rgrad(X, leaf.grad)
    assert (clipped / clipped.norm() - whole / whole.norm()).abs().max() < 1e-14
    stiefel.optim.RGD([leaf], lr=1.0).step()
    assert (leaf.detach() - X + clipped).norm() < 1e-6  # second order in 1e-3


@pytest.mark.parametrize(
    "manifold",
    [
        geoopt.EuclideanStiefel(),
        geoopt.CanonicalStiefel(),
        geoopt.Sphere(),
        geoopt.PoincareBall().double(),
        geoopt.Euclidean(ndim=1),
    ],
    ids=lambda m: type(m).__name__,
)
def test_geoopt_manifolds_by_their_own_methods(manifold, device):
    X = manifold.random(6, 3, dtype=torch.float64, device=device)
    leaf = with_noise(geoopt.ManifoldParameter(X, manifold=manifold))
    gradient = manifold.egrad2rgrad(leaf.detach(), leaf.grad)
    points = (
        [(leaf.detach(), gradient)]
        if manifold.ndim == 2
        else zip(leaf.detach(), gradient, strict=True)
    )
    expected = sum(float(manifold.inner(x, g, g).sum()) for x, g in points) ** 0.5  # one by one
    assert float(clip_grad_norm_(leaf, 0.1)) == pytest.approx(expected, rel=1e-12)
    assert float(clip_grad_norm_(leaf, 1.0)) == pytest.approx(0.1, rel=1e-5)


def test_many_matrices_are_one_call(device, monkeypatch):
    calls, inner = [], stiefel.Stiefel.inner
    monkeypatch.setattr(
        stiefel.Stiefel,
        "inner",
        lambda self, x, *rest, **options: calls.append(x.shape) or inner(self, x, *rest, **options),
    )
    leaves = [leaf_on(stiefel.Stiefel(), (), 8, 3, torch.float32, device) for _ in range(300)]
    clip_grad_norm_(leaves, 1.0)
    assert calls == [(300, 8, 3)]


def test_huge_gradients_do_not_overflow(device):
    leaf = leaf_on(stiefel.Stiefel(), (2,), 7, 3, torch.float32, device)
    twin = copy.deepcopy(leaf)
    twin.grad = leaf.grad * 1e30
    plain = clip_grad_norm_(leaf, 1.0)
    assert float(clip_grad_norm_(twin, 1.0)) == pytest.approx(1e30 * float(plain), rel=1e-5)
    torch.testing.assert_close(twin.grad, leaf.grad)


def test_nothing_to_clip(device):
    assert float(clip_grad_norm_([], 1.0)) == 0
    leaf = leaf_on(stiefel.Stiefel(), (), 4, 2, torch.float32, device)
    leaf.grad.zero_()
    assert float(clip_grad_norm_(leaf, 1.0)) == 0
    assert torch.equal(leaf.grad, torch.zeros_like(leaf.grad))
    empty = leaf_on(stiefel.Stiefel(), (0,), 4, 2, torch.float32, device)
    assert float(clip_grad_norm_([leaf, empty], 1.0)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_totals(bad, device):
    leaves = [leaf_on(stiefel.Stiefel(), (), 4, 2, torch.float32, device) for _ in range(2)]
    leaves[1].grad[0, 0] = bad
    before = leaves[0].grad.clone()
    with pytest.raises(NonFiniteError, match="nothing was clipped"):
        clip_grad_norm_(leaves, 1.0, error_if_nonfinite=True)
    assert torch.equal(leaves[0].grad, before)
    assert not torch.isfinite(clip_grad_norm_(leaves, 1.0))
    with pytest.raises(NonFiniteError, match="parameter 1 of group 0"):
        stiefel.optim.RGD(leaves, lr=0.1).step()


def test_what_is_refused(device):
    leaf = leaf_on(stiefel.Stiefel(), (), 4, 2, torch.float32, device)
    with pytest.raises(UnknownNameError, match="euclidean, riemannian"):
        clip_grad_norm_(leaf, 1.0, norm="spectral")
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="max_norm >= 0"):
            clip_grad_norm_(leaf, bad)
    leaf.grad = leaf.grad.to_sparse()
    with pytest.raises(ConfigurationError, match="sparse=False"):
        clip_grad_norm_(leaf, 1.0)
    model = Model(device)
    torch.utils.swap_tensors(
        model.layers[1].parametrizations.weight.original, nn.Parameter(torch.eye(6, device=device))
    )
    with pytest.raises(LostManifoldError, match=r"layers\.1\.weight"):
        clip_grad_norm_(model, 1.0)
