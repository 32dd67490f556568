"""What every recurrent network shares: layers, directions, steps."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.geometry import product
from stiefel.models._twin import one_precision
from stiefel.models.activations import drop_units
from stiefel.models.layouts import Lengths, SequenceNetwork
from stiefel.models.rollout import as_lengths
from stiefel.models.step import LayerStep, Stepper

__all__ = ["RecurrentNetwork", "decode"]


def decode(a: Tensor, decoder: Tensor) -> Tensor:
    """h = a R for rows `(..., H)`, in full precision."""
    return product(a.flatten(0, -2), decoder).view(a.shape)


class RecurrentNetwork(SequenceNetwork):
    """Layers and directions of a recurrence under the interface of `torch.nn.RNN`.

    A model is a layer class and a few lines. A layer is called as ``layer(x, h0, lengths,
    reverse)`` with `(T, B, features)`, `(B, H)` or None for zero, an int64 tensor `(B,)` or None,
    and a bool; it gives the states `(T, B, H)`, zero past the end of a sequence, and the state
    `(B, H)` at each sequence's own last step. ``layer.stepper()`` gives one step of it, as
    `elman_step` does; ``layer.input.weight`` tells dtype and device. With `ends_linear` a layer
    has ``layer.coded(...)`` as well, with its last map left out of the states (`coded` below).
    Layer l and direction d are ``rnn.layers[l * directions + d]``.

    Args:
        layer: ``layer(features)`` makes one layer and direction for that many inputs.
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers, each fed with the output of the one below.
        batch_first: Whether sequences are `(B, T, features)` instead of `(T, B, features)`.
        dropout: Probability of dropping a unit of the output of all layers but the last.
        bidirectional: Whether a second recurrence per layer runs backwards.
        learnable_h0: Whether the first state is learned, one row of ``rnn.h0`` `(layers *
            directions, H)` for each layer and direction, zero at the start.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ConfigurationError: If a size or the dropout is out of range.
        DtypeError: If the dtype is an integer, or complex and the network is real.
    """

    #: Whether there is a form with complex weights and states.
    takes_complex: ClassVar[bool] = False

    #: Whether the output may end in a linear map that a head can take over (`coded`).
    ends_linear: ClassVar[bool] = False

    h0: nn.Parameter | None

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        learnable_h0: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_sizes(input_size, hidden_size, num_layers, dropout)
        self._check_dtype(dtype)
        directions = 2 if bidirectional else 1
        super().__init__(
            num_layers * directions,
            hidden_size,
            batch_first=batch_first,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.dropout, self.bidirectional, self.directions = dropout, bidirectional, directions
        self._make_layers(layer)

    def _check_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype is None or dtype.is_floating_point or (dtype.is_complex and self.takes_complex):
            return
        kinds = "floating point or complex" if self.takes_complex else "real floating point"
        raise DtypeError(
            f"expected a {kinds} dtype for {type(self).__name__}, got {dtype}; OrthogonalRNN has "
            "complex states"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RecurrentNetwork:
        """A conversion; the two kinds of tensors of a complex network keep one precision."""
        mixed = self.takes_complex and self._like.is_complex()
        return super()._apply(one_precision(fn) if mixed else fn, recurse)

    def _make_layers(self, layer: Callable[[int], nn.Module]) -> None:
        self.layers = nn.ModuleList(
            layer(
                self.input_size if index < self.directions else self.hidden_size * self.directions
            )
            for index in range(self.num_layers * self.directions)
        )

    def forward(
        self,
        x: Tensor | PackedSequence,
        h0: Any = None,
        lengths: Lengths = None,
    ) -> tuple[Tensor | PackedSequence, Any]:
        """Runs a batch of sequences.

        Args:
            x: `(T, B, K)`, with batch_first `(B, T, K)`, unbatched `(T, K)`, or packed. T = 0 is
                an error; an empty batch gives empty results.
            h0: First states `(layers * directions, B, H)`, unbatched without B; those learned, or
                zero, when None. A pair where the state is one (`LSTM`).
            lengths: Steps of each sequence `(B,)`, from 1 to T, of a padded batch. The padding is
                never read and the output is zero there.

        Returns:
            The states of the last layer `(T, B, directions * H)` in the layout of `x` (packed if
            `x` is), and the last state of each layer and direction `(layers * directions, B, H)`,
            at each sequence's own last step; a pair where the state is one.

        Raises:
            ShapeError: If a shape is wrong, T = 0, or a length is out of range.
            DtypeError: If dtype or device of `x` or `h0` is not that of the parameters.
        """
        output, state, decoder = self.coded(x, h0, lengths)
        if decoder is None:
            return output, state
        if isinstance(output, PackedSequence):
            return output._replace(data=decode(output.data, decoder).to(self._like.dtype)), state
        return decode(output, decoder).to(self._like.dtype), state

    def coded(
        self,
        x: Tensor | PackedSequence,
        h0: Any = None,
        lengths: Lengths = None,
    ) -> tuple[Tensor | PackedSequence, Any, Tensor | None]:
        """What `forward` computes, with the output before a last linear map that it may have.

        A head that follows can take the map into its own weight, or leave the output alone.

        Args:
            x: As for `forward`.
            h0: As for `forward`.
            lengths: As for `forward`.

        Returns:
            The output a, the last state, and R `(H, H)` with h = a R, or None where h = a.
        """
        return self._over(x, h0, lengths)

    def _run(
        self, x: Tensor, states: Sequence[Tensor | None], lengths: Lengths
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        if lengths is not None:
            lengths = as_lengths(lengths, x)
        starts = [None] * len(self.layers) if states[0] is None else states[0].unbind(0)
        ends: list[Tensor] = []
        decoder = None
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                run: Any = self.layers[index]
                arguments = (x, starts[index], lengths, direction == 1)
                top = self.directions == 1 and layer == self.num_layers - 1
                if top and self.ends_linear:
                    output, end, decoder = run.coded(*arguments)
                else:
                    output, end = run(*arguments)
                outputs.append(output)
                ends.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout and layer < self.num_layers - 1:
                x = drop_units(x, self.dropout, self.training)
        return x, [torch.stack(ends)], decoder

    def stepper(self) -> Stepper:
        """This network as a function of one step, for inputs that depend on outputs (decoders).

        ``output, state = step(x, state)`` with `x` `(B, K)`; see `Stepper`. Every weight or
        operator is read once, here.

        Returns:
            The step.

        Raises:
            ConfigurationError: If the network is bidirectional.

        Example:
            >>> import torch
            >>> from stiefel.models import OrthogonalRNN
            >>> rnn, x = OrthogonalRNN(3, 8), torch.randn(5, 2, 3)
            >>> step, state = rnn.stepper(), None
            >>> for x_t in x.unbind(0):
            ...     output, state = step(x_t, state)
            >>> torch.allclose(output, rnn(x)[0][-1], atol=1e-6)
            True
        """
        return Stepper(self)

    def layer_step(self, index: int) -> LayerStep:
        """One step of ``rnn.layers[index]``, from its own ``stepper()``."""
        layer: Any = self.layers[index]
        return layer.stepper()

    @property
    def _like(self) -> Tensor:
        """A parameter whose dtype and device those of all tensors are."""
        layer: Any = self.layers[0]
        return layer.input.weight

    def _fits(self, x: Tensor) -> bool:
        return x.shape[-1] == self.input_size

    def _shape_error(self, x: Tensor) -> ShapeError:
        layout = "(B, T, K)" if self.batch_first else "(T, B, K)"
        return ShapeError(
            f"expected an input of shape {layout} or unbatched (T, K) with K = {self.input_size} "
            f"features, got {tuple(x.shape)}"
        )

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        shown = [str(self.input_size), str(self.hidden_size), *self._shown()]
        for name in ("num_layers", "batch_first", "dropout", "bidirectional"):
            value = getattr(self, name)
            if value not in (False, 0, 1) or value is True:
                shown.append(f"{name}={value}")
        return ", ".join(shown)

    def _shown(self) -> list[str]:
        """A model's own options, for printing."""
        return []


def _check_sizes(input_size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
    for name, value in (
        ("input_size", input_size),
        ("hidden_size", hidden_size),
        ("num_layers", num_layers),
    ):
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"expected {name} to be an integer of at least 1, got {_shown(value)}"
            )
    if not isinstance(dropout, numbers.Real | Tensor) or not 0 <= dropout <= 1:
        raise ConfigurationError(f"expected a dropout probability in [0, 1], got {_shown(dropout)}")


def _shown(value: Any) -> str:
    """A value in an error, with its type where it is no number."""
    if isinstance(value, numbers.Real | Tensor):
        return str(value)
    return f"{value!r} of type {type(value).__name__}: pass a number"
