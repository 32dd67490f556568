"""Whole models under every optimizer of the registry, and ordinary parameters under each class."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stiefel
from stiefel import geometry
from stiefel.optim import build
from tests.registry import OPTIMIZERS

every = pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
KINDS = list({case.kind: None for case in OPTIMIZERS})
each_class = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


class _Model(nn.Module):
    """A weight used twice, a frozen one, a chart, a bare batch of points and a head."""

    def __init__(self, case, device):
        super().__init__()
        options = {"via": "riemannian", "manifold": case.manifolds[0]}
        self.first = stiefel.orthogonal(nn.Linear(6, 6, bias=False, device=device), **options)
        self.frozen = stiefel.orthogonal(nn.Linear(6, 4, device=device), **options)
        self.frozen.requires_grad_(False)
        self.chart = stiefel.orthogonal(nn.Linear(4, 4, device=device), via="cwy")
        bare = geometry.haar(6, 2, (3,), device=device)
        self.bare = stiefel.ManifoldParameter(bare, case.manifolds[0])

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.first(x))))  # tied in time
        return self.chart(self.frozen(x)).sum(1) + (x @ self.bare).sum((0, 2))


def _train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator).to(model.bare.device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _built(case, model, lr=0.02):
    return build(model, lr=lr, riemannian=case.kind, riemannian_options=case.options)


def _equal(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@every
def test_a_built_optimizer_goes_on_bit_for_bit_from_a_file(case, device):
    model = _Model(case, device)
    optimizer = _built(case, model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
    frozen = model.frozen.weight.detach().clone()
    _train(model, optimizer, 3, seed=0)
    scheduler.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    _train(model, optimizer, 3, seed=1)
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)
    resumed = _Model(case, device)
    resumed.load_state_dict(weights)
    other = _built(case, resumed, lr=9.0)
    later = lr_scheduler.ExponentialLR(other, 0.7)
    other.load_state_dict(state)
    later.load_state_dict(schedule)
    _train(resumed, other, 3, seed=1)
    assert _equal(model, resumed)
    assert torch.equal(model.frozen.weight, frozen)
    for constraint in stiefel.constraints(model):
        bound = 1e-5 if case.feasible else case.manifolds[0].tolerance_for(torch.float32, 6, 6)
        assert geometry.orthonormality_residual(constraint.point).max() < bound


@every
def test_copies_of_model_and_optimizer_train_on_alone(case, device):
    model = _Model(case, device)
    optimizer = _built(case, model)
    _train(model, optimizer, 2, seed=0)
    copied, other = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model)
    _train(copied, other, 2, seed=1)
    assert _equal(model, before)
    _train(model, optimizer, 2, seed=1)
    assert _equal(model, copied)
    assert not _equal(model, before)


@every
def test_a_weight_of_two_modules_is_held_and_stepped_once(case, device):
    first, second = nn.Linear(5, 5, device=device), nn.Linear(5, 5, device=device)
    stiefel.orthogonal(first, via="riemannian", manifold=case.manifolds[0])
    leaf = first.parametrizations.weight.original
    second.parametrizations = first.parametrizations
    second.__class__ = first.__class__
    del second._parameters["weight"]
    model = nn.Sequential(first, second)
    optimizer = build(model, lr=0.1, riemannian=case.kind, riemannian_options=case.options)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is leaf for p in held) == 1
    twin = copy.deepcopy(leaf)
    model(torch.randn(3, 5, device=device)).square().sum().backward()
    twin.grad = leaf.grad.clone()
    optimizer.step()
    case.kind([twin], lr=0.01, **case.options).step()
    assert torch.equal(leaf, twin)
    assert torch.equal(first.weight, second.weight)


# -------------------------------------------------------------------------- ordinary parameters
#: Options of torch's optimizers; a class is held to those of them that it has.
EUCLIDEAN = [
    ("sgd", torch.optim.SGD, {}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.01, "maximize": True}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", torch.optim.Adam, {}),
    ("adam", torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    ("adam", torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"amsgrad": True}),
]


@each_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(("euclidean", "torchs", "options"), EUCLIDEAN)
def test_ordinary_parameters_are_stepped_as_torch_does_bit_for_bit(
    kind, euclidean, torchs, options, dtype, device
):
    known = inspect.signature(kind).parameters
    group = {name: value for name, value in options.items() if name not in known}
    whole = {name: value for name, value in options.items() if name in known}
    # what has another default in the two classes is torch's default for ordinary parameters too
    for name in ("betas", "eps"):
        if name in known and euclidean == "adam":
            whole.setdefault(name, inspect.signature(torchs).parameters[name].default)
    ours = [nn.Parameter(torch.randn(k, 3, dtype=dtype, device=device)) for k in (1, 4, 4)]
    theirs = copy.deepcopy(ours)
    first = kind([{"params": ours, **group}], lr=0.05, euclidean=euclidean, **whole)
    second = torchs(theirs, lr=0.05, **options)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, dtype=dtype, device=device)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for name, value in second.state[b].items():
            if value is not None:
                torch.testing.assert_close(first.state[a][name], value, rtol=0, atol=0)
