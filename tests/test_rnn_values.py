"""`OrthogonalRNN` computes what `nn.RNN` and a loop over steps compute."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stiefel.models import NONLINEARITIES, OrthogonalRNN, activate
from tests.recurrent_networks import double, layers


def like_rnn(reference: nn.RNN, **options) -> OrthogonalRNN:
    """A network with plain weights and the values of an `nn.RNN`."""
    rnn = double(
        reference.input_size,
        reference.hidden_size,
        reference.num_layers,
        reference.nonlinearity,
        batch_first=reference.batch_first,
        bidirectional=reference.bidirectional,
        via=None,
        **options,
    )
    state = reference.state_dict()
    names = [k.removeprefix("weight_hh") for k in state if k.startswith("weight_hh")]
    with torch.no_grad():
        for one, suffix in zip(layers(rnn), names, strict=True):
            one.input.weight.copy_(state["weight_ih" + suffix])
            one.recurrent.weight.copy_(state["weight_hh" + suffix])
            one.input.bias.copy_(state["bias_ih" + suffix] + state["bias_hh" + suffix])
    return rnn


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_equals_nn_rnn(nonlinearity: str) -> None:
    for count, bidirectional, batch_first, with_h0 in itertools.product(
        (1, 2), (False, True), (False, True), (False, True)
    ):
        reference = nn.RNN(
            3,
            5,
            count,
            nonlinearity,
            batch_first=batch_first,
            bidirectional=bidirectional,
            dtype=torch.float64,
        )
        rnn = like_rnn(reference)
        shape = (4, 9, 3) if batch_first else (9, 4, 3)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        h0 = None
        if with_h0:
            h0 = torch.randn(count * rnn.directions, 4, 5, dtype=torch.float64, requires_grad=True)
        mine, theirs = rnn(x, h0), reference(x, h0)
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)
        leaves = [x] if h0 is None else [x, h0]
        suffixes = [f"_l{i}{d}" for i in range(count) for d in ("", "_reverse")[: rnn.directions]]
        pairs = [
            (parameter, getattr(reference, name + suffix))
            for one, suffix in zip(layers(rnn), suffixes, strict=True)
            for parameter, name in (
                (one.recurrent.weight, "weight_hh"),
                (one.input.weight, "weight_ih"),
                (one.input.bias, "bias_ih"),
            )
        ] + [(leaf, leaf) for leaf in leaves]
        cotangents = [torch.randn_like(b) for b in theirs]
        slopes = torch.autograd.grad(mine, [pair[0] for pair in pairs], cotangents)
        expected = torch.autograd.grad(theirs, [pair[1] for pair in pairs], cotangents)
        for a, b in zip(slopes, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_and_lengths_equal_nn_rnn(enforce_sorted: bool) -> None:
    reference = nn.RNN(3, 5, 2, bidirectional=True, dtype=torch.float64)
    rnn = like_rnn(reference)
    lengths = torch.tensor([9, 7, 2] if enforce_sorted else [2, 9, 7])
    x = torch.randn(9, 3, 3, dtype=torch.float64)
    h0 = torch.randn(4, 3, 5, dtype=torch.float64)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    for first in (None, h0):
        expected, expected_last = reference(packed, first)
        output, last = rnn(packed, first)
        assert isinstance(output, PackedSequence)
        assert torch.allclose(output.data, expected.data, atol=1e-12)
        assert torch.equal(output.batch_sizes, expected.batch_sizes)
        assert torch.allclose(last, expected_last, atol=1e-12)
        padded, _ = pad_packed_sequence(expected)
        for given in (lengths, lengths.tolist()):
            output, last = rnn(x, first, lengths=given)
            assert torch.allclose(output, padded, atol=1e-12)  # zero past the end
            assert torch.allclose(last, expected_last, atol=1e-12)


def test_unbatched_sequences_equal_nn_rnn() -> None:
    reference = nn.RNN(3, 5, 2, batch_first=True, bidirectional=True, dtype=torch.float64)
    rnn = like_rnn(reference)
    x = torch.randn(9, 3, dtype=torch.float64)
    h0 = torch.randn(4, 5, dtype=torch.float64)
    for first in (None, h0):
        for a, b in zip(rnn(x, first), reference(x, first), strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)


def loop(rnn: OrthogonalRNN, x: Tensor, h0: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """All layers and directions, one sequence and one step at a time."""
    ends = []
    for at in range(rnn.num_layers):
        outputs = []
        for direction in range(rnn.directions):
            index = at * rnn.directions + direction
            one = layers(rnn)[index]
            Q, rows, last = one.recurrent.weight, [], []
            for i, steps in enumerate(lengths):
                h = h0[index, i]
                row = [torch.zeros_like(h)] * len(x)
                for t in reversed(range(steps)) if direction else range(steps):
                    z = Q @ h + one.input(x[t, i])
                    row[t] = h = activate(one.nonlinearity, z, one.beta)
                rows.append(torch.stack(row))
                last.append(h)
            outputs.append(torch.stack(rows, dim=1))
            ends.append(torch.stack(last))
        x = torch.cat(outputs, dim=-1)
    return x, torch.stack(ends)


@pytest.mark.parametrize("reflections", [8, 3])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_equals_a_loop_with_gradients_to_the_coordinates(
    nonlinearity: str, reflections: int, device: torch.device
) -> None:
    rnn = double(
        3,
        8,
        2,
        nonlinearity,
        bidirectional=True,
        batch_first=True,
        reflections=reflections,
        device=device,
    )
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(3, 6, 3, dtype=torch.float64, device=device)
    h0 = torch.randn(4, 3, 8, dtype=torch.float64, device=device)
    lengths = [6, 2, 4]
    output, last = rnn(x, h0, lengths=lengths)
    expected, expected_last = loop(rnn, x.transpose(0, 1), h0, lengths)
    assert torch.allclose(output, expected.transpose(0, 1), atol=1e-11)
    assert torch.allclose(last, expected_last, atol=1e-11)
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(output.square().sum() + last.sum(), leaves)
    wanted = torch.autograd.grad(expected.square().sum() + expected_last.sum(), leaves)
    for a, b in zip(slopes, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)
