"""Laws of the optimizers that keep points near the manifold: the bound they report holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import stiefel
from stiefel import geometry
from stiefel.optim import POGO
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.near import NearManifold
from tests.registry import OPTIMIZERS

NEAR = [case for case in OPTIMIZERS if issubclass(case.kind, NearManifold) and not case.feasible]


def test_there_are_some():
    assert len({case.kind for case in NEAR}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.name)
@pytest.mark.usefixtures("one_thread")
def test_ten_thousand_noisy_steps_keep_the_reported_bound(case, device, monkeypatch):
    """Gradients N(0, 1), lr 0.01 and 0.1, float32, and no point is mended."""
    follow(case, 10_000, device, monkeypatch)


@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.name)
@pytest.mark.usefixtures("one_thread")
def test_two_hundred_noisy_steps_keep_the_reported_bound(case, device, monkeypatch):
    follow(case, 200, device, monkeypatch)


def follow(case, steps, device, monkeypatch):
    def mend(*args):
        raise AssertionError("a point had to be mended: the bound does not hold")

    monkeypatch.setattr(RiemannianOptimizer, "_mend", mend)
    value = geometry.haar(64, 16, (2,), dtype=torch.float32, device=device)
    leaves = [stiefel.ManifoldParameter(X.clone(), case.manifolds[0]) for X in value]
    groups = [{"params": [x], "lr": lr} for x, lr in zip(leaves, (0.01, 0.1), strict=True)]
    optimizer = case.kind(groups, lr=0.01, **case.options)
    worst = torch.zeros(2, device=device)
    for step in range(steps):
        for leaf, gradient in zip(leaves, torch.randn_like(value), strict=True):
            leaf.grad = gradient
        optimizer.step()
        if step % 10 == 0:
            X = torch.stack([leaf.detach() for leaf in leaves])
            E = X.mH @ X - torch.eye(16, device=device)
            worst = torch.maximum(worst, E.abs().amax((-2, -1)))
    usual = stiefel.tolerance(torch.float32, 64, 16)
    for measured, bound in zip(worst.tolist(), optimizer.bound(), strict=True):
        assert measured < bound + usual
        assert measured > bound / 100 or not case.attains  # the bound says something


def work_promised(kind, options, n, p):
    """Operations of a step below 512 columns, as the docstrings of the classes say."""
    product, square = 2 * n * p * p, n == p
    if kind is POGO:
        count = 3 + 1 if square else 4 + 2
        bound = product + 2 * 2 * p**3 if p <= 256 else 16 * n * p
        corrections = 2 * (options.get("corrections", 1) - 1)
    else:
        count, bound, corrections = 3 if square else 4, 0, 0
    averages = 2 if options.get("momentum") or options.get("base") == "adam" else 0
    check = 1
    return (count + averages + corrections + check) * product + bound


@pytest.mark.parametrize("shape", [(60, 20), (30, 30), (600, 300), (300, 300)], ids=str)
@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.name)
@pytest.mark.usefixtures("one_thread")
def test_a_step_takes_the_products_that_are_promised(case, shape, device):
    leaf = stiefel.ManifoldParameter(geometry.haar(*shape, device=device), case.manifolds[0])
    optimizer = case.kind([leaf], lr=0.1, **case.options)
    for counter in (FlopCounterMode(display=False), FlopCounterMode(display=False)):
        leaf.grad = torch.randn_like(leaf)
        with counter:
            optimizer.step()
    assert counter.get_total_flops() == work_promised(case.kind, case.options, *shape)
