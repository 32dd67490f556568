"""How `OrthogonalRNN` starts: counts, biases, the recurrent weight, generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stiefel
from stiefel import errors
from stiefel.geometry import orthonormality_residual
from stiefel.models import NONLINEARITIES, OrthogonalRNN, SequenceModel
from stiefel.parametrizations import CWY
from tests.recurrent_networks import double, layers, recurrent

VIAS = ("cwy", "rgd-c-c", "rgd-e-qr", None)


def test_parameter_count_of_the_copying_model() -> None:
    """CWY with L = N = 190, 10 inputs, 9 outputs: N^2 + N K + N + N out + out."""
    model = SequenceModel(OrthogonalRNN(10, 190), 9)
    assert sum(p.numel() for p in model.parameters()) == 39_909
    plain = SequenceModel(OrthogonalRNN(10, 190, via=None), 9)
    assert sum(p.numel() for p in plain.parameters()) == 39_909


def test_the_bias_goes_with_the_nonlinearity() -> None:
    for nonlinearity in NONLINEARITIES:
        one = layers(OrthogonalRNN(3, 4, nonlinearity=nonlinearity))[0]
        assert (one.beta is not None) == (nonlinearity == "modrelu")
        assert (one.input.bias is not None) == (nonlinearity != "modrelu")
        if one.input.bias is not None:
            assert not one.input.bias.any()
    both = layers(OrthogonalRNN(3, 4, bias=True))[0]
    assert both.beta is not None
    assert both.input.bias is not None
    assert layers(OrthogonalRNN(3, 4, nonlinearity="abs", bias=False))[0].input.bias is None


def test_starts_of_the_input_kernel_and_of_modrelu() -> None:
    one = layers(OrthogonalRNN(50, 400, generator=torch.Generator().manual_seed(1)))[0]
    assert one.input.weight.std().item() == pytest.approx((2 / 50) ** 0.5, rel=0.02)
    assert one.input.weight.mean().abs() < 5e-3
    assert 0.009 < one.beta.abs().max() <= 0.01
    filled = layers(OrthogonalRNN(3, 4, input_init=nn.init.ones_))[0]
    assert torch.equal(filled.input.weight, torch.ones(4, 3))


def test_every_via_has_the_same_start() -> None:
    for init in (None, "henaff", "cayley", "haar", nn.init.eye_):
        models = []
        for via in VIAS:
            generator = torch.Generator().manual_seed(3)
            models.append(double(3, 7, via=via, init=init, generator=generator))
        first = layers(models[-1])[0]
        assert orthonormality_residual(first.recurrent.weight) < 1e-12
        for other in models[:-1]:
            one = layers(other)[0]
            assert torch.equal(one.input.weight, first.input.weight)
            assert torch.equal(one.beta, first.beta)
            assert torch.allclose(one.recurrent.weight, first.recurrent.weight, atol=1e-12)
            assert len(list(stiefel.constraints(other))) == 1
    assert not list(stiefel.constraints(models[-1]))


def test_the_default_start_is_henaff_in_blocks_of_two() -> None:
    weight = recurrent(double(3, 8, via=None))
    outside = torch.block_diag(*[torch.ones(2, 2)] * 4) == 0
    assert not weight[outside].any()
    for block in (weight[i : i + 2, i : i + 2] for i in range(0, 8, 2)):
        assert torch.allclose(block[0, 0], block[1, 1])
        assert torch.allclose(block[0, 1], -block[1, 0])


def test_few_reflections_take_a_start_that_they_can_hold() -> None:
    rnn = double(3, 16, reflections=4, generator=torch.Generator().manual_seed(0))
    weight = recurrent(rnn)
    assert orthonormality_residual(weight) < 1e-12
    eye = torch.eye(16, dtype=torch.float64)
    assert torch.linalg.matrix_rank(weight - eye) == 4
    again = double(3, 16, reflections=4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight, recurrent(again))
    with pytest.raises(errors.RepresentationError, match="reflections"):
        double(3, 16, reflections=4, init="henaff")


def test_determinant_charts_made_by_hand_and_options() -> None:
    for determinant in (1, -1):
        for options in ({}, {"reflections": 3}, {"via": "rgd-c-c"}):
            rnn = double(3, 8, determinant=determinant, **options)
            weight = recurrent(rnn)
            assert torch.linalg.det(weight).item() == pytest.approx(determinant)
    chart = CWY(8, reflections=2)
    by_hand = double(3, 8, 2, via=chart)
    assert by_hand.via == "cwy"
    for one in layers(by_hand):
        storage: Any = one.recurrent.parametrizations
        assert storage.weight.chart.reflections == 2
    riemannian = double(3, 8, via="riemannian", retraction="qr")
    (constraint,) = stiefel.constraints(riemannian)
    assert constraint.manifold.retraction == "qr"


def test_weights_and_the_generator_decide_everything() -> None:
    def make() -> SequenceModel:
        generator = torch.Generator().manual_seed(7)
        return SequenceModel(OrthogonalRNN(3, 6, 2, generator=generator), 2, generator=generator)

    one, two = make().state_dict(), make().state_dict()
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key])
