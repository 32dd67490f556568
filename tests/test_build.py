"""`stiefel.optim.build`: one torch optimizer over a whole model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError
from stiefel.optim import RGD, build
from tests.mixed_model import Model, equal, residuals, train


# --------------------------------------------------------------------------------------- groups
def test_every_parameter_is_in_its_group_with_its_rate(device):
    model = Model(device)
    optimizer = build(model, lr=1e-2, optimizer="adamw", optimizer_options={"weight_decay": 0.3})
    assert isinstance(optimizer, torch.optim.Optimizer)
    roles = [(g["role"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert roles == [("free", 1e-2, 5), ("chart", 1e-3, 1), ("manifold", 1e-3, 3)]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0, 0]
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}
    optimizer = build(model, lr=1.0, lr_orthogonal=0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.5, 0.5]
    optimizer = build(model, lr=1.0, lr_orthogonal=0.5, lr_riemannian=0.2)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.5, 0.2]


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd", torch.optim.NAdam])
def test_a_step_is_the_steps_of_both_bit_for_bit(name, device):
    kinds = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "sgd": torch.optim.SGD,
    }
    model = Model(device)
    twin = copy.deepcopy(model)
    optimizer = build(
        model,
        lr=1e-2,
        lr_orthogonal=2e-3,
        lr_riemannian=5e-2,
        optimizer=name,
        optimizer_options={"weight_decay": 0.1},
        riemannian_options={"momentum": 0.5},
    )
    points = [twin.bare, twin.layers[1].parametrizations.weight.original]
    points.append(twin.layers[2].parametrizations.weight.original)
    chart = [twin.layers[0].parametrizations.weight.original]
    special = {id(p) for p in (*points, *chart)}
    rest = [p for p in twin.parameters() if id(p) not in special]
    ordinary = kinds.get(name, name)(
        [{"params": rest}, {"params": chart, "lr": 2e-3, "weight_decay": 0}],
        lr=1e-2,
        weight_decay=0.1,
    )
    riemannian = RGD(points, lr=5e-2, momentum=0.5)

    class Both:
        def zero_grad(self):
            twin.zero_grad()

        def step(self):
            ordinary.step()
            riemannian.step()

    train(model, optimizer, 4)
    train(twin, Both(), 4)
    assert equal(model, twin)
    assert residuals(model) < 1e-5
    assert not torch.equal(model.head.weight, Model(device).head.weight)


@pytest.mark.parametrize("via", [("cwy",), ("rgd-c-c",), ("tcwy",)])
def test_models_with_one_kind_only(via, device):
    layer = nn.Linear(6, 2 if via == ("tcwy",) else 6, bias=False, device=device)
    stiefel.orthogonal(layer, via=via[0])
    optimizer = build(layer, lr=0.1)
    before = layer.weight.detach().clone()
    layer(torch.randn(4, 6, device=device)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    plain = nn.Linear(3, 3, device=device)
    twin = copy.deepcopy(plain)
    for module, opt in (
        (plain, build(plain, lr=0.1)),
        (twin, torch.optim.Adam(twin.parameters(), 0.1)),
    ):
        module(torch.ones(1, 3, device=device)).sum().backward()
        opt.step()
    assert equal(plain, twin)


def test_tied_weights_are_held_once(device):
    first, second = nn.Linear(5, 5, device=device), nn.Linear(5, 5, device=device)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    stiefel.orthogonal(first, via="rgd-c-c")
    held = [p for g in build(model, lr=0.1).param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held})


def test_frozen_parameters_stay_and_can_be_unfrozen(device):
    model = Model(device)
    for p in (model.bare, model.layers[0].parametrizations.weight.original):
        p.requires_grad_(False)
    optimizer = build(model, lr=0.1)
    bare, chart = model.bare.detach().clone(), model.layers[0].weight.detach().clone()
    train(model, optimizer)
    assert torch.equal(model.bare, bare)
    assert torch.equal(model.layers[0].weight, chart)
    model.bare.requires_grad_(True)
    train(model, optimizer)
    assert not torch.equal(model.bare, bare)


# ----------------------------------------------------------------------------- torch's contract
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.01, 0.05], total_steps=10),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
        ),
    ],
)
def test_schedulers_move_all_rates(make, device):
    model = Model(device)
    optimizer = build(model, lr=0.04)
    scheduler = make(optimizer)
    rates = []
    for _ in range(5):
        train(model, optimizer, 1)
        scheduler.step()
        rates.append([g["lr"] for g in optimizer.param_groups])
        inner = optimizer.ordinary.param_groups + optimizer.riemannian.param_groups
        assert rates[-1] == [g["lr"] for g in inner]
    assert all(len({r[k] for r in rates}) > 1 for k in range(3))
    assert residuals(model) < 1e-5


def test_a_scheduler_that_cycles_momentum_says_that_it_cannot():
    """RGD has no momentum here: cycling would switch it on."""
    optimizer = build(Model(), lr=0.1, optimizer="sgd", optimizer_options={"momentum": 0.9})
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)


def test_plateau_scheduler():
    optimizer = build(Model(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3, 1e-4, 1e-4])


@pytest.mark.parametrize("name", ["adam", "rmsprop", "sgd"])
def test_a_saved_run_continues_bit_for_bit(name, device):
    options = {
        "lr": 0.05,
        "optimizer": name,
        "optimizer_options": {"momentum": 0.9} if name == "sgd" else {},
        "riemannian_options": {"momentum": 0.9},
    }
    model = Model(device)
    optimizer = build(model, **options)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer)
    scheduler.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(model, optimizer, seed=1)
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)
    resumed = Model(device)
    resumed.load_state_dict(weights)
    other = build(resumed, **{**options, "lr": 9.0})
    later = lr_scheduler.ExponentialLR(other, 0.9)
    other.load_state_dict(state)
    later.load_state_dict(schedule)
    assert other.ordinary.state is other.state
    assert other.riemannian.state is other.state
    train(resumed, other, seed=1)
    assert equal(model, resumed)
    scheduler.step()
    later.step()
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_a_state_of_other_groups_is_refused():
    optimizer = build(Model(), lr=0.1)
    with pytest.raises(ConfigurationError, match="roles"):
        optimizer.load_state_dict(torch.optim.Adam(Model().parameters()).state_dict())
    with pytest.raises(ConfigurationError, match=r"stiefel\.convert"):
        optimizer.load_state_dict(build(Model(via=("cwy",) * 3), lr=0.1).state_dict())


def test_copies_and_pickles_train_on_alone(device):
    model = Model(device)
    optimizer = build(model, lr=0.05, riemannian_options={"momentum": 0.9})
    train(model, optimizer)
    copied, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, seed=1)
    train(copied, other, seed=1)
    assert equal(model, copied)
    assert not equal(model, Model(device))
    bare = nn.Module()  # torch does not pickle parametrized modules
    bare.point = stiefel.ManifoldParameter(geometry.haar(4, 2, device=device))
    optimizer = build(bare, lr=0.05, riemannian_options={"momentum": 0.9})
    bare.point.grad = torch.ones_like(bare.point)
    optimizer.step()
    pickled, third = pickle.loads(pickle.dumps((bare, optimizer)))
    pickled.point.grad = torch.ones_like(bare.point)
    optimizer.step()
    third.step()
    assert equal(bare, pickled)


def test_closure_hooks_and_zero_grad(device):
    model, calls, hooked = Model(device), [], []
    optimizer = build(model, lr=0.05)
    optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
    x = torch.randn(4, 6, device=device)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == calls
    assert losses[-1] < losses[0]
    assert hooked == ["before", "after"] * 5
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_groups_may_be_added(device):
    model = Model(device)
    optimizer = build(model, lr=0.05)
    model.extra = nn.Linear(2, 2, device=device)
    model.point = stiefel.ManifoldParameter(geometry.haar(4, 2, device=device))
    optimizer.add_param_group({"params": model.extra.parameters(), "lr": 0.3})
    optimizer.add_param_group({"params": model.point, "lr": 0.2})
    assert [g["role"] for g in optimizer.param_groups[3:]] == ["free", "manifold"]
    assert [g["lr"] for g in optimizer.param_groups[3:]] == [0.3, 0.2]
    model.extra(torch.ones(1, 2, device=device)).sum().backward()
    model.point.grad = torch.randn_like(model.point)
    before = model.extra.weight.detach().clone(), model.point.detach().clone()
    optimizer.step()
    assert not torch.equal(model.extra.weight, before[0])
    assert not torch.equal(model.point, before[1])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    with pytest.raises(ConfigurationError, match="mixture"):
        optimizer.add_param_group({"params": [model.point, nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigurationError, match="already"):
        optimizer.add_param_group({"params": [model.point]})
