"""Errors of a constrained weight speak in the words of the user."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import RebaseError, StiefelError
from stiefel.parameter import SHORT_FORMS, Riemannian, via_names
from stiefel.parametrizations import CHARTS

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
        offered = text.split("its options are ")[1].split(", ")
        for option in options_of(via):
            assert (option in offered) == (option not in SHORT_FORMS.get(via, (via, {}))[1])

    @pytest.mark.parametrize("value", [object(), "no such value", [1], -3.5], ids=repr)
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
