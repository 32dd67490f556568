"""What every convolutional recurrent network shares: layers over frames, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.models.layouts import Lengths, SequenceNetwork
from stiefel.models.masks import checked_lengths

__all__ = ["FrameRNN", "FrameState", "within_lengths"]

#: The state of a network: one tensor `(layers, B, f, H, W)`, or one for each of `state_names`.
FrameState = Tensor | tuple[Tensor, ...]


def within_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """`(T, B, 1, 1, 1)` bool: true up to the end of each sequence of `x` `(T, B, ...)`."""
    steps = torch.arange(x.shape[0], device=x.device)
    return (steps[:, None] < lengths.to(x.device)[None, :])[:, :, None, None, None]


class FrameRNN(SequenceNetwork):
    """Layers of a recurrence over frames, under the interface of `torch.nn.RNN`.

    A network is a layer class and a few lines. A layer is called as ``layer(x, state, within)``
    with `(T, B, channels, H, W)`, a tuple of `(B, f, H, W)` with one for each of `state_names`, or
    None for zero, and None or `(T, B, 1, 1, 1)` bool, true up to the end of each sequence. It gives
    the outputs `(T, B, f, H, W)` and the state at each sequence's own last step.
    ``layer.input_weight`` tells dtype and device.

    Args:
        layer: ``layer(channels)`` makes one layer for that many channels of its input.
        in_channels: Channels of the frames.
        hidden_channels: Channels of the state, f.
        num_layers: Layers, each fed with the output of the one below.
        batch_first: Whether sequences are `(B, T, C, H, W)` instead of `(T, B, C, H, W)`.
        learnable_h0: Whether the first state is learned, one number for each layer and channel,
            zero at the start: ``rnn.h0`` `(layers, f)`, and a parameter for each further name of
            `state_names`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ConfigurationError: If a size is not a positive integer.
        DtypeError: If `dtype` is not real floating point.
    """

    rank = 5
    state_words = ("layers", "f, H, W", "state")

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        in_channels: int,
        hidden_channels: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        learnable_h0: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"in_channels": in_channels, "hidden_channels": hidden_channels}
        for name, value in {**sizes, "num_layers": num_layers}.items():
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"expected {name} to be a positive integer, got {value!r}")
        if not (torch.get_default_dtype() if dtype is None else dtype).is_floating_point:
            raise DtypeError(f"expected a real floating point dtype, got {dtype}")
        super().__init__(
            num_layers,
            hidden_channels,
            batch_first=batch_first,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.in_channels, self.hidden_channels = in_channels, hidden_channels
        self.num_layers = num_layers
        self.layers = nn.ModuleList(
            layer(hidden_channels if index else in_channels) for index in range(num_layers)
        )

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: FrameState | None = None,
        lengths: Lengths = None,
    ) -> tuple[Tensor | PackedSequence, FrameState]:
        """Runs a batch of sequences of frames.

        Args:
            x: `(T, B, C, H, W)`, with batch_first `(B, T, C, H, W)`, unbatched `(T, C, H, W)`, or
                packed. T = 0 is an error; an empty batch gives empty results.
            state: First states `(layers, B, f, H, W)`, unbatched without B, as the second result
                has them; those learned, or zero, when None.
            lengths: Steps of each sequence `(B,)`, from 1 to T, of a padded batch. The padding is
                never read, the state stays what it was at a sequence's end, and the output is
                zero from there on.

        Returns:
            The outputs of the last layer `(T, B, f, H, W)` in the layout of `x` (packed if `x`
            is), and the state `(layers, B, f, H, W)` at each sequence's own last step.

        Raises:
            ShapeError: If a shape is wrong, T = 0, or a length is out of range.
            DtypeError: If dtype or device of `x` or `state` is not that of the parameters.
        """
        output, end, _ = self._over(x, state, lengths)
        return output, end

    def _run(
        self, x: Tensor, states: Sequence[Tensor | None], lengths: Lengths
    ) -> tuple[Tensor, list[Tensor], None]:
        within = None
        if lengths is not None:
            within = within_lengths(checked_lengths(lengths, *x.shape[:2]), x)
            x = x.masked_fill(~within, 0)
        ends: list[tuple[Tensor, ...]] = []
        for index, layer in enumerate(self.layers):
            first = tuple(part[index] for part in states if part is not None)
            x, end = layer(x, first or None, within)
            ends.append(end)
        if within is not None:
            x = x.masked_fill(~within, 0)
        return x, [torch.stack(part) for part in zip(*ends, strict=True)], None

    @property
    def _like(self) -> Tensor:
        layer: Any = self.layers[0]
        return layer.input_weight

    def _fits(self, x: Tensor) -> bool:
        return x.shape[-3] == self.in_channels and 0 not in x.shape[-2:]

    def _shape_error(self, x: Tensor) -> ShapeError:
        layout = "(B, T, C, H, W)" if self.batch_first else "(T, B, C, H, W)"
        return ShapeError(
            f"expected frames of shape {layout} or unbatched (T, C, H, W) with C = "
            f"{self.in_channels} channels, got {tuple(x.shape)}"
        )
