"""How often a step of an optimizer waits for the device: what docs/architecture.md promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.optim import StiefelMuon, build
from tests.accelerators import as_on_an_accelerator
from tests.host_reads import HostReads
from tests.registry import BY_RETRACTION

every = pytest.mark.parametrize(
    ("case", "manifold"), BY_RETRACTION, ids=[f"{c.name}-{m.retraction}" for c, m in BY_RETRACTION]
)
LEAVES = [
    ((), 6, 6, torch.float32),
    ((2, 3), 6, 2, torch.float64),
    ((50,), 16, 8, torch.float32),
    ((50,), 16, 8, torch.float32),
    ((), 12, 4, torch.complex128),
]


def reads_of_step(optimizer, leaves):
    """Of the second step, when states and batches are there."""
    reads = HostReads()
    for step in range(2):
        for leaf in leaves:
            leaf.grad = torch.randn_like(leaf)
        if step == 0:
            optimizer.step()
    with reads:
        optimizer.step()
    return reads.found


@every
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("rate", [1e-4, torch.tensor(1e-4)], ids=["number", "tensor"])
def test_a_step_reads_two_flags_or_none(case, manifold, skip, rate, device, monkeypatch):
    """However many leaves, shapes and dtypes there are; some kernels read inside besides."""
    as_on_an_accelerator(monkeypatch)
    leaves = [
        stiefel.ManifoldParameter(geometry.haar(n, p, batch, dtype=dtype, device=device), manifold)
        for batch, n, p, dtype in LEAVES
    ]
    if isinstance(rate, float):  # torch's SGD reads a rate that is a tensor
        leaves += [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = case.kind(leaves, lr=rate, euclidean="sgd", skip_nonfinite=skip, **case.options)
    found = reads_of_step(optimizer, leaves)
    flags = 0 if skip else 2
    if case.kind is StiefelMuon or manifold.retraction in ("polar", "exp"):
        assert len(found) > flags
    else:
        assert found == ["aten::_local_scalar_dense"] * flags


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("riemannian", ["rgd", "rgd-adam", "adam"])
def test_a_step_of_a_whole_model_reads_no_more(riemannian, skip, device, monkeypatch):
    as_on_an_accelerator(monkeypatch)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 2)).to(device)
    stiefel.orthogonal(model[0], via="rgd-c-c")
    stiefel.orthogonal(model[1], via="cwy")
    optimizer = build(model, lr=0.01, optimizer="sgd", riemannian=riemannian, skip_nonfinite=skip)
    assert len(reads_of_step(optimizer, list(model.parameters()))) == (0 if skip else 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: x[0, 0].item(),
        lambda x: float(x[0, 0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 1) if x[0, 0] else None,
        lambda x: x.clone().__setitem__(x > 0, 1.0),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.allclose(x, x),
        geometry.polar_factor,
        geometry.gram_polar_factor,
    ],
)
def test_the_counter_sees_reads_and_nothing_else(read, device):
    x = torch.eye(3, device=device)
    with HostReads() as reads:
        torch.where(x > 0, x @ x, x).cumsum(0)[0, :2].add_(x[1, :2])
        assert reads.found == []
        read(x)
    assert reads.found
