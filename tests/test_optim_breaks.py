"""States that do not fit, numbers at the end of the range, and leaves that cannot be stepped."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import stiefel
from stiefel.errors import ConfigurationError, NonFiniteError
from stiefel.geometry import haar, orthonormality_residual
from stiefel.optim import POGO, RGD, Landing, RGDAdam, RiemannianAdam, StiefelMuon

KINDS = {
    "rgd": (RGD, {"momentum": 0.9}),
    "rgd-adam": (RGDAdam, {}),
    "adam": (RiemannianAdam, {}),
    "landing": (Landing, {"momentum": 0.9}),
    "pogo": (POGO, {"base": "adam"}),
    "stiefel-muon": (StiefelMuon, {"momentum": 0.9}),
}
KEPT = {"rgd-adam", "adam", "pogo"}  # several states each


def make(name, n=6, dtype=torch.float32, count=2, **options):
    kind, usual = KINDS[name]
    manifold = stiefel.Stiefel(tolerance=0.6)
    leaves = [stiefel.ManifoldParameter(haar(n, 3, dtype=dtype), manifold) for _ in range(count)]
    return leaves, kind(leaves, lr=0.1, **{**usual, **options})


def train(leaves, optimizer, steps=3, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for leaf in leaves:
            real = torch.float64 if leaf.dtype in (torch.float64, torch.complex128) else None
            noise = torch.randn(leaf.shape, generator=generator, dtype=real or torch.float32)
            leaf.grad = (scale * noise).to(leaf.dtype)
        optimizer.step()


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(KINDS, 2)])
def test_the_state_of_another_optimizer_is_refused(old, new):
    saved = make(old)
    train(*saved)
    leaves, optimizer = make(new)
    train(leaves, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigurationError, match="saved by another optimizer"):
        optimizer.load_state_dict(saved[1].state_dict())
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("name", KINDS)
def test_the_state_of_another_shape_is_refused(name):
    saved = make(name)
    train(*saved)
    with pytest.raises(ConfigurationError, match="saved for another model"):
        make(name, n=7)[1].load_state_dict(saved[1].state_dict())


@pytest.mark.parametrize("name", sorted(KEPT))
def test_an_incomplete_state_is_refused(name):
    saved = make(name)
    train(*saved)
    for lacking in list(saved[1].state_dict()["state"][0]):
        state = copy.deepcopy(saved[1].state_dict())
        del state["state"][0][lacking]
        with pytest.raises(ConfigurationError, match="the state is incomplete"):
            make(name)[1].load_state_dict(state)
    state = copy.deepcopy(saved[1].state_dict())
    del state["param_groups"][0]["lr"]
    with pytest.raises(ConfigurationError, match="without lr"):
        make(name)[1].load_state_dict(state)


def test_build_refuses_the_state_of_another_riemannian_optimizer():
    def built(name):
        model = stiefel.orthogonal(torch.nn.Linear(5, 5), via="rgd-adam")
        optimizer = stiefel.optim.build(model, lr=0.1, riemannian=name)
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        return optimizer

    with pytest.raises(ConfigurationError, match="the state of a RGDAdam"):
        built("rgd-adam").load_state_dict(built("rgd").state_dict())


@pytest.mark.parametrize("wide", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", KINDS)
def test_a_state_takes_the_precision_of_the_model_that_loads_it(name, wide):
    narrow = torch.float32 if wide is torch.float64 else torch.complex64
    saved = make(name, dtype=narrow)
    train(*saved)
    for dtype in (wide, narrow):
        leaves, optimizer = make(name, dtype=dtype)
        optimizer.load_state_dict(saved[1].state_dict())
        train(leaves, optimizer, 1)
        real = leaves[0].real.dtype if dtype.is_complex else dtype
        assert {v.dtype for v in optimizer.state[leaves[0]].values()} <= {dtype, real}
        saved = leaves, optimizer


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["rgd-adam", "adam"])
def test_amsgrad_may_be_switched_on_and_off(name, count):
    leaves, optimizer = make(name, count=count)
    train(leaves, optimizer)
    second = optimizer.state[leaves[0]]["exp_avg_sq"].clone()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.load_state_dict(optimizer.state_dict())
    train(leaves, optimizer, 1, scale=0.0)
    largest = optimizer.state[leaves[0]]["max_exp_avg_sq"]
    assert 0.9 * second < largest < second  # it begins now
    train(leaves, optimizer, 3, scale=0.0)
    assert torch.equal(optimizer.state[leaves[0]]["max_exp_avg_sq"], largest)
    optimizer.param_groups[0]["amsgrad"] = False
    train(leaves, optimizer)


@pytest.mark.parametrize("name", KINDS)
def test_expanded_leaves_are_refused(name):
    kind, options = KINDS[name]
    expanded = haar(6, 3).expand(4, 6, 3)
    leaf = stiefel.ManifoldParameter(expanded, stiefel.Stiefel(tolerance=0.6))
    with pytest.raises(ConfigurationError, match="made by expand"):
        kind([leaf], lr=0.1, **options)


def test_pogo_with_adam_takes_gradients_whose_square_overflows():
    leaves, optimizer = make("pogo")
    train(leaves, optimizer, 3, scale=1e25)
    before = leaves[0].detach().clone()
    train(leaves, optimizer, 1, scale=1e25)
    assert torch.isfinite(optimizer.state[leaves[0]]["exp_avg_sq"]).all()
    assert 0 < (leaves[0] - before).abs().max() < 1


@pytest.mark.parametrize("shape", [(6, 3), (5, 5)])
@pytest.mark.parametrize("direction", ["steepest", "projected"])
@pytest.mark.parametrize("skip", [False, True])
def test_muon_takes_the_largest_gradients(shape, direction, skip):
    X = stiefel.ManifoldParameter(haar(*shape))
    optimizer = StiefelMuon([X], lr=0.1, direction=direction, skip_nonfinite=skip)
    X.grad = 3e38 * torch.randn(shape).sign()
    before = X.detach().clone()
    optimizer.step()
    assert orthonormality_residual(X) < 1e-5
    assert skip or (X - before).abs().max() > 1e-3


def test_a_state_that_overflows_is_not_written():
    torch.manual_seed(0)
    manifold = stiefel.Stiefel("euclidean")
    X = stiefel.ManifoldParameter(haar(6, 3, dtype=torch.float64), manifold)
    optimizer = RiemannianAdam([X], lr=1e30, transport="cayley")
    with pytest.raises(NonFiniteError, match="the step overflows"):
        train([X], optimizer, 20)
    for value in optimizer.state[X].values():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("inner", ["canonical", "euclidean"])
def test_skipping_keeps_points_on_the_manifold_through_long_steps(inner, count):
    manifold = stiefel.Stiefel(inner)
    leaves = [stiefel.ManifoldParameter(haar(6, 3), manifold) for _ in range(count)]
    optimizer = RGD(leaves, lr=0.1, skip_nonfinite=True)
    before = leaves[0].detach().clone()
    train(leaves, optimizer, 300, scale=30.0)
    assert (leaves[0] - before).abs().max() > 0.1
    for leaf in leaves:
        assert orthonormality_residual(leaf) <= stiefel.tolerance(leaf.dtype, 6, 3)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_may_change_its_precision_between_steps(name, count):
    leaves, optimizer = make(name, count=count)
    train(leaves, optimizer)
    for dtype in (torch.float64, torch.float32):
        for leaf in leaves:
            leaf.data = leaf.data.to(dtype)
            leaf.grad = None
        train(leaves, optimizer)
        for value in optimizer.state[leaves[0]].values():
            assert value.dtype == dtype
        assert max(float(orthonormality_residual(leaf)) for leaf in leaves) < 0.5


@pytest.mark.parametrize("lr", ["a", None, torch.tensor([0.1, 0.2]), [0.1], 1j])
def test_rates_that_are_no_number_are_refused(lr):
    with pytest.raises(ConfigurationError, match="expected lr, a number"):
        RGD([stiefel.ManifoldParameter(haar(4, 2))], lr=lr)
