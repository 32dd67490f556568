"""`PlainRNN`, `IRNN`, `LSTM` and `GRU`: their starts, values and counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import stiefel
from stiefel import errors
from stiefel.geometry import orthonormality_residual
from stiefel.models import (
    ASRNN,
    GRU,
    IRNN,
    LSTM,
    NNRNN,
    OrthogonalRNN,
    PlainRNN,
    RecurrentNetwork,
    SequenceModel,
)


def layer_of(rnn: RecurrentNetwork) -> Any:
    return rnn.layers[0]


# ------------------------------------------------------------------------------- identity start


def test_a_new_irnn_adds_up_its_inputs() -> None:
    rnn = IRNN(3, 8, dtype=torch.float64)
    layer = layer_of(rnn)
    with torch.no_grad():
        layer.input.weight.abs_()
    x = torch.rand(300, 2, 3, dtype=torch.float64)
    wanted = torch.relu(x @ layer.input.weight.mT).cumsum(0)
    assert (rnn(x)[0] - wanted).abs().max() < 1e-12


def test_start_of_an_irnn() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = layer_of(IRNN(200, 300, generator=generator))
    assert torch.equal(layer.recurrent.weight, torch.eye(300))
    assert layer.input.weight.std().item() == pytest.approx(1e-3, rel=0.02)
    assert not layer.input.bias.any()
    scaled = layer_of(IRNN(3, 300, scale=0.01, noise=0.02, generator=generator)).recurrent.weight
    off = scaled - 0.01 * torch.eye(300)
    assert off.std().item() == pytest.approx(0.02, rel=0.02)
    assert scaled.requires_grad


def test_worked_numbers_of_repeated_multiplication() -> None:
    """100 turns by 30 degrees are one by 120; diag(1.05, 0.95)^100 (1, 1) = (131.5, 0.0059)."""
    turn = math.radians(30)
    rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    start = torch.ones(1, 1, 2)
    for W, wanted in (
        (rotation, [math.sqrt(2) * f(math.radians(45 + 120)) for f in (math.cos, math.sin)]),
        (torch.diag(torch.tensor([1.05, 0.95])), [131.5, 0.0059]),
    ):
        rnn = PlainRNN(1, 2, nonlinearity="identity", init=lambda t, W=W: t.copy_(W))
        _, last = rnn(torch.zeros(100, 1, 1), start)
        assert last.flatten().tolist() == pytest.approx(wanted, rel=2e-3, abs=1e-4)


def test_errors_of_irnn_teach() -> None:
    with pytest.raises(errors.ConfigurationError, match="known by its start"):
        IRNN(3, 8, init="haar")
    with pytest.raises(errors.ConfigurationError, match="noise"):
        IRNN(3, 8, noise=-1)


# ---------------------------------------------------------------------------------- plain weights


def test_starts_of_a_plain_weight() -> None:
    haar = layer_of(PlainRNN(3, 64, init="haar", dtype=torch.float64)).recurrent.weight
    assert orthonormality_residual(haar) < 1e-12
    glorot = layer_of(PlainRNN(3, 64)).recurrent.weight
    bound = math.sqrt(6 / 128)
    assert bound * 0.98 < glorot.abs().max() <= bound
    with pytest.raises(errors.UnknownNameError, match="glorot"):
        PlainRNN(3, 8, init="glorott")


def test_an_orthogonal_start_is_that_of_the_constrained_network() -> None:
    """Same generator, same values: only what training does differs."""
    plain = PlainRNN(3, 8, init="haar", generator=torch.Generator().manual_seed(3))
    x = torch.randn(5, 2, 3)
    held = OrthogonalRNN(3, 8, nonlinearity="tanh", via="rgd-c-c", init="haar")
    state = plain.state_dict()
    held.load_state_dict(state, strict=False)
    next(stiefel.constraints(held)).assign(state["layers.0.recurrent.weight"])
    assert torch.allclose(plain(x)[0], held(x)[0], atol=1e-6)


# ------------------------------------------------------------------------------------------ gates


@pytest.mark.parametrize(("kind", "reference"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_gated_networks_are_those_of_torch(kind: Any, reference: Any) -> None:
    mine = kind(3, 5, 2, batch_first=True, bidirectional=True)
    theirs = reference(3, 5, 2, batch_first=True, bidirectional=True)
    theirs.load_state_dict(mine.network.state_dict())
    x = torch.randn(4, 6, 3)
    output, state = mine(x)
    wanted, ends = theirs(x)
    assert torch.equal(output, wanted)
    for a, b in zip(*(s if isinstance(s, tuple) else (s,) for s in (state, ends)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"dropout": 0.5}])
@pytest.mark.parametrize(("kind", "reference"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_long_sequences_are_those_of_torch(kind: Any, reference: Any, options: Any) -> None:
    """On the CPU they go in pieces, unless they run backwards or drop at random."""
    mine = kind(3, 5, 2, dtype=torch.float64, **options)
    theirs = reference(3, 5, 2, dtype=torch.float64, **options)
    theirs.load_state_dict(mine.network.state_dict())
    x = torch.randn(150, 4, 3, dtype=torch.float64)
    results = []
    for network, parameters in ((mine, mine.network.parameters()), (theirs, theirs.parameters())):
        torch.manual_seed(0)  # of the masks
        output, state = network(x)
        parts = state if isinstance(state, tuple) else (state,)
        loss = output.square().sum() + sum(part.sum() for part in parts)
        results.append([output, *parts, *torch.autograd.grad(loss, list(parameters))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("forget_bias", "first", "second"), [(1.0, 1.0, 0.0), ("split", 0.5, 0.5), (2, 2.0, 0.0)]
)
def test_forget_bias(forget_bias: Any, first: float, second: float) -> None:
    rnn = LSTM(3, 5, 2, bidirectional=True, forget_bias=forget_bias)
    drawn = 0
    for name, parameter in rnn.network.named_parameters():
        if name.startswith("bias"):
            wanted = first if name.startswith("bias_ih") else second
            assert (parameter[5:10] == wanted).all()
            assert (parameter[:5].abs() > 0).all()
            drawn += 1
    assert drawn == 8
    as_drawn: Any = LSTM(3, 5).network.bias_ih_l0
    assert (as_drawn[5:10].abs() <= 5**-0.5).all()


def test_a_generator_decides_the_start() -> None:
    one, two = (GRU(3, 5, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_errors_of_gates_teach() -> None:
    with pytest.raises(errors.ConfigurationError, match="split"):
        LSTM(3, 5, forget_bias="one")
    with pytest.raises(errors.ConfigurationError, match="no bias"):
        LSTM(3, 5, bias=False, forget_bias=1.0)
    with pytest.raises(errors.ShapeError, match=r"the state \(h0, c0\)"):
        LSTM(3, 5)(torch.randn(4, 2, 3), torch.zeros(1, 2, 5))


# ----------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("rnn", "outputs", "count"),
    [
        (lambda: LSTM(1, 128), 10, 68_362),
        (lambda: LSTM(10, 68), 9, 22_381),
        (lambda: OrthogonalRNN(1, 170, via="rgd-c-c"), 10, 16_415),
        (lambda: OrthogonalRNN(1, 360, via="rgd-c-c"), 10, 68_950),
        (lambda: OrthogonalRNN(1, 512, via="rgd-c-c"), 10, 136_970),
        (lambda: OrthogonalRNN(10, 190, via="exprnn"), 9, 21_764),
    ],
    ids=["lstm128", "lstm68", "exp170", "exp360", "exp512", "exp190"],
)
def test_published_counts(rnn: Any, outputs: int, count: int) -> None:
    model = SequenceModel(rnn(), outputs)
    assert model.expected_parameters(effective=True) == count


@pytest.mark.parametrize(
    ("rnn", "count"),
    [
        (lambda: OrthogonalRNN(200, 1386, via="rgd-c-c", device="meta"), 1_317_741),
        (lambda: ASRNN(200, 1024, via="rgd-c-c", device="meta"), 1_315_650),
        (lambda: NNRNN(200, 1024, via="rgd-c-c", mask="triangle", device="meta"), 1_315_650),
        (lambda: LSTM(200, 475, device="meta"), 1_320_100),
    ],
    ids=["exp1386", "as1024", "nn1024", "lstm475"],
)
def test_published_counts_of_characters(rnn: Any, count: int) -> None:
    """Penn Treebank by characters: 50 of them, embedded in 200 dimensions."""
    model = SequenceModel(rnn(), 50)
    assert model.expected_parameters(effective=True) + 50 * 200 == count
