"""RGD at the limits of floating point, of batches, and of what a user may do to a point."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import ConfigurationError, OffManifoldError
from stiefel.optim import RGD


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_skipping_leaves_a_point_that_a_finite_gradient_would_overflow(momentum):
    X = stiefel.ManifoldParameter(torch.eye(6, 2))
    optimizer = RGD([X], lr=1.0, momentum=momentum, skip_nonfinite=True)
    X.grad = torch.full((6, 2), 1e25)
    optimizer.step()
    assert torch.equal(X, torch.eye(6, 2))
    X.grad = torch.ones(6, 2) / 10
    optimizer.step()
    assert torch.isfinite(X).all()
    assert not torch.equal(X, torch.eye(6, 2))


@pytest.mark.parametrize("shape", [(3, 200, 200), (3, 300, 160)])
def test_a_batch_of_large_matrices_equals_the_loop(shape):
    torch.set_num_threads(torch.get_num_threads())  # what makes torch's batched LU go wrong
    X = stiefel.geometry.haar(*shape[1:], shape[:1], dtype=torch.float64)
    G = torch.randn_like(X)
    whole = stiefel.ManifoldParameter(X.clone())
    parts = [stiefel.ManifoldParameter(x.clone()) for x in X]
    whole.grad = G
    for part, g in zip(parts, G, strict=True):
        part.grad = g
    RGD([whole], lr=0.1).step()
    for part in parts:
        RGD([part], lr=0.1).step()
    assert (whole - torch.stack([part.detach() for part in parts])).abs().max() < 1e-12


def test_rates_that_are_no_numbers_are_refused():
    for lr in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigurationError, match="finite lr"):
            RGD([stiefel.ManifoldParameter(torch.eye(4, 2))], lr=lr)


def test_a_point_that_was_overwritten_is_not_projected_in_silence():
    X = stiefel.ManifoldParameter(torch.eye(6, 2))
    optimizer = RGD([X], lr=0.1)
    nn.init.normal_(X)
    before = X.detach().clone()
    X.grad = torch.ones(6, 2)
    with pytest.raises(OffManifoldError, match="wrote into the parameter"):
        optimizer.step()
    assert torch.equal(X, before)


def test_one_cycle_scheduler_cycles_the_momentum():
    X = stiefel.ManifoldParameter(torch.eye(6, 2))
    optimizer = RGD([X], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)
