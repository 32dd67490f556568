"""`stiefel.optim.build` when something goes wrong, and when the model changes."""

from __future__ import annotations

import copy
import gc
import weakref

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, LostManifoldError, NonFiniteError, UnknownNameError
from stiefel.optim import RGD, build
from tests.mixed_model import Model, equal, group, residuals, train


# ------------------------------------------------------------------------------ going wrong
@pytest.mark.parametrize("where", ["head.weight", "bare", "layers.0.parametrizations"])
def test_a_non_finite_gradient_changes_nothing(where, device):
    model = Model(device)
    optimizer = build(model, lr=0.05, riemannian_options={"momentum": 0.9})
    train(model, optimizer)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    name, victim = next(x for x in model.named_parameters() if x[0].startswith(where))
    victim.grad[(0,) * victim.ndim] = float("nan")
    with pytest.raises(NonFiniteError, match=name):
        optimizer.step()
    assert equal(model, before)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, entries in state["state"].items():
        for label, value in entries.items():
            assert torch.equal(after["state"][key][label], value)


@pytest.mark.parametrize("riemannian", [RGD, geoopt.optim.RiemannianAdam])
@pytest.mark.parametrize("where", ["head.weight", "bare", "layers.0.parametrizations"])
def test_skip_nonfinite_skips_one_parameter(where, riemannian, device):
    model = Model(device)
    optimizer = build(model, lr=0.05, skip_nonfinite=True, riemannian=riemannian)
    train(model, optimizer)
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    states = copy.deepcopy({k: optimizer.state[v] for k, v in model.named_parameters()})
    name, victim = next(x for x in model.named_parameters() if x[0].startswith(where))
    victim.grad[(0,) * victim.ndim] = float("inf")
    optimizer.step()
    for key, value in model.named_parameters():
        assert torch.isfinite(value).all()
        assert torch.equal(value, before[key]) == (key == name)
    for label, value in states[name].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(optimizer.state[victim][label], value)


def _to_meta(model):
    return model.to("meta")


def _overwritten(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _swapped(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _assigned(model):
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


@pytest.mark.parametrize("lose", [_to_meta, _overwritten, _swapped, _assigned])
@pytest.mark.parametrize("riemannian", [RGD, geoopt.optim.RiemannianSGD])
def test_a_bare_point_that_lost_its_manifold_is_noticed(lose, riemannian, device):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.point = geoopt.ManifoldParameter(
                geometry.haar(5, 2, device=device), manifold=geoopt.EuclideanStiefel()
            )

    model = Bare()
    optimizer = build(model, lr=0.1, riemannian=riemannian)
    lose(model)
    if getattr(model.inner.point, "manifold", None) is None:
        with pytest.raises(LostManifoldError, match=r"inner\.point|ordinary parameter now"):
            optimizer.step()
    else:  # torch kept the object
        assert lose is not _assigned


@pytest.mark.parametrize("lose", [_overwritten, _swapped, _assigned])
def test_weights_made_by_the_door_survive_or_ask_for_a_new_optimizer(lose, device):
    layer = stiefel.orthogonal(nn.Linear(5, 5, device=device), via="rgd-c-c")
    optimizer = build(layer, lr=0.1)
    leaf = layer.parametrizations.weight.original
    lose(layer)
    if layer.parametrizations.weight.original is leaf:
        x = torch.ones(1, 5, device=device, dtype=layer.weight.dtype)
        layer(x).sum().backward()
        optimizer.step()
        assert geometry.orthonormality_residual(layer.weight) < 1e-5
    else:
        with pytest.raises(ConfigurationError, match="replaced after the optimizer was made"):
            optimizer.step()
    build(layer, lr=0.1).step()


def test_a_weight_changed_behind_the_optimizers_back(device):
    def make():
        model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device))
        stiefel.orthogonal(model[0], via="cwy")
        optimizer = build(model, lr=0.1)
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    stiefel.convert(model, "rgd-c-c")
    with pytest.raises(ConfigurationError, match="optimizer="):
        optimizer.step()
    model, optimizer = make()
    stiefel.release(model)
    with pytest.raises(ConfigurationError, match="released"):
        optimizer.step()
    model, optimizer = make()
    model[0] = stiefel.orthogonal(nn.Linear(4, 4, device=device), via="rgd-c-c")
    with pytest.raises(ConfigurationError, match="replaced"):
        optimizer.step()
    model, optimizer = make()
    stiefel.orthogonal(model[1], via="rgd-c-c")
    with pytest.raises(ConfigurationError, match=r"1\.weight"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": "lion"}, UnknownNameError, "adam, adamw, rmsprop, sgd"),
        ({"optimizer": torch.optim.LBFGS}, ConfigurationError, "several times"),
        ({"optimizer": torch.nn.Linear}, ConfigurationError, "class of a torch optimizer"),
        ({"optimizer_options": {"lr": 1.0}}, ConfigurationError, "lr_orthogonal"),
        ({"riemannian_options": {"momentum": -1}}, ConfigurationError, "momentum"),
        ({"riemannian_options": {"beta": 1}}, TypeError, "beta"),
        ({"lr": -1.0}, ValueError, "lr|learning rate"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        build(Model(), **{"lr": 0.1, **options})


def test_a_model_without_parameters():
    with pytest.raises(ConfigurationError, match="none"):
        build(nn.ReLU(), lr=0.1)


# ------------------------------------------------------------------ conversions and schedules
def test_conversion_exchanges_leaves_and_keeps_the_rest(device):
    model = Model(device)
    optimizer = build(model, lr=0.05, lr_orthogonal=0.03, lr_riemannian=0.02)
    train(model, optimizer)
    moment = optimizer.state[model.head.weight]["exp_avg"]
    weights = [layer.weight.detach().clone() for layer in model.layers]
    stiefel.convert(model, "rgd-e-c", name="layers.0.weight", optimizer=optimizer)
    stiefel.convert(model, "cwy", name="layers.1.weight", optimizer=optimizer)
    for layer, weight in zip(model.layers, weights, strict=True):
        assert (layer.weight - weight).abs().max() < 1e-5
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert set(map(id, optimizer.state)) <= held
    assert optimizer.state[model.head.weight]["exp_avg"] is moment
    chart = model.layers[1].parametrizations.weight.original
    point = model.layers[0].parametrizations.weight.original
    assert any(p is chart for p in group(optimizer, "chart")["params"])
    assert any(p is point for p in group(optimizer, "manifold")["params"])
    train(model, optimizer)
    assert all(
        not torch.equal(layer.weight, weight)
        for layer, weight in zip(model.layers, weights, strict=True)
    )
    assert residuals(model) < 1e-5
    everything = [c.via for c in stiefel.constraints(model)]
    assert everything.count("cwy") == 1


def _rebased(model):
    """Norms of the reflection vectors of the first layer: 1 right after a rebase."""
    V = model.layers[0].parametrizations.weight.original.detach()
    return bool(((V.norm(dim=0) - 1).abs() < 1e-6).all())


def test_rebase_schedules_run_and_resume_at_the_same_step(device):
    def make():
        model = Model(device)
        model.layers[0].parametrizations.weight.chart.rebase_every = 3
        with torch.no_grad():
            model.layers[0].parametrizations.weight.original.mul_(2)
        return model

    model = make()
    optimizer = build(model, lr=0.05)
    pattern = []
    for step in range(4):
        train(model, optimizer, 1, seed=step)
        pattern.append(_rebased(model))
    assert pattern == [False, False, True, False]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = make()
    resumed.load_state_dict(saved[0])
    other = build(resumed, lr=0.05)
    other.load_state_dict(saved[1])
    for step in range(4, 8):
        train(model, optimizer, 1, seed=step)
        train(resumed, other, 1, seed=step)
        assert _rebased(model) == _rebased(resumed) == (step == 5)
    assert equal(model, resumed)


@pytest.mark.parametrize("kind", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam])
def test_geoopts_optimizers_may_do_the_riemannian_part(kind, device):
    model = Model(device)
    optimizer = build(model, lr=0.05, riemannian=kind)
    before = model.bare.detach().clone()
    train(model, optimizer)
    assert not torch.equal(model.bare, before)
    assert residuals(model) < 1e-5
    model.bare.grad[0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="bare"):
        optimizer.step()


# ---------------------------------------------------------------------------- other precisions
def _step(model, optimizer):
    generator = torch.Generator().manual_seed(1)
    weight = model.head.weight
    x = torch.randn(8, 6, generator=generator).to(weight.device, weight.dtype)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


ORDINARY = {
    "adam": ("adam", {}),
    "adam-amsgrad": ("adam", {"amsgrad": True}),
    "adam-loop": ("adam", {"foreach": False}),
    "sgd": ("sgd", {"momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "rprop": (torch.optim.Rprop, {}),
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("riemannian", ["rgd-adam", geoopt.optim.RiemannianAdam])
def test_a_model_may_change_its_precision_between_steps(name, riemannian, device):
    """As if the state had been loaded into an optimizer that was made for the model as it is."""
    kind, options = ORDINARY[name]

    def make(model):
        return build(
            model, lr=0.05, optimizer=kind, optimizer_options=options, riemannian=riemannian
        )

    model = Model(device, via=("cwy", "rgd-c-c", "rgd-c-c"))
    optimizer = make(model)
    train(model, optimizer)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        model.bare.data = geometry.polar_factor(model.bare.data)
        twin = copy.deepcopy(model)
        reference = make(twin)
        reference.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            _step(model, optimizer)
            _step(twin, reference)
        ours = isinstance(riemannian, str)  # geoopt counts by an int, which torch loads as float32
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (parameter - other).abs().max() <= (0 if ours else 1e-6)
            for state in optimizer.state[parameter].values():
                averages = isinstance(state, torch.Tensor) and state.ndim > 0
                assert not averages or state.dtype == dtype


@pytest.mark.parametrize("build_it", [True, False])
def test_a_parameter_that_becomes_complex_stops_the_step_before_it_begins(build_it, device):
    model = nn.Module()
    model.point = stiefel.ManifoldParameter(torch.eye(4, 2, device=device))
    model.plain = nn.Parameter(torch.ones(3, device=device))
    model.other = nn.Parameter(torch.ones(3, device=device))
    leaves = list(model.parameters())
    optimizer = build(model, lr=0.1) if build_it else RGD(leaves, lr=0.1, euclidean="adam")
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    model.plain.grad = None
    model.plain.data = model.plain.data.to(torch.complex64)
    model.plain.grad = torch.ones_like(model.plain)
    before = copy.deepcopy(model)
    match = "plain of dtype torch.complex64" if build_it else "parameter 1 of group 0"
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=match):
            optimizer.step()
        assert equal(model, before)


def test_leaves_that_were_exchanged_are_freed(device):
    layer = stiefel.orthogonal(nn.Linear(3, 3, device=device), via="polar")
    optimizer = build(layer, lr=0.1)
    gone = weakref.ref(layer.parametrizations.weight.original)
    stiefel.convert(layer, "own", optimizer=optimizer)
    optimizer.check()
    gc.collect()
    assert gone() is None


def test_states_follow_their_parameters_in_all_groups_or_in_none(device):
    leaves = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    groups = [{"params": [leaf]} for leaf in leaves]
    optimizer = RGD(groups, lr=0.1, euclidean="adam")
    for dtypes in ((torch.float32, torch.float32), (torch.float64, torch.complex64)):
        for leaf, dtype in zip(leaves, dtypes, strict=True):
            leaf.grad = None
            leaf.data = leaf.data.to(dtype)
            leaf.grad = torch.ones_like(leaf)
        if dtypes[1] is torch.float32:
            optimizer.step()
    with pytest.raises(ConfigurationError, match=r"parameter 0 of group 1 .*Nothing was changed"):
        optimizer.step()
    assert optimizer.state[leaves[0]]["exp_avg"].dtype == torch.float32
    leaves[1].grad = None
    leaves[1].data = leaves[1].data.real.double()
    leaves[1].grad = torch.ones_like(leaves[1])
    optimizer.step()
    assert all(optimizer.state[leaf]["exp_avg"].dtype == torch.float64 for leaf in leaves)


def test_ordinary_parameters_of_one_optimizer_may_change_their_precision(device):
    point = stiefel.ManifoldParameter(geometry.haar(4, 2, dtype=torch.float64, device=device))
    plain = nn.Parameter(torch.ones(3, device=device))
    twin = nn.Parameter(torch.ones(3, device=device, dtype=torch.float64))
    optimizer = RGD([point, plain], lr=0.1, euclidean="adam")
    reference = torch.optim.Adam([twin], lr=0.1)
    for step in range(4):
        if step == 2:
            plain.grad = None
            plain.data = plain.data.double()
        for leaf in (point, plain, twin):
            leaf.grad = (step + 1) * torch.ones_like(leaf)
        optimizer.step()
        reference.step()
    assert (plain - twin).abs().max() < 1e-6
    assert optimizer.state[plain]["exp_avg"].dtype == torch.float64
