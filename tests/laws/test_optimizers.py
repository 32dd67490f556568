"""Laws that every Riemannian optimizer of the registry obeys."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import RGD
from stiefel.optim.base import RiemannianOptimizer
from tests.registry import DOUBLE, OPTIMIZERS, RGD_MANIFOLDS, SHAPES

CASES = [(case, manifold) for case in OPTIMIZERS for manifold in case.manifolds]
every = pytest.mark.parametrize(
    ("case", "manifold"), CASES, ids=[f"{c.name}-{m.metric}-{m.retraction}" for c, m in CASES]
)
rgd_manifold = pytest.mark.parametrize(
    "manifold", RGD_MANIFOLDS, ids=lambda m: f"{m.metric}-{m.retraction}"
)
SLOW = pytest.mark.slow
#: Every optimizer that claims to stay on the manifold, in one metric; plain RGD in both. Those that
#: are costly run with ``--runslow``.
FEASIBLE = [
    (case, manifold)
    for case, manifold in CASES
    if case.feasible
    and (manifold.metric == "canonical" or (case.name == "rgd" and manifold in RGD_MANIFOLDS))
]
feasible = pytest.mark.parametrize(
    ("case", "manifold"),
    [
        pytest.param(c, m, id=f"{c.name}-{m.metric}-{m.retraction}", marks=[SLOW] * bool(c.costly))
        for c, m in FEASIBLE
    ],
)


def leaf_on(manifold, batch, n, p, dtype, device):
    value = geometry.haar(n, p, batch, dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, manifold)


def noise(leaf):
    return torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def eigenvalue_loss(leaf, C):
    return (leaf.conj() * (C @ leaf)).real.sum()


@feasible
@pytest.mark.usefixtures("one_thread")
def test_ten_thousand_noisy_steps_stay_on_the_manifold(case, manifold, device, monkeypatch):
    """Gradients N(0, 1), one matrix at lr 0.01 and one at 0.1."""

    def mend(*args):
        raise AssertionError("a point had to be mended: the retraction itself drifts")

    monkeypatch.setattr(RiemannianOptimizer, "_mend", mend)
    leaves = [leaf_on(manifold, (), 64, 16, torch.float32, device) for _ in range(2)]
    groups = [{"params": [leaf], "lr": lr} for leaf, lr in zip(leaves, (0.01, 0.1), strict=True)]
    optimizer = case.kind(groups, lr=0.01, **case.options)
    for _ in range(100):
        for gradients in torch.randn(100, 2, *leaves[0].shape, device=device):
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            optimizer.step()
        for leaf in leaves:
            assert geometry.orthonormality_residual(leaf) < 1e-5


@rgd_manifold
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_slope_along_the_step_is_minus_the_squared_gradient(manifold, dtype, device):
    C, L = (torch.randn(7, k, dtype=dtype, device=device) for k in (7, 3))
    start = leaf_on(manifold, (), 7, 3, dtype, device)

    def value(X):
        return (X.conj() * (C @ X + L)).real.sum()

    value(start).backward()
    rate, values = 1e-5, []
    for maximize in (False, True):
        leaf = copy.deepcopy(start)
        leaf.grad = start.grad.clone()
        RGD([leaf], lr=rate, maximize=maximize).step()
        values.append(float(value(leaf.detach())))
    slope = (values[0] - values[1]) / (2 * rate)
    X = start.detach()
    gradient = manifold.egrad2rgrad(X, start.grad)
    assert slope == pytest.approx(-float(manifold.inner(X, gradient)), rel=1e-7)
    assert slope < 0


@rgd_manifold
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_step_is_the_dense_formula(manifold, shape, dtype, device):
    """(I + eta/2 A)^-1 (I - eta/2 A) X, or qf(X - eta A X), with the n x n matrix A."""
    batch, n, p = shape
    eta = 0.3
    leaf = leaf_on(manifold, batch, n, p, dtype, device)
    X, G = leaf.detach().clone(), noise(leaf)
    leaf.grad = G.clone()
    RGD([leaf], lr=eta).step()
    eye = torch.eye(n, dtype=dtype, device=device)
    half = G @ X.mH
    if manifold.metric == "euclidean":
        half = half - X @ X.mH @ half / 2
    A = half - half.mH
    if manifold.retraction == "cayley":
        expected = torch.linalg.solve(eye + eta / 2 * A, (eye - eta / 2 * A) @ X)
    else:
        Q, R = torch.linalg.qr(X - eta * A @ X)
        expected = Q * torch.sgn(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    assert (leaf.detach() - expected).abs().max() < 1e-12
    assert torch.equal(leaf.grad, G)


@rgd_manifold
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_step_is_the_retraction_of_the_gradient(manifold, shape, dtype, device):
    """With and without momentum the first step is the same; one of them is fused."""
    batch, n, p = shape
    leaf = leaf_on(manifold, batch, n, p, dtype, device)
    X, G = leaf.detach().clone(), noise(leaf)
    expected = manifold.retr(X, -0.3 * manifold.egrad2rgrad(X, G))
    for momentum in (0.0, 0.5):
        twin = copy.deepcopy(leaf)
        twin.grad = G.clone()
        RGD([twin], lr=0.3, momentum=momentum).step()
        assert (twin.detach() - expected).abs().max() < 1e-13


@every
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_minimum_of_the_trace_is_the_sum_of_the_smallest_eigenvalues(case, manifold, dtype, device):
    basis = geometry.haar(8, 8, dtype=dtype, device=device)
    values = torch.arange(1.0, 9.0, dtype=torch.float64, device=device)
    C = basis @ torch.diag(values).to(dtype) @ basis.mH
    leaf = leaf_on(manifold, (), 8, 3, dtype, device)
    optimizer = case.kind([leaf], lr=case.rate, **case.options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)
    for _ in range(300):
        optimizer.zero_grad()
        loss = eigenvalue_loss(leaf, C)
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert eigenvalue_loss(leaf.detach(), C) == pytest.approx(6.0, abs=1e-6)
    assert manifold.check_point_on_manifold(leaf)


@every
def test_one_batch_equals_a_loop(case, manifold, device):
    """Single, repeated, batched and differently batched leaves, through three steps."""
    batches = [(), (), (3,), (3,), (2, 2)]
    first = [leaf_on(manifold, batch, 6, 2, torch.float64, device) for batch in batches]
    second = copy.deepcopy(first)
    together = case.kind(first, lr=0.1, **case.options)
    alone = [case.kind([leaf], lr=0.1, **case.options) for leaf in second]
    for _ in range(3):
        for a, b in zip(first, second, strict=True):
            a.grad = noise(a)
            b.grad = a.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    # torch.matrix_exp of a single small float64 matrix is good to 1e-10 only
    bound = 1e-9 if manifold.retraction == "exp" else 1e-13
    for a, b, optimizer in zip(first, second, alone, strict=True):
        assert (a - b).abs().max() < bound
        assert together.state[a].keys() == optimizer.state[b].keys()
        for name, value in together.state[a].items():
            assert (value - optimizer.state[b][name]).abs().max() < bound


def test_same_shapes_are_one_call(device, monkeypatch):
    calls = []
    manifold = stiefel.Stiefel("canonical", "qr")
    monkeypatch.setattr(
        stiefel.Stiefel, "retr", lambda self, x, u: calls.append(x.shape) or (x + 0 * u)
    )
    leaves = [leaf_on(copy.deepcopy(manifold), (), 6, 2, torch.float32, device) for _ in range(20)]
    leaves += [leaf_on(manifold, (4,), 6, 2, torch.float32, device)]
    leaves += [leaf_on(manifold, (), 5, 2, torch.float32, device)]
    for leaf in leaves:
        leaf.grad = noise(leaf)
    RGD(leaves, lr=0.1).step()
    assert sorted(tuple(shape) for shape in calls) == [(5, 2), (24, 6, 2)]


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_state_stays_tangent(case, manifold, shape, device):
    batch, n, p = shape
    leaf = leaf_on(manifold, batch, n, p, torch.complex128, device)
    optimizer = case.kind([leaf], lr=0.1, **case.options)
    for _ in range(5):
        leaf.grad = noise(leaf)
        optimizer.step()
        assert manifold.check_point_on_manifold(leaf)
    kinds = optimizer._state_kinds(optimizer.param_groups[0])
    assert optimizer.state[leaf].keys() == kinds.keys()
    shapes = {"point": leaf.shape, "matrix": (*batch, 1, 1), "leaf": ()}
    for name, value in optimizer.state[leaf].items():
        assert value.shape == shapes[kinds[name]]
        assert value.abs().max() > 0
        if kinds[name] == "point" and case.tangent:
            assert geometry.tangency_residual(leaf, value).max() < 1e-13


def test_cayley_transport_keeps_the_length_of_momentum(device):
    """With momentum 1 and no gradient the buffer is only carried."""
    leaf = leaf_on(stiefel.Stiefel(), (), 7, 3, torch.float64, device)
    lengths = {}
    for transport in ("cayley", "projection"):
        twin = copy.deepcopy(leaf)
        optimizer = RGD([twin], lr=0.5, momentum=1.0, transport=transport)
        twin.grad = noise(twin)
        optimizer.step()
        before = optimizer.state[twin]["momentum_buffer"].norm()
        twin.grad = torch.zeros_like(twin)
        optimizer.step()
        lengths[transport] = float(optimizer.state[twin]["momentum_buffer"].norm() / before)
    assert lengths["cayley"] == pytest.approx(1.0, abs=1e-13)
    assert lengths["projection"] < 0.99


@every
def test_a_saved_run_continues_bit_for_bit(case, manifold, device):
    def run(leaves, optimizer, gradients):
        for step in gradients:
            for leaf, gradient in zip(leaves, step, strict=True):
                leaf.grad = gradient.clone()
            optimizer.step()

    leaves = [leaf_on(manifold, (), 6, 2, torch.float32, device) for _ in range(3)]
    gradients = [[noise(leaf) for leaf in leaves] for _ in range(6)]
    optimizer = case.kind(leaves, lr=0.1, **case.options)
    run(leaves, optimizer, gradients[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    twins = copy.deepcopy(leaves)
    run(leaves, optimizer, gradients[3:])
    file.seek(0)
    resumed = case.kind(twins, lr=0.7, **case.options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(twins, resumed, gradients[3:])
    assert all(torch.equal(a, b) for a, b in zip(leaves, twins, strict=True))


@every
def test_a_gradient_normal_to_the_manifold_moves_nothing_but_rounding(case, manifold, device):
    """Steps of a given length are not made of rounding errors, at a critical point least of all."""
    leaf = leaf_on(manifold, (), 8, 3, torch.float32, device)
    start = leaf.detach().clone()
    optimizer = case.kind([leaf], lr=0.1, **case.options)
    for _ in range(100):
        S = torch.randn(3, 3, device=device)
        leaf.grad = leaf.detach() @ (S + S.mT)
        optimizer.step()
    assert (leaf.detach() - start).abs().max() < 0.02
