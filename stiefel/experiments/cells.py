"""The recurrent networks of the methods, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stiefel.models import ASRNN, GRU, IRNN, LSTM, NNRNN, OrthogonalRNN, PlainRNN, RecurrentNetwork
from stiefel.numerics import complex_dtype

__all__ = ["CELLS", "PENALTIES", "penalty"]

#: delta and decay of `NNRNN.penalty` on each task, as published.
PENALTIES: dict[str, tuple[float, float]] = {
    "copying": (1e-4, 1e-6),
    "smnist": (0.15, 1e-4),
    "pmnist": (0.15, 1e-4),
}


def _unitary(features: int, hidden: int, *, init: Any, dtype: Any, **options: Any) -> OrthogonalRNN:
    """Complex weights of the run's precision, at the chart's own start."""
    return OrthogonalRNN(features, hidden, dtype=complex_dtype(dtype), **options)


def _irnn(features: int, hidden: int, *, via: None, init: Any, **options: Any) -> IRNN:
    """Its start is its own."""
    return IRNN(features, hidden, **options)


def _plain(features: int, hidden: int, *, via: None, init: Any, **options: Any) -> PlainRNN:
    return PlainRNN(features, hidden, init=init, **options)


def _lstm(features: int, hidden: int, *, via: None, init: Any, **options: Any) -> LSTM:
    return LSTM(features, hidden, forget_bias=1.0, **options)


def _gru(features: int, hidden: int, *, via: None, init: Any, **options: Any) -> GRU:
    return GRU(features, hidden, **options)


#: ``make(features, hidden, via=, init=, dtype=, **options)`` of each ``Method.cell``.
CELLS: dict[str, Callable[..., RecurrentNetwork]] = {
    "orthogonal_rnn": OrthogonalRNN,
    "unitary_rnn": _unitary,
    "asrnn": ASRNN,
    "nnrnn": NNRNN,
    "irnn": _irnn,
    "plain_rnn": _plain,
    "lstm": _lstm,
    "gru": _gru,
}


def penalty(model: nn.Module, task: str) -> Tensor | float:
    """What the loss of a task has besides the data: the penalty of an nnRNN, or nothing.

    Args:
        model: The model of a run.
        task: The name of the task.

    Returns:
        The sum over the networks of the model.
    """
    delta, decay = PENALTIES.get(task, (0.0, 0.0))
    networks = [part for part in model.modules() if isinstance(part, NNRNN)]
    return sum((part.penalty(delta, decay) for part in networks), 0.0)
