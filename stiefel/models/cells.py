"""Recurrent networks by name, class or function, for models that are built around one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from stiefel.errors import ConfigurationError, unknown
from stiefel.models.asrnn import ASRNN
from stiefel.models.base import RecurrentNetwork
from stiefel.models.gated import GRU, LSTM
from stiefel.models.nnrnn import NNRNN
from stiefel.models.plain import IRNN, PlainRNN
from stiefel.models.recurrent import OrthogonalRNN
from stiefel.parametrizations import Parametrization

__all__ = ["CELLS", "Cell", "check_networks", "network_maker"]

#: Names that ``cell=`` takes.
CELLS: dict[str, type[RecurrentNetwork]] = {
    "orthogonal-rnn": OrthogonalRNN,
    "asrnn": ASRNN,
    "nnrnn": NNRNN,
    "rnn": PlainRNN,
    "irnn": IRNN,
    "lstm": LSTM,
    "gru": GRU,
}
#: A recurrent network by name, by class, or made by a function of its number of inputs.
Cell = str | type[RecurrentNetwork] | Callable[[int], RecurrentNetwork]


def network_maker(
    cell: Cell,
    via: str | Parametrization | None,
    hidden_size: int,
    num_layers: int,
    shared: dict[str, Any],
    options: dict[str, Any],
) -> Callable[[int, bool], RecurrentNetwork]:
    """What makes a network for a number of inputs, its first state learned or not."""
    if isinstance(cell, str):
        if cell not in CELLS:
            raise unknown("cell", cell, CELLS)
        cell = CELLS[cell]
    if isinstance(cell, type):
        given = dict(shared)
        if not issubclass(cell, RecurrentNetwork):
            raise ConfigurationError(
                f"expected a class of recurrent networks, got {cell.__name__}: derive it from "
                f"RecurrentNetwork, or name one of {', '.join(CELLS)}"
            )
        if "via" in inspect.signature(cell).parameters:
            given["via"] = via
        if issubclass(cell, OrthogonalRNN):
            given.setdefault("nonlinearity", "abs")
        kind: Any = cell
        return lambda features, learned: kind(
            features, hidden_size, num_layers, learnable_h0=learned, **given
        )
    if options:
        raise ConfigurationError(
            f"a function that makes networks decides on everything itself: expected no further "
            f"options, got {sorted(options)}"
        )
    function = cell
    return lambda features, learned: function(features)


def check_networks(
    encoder: Any, decoder: Any, hidden_size: int, embedding_size: int, dtype: torch.dtype
) -> None:
    """What a cell function made must fit."""
    inputs = (embedding_size, hidden_size + embedding_size)
    for network, features in zip((encoder, decoder), inputs, strict=True):
        fits = isinstance(network, RecurrentNetwork) and (
            (network.input_size, network.hidden_size) == (features, hidden_size)
            and not network.batch_first
            and not network.bidirectional
        )
        if not fits:
            raise ConfigurationError(
                f"expected cell({features}) to be a RecurrentNetwork of {features} inputs and "
                f"{hidden_size} hidden units, without batch_first and bidirectional, got "
                f"{network!r}"
            )
    if (encoder.num_layers, encoder.state_names) != (decoder.num_layers, decoder.state_names):
        raise ConfigurationError(
            "expected an encoder and a decoder of as many layers and one kind of state, for the "
            f"last state of one is the first of the other, got {encoder!r} and {decoder!r}"
        )
    came = [network._like.dtype for network in (encoder, decoder)]
    if came != [dtype, dtype]:
        raise ConfigurationError(
            f"expected an encoder and a decoder in {dtype}, as the embeddings, got {came}: give "
            "the model and the networks that cell(features) makes one dtype="
        )
