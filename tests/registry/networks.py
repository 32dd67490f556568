"""Recurrent networks, with what their papers count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.models import ASRNN, GRU, IRNN, LSTM, NNRNN, OrthogonalRNN, PlainRNN, SequenceModel
from stiefel.models.activations import NONLINEARITIES


@dataclass(frozen=True)
class NetworkCase:
    """A recurrent network of 3 inputs and 8 hidden units.

    ``make(via, **options)``: in float64 unless told otherwise; ``constraints``: constrained weights
    of a layer and direction; ``published``: parameters of a layer of K inputs and N hidden units.
    """

    make: Callable[..., Any]
    constraints: int
    published: Callable[[int, int], int]

    def model(self, via: str) -> nn.Module:
        """Two layers and a head."""
        return SequenceModel(self.make(via, num_layers=2), 2)

    def sample(self) -> Tensor:
        """An input, `(T, B, K)`."""
        return torch.randn(5, 4, 3, dtype=torch.float64)


def _network(kind: type[nn.Module], *, takes_via: bool = True, **fixed: Any) -> Callable[..., Any]:
    def make(via: str, *sizes: int, **options: Any) -> nn.Module:
        trained = {"via": via} if takes_via else {}
        return kind(*(sizes or (3, 8)), **{"dtype": torch.float64, **fixed, **trained, **options})

    return make


#: Recurrent networks, with the numbers that their papers count.
NETWORKS: dict[str, NetworkCase] = {
    **{
        f"orthogonal-rnn-{nonlinearity}": NetworkCase(
            _network(OrthogonalRNN, nonlinearity=nonlinearity),
            1,
            lambda K, N: N * (N - 1) // 2 + N * K + N,
        )
        for nonlinearity in NONLINEARITIES
    },
    "asrnn": NetworkCase(_network(ASRNN), 2, lambda K, N: N * (N - 1) + N * K + 2 * N),
    "asrnn-free": NetworkCase(
        _network(ASRNN, recurrent="free"),
        1,
        lambda K, N: N * N + N * (N - 1) // 2 + N * K + 2 * N,
    ),
    "nnrnn": NetworkCase(_network(NNRNN), 1, lambda K, N: N * (N - 1) + N * K + 2 * N - N // 2),
    "nnrnn-triangle": NetworkCase(
        _network(NNRNN, mask="triangle"), 1, lambda K, N: N * (N - 1) + N * K + 2 * N
    ),
    "plain-rnn": NetworkCase(
        _network(PlainRNN, takes_via=False), 0, lambda K, N: N * N + N * K + N
    ),
    "irnn": NetworkCase(
        _network(IRNN, takes_via=False, input_std=0.5), 0, lambda K, N: N * N + N * K + N
    ),
    "lstm": NetworkCase(
        _network(LSTM, takes_via=False, forget_bias=1.0), 0, lambda K, N: 4 * N * (N + K) + 8 * N
    ),
    "gru": NetworkCase(_network(GRU, takes_via=False), 0, lambda K, N: 3 * N * (N + K) + 6 * N),
}
#: ``make(via)``: a float64 model whose square weights are trained that way; with an input for it.
MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], Tensor]]] = {
    name: (case.model, case.sample) for name, case in NETWORKS.items() if case.constraints
}
#: Ways to train a square weight.
SQUARE_VIAS = [
    *("cwy", "householder", "matrix_exp", "exprnn", "dtriv", "cayley", "scornn"),
    *("own", "polar", "givens", "rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr"),
]
