"""What the tests of the convolutional recurrent networks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefel
from stiefel.models import ConvLSTM, ConvNERU
from stiefel.models.frames import FrameRNN, FrameState

#: Ways to train a kernel, whose point is tall.
TALL_VIAS = [
    *("cwy", "tcwy", "householder", "matrix_exp", "dtriv", "own", "polar"),
    *("rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr"),
]

#: ``make(**options)`` gives a float64 network with 2 input channels and 3 hidden ones.
NETWORKS: dict[str, Callable[..., FrameRNN]] = {
    "neru-cwy": lambda **o: double(ConvNERU, via="cwy", **o),
    "neru-riemannian": lambda **o: double(
        ConvNERU, via="rgd-e-qr", nonlinearity="abs", padding_mode="circular", **o
    ),
    "neru-free": lambda **o: double(ConvNERU, kernel="free", nonlinearity="tanh", **o),
    "neru-zeros": lambda **o: double(ConvNERU, kernel="zeros", **o),
    "lstm": lambda **o: double(ConvLSTM, **o),
    "lstm-peepholes": lambda **o: double(ConvLSTM, peepholes=(5, 4), padding_mode="circular", **o),
    "lstm-norm": lambda **o: double(ConvLSTM, norm="instance", **o),
}


def double(kind: type[FrameRNN], **options: Any) -> FrameRNN:
    shape = {"in_channels": 2, "hidden_channels": 3, "kernel_size": 3, "dtype": torch.float64}
    return kind(**{**shape, **options})


def frames(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts(state: FrameState) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def disturb(network: nn.Module) -> None:
    """Moves what starts at zero or one, so that a test sees whether it is used."""
    constrained = {id(leaf) for c in stiefel.constraints(network) for leaf in c.leaves}
    with torch.no_grad():
        for parameter in network.parameters():
            if id(parameter) not in constrained:
                parameter.add_(0.3 * torch.randn_like(parameter))


def dense_convolution(kernel: Tensor, size: int, padding_mode: str) -> Tensor:
    """The matrix of ``G -> K * G`` over images of `size` x `size` pixels, entry by entry.

    Row and column numbers run over (channel, row, column) of an image.
    """
    out, channels, kh, kw = kernel.shape
    dense = kernel.new_zeros(out, size, size, channels, size, size)
    for y in range(size):
        for x in range(size):
            for a in range(kh):
                for b in range(kw):
                    v, u = y + a - (kh - 1) // 2, x + b - (kw - 1) // 2
                    if padding_mode == "circular":
                        v, u = v % size, u % size
                    if 0 <= v < size and 0 <= u < size:
                        dense[:, y, x, :, v, u] += kernel[:, :, a, b]
    return dense.reshape(out * size * size, channels * size * size)
