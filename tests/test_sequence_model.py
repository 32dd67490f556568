"""`SequenceModel`: readouts and heads, of these networks and of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from stiefel import errors
from stiefel.models import OrthogonalRNN, SequenceModel


@pytest.mark.parametrize("bidirectional", [False, True])
def test_readouts(bidirectional: bool) -> None:
    rnn = OrthogonalRNN(3, 6, 2, bidirectional=bidirectional, batch_first=True)
    x = torch.randn(4, 5, 3)
    every = SequenceModel(rnn, 7)
    assert torch.allclose(every(x), every.head(rnn(x)[0]))
    last = SequenceModel(rnn, 7, readout="last")
    lengths = [5, 2, 1, 4]
    output = rnn(x, lengths=lengths)[0]
    ends = torch.stack([output[i, n - 1, :6] for i, n in enumerate(lengths)])
    if bidirectional:
        ends = torch.cat([ends, output[:, 0, 6:]], dim=1)
    assert torch.allclose(last(x, lengths=lengths), last.head(ends), atol=1e-6)
    assert last(x[0]).shape == (7,)
    packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
    assert torch.allclose(last(packed), last(x, lengths=lengths), atol=1e-6)
    logits = every(packed)
    assert isinstance(logits, PackedSequence)
    assert logits.data.shape == (12, 7)


def test_heads_start_as_published() -> None:
    rnn = OrthogonalRNN(3, 500, via=None)
    copying = SequenceModel(rnn, 900).head
    assert copying.weight.std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert not copying.bias.any()
    pixels = SequenceModel(rnn, 900, head_init="default").head
    bound = 500**-0.5
    for parameter in pixels.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.06)
    with pytest.raises(errors.UnknownNameError, match="kaiming"):
        SequenceModel(rnn, 9, head_init="xavier")
    with pytest.raises(errors.UnknownNameError, match="last"):
        SequenceModel(rnn, 9, readout="first")


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_heads_take_the_networks_of_torch(kind: Any) -> None:
    rnn = kind(3, 6, num_layers=2, bidirectional=True)
    x = torch.randn(5, 4, 3)
    assert SequenceModel(rnn, 7)(x).shape == (5, 4, 7)
    model = SequenceModel(rnn, 7, readout="last")
    output = rnn(x)[0]
    ends = torch.cat([output[-1, :, :6], output[0, :, 6:]], dim=1)
    assert torch.allclose(model(x), model.head(ends), atol=1e-6)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_lstm_has_fewer_features() -> None:
    x = torch.randn(5, 2, 3)
    for readout, shape in (("all", (5, 2, 4)), ("last", (2, 4))):
        model = SequenceModel(nn.LSTM(3, 6, proj_size=2), 4, readout=readout)
        assert model(x).shape == shape
