"""RiemannianAdam: its formula point by point, geoopt's own Adam on geoopt's manifolds, torch's."""

from __future__ import annotations

import copy
import pickle

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.optim import RGDAdam, RiemannianAdam
from tests.registry import DOUBLE, MANIFOLDS

pytestmark = pytest.mark.usefixtures("one_thread")


def noise(leaf, scale=1.0):
    return scale * torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def stiefel_leaf(*shape, inner="canonical", retraction="cayley", dtype=torch.float64, device="cpu"):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, stiefel.Stiefel(inner, retraction))


# ------------------------------------------------------------------------------- the formula
@pytest.mark.parametrize("manifold", MANIFOLDS, ids=lambda m: f"{m.metric}-{m.retraction}")
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True, "betas": (0.6, 0.4)}, {"maximize": True, "eps": 1e-2}],
    ids=str,
)
def test_every_matrix_follows_the_formula(manifold, dtype, options, device):
    shape = (2, 7, 3)
    value = geometry.haar(7, 3, (2,), dtype=dtype, device=device)
    leaf = stiefel.ManifoldParameter(value.clone(), manifold)
    optimizer = RiemannianAdam([leaf], lr=0.3, **options)
    b1, b2 = options.get("betas", (0.9, 0.999))
    eps, sign = options.get("eps", 1e-8), 1 if options.get("maximize") else -1
    X, m, v, most = list(value), [0, 0], [0, 0], [0, 0]
    for k in range(1, 5):
        G = noise(leaf)
        leaf.grad = G.clone()
        optimizer.step()
        assert torch.equal(leaf.grad, G)
        for i in range(2):
            g = manifold.egrad2rgrad(X[i], G[i])
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * float(manifold.inner(X[i], g))
            most[i] = max(most[i], v[i])
            second = (most if options.get("amsgrad") else v)[i] / (1 - b2**k)
            u = sign * 0.3 * m[i] / (1 - b1**k) / (second**0.5 + eps)
            X[i] = manifold.retr(X[i], u)
            m[i] = manifold.proju(X[i], m[i])
    bound = 1e-9 if manifold.retraction == "exp" else 1e-13
    assert (leaf.detach() - torch.stack(X)).abs().max() < bound
    state = optimizer.state[leaf]
    assert (state["exp_avg"] - torch.stack(m)).abs().max() < bound
    assert state["exp_avg_sq"].shape == (2, 1, 1)
    assert state["exp_avg_sq"].flatten().tolist() == pytest.approx(v, rel=1e-8)
    assert ("max_exp_avg_sq" in state) == options.get("amsgrad", False)
    assert state["step"] == 4
    assert state["exp_avg"].shape == shape


def test_cayley_transport_keeps_the_length_of_momentum(device):
    """Without a gradient, momentum is halved and carried."""
    leaf = stiefel_leaf(7, 3, device=device)
    ratios = {}
    for transport in ("cayley", "projection"):
        twin = copy.deepcopy(leaf)
        optimizer = RiemannianAdam([twin], lr=0.5, betas=(0.5, 0.999), transport=transport)
        twin.grad = noise(twin)
        optimizer.step()
        before = optimizer.state[twin]["exp_avg"].norm()
        twin.grad = torch.zeros_like(twin)
        optimizer.step()
        ratios[transport] = float(optimizer.state[twin]["exp_avg"].norm() / before)
    assert ratios["cayley"] == pytest.approx(0.5, abs=1e-13)
    assert ratios["projection"] < 0.499


# ------------------------------------------------------------------------ geoopt's manifolds
def _product():
    return geoopt.ProductManifold((geoopt.Sphere(), 4), (geoopt.PoincareBall(), 3))


#: A manifold and the shape of a leaf on it: points of 0, 1 and 2 dimensions.
FOREIGN = {
    "euclidean-0": (geoopt.Euclidean, (4, 3)),
    "euclidean-0-number": (geoopt.Euclidean, ()),
    "euclidean-1": (lambda: geoopt.Euclidean(1), (4, 3)),
    "sphere": (geoopt.Sphere, (4, 3)),
    "sphere-vector": (geoopt.SphereExact, (3,)),
    "poincare": (geoopt.PoincareBall, (4, 3)),
    "lorentz": (geoopt.Lorentz, (4, 3)),
    "product": (_product, (5, 7)),
    "scaled": (lambda: geoopt.Scaled(geoopt.Sphere(), 2.0), (4, 3)),
    "stiefel-euclidean": (geoopt.EuclideanStiefel, (2, 5, 3)),
    "stiefel-canonical": (geoopt.CanonicalStiefel, (2, 5, 3)),
    "positive-definite": (geoopt.SymmetricPositiveDefinite, (2, 3, 3)),
    "birkhoff": (geoopt.BirkhoffPolytope, (2, 3, 3)),
}


#: Birkhoff: its retraction is an iteration that stops at 1e-6, for all points of a call together.
LOOSE = {"birkhoff": 1e-5}


def foreign_leaf(name, device):
    make, shape = FOREIGN[name]
    manifold = make().to(device=device, dtype=torch.float64)
    value = torch.randn(shape, dtype=torch.float64, device=device)
    if name == "positive-definite":
        value = value @ value.mT + torch.eye(3, dtype=torch.float64, device=device)
    if name == "birkhoff":
        value = value.exp()
    value = 0.3 * value if name in ("poincare", "product") else value
    return geoopt.ManifoldParameter(manifold.projx(value), manifold=manifold)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_on_their_manifolds_it_is_geoopts_adam(name, amsgrad, device):
    ours = foreign_leaf(name, device)
    theirs = copy.deepcopy(ours)
    pair = [
        RiemannianAdam([ours], lr=0.05, amsgrad=amsgrad),
        geoopt.optim.RiemannianAdam([theirs], lr=0.05, amsgrad=amsgrad),
    ]
    start = ours.detach().clone()
    for _ in range(5):
        G = noise(ours)
        for leaf, optimizer in zip((ours, theirs), pair, strict=True):
            leaf.grad = G.clone()
            optimizer.step()
        assert torch.equal(ours.grad, G)
    assert (ours - start).abs().max() > 1e-3
    assert (ours - theirs).abs().max() < 1e-10
    first, second = (o.state[x] for o, x in zip(pair, (ours, theirs), strict=True))
    assert first.keys() == second.keys()
    for key, value in first.items():
        reference = torch.as_tensor(second[key])
        assert (value - reference.to(value)).abs().max() < 1e-10
    if name not in ("stiefel-canonical", "birkhoff"):  # their projections are not idempotent
        vector = first["exp_avg"]
        residual = ours.manifold.proju(ours.detach(), vector) - vector
        assert residual.abs().max() < LOOSE.get(name, 1e-10)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_batch_of_leaves_equals_a_loop(name, device):
    leaves = [foreign_leaf(name, device) for _ in range(3)]
    for leaf in leaves[1:]:
        leaf.manifold = leaves[0].manifold
    twins = copy.deepcopy(leaves)
    together = RiemannianAdam(leaves, lr=0.05)
    alone = [RiemannianAdam([leaf], lr=0.05) for leaf in twins]
    for _ in range(3):
        for a, b in zip(leaves, twins, strict=True):
            a.grad = noise(a)
            b.grad = a.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    bound = LOOSE.get(name, 1e-12)
    for a, b, optimizer in zip(leaves, twins, alone, strict=True):
        assert (a - b).abs().max() < bound
        for key, value in together.state[a].items():
            assert value.shape == optimizer.state[b][key].shape
            assert (value - optimizer.state[b][key]).abs().max() < bound


def test_complex_points_of_geoopt(device):
    """Symmetric complex matrices: the second moment is real."""
    manifold = geoopt.manifolds.UpperHalf()
    leaf = geoopt.ManifoldParameter(
        manifold.random(2, 3, 3, dtype=torch.complex128, device=device), manifold=manifold
    )
    optimizer = RiemannianAdam([leaf], lr=0.01)
    for _ in range(3):
        G = noise(leaf)
        leaf.grad = G + G.mT
        optimizer.step()
    assert optimizer.state[leaf]["exp_avg_sq"].dtype == torch.float64
    assert optimizer.state[leaf]["exp_avg_sq"].shape == (2, 1, 1)
    assert manifold.check_point_on_manifold(leaf, atol=1e-8)


def test_products_keep_a_second_moment_for_each_factor_through_copies(device):
    leaf = foreign_leaf("product", device)
    optimizer = RiemannianAdam([leaf], lr=0.05)
    leaf.grad = noise(leaf)
    optimizer.step()
    second = optimizer.state[leaf]["exp_avg_sq"]
    assert second.shape == leaf.shape
    assert (second[:, :4] == second[:, :1]).all()
    assert (second[:, 4:] == second[:, 4:5]).all()
    assert (second[:, 0] != second[:, 4]).all()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (other,) = twin.param_groups[0]["params"]
        other.grad = leaf.grad.clone()
        twin.step()
        assert twin.state[other]["exp_avg_sq"].shape == leaf.shape


# ------------------------------------------------------------------------------ torch's Adam
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_points_of_a_product_change_nothing_for_others(refused, together, device):
    """Not when they join a group later, nor when they are refused."""
    points = [stiefel_leaf(6, 2, device=device), stiefel_leaf(3, 6, 2, device=device)]
    twins = copy.deepcopy(points)
    flat = geoopt.Euclidean()
    product = geoopt.ManifoldParameter(
        torch.randn(2, 5, device=device), manifold=geoopt.ProductManifold((flat, 2), (flat, 3))
    )
    optimizer, reference = RiemannianAdam(points, lr=0.1), RiemannianAdam(twins, lr=0.1)
    for step in range(4):
        if step == 2 and refused:
            with pytest.raises(ConfigurationError, match="eps"):
                optimizer.add_param_group({"params": [product], "eps": 0.0})
        elif step == 2 and together:
            optimizer.accept([product], optimizer.param_groups[0])
        elif step == 2:
            optimizer.add_param_group({"params": [product]})
        for leaf, twin in zip(points, twins, strict=True):
            leaf.grad = noise(leaf)
            twin.grad = leaf.grad.clone()
        product.grad = noise(product)
        optimizer.step()
        reference.step()
    for leaf, twin in zip(points, twins, strict=True):
        assert torch.equal(leaf, twin)
        assert optimizer.state[leaf]["exp_avg_sq"].shape == (*leaf.shape[:-2], 1, 1)
    assert refused or optimizer.state[product]["exp_avg_sq"].shape == product.shape


def test_on_a_product_of_lines_it_is_torchs_adam(device):
    ours = foreign_leaf("euclidean-0", device)
    theirs = nn.Parameter(ours.detach().clone().as_subclass(torch.Tensor))
    pair = [RiemannianAdam([ours], lr=0.05), torch.optim.Adam([theirs], lr=0.05)]
    for _ in range(5):
        ours.grad = noise(ours)
        theirs.grad = ours.grad.clone().as_subclass(torch.Tensor)
        for optimizer in pair:
            optimizer.step()
    assert (ours - theirs).abs().max() < 1e-15


@pytest.mark.parametrize("kind", [RiemannianAdam, RGDAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"amsgrad": True, "weight_decay": 0.1, "maximize": True, "eps": 1e-3},
    ],
    ids=str,
)
def test_ordinary_parameters_are_stepped_as_torchs_adam_does(kind, dtype, options, device):
    ours = [nn.Parameter(torch.randn(k, 3, dtype=dtype, device=device)) for k in (1, 4, 4)]
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.05, "betas": (0.8, 0.95), **options}
    first = kind(ours, euclidean="adam", **options)
    second = torch.optim.Adam(theirs, **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = noise(a)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert first.state[a].keys() == second.state[b].keys()
        for name, value in second.state[b].items():
            torch.testing.assert_close(first.state[a][name], value, rtol=0, atol=0)


# ------------------------------------------------------------------------------ limits, options
def test_zero_and_huge_gradients(device):
    leaf = stiefel_leaf(3, 8, 2, dtype=torch.float32, device=device)
    start = leaf.detach().clone()
    optimizer = RiemannianAdam([leaf], lr=0.1)
    leaf.grad = torch.zeros_like(start)
    optimizer.step()
    assert torch.equal(leaf.detach(), start)
    leaf.grad = noise(leaf)
    leaf.grad[1] *= 1e25  # its square overflows
    leaf.grad[2] = 0
    optimizer.step()
    moved = (leaf.detach() - start).norm(dim=(-2, -1))
    assert moved[0] > 0.01
    assert moved[2] == 0
    assert all(torch.isfinite(value).all() for value in optimizer.state[leaf].values())
    assert leaf.manifold.check_point_on_manifold(leaf)


def test_later_groups_have_the_same_defaults():
    optimizer = RiemannianAdam([stiefel_leaf(5, 2)], betas=(0.7, 0.8))
    optimizer.add_param_group({"params": [stiefel_leaf(5, 2)]})
    assert optimizer.param_groups[1]["betas"] == (0.7, 0.8)
    assert optimizer.param_groups[1]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"betas": (0.9, 1.0)}, ConfigurationError, "two numbers"),
        ({"betas": (0.9, 0.9, 0.9)}, ConfigurationError, "two numbers"),
        ({"eps": -1e-8}, ConfigurationError, "eps >= 0"),
        ({"eps": 0.0}, ConfigurationError, "eps > 0"),
        ({"lr": -1.0}, ConfigurationError, "lr >= 0"),
        ({"weight_decay": 0.1}, ConfigurationError, "no point of the manifold"),
        ({"transport": "parallel"}, UnknownNameError, "cayley, projection"),
        ({"foreach": True}, TypeError, "foreach"),
    ],
    ids=str,
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        RiemannianAdam([stiefel_leaf(5, 2)], **options)


def test_cayley_transport_needs_the_cayley_retraction():
    with pytest.raises(ConfigurationError, match="transport='projection'"):
        RiemannianAdam([stiefel_leaf(5, 2, retraction="qr")], transport="cayley")
