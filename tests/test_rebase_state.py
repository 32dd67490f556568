"""Rebasing beside optimizers of every kind of state, copies, conversions, and inference mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stiefel

BASED = [("cayley", {"rebase_every": 1}), ("matrix_exp", {"rebase_every": 1})]


def layer(via, **options):
    torch.manual_seed(0)
    return stiefel.orthogonal(nn.Linear(6, 6), via=via, **options)


def take_step(model, optimizer, seed=0, batches=1):
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(4, 6, generator=generator) for _ in range(batches)]

    def closure():
        optimizer.zero_grad()
        losses = [model(x).sin().sum() for x in xs]
        sum(losses[1:], losses[0]).backward()
        return losses[0]

    optimizer.step(closure)


@pytest.mark.parametrize(("via", "options"), BASED)
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_state_of_another_shape_is_dropped(via, options, kind):
    model = layer(via, **options)
    leaves = [model.bias, *next(iter(stiefel.constraints(model))).leaves]
    optimizer = kind(leaves, lr=0.01)
    stiefel.attach(model, optimizer)
    take_step(model, optimizer)
    assert not optimizer.state.get(leaves[0 if kind is torch.optim.LBFGS else 1])
    take_step(model, optimizer, seed=1)
    bound = stiefel.tolerance(torch.float32, 6, 6)
    assert stiefel.geometry.orthonormality_residual(model.weight) < bound


def test_factored_moments_resume():
    runs = []
    for _ in range(2):
        model = layer("cwy")
        runs.append((model, stiefel.optim.build(model, lr=0.1, optimizer=torch.optim.Adafactor)))
    (first, optimizer), (second, resumed) = runs
    take_step(first, optimizer)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        take_step(first, optimizer, seed)
        take_step(second, resumed, seed)
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(("via", "options"), BASED)
def test_copies_and_conversions_are_attended_before_their_first_step(via, options):
    model = layer(via, **options)
    optimizer = stiefel.optim.build(model, lr=0.01)
    take_step(model, optimizer)
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    take_step(twin, its_optimizer, batches=5)
    take_step(model, optimizer, batches=5)
    assert torch.equal(twin.weight, model.weight)
    stiefel.convert(model, "cwy", optimizer=optimizer)
    stiefel.convert(model, via, optimizer=optimizer, **options)
    take_step(model, optimizer, batches=5)


@pytest.mark.parametrize(("via", "options"), BASED)
def test_a_weight_assigned_in_inference_mode_is_trained(via, options):
    model = layer(via, **options)
    optimizer = stiefel.optim.build(model, lr=0.01)
    value = stiefel.init.haar_(torch.empty(6, 6))
    with torch.inference_mode():
        model.weight = value
    assert torch.allclose(model.weight, value, atol=1e-6)
    take_step(model, optimizer)
    assert not torch.allclose(model.weight, value, atol=1e-6)
