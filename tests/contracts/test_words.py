"""Errors of a constrained weight speak in the words of the user."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import (
    DtypeError,
    RebaseError,
    RepresentationError,
    StiefelError,
    UnknownNameError,
)
from stiefel.parameter import SHORT_FORMS, Riemannian, via_names
from stiefel.parametrizations import CHARTS, OWN

GIVEN_BY_THE_DOOR = ("self", "n", "p", "batch", "device")
ALIASES = sorted(SHORT_FORMS)


def chart_of(via):
    return {**CHARTS, "riemannian": Riemannian}[SHORT_FORMS.get(via, (via, {}))[0]]


def layer_for(via):
    chart = chart_of(via)
    dtype = torch.complex64 if chart.name == "urnn" else None
    return nn.Linear(4 if chart.name == "tcwy" else 6, 6, dtype=dtype)


def options_of(via):
    names = inspect.signature(chart_of(via).__init__).parameters
    return [name for name in names if name not in GIVEN_BY_THE_DOOR]


@pytest.mark.parametrize("call", ["orthogonal", "convert"])
@pytest.mark.parametrize("via", via_names())
class TestOptions:
    def refused(self, via, call, **options):
        layer = layer_for(via)
        if call == "convert":
            stiefel.orthogonal(layer)
        door = stiefel.convert if call == "convert" else stiefel.orthogonal
        with pytest.raises(StiefelError) as caught:
            door(layer, via=via, **options)
        return str(caught.value)

    def test_an_unknown_option_is_refused_in_the_users_word(self, via, call):
        text = self.refused(via, call, bad_option=1)
        assert repr(via) in text
        assert "'bad_option'" in text
        offered = text.split("its options are ")[1].split(".")[0].split(", ")
        for option in options_of(via):
            assert (option in offered) == (option not in SHORT_FORMS.get(via, (via, {}))[1])

    @pytest.mark.parametrize("value", [object, "no such value", [1], -3.5], ids=str)
    def test_a_wrong_value_is_refused_in_the_users_word(self, via, call, value):
        for option in options_of(via):
            text = self.refused(via, call, **{option: value})
            assert repr(via) in text
            assert option.split("_")[0] in text


@pytest.mark.parametrize("via", ALIASES)
def test_a_weight_keeps_the_word_and_the_chart_its_name(via):
    layer = stiefel.orthogonal(layer_for(via), via=via, init="haar")
    (constraint,) = stiefel.constraints(layer)
    chart = constraint.storage.chart
    assert chart.label == f"chart {via!r} ({chart.name})"
    assert constraint.via == chart.name == chart_of(via).name
    stiefel.convert(layer, constraint.via)
    assert next(stiefel.constraints(layer)).storage.chart.label == f"chart {chart.name!r}"


@pytest.mark.parametrize("via", ["scornn", "eurnn"])
def test_a_tall_weight_is_refused_in_the_users_word(via):
    with pytest.raises(StiefelError, match=rf"'{via}'.*square.*via='tcwy'"):
        stiefel.orthogonal(nn.Linear(3, 6), via=via)


@pytest.mark.parametrize("options", [{"layers": 1}, {"style": "fft"}], ids=str)
def test_few_rotations_are_refused_in_the_users_word(options):
    layer = nn.Linear(4, 4)
    with pytest.raises(RepresentationError, match=r"chart 'eurnn' \(givens\) with .* reaches few"):
        stiefel.orthogonal(layer, via="eurnn", init="keep", **options)


@pytest.mark.parametrize("word", ["mine", "own"])
def test_a_chart_knows_the_users_word_before_it_is_made(word, monkeypatch):
    class Named(OWN):
        def __init__(self, n, p=None, *, batch=(), center=False):
            heard.append(self.label)
            super().__init__(n, p, batch=batch, center=center)

    heard = []
    monkeypatch.setitem(CHARTS, "own", Named)
    monkeypatch.setitem(SHORT_FORMS, "mine", ("own", {}))
    label = "chart 'mine' (own)" if word == "mine" else "chart 'own'"
    with pytest.raises(StiefelError, match=f"^{re.escape(label)} with center=True"):
        stiefel.orthogonal(nn.Linear(4, 4), via=word, center=True)
    assert heard == [label]
    layer = stiefel.orthogonal(nn.Linear(3, 4), via=word, center=True, init="chart")
    assert next(stiefel.constraints(layer)).storage.chart.said == (word if word == "mine" else None)


def test_a_schedule_that_nobody_keeps_is_named_in_the_users_word():
    layer = stiefel.orthogonal(nn.Linear(3, 3), via="dtriv")
    for _ in range(100):
        layer(torch.ones(3))
    with pytest.raises(RebaseError, match=r"'dtriv' \(matrix_exp\)"):
        layer(torch.ones(3))


def test_a_checkpoint_of_another_chart_is_refused_in_the_users_word():
    layer = stiefel.orthogonal(nn.Linear(6, 6), via="scornn", init="haar")
    other = stiefel.orthogonal(nn.Linear(6, 6), via="own")
    with pytest.raises(RuntimeError, match=r"chart 'own', the model has chart 'scornn' \(cayley\)"):
        layer.load_state_dict(other.state_dict())


# ------------------------------------------------------------------------------ which weight
PATH = "encoder.layers.1.weight"


def deep_model(via="cwy", **options):
    model = nn.Module()
    model.encoder = nn.Module()
    model.encoder.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for layer in model.encoder.layers:
        stiefel.orthogonal(layer, via=via, **options)
    return model


def second(model):
    return list(stiefel.constraints(model))[1]


def far():
    return stiefel.geometry.haar(4, determinant=1)


@pytest.mark.parametrize("via", ["cwy", "rgd-c-c", "dtriv", "scornn", "polar"])
class TestWhichWeight:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (torch.full((4, 4), torch.nan), "NaN or infinity"),
            (torch.eye(3), r"shape \(4, 4\), got \(3, 3\).*n >= p"),
            (torch.eye(4, dtype=torch.complex64), "real value"),
        ],
    )
    def test_assign_names_it(self, via, value, words):
        constraint = second(deep_model(via, init="haar"))
        before = constraint.point.clone()
        with pytest.raises(StiefelError, match=rf"^{PATH}: .*{words}"):
            constraint.assign(value)
        assert torch.equal(constraint.point, before)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (torch.full((4, 4), torch.nan), "NaN or an infinity.*Load an earlier one"),
            (torch.eye(4, dtype=torch.complex64), "entries of torch.complex64.*torch.float32"),
            (torch.eye(4, dtype=torch.int64), "entries of torch.int64.*torch.float32"),
        ],
    )
    def test_a_checkpoint_names_it_and_changes_nothing_there(self, via, value, words):
        model = deep_model(via, init="haar")
        saved = model.state_dict()
        saved["encoder.layers.1.parametrizations.weight.original"] = value
        before = second(model).point.clone()
        with pytest.raises(RuntimeError, match=rf"\t{PATH}: the checkpoint has .*{words}"):
            model.load_state_dict(saved)
        assert torch.equal(second(model).point, before)


def test_a_checkpoint_off_the_manifold_names_the_weight():
    model = deep_model("rgd-c-c")
    saved = model.state_dict()
    saved["encoder.layers.1.parametrizations.weight.original"] = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=rf"\t{PATH}: the checkpoint is off the manifold"):
        model.load_state_dict(saved)


def test_a_point_that_the_chart_cannot_hold_names_the_weight():
    constraint = second(deep_model(reflections=1, init="chart"))
    with pytest.raises(RepresentationError, match=rf"^{PATH}: .*rank.*reflections="):
        constraint.assign(far())


@pytest.mark.parametrize(
    ("via", "options", "words"),
    [
        ("cwy", {"reflections": 1}, "rank"),
        ("cwy", {"reflections": 9}, "from 1 to 4, got 9"),
        ("tcwy", {}, "p < n"),
        ("urnn", {}, "complex weights only"),
        ("eurnn", {"layers": 1}, "reaches few matrices"),
    ],
)
def test_a_conversion_names_the_weight(via, options, words):
    model = deep_model("rgd-c-c")
    second(model).assign(far())
    with pytest.raises(StiefelError, match=rf"^{PATH}: .*{words}"):
        stiefel.convert(model, via, name=PATH, **options)
    assert [c.via for c in stiefel.constraints(model)] == ["riemannian"] * 2


def test_an_optimizer_that_cannot_take_a_weight_names_it():
    model = deep_model()
    model.encoder.get_submodule("layers.1").bfloat16()
    optimizer = stiefel.optim.build(model, lr=0.1)
    with pytest.raises(DtypeError, match=rf"^{PATH}: .*float32 or better"):
        stiefel.convert(model, "rgd-c-c", optimizer=optimizer)


def test_an_unknown_way_is_no_matter_of_a_weight():
    with pytest.raises(UnknownNameError, match=r"^unknown via 'cww'.*Did you mean 'cwy'"):
        stiefel.convert(deep_model(), "cww")
    with pytest.raises(UnknownNameError, match=r"^unknown via 3: "):
        stiefel.convert(deep_model(), 3)
