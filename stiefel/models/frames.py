"""What every convolutional recurrent network shares: shapes, lengths, packs, states, counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.models.counts import Counted
from stiefel.models.masks import checked_lengths

__all__ = ["FrameRNN", "FrameState", "within_lengths"]

#: The state of a network: one tensor `(layers, B, f, H, W)`, or one for each of `state_names`.
FrameState = Tensor | tuple[Tensor, ...]


def within_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """`(T, B, 1, 1, 1)` bool: true up to the end of each sequence of `x` `(T, B, ...)`."""
    steps = torch.arange(x.shape[0], device=x.device)
    return (steps[:, None] < lengths.to(x.device)[None, :])[:, :, None, None, None]


class FrameRNN(Counted):
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

    #: What a state is made of.
    state_names: ClassVar[tuple[str, ...]] = ("h0",)

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
        super().__init__()
        sizes = {"in_channels": in_channels, "hidden_channels": hidden_channels}
        for name, value in {**sizes, "num_layers": num_layers}.items():
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"expected {name} to be a positive integer, got {value!r}")
        if not (torch.get_default_dtype() if dtype is None else dtype).is_floating_point:
            raise DtypeError(f"expected a real floating point dtype, got {dtype}")
        self.in_channels, self.hidden_channels = in_channels, hidden_channels
        self.num_layers, self.batch_first = num_layers, batch_first
        self.layers = nn.ModuleList(
            layer(hidden_channels if index else in_channels) for index in range(num_layers)
        )
        for name in self.state_names:
            zero = torch.zeros(num_layers, hidden_channels, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(zero) if learnable_h0 else None)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: FrameState | None = None,
        lengths: Tensor | Sequence[int] | None = None,
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
        if isinstance(x, PackedSequence):
            return self._forward_packed(x, state, lengths)
        batched = self._check_input(x, lengths)
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        x = self._to_dtype(x, "input")
        parts = self._first_states(state, x, batched)
        output, ends = self._run(x, parts, lengths)
        if not batched:
            return output.squeeze(1), self._as_state([end.squeeze(1) for end in ends])
        return (output.transpose(0, 1) if self.batch_first else output), self._as_state(ends)

    def _run(
        self, x: Tensor, parts: list[Tensor] | None, lengths: Tensor | Sequence[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers over `(T, B, C, H, W)`; the states come and go part by part."""
        within = None
        if lengths is not None:
            within = within_lengths(checked_lengths(lengths, *x.shape[:2]), x)
            x = x.masked_fill(~within, 0)
        ends: list[tuple[Tensor, ...]] = []
        for index, layer in enumerate(self.layers):
            state = None if parts is None else tuple(part[index] for part in parts)
            x, end = layer(x, state, within)
            ends.append(end)
        if within is not None:
            x = x.masked_fill(~within, 0)
        return x, [torch.stack(part) for part in zip(*ends, strict=True)]

    def _forward_packed(
        self,
        x: PackedSequence,
        state: FrameState | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[PackedSequence, FrameState]:
        """Pads in the sorted order of the pack, runs, and packs again."""
        if lengths is not None:
            raise ConfigurationError("a PackedSequence has its own lengths: leave lengths= out")
        padded, steps = pad_packed_sequence(PackedSequence(x.data, x.batch_sizes))
        self._check_channels(padded, 5)
        padded = self._to_dtype(padded, "input")
        parts = self._first_states(state, padded, True)
        if state is not None and parts is not None and x.sorted_indices is not None:
            parts = [part.index_select(1, x.sorted_indices) for part in parts]
        output, ends = self._run(padded, parts, steps)
        data = pack_padded_sequence(output, steps).data
        if x.unsorted_indices is not None:
            ends = [end.index_select(1, x.unsorted_indices) for end in ends]
        packed = PackedSequence(data, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, self._as_state(ends)

    def _as_state(self, parts: list[Tensor]) -> FrameState:
        return parts[0] if len(self.state_names) == 1 else tuple(parts)

    def _first_states(
        self, state: FrameState | None, x: Tensor, batched: bool
    ) -> list[Tensor] | None:
        """The parts `(layers, B, f, H, W)` of the first state, None for zero."""
        batch, size = x.shape[1], tuple(x.shape[-2:])
        if state is None:
            learned = [getattr(self, name) for name in self.state_names]
            if learned[0] is None:
                return None
            return [h[:, None, :, None, None].expand(-1, batch, -1, *size) for h in learned]
        given: Any = (state,) if isinstance(state, Tensor) else state
        parts = tuple(given) if isinstance(given, tuple | list) else ()
        if len(parts) != len(self.state_names) or not all(isinstance(p, Tensor) for p in parts):
            kinds = [type(part).__name__ for part in parts] or type(given).__name__
            raise ShapeError(
                f"expected a state of {len(self.state_names)} tensors, {self.state_names}, got "
                f"{kinds}: pass on what the last call gave as its second result"
            )
        wanted = (self.num_layers, *([batch] if batched else []), self.hidden_channels, *size)
        for part in parts:
            if tuple(part.shape) != wanted:
                names = "(layers, B, f, H, W)" if batched else "(layers, f, H, W)"
                raise ShapeError(
                    f"expected a state of shape {wanted}, {names}, got {tuple(part.shape)}; the "
                    "batch is second in it with batch_first too"
                )
        parts = [self._to_dtype(part, "state") for part in parts]
        return parts if batched else [part.unsqueeze(1) for part in parts]

    def _to_dtype(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor in the dtype of the parameters; only autocast may have changed it."""
        first: Any = self.layers[0]
        weight = first.input_weight
        if tensor.device == weight.device:
            if tensor.dtype == weight.dtype:
                return tensor
            if tensor.dtype.is_floating_point and torch.is_autocast_enabled(tensor.device.type):
                return tensor.to(weight.dtype)
        raise DtypeError(
            f"expected {name} of {weight.dtype} on {weight.device}, as the parameters, got "
            f"{tensor.dtype} on {tensor.device}: use {name}.to(dtype=..., device=...)"
        )

    def _check_channels(self, x: Tensor, *dimensions: int) -> None:
        if x.ndim not in dimensions or x.shape[-3] != self.in_channels or 0 in x.shape[-2:]:
            layout = "(B, T, C, H, W)" if self.batch_first else "(T, B, C, H, W)"
            raise ShapeError(
                f"expected frames of shape {layout} or unbatched (T, C, H, W) with C = "
                f"{self.in_channels} channels, got {tuple(x.shape)}"
            )

    def _check_input(self, x: Tensor, lengths: Tensor | Sequence[int] | None) -> bool:
        """Checks the shape of a padded input and says whether it is batched."""
        self._check_channels(x, 4, 5)
        batched = x.ndim == 5
        if lengths is not None and not batched:
            raise ShapeError(
                f"lengths= is for batches, got an unbatched input of shape {tuple(x.shape)}: cut "
                "the sequence at its length instead"
            )
        if x.shape[1 if batched and self.batch_first else 0] == 0:
            raise ShapeError(
                f"expected sequences of at least one frame, got an input of shape "
                f"{tuple(x.shape)} with T = 0: skip empty sequences, the state stays what it was"
            )
        return batched
