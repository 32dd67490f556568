"""`ConvLSTM` against a loop that is written out, and its counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stiefel import errors
from stiefel.models import ConvLSTM
from tests.frame_networks import disturb, double, frames


def normalised(x: Tensor, norm: Any) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-5) over the pixels, then scale and shift."""
    mean = x.mean((2, 3), keepdim=True)
    variance = (x - mean).square().mean((2, 3), keepdim=True)
    scale, shift = (one[:, None, None] for one in (norm.weight, norm.bias))
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_size": (3, 5)},
        {"padding_mode": "circular", "forget_bias": 0.0},
        {"peepholes": True},
        {"peepholes": (5, 6)},
        {"norm": "instance", "peepholes": True},
        {"bias": False},
    ],
)
def test_the_recurrence_is_its_formula(options: dict[str, Any]) -> None:
    rnn = double(ConvLSTM, **options)
    disturb(rnn)
    layers: Any = rnn.layers
    layer = layers[0]
    x, h, c = frames(4, 2, 2, 5, 6), frames(2, 3, 5, 6), frames(2, 3, 5, 6)
    output, (last_h, last_c) = rnn(x, (h.unsqueeze(0), c.unsqueeze(0)))
    w_i, w_f, w_o = (0, 0, 0) if layer.peepholes is None else layer.peepholes
    for t in range(4):
        both = torch.cat([x[t], h], dim=1)
        if options.get("padding_mode") == "circular":
            gates = nn.functional.conv2d(
                nn.functional.pad(both, (1, 1, 1, 1), mode="circular"),
                layer.gates.weight,
                layer.gates.bias,
            )
        else:
            padding = tuple(k // 2 for k in layer.gates.kernel_size)
            gates = nn.functional.conv2d(
                both, layer.gates.weight, layer.gates.bias, padding=padding
            )
        if options.get("norm"):
            gates = normalised(gates, layer.gate_norm)
        i, j, f, o = gates[:, :3], gates[:, 3:6], gates[:, 6:9], gates[:, 9:]
        forget = torch.sigmoid(f + w_f * c + options.get("forget_bias", 1.0))
        c = c * forget + torch.sigmoid(i + w_i * c) * torch.tanh(j)
        if options.get("norm"):
            c = normalised(c, layer.cell_norm)
        h = torch.tanh(c) * torch.sigmoid(o + w_o * c)
        assert (output[t] - h).abs().max() < 1e-12
    assert (last_h - h).abs().max() < 1e-12
    assert (last_c - c).abs().max() < 1e-12


def test_the_start() -> None:
    rnn = ConvLSTM(4, 16, 5, peepholes=True)
    layers: Any = rnn.layers
    weight = layers[0].gates.weight
    assert weight.abs().max() <= 0.04
    assert (
        abs(weight.std() - 0.0176) < 3e-4
    )  # of a normal of 0.02 that is cut off at two deviations
    assert not layers[0].gates.bias.any()
    assert not layers[0].peepholes.any()


@pytest.mark.parametrize("q", [3, 5])
def test_counts(q: int) -> None:
    f_in, f = 2, 3
    kernel = 4 * q**2 * (f_in + f) * f
    for options, count in (
        ({}, kernel + 4 * f),
        ({"num_layers": 2}, kernel + 4 * q**2 * 2 * f * f + 8 * f),
        ({"norm": "instance"}, kernel + 10 * f),
        ({"peepholes": True}, kernel + 4 * f + 3 * f),
        ({"peepholes": (7, 8), "learnable_h0": True, "bias": False}, kernel + 3 * f * 56 + 2 * f),
    ):
        assert double(ConvLSTM, kernel_size=q, **options).expected_parameters() == count


def test_errors_teach() -> None:
    with pytest.raises(errors.UnknownNameError, match="instance"):
        ConvLSTM(2, 3, norm="layer")
    with pytest.raises(errors.ConfigurationError, match=r"\(H, W\)"):
        ConvLSTM(2, 3, peepholes=(1, 2, 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.ShapeError, match="peepholes=True"):
        ConvLSTM(2, 3, peepholes=(4, 4))(torch.randn(1, 1, 2, 5, 4))
    with pytest.raises(errors.ShapeError, match=r"2 tensors, \('h0', 'c0'\)"):
        ConvLSTM(2, 3)(torch.randn(1, 1, 2, 5, 4), torch.randn(1, 1, 3, 5, 4))
