"""The names of Riemannian optimizers, and the short forms that make manifolds for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.optim import build
from stiefel.optim.build import RIEMANNIAN
from stiefel.parameter import SHORT_FORMS
from stiefel.parameter.via import NAMED_OPTIMIZERS

#: For each name a way to store a weight that its optimizer takes.
VIAS = {name: name if name in SHORT_FORMS else "rgd-c-c" for name in RIEMANNIAN}


@pytest.mark.parametrize("name", RIEMANNIAN)
@pytest.mark.parametrize("sizes", [(6, 6), (8, 3)], ids=str)
def test_a_name_is_its_class_on_the_manifold_of_its_short_form(name, sizes, device):
    layer = nn.Linear(sizes[1], sizes[0], device=device)
    stiefel.orthogonal(layer, via=VIAS[name])
    optimizer = build(layer, lr=1e-2, lr_riemannian=5e-2, riemannian=name)
    assert type(optimizer.riemannian) is RIEMANNIAN[name]
    (constraint,) = stiefel.constraints(layer)
    x, goal = torch.randn(8, sizes[1], device=device), torch.randn(8, sizes[0], device=device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        bound = constraint.manifold.tolerance_for(torch.float32, *sizes)
        assert geometry.orthonormality_residual(constraint.point) <= bound
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [name for name in RIEMANNIAN if name in SHORT_FORMS])
def test_the_optimizer_that_a_short_form_names_is_the_default(name):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    stiefel.orthogonal(model[0], via=name)
    stiefel.orthogonal(model[1], via="cwy")
    assert type(build(model, lr=0.1).riemannian) is RIEMANNIAN[name]
    assert type(build(copy.deepcopy(model), lr=0.1).riemannian) is RIEMANNIAN[name]
    assert type(build(model, lr=0.1, riemannian="rgd").riemannian) is RIEMANNIAN["rgd"]
    stiefel.orthogonal(model[2], via="rgd-c-c")
    with pytest.raises(ConfigurationError, match=rf"'{name}' \(0.weight\), 'rgd' \(2.weight\)"):
        build(model, lr=0.1)
    stiefel.convert(model, name)
    assert type(build(model, lr=0.1).riemannian) is RIEMANNIAN[name]


@pytest.mark.parametrize("name", [name for name in RIEMANNIAN if name in SHORT_FORMS])
def test_a_conversion_takes_the_optimizer_that_the_short_form_names_alone(name):
    model = nn.Sequential(*[stiefel.orthogonal(nn.Linear(5, 5), init="haar") for _ in range(2)])
    kind = RIEMANNIAN[name].__name__
    other = build(model, lr=0.1)
    held = [list(group["params"]) for group in other.param_groups]
    with pytest.raises(
        ConfigurationError,
        match=rf"^0.weight: via='{name}' names the optimizer {kind}, .* by RGD: .*optim\.build.*"
        "via='riemannian', inner='euclidean'",
    ):
        stiefel.convert(model, name, optimizer=other)
    assert [c.via for c in stiefel.constraints(model)] == ["cwy", "cwy"]
    for group, before in zip(other.param_groups, held, strict=True):
        assert all(a is b for a, b in zip(group["params"], before, strict=True))
    other.check()

    class Derived(RIEMANNIAN[name]):
        pass

    for riemannian in (name, Derived):
        fitting = build(model, lr=0.1, riemannian=riemannian)
        stiefel.convert(model, name, optimizer=fitting)
        assert [c.made_for for c in stiefel.constraints(model)] == [name] * 2
        fitting.check()
        stiefel.convert(model, "cwy", optimizer=fitting)


def test_the_manifold_of_a_short_form_goes_with_any_optimizer():
    model = nn.Sequential(stiefel.orthogonal(nn.Linear(5, 5), init="haar"))
    optimizer = build(model, lr=0.1)
    stiefel.convert(model, "riemannian", inner="euclidean", tolerance=0.5, optimizer=optimizer)
    optimizer.check()


def test_every_short_form_that_names_an_optimizer_knows_its_class():
    named = [name for name in RIEMANNIAN if name in SHORT_FORMS]
    assert {name: RIEMANNIAN[name].__name__ for name in named} == NAMED_OPTIMIZERS


def test_what_is_refused():
    layer = stiefel.orthogonal(nn.Linear(5, 5), via="rgd-c-c")
    with pytest.raises(UnknownNameError, match=r"landing, pogo.*Did you mean 'landing'"):
        build(layer, lr=0.1, riemannian="lending")
    with pytest.raises(ConfigurationError, match="name or the class of a Riemannian optimizer"):
        build(
            layer,
            lr=0.1,
            riemannian=stiefel.optim.RGD([torch.nn.Parameter(torch.eye(2))], 0.1, euclidean="sgd"),
        )
    for name in ("landing", "pogo"):
        with pytest.raises(ConfigurationError, match="tolerance="):
            build(layer, lr=0.1, riemannian=name)
