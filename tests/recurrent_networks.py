"""What the tests of `OrthogonalRNN` share."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from stiefel.models import OrthogonalRNN, RecurrentLayer


def double(*args: Any, **options: Any) -> OrthogonalRNN:
    return OrthogonalRNN(*args, dtype=torch.float64, **options)


def layers(rnn: OrthogonalRNN) -> list[RecurrentLayer]:
    return [cast(RecurrentLayer, one) for one in rnn.layers]


def recurrent(rnn: OrthogonalRNN) -> Tensor:
    return layers(rnn)[0].recurrent.weight
