"""Laws of the models: each trains every way, and is the same function whichever way that is."""

from __future__ import annotations

import copy

import pytest
import torch

import stiefel
from stiefel import geometry
from tests.registry import MODELS, SQUARE_VIAS


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]


def train(model, x, steps=3):
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("via", SQUARE_VIAS)
def test_trains_and_stays_on_the_manifold(case, via, device):
    make, sample = case
    model, x = make(via).to(device), sample().to(device)
    before = [c.point.clone() for c in stiefel.constraints(model)]
    losses = train(model, x, steps=10)
    assert losses[-1] < losses[0]
    after = [c.point for c in stiefel.constraints(model)]
    assert len(after) == len(before) > 0
    for old, new in zip(before, after, strict=True):
        assert geometry.orthonormality_residual(new) < stiefel.tolerance(new.dtype, *new.shape)
        assert not torch.equal(old, new)


def test_every_way_to_train_is_the_same_function(case, device):
    make, sample = case
    model, x = make("cwy").to(device), sample().to(device)
    expected = model(x)
    for via in [*SQUARE_VIAS, "cwy"]:
        stiefel.convert(model, via)
        assert (model(x) - expected).abs().max() < 1e-12, via
    stiefel.release(model)
    assert (model(x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("via", SQUARE_VIAS[:2])
def test_copies_and_checkpoints_are_the_same_function(case, via, device):
    make, sample = case
    model, other = make(via).to(device), make(via).to(device)
    x = sample().to(device)
    train(model, x, steps=1)
    twin = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    assert torch.equal(other(x), model(x))
