"""What every network over sequences shares: layouts, lengths, packs, states and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.models.counts import Counted
from stiefel.numerics import real_dtype

__all__ = ["Lengths", "SequenceNetwork"]

#: Steps of each sequence of a padded batch `(B,)`; None where all have T.
Lengths = Tensor | Sequence[int] | None


class SequenceNetwork(Counted):
    """A network of several layers over sequences, whatever a step of them is.

    Inside, a batch is `(T, B, *step)`, and a state has a part `(rows, B, width, *size)` for each
    of `state_names`, with one row for each layer and direction, and the sizes of a step that come
    behind its features. A network says what a step is (`rank`, `_fits`, `_shape_error`, `_like`)
    and runs over such a batch (`_run`); `_over` does the rest.

    Args:
        rows: Rows of a state.
        width: Features of a state.
        batch_first: Whether sequences come as `(B, T, *step)`.
        learnable_h0: Whether first states are learned: parameters `(rows, width)` by the names of
            `state_names`, zero at the start.
        device: Device of these parameters.
        dtype: Their dtype.
    """

    #: What a state is made of; each part is learned under its name with `learnable_h0`.
    state_names: ClassVar[tuple[str, ...]] = ("h0",)

    #: Dimensions of a batch of padded sequences.
    rank: ClassVar[int] = 3

    #: How errors call the rows of a state, what follows its batch, and a part (by name if None).
    state_words: ClassVar[tuple[str, str, str | None]] = ("layers * directions", "H", None)

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        batch_first: bool,
        learnable_h0: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self._state_shape = (rows, width)
        for name in self.state_names:
            zero = torch.zeros(rows, width, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(zero) if learnable_h0 else None)

    @property
    def _like(self) -> Tensor:
        """A parameter whose dtype and device those of all tensors are."""
        raise NotImplementedError

    def _fits(self, x: Tensor) -> bool:
        """Whether the steps of `x`, behind T and B, have the sizes that the network takes."""
        raise NotImplementedError

    def _shape_error(self, x: Tensor) -> ShapeError:
        """The error for an input of which the steps do not fit."""
        raise NotImplementedError

    def _run(
        self, x: Tensor, states: Sequence[Tensor | None], lengths: Lengths
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """All layers over a batch `(T, B, *step)`.

        Args:
            x: The batch.
            states: The parts of the first state, all None for zero.
            lengths: Steps of each sequence, or None.

        Returns:
            The output, zero past the end of a sequence; the parts of the last state; and a last
            linear map that the output still needs, or None.
        """
        raise NotImplementedError

    def _over(
        self, x: Tensor | PackedSequence, state: Any, lengths: Lengths
    ) -> tuple[Any, Any, Tensor | None]:
        """`_run` over sequences in any layout, with output and state in the same one."""
        if isinstance(x, PackedSequence):
            return self._over_packed(x, state, lengths)
        batched = self._check_input(x, lengths)
        x = self._to_dtype(x, "input")
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        states = self._first_states(state, x.shape[1], batched, x.shape[3:])
        output, ends, decoder = self._run(x, states, lengths)
        if not batched:
            return output.squeeze(1), self._state([end.squeeze(1) for end in ends]), decoder
        output = output.transpose(0, 1) if self.batch_first else output
        return output, self._state(ends), decoder

    def _over_packed(
        self, x: PackedSequence, state: Any, lengths: Lengths
    ) -> tuple[PackedSequence, Any, Tensor | None]:
        """Pads in the sorted order of the pack, runs, and packs again."""
        if lengths is not None:
            raise ConfigurationError("a PackedSequence has its own lengths: leave lengths= out")
        if x.data.ndim != self.rank - 1 or not self._fits(x.data):
            raise self._shape_error(x.data)
        data = self._to_dtype(x.data, "input")
        parts = torch.view_as_real(data) if data.is_complex() else data  # as torch packs reals only
        padded, steps = pad_packed_sequence(PackedSequence(parts, x.batch_sizes))
        padded = torch.view_as_complex(padded) if data.is_complex() else padded
        states = self._first_states(state, padded.shape[1], True, padded.shape[3:])
        if state is not None and x.sorted_indices is not None:
            states = [None if h is None else h.index_select(1, x.sorted_indices) for h in states]
        output, ends, decoder = self._run(padded, states, steps)
        parts = torch.view_as_real(output) if output.is_complex() else output
        rows = pack_padded_sequence(parts, steps).data
        rows = torch.view_as_complex(rows) if output.is_complex() else rows
        if x.unsorted_indices is not None:
            ends = [end.index_select(1, x.unsorted_indices) for end in ends]
        again = PackedSequence(rows, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return again, self._state(ends), decoder

    def _state(self, parts: list[Tensor]) -> Any:
        """The state as a caller sees it: the tensor, or a tuple of several."""
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _first_states(
        self, given: Any, batch: int, batched: bool, size: Sequence[int] = ()
    ) -> list[Tensor | None]:
        """The parts of the first state `(rows, B, width, *size)`, None for zero."""
        (rows, width), names = self._state_shape, self.state_names
        if given is None:
            learned = [getattr(self, name) for name in names]
            flat = (rows, 1, width, *(1 for _ in size))
            return [
                h if h is None else h.reshape(flat).expand(-1, batch, -1, *size) for h in learned
            ]
        parts = (given,) if isinstance(given, Tensor) else given
        parts = tuple(parts) if isinstance(parts, tuple | list) else ()
        if len(parts) != len(names) or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts) or type(given).__name__
            raise ShapeError(
                f"expected the state ({', '.join(names)}), got {kinds}: pass on what the last call "
                f"gave as its second result, {len(names)} tensors, {names}"
            )
        wanted = (rows, *([batch] if batched else []), width, *size)
        of_rows, of_step, word = self.state_words
        states: list[Tensor | None] = []
        for name, part in zip(names, parts, strict=True):
            name = name if word is None else word
            if tuple(part.shape) != wanted:
                raise ShapeError(
                    f"expected {name} of shape {wanted}, ({of_rows}, {'B, ' * batched}{of_step}), "
                    f"got {tuple(part.shape)}; the batch is second in {name} with batch_first too"
                )
            part = self._to_dtype(part, name)
            states.append(part if batched else part.unsqueeze(1))
        return states

    def _to_dtype(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor in the dtype of the parameters; only autocast may have changed it.

        A complex network takes real inputs of its precision as they are.
        """
        like = self._like
        if tensor.device != like.device:
            raise DtypeError(
                f"expected {name} on {like.device}, where the parameters are, got "
                f"{tensor.device}: use {name}.to(device)"
            )
        wanted = like.dtype
        if wanted.is_complex and not tensor.is_complex() and name == "input":
            wanted = real_dtype(wanted)
        if tensor.dtype == wanted:
            return tensor
        if tensor.dtype.is_floating_point and torch.is_autocast_enabled(tensor.device.type):
            return tensor.to(wanted)
        raise DtypeError(
            f"expected {name} of {wanted}, as the parameters, got {tensor.dtype}: use "
            f"{name}.to({wanted}) or rnn.to({tensor.dtype})"
        )

    def _check_input(self, x: Tensor, lengths: Lengths) -> bool:
        """Checks the shape of a padded input and says whether it is batched."""
        if not isinstance(x, Tensor):
            raise DtypeError(
                f"expected the input of {type(self).__name__} to be a tensor or a PackedSequence, "
                f"got {type(x).__name__}: make a tensor of the sequences, with torch.as_tensor("
                f"..., dtype={self._like.dtype})"
            )
        if x.ndim not in (self.rank - 1, self.rank) or not self._fits(x):
            raise self._shape_error(x)
        batched = x.ndim == self.rank
        if lengths is not None and not batched:
            raise ShapeError(
                f"lengths= is for batches, got an unbatched input of shape {tuple(x.shape)}: cut "
                "the sequence at its length instead"
            )
        if x.shape[1 if batched and self.batch_first else 0] == 0:
            raise ShapeError(
                f"expected sequences of at least one step, got an input of shape {tuple(x.shape)} "
                "with T = 0: skip empty sequences, the state after them is what it was"
            )
        return batched
