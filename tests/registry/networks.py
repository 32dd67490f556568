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
    of a layer and direction; ``published``: parameters of a layer of K inputs and N hidden units;
    ``dtype``: that of a state; ``vias``: ways to train it, beside which it has no other.
    """

    make: Callable[..., Any]
    constraints: int
    published: Callable[[int, int], int]
    dtype: torch.dtype = torch.float64
    vias: tuple[str, ...] = ("cwy", "exprnn", "givens", "rgd-c-c")

    @property
    def complex(self) -> bool:
        """Whether states are complex; inputs are real all the same."""
        return self.dtype.is_complex

    @property
    def maps(self) -> bool:
        """Whether `torch.func.vmap` takes it: torch's own gates work in place and do not."""
        return self.make not in (_lstm, _gru)

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


def _unitary(fixed: str | None = None) -> Callable[..., Any]:
    """Networks with complex weights, asked for by the real dtype of their inputs."""

    def make(via: str, *sizes: int, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        return OrthogonalRNN(
            *(sizes or (3, 8)), via=fixed or via, dtype=dtype.to_complex(), **options
        )

    return make


_lstm = _network(LSTM, takes_via=False, forget_bias=1.0)
_gru = _network(GRU, takes_via=False)

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
    "unitary": NetworkCase(
        _unitary(), 1, lambda K, N: N * N + 2 * N * K + N, dtype=torch.complex128
    ),
    "urnn": NetworkCase(
        _unitary("urnn"),
        1,
        lambda K, N: min(7 * N, N * N) + 2 * N * K + N,
        dtype=torch.complex128,
        vias=("urnn",),
    ),
    "lstm": NetworkCase(_lstm, 0, lambda K, N: 4 * N * (N + K) + 8 * N),
    "gru": NetworkCase(_gru, 0, lambda K, N: 3 * N * (N + K) + 6 * N),
}
#: ``make(via)``: a float64 model whose square weights are trained that way; with an input for it.
MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], Tensor]]] = {
    name: (case.model, case.sample)
    for name, case in NETWORKS.items()
    if case.constraints and "cwy" in case.vias
}
#: Ways to train a square weight.
SQUARE_VIAS = [
    *("cwy", "householder", "matrix_exp", "exprnn", "dtriv", "cayley", "scornn"),
    *("own", "polar", "givens", "rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr"),
]
