"""torch's LSTM and GRU under the interface of the other networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stiefel.errors import ConfigurationError
from stiefel.models.base import RecurrentNetwork
from stiefel.models.masks import checked_lengths
from stiefel.models.step import LayerStep, Parts

__all__ = ["GRU", "LSTM"]

#: Steps that torch's kernel is given at once on the CPU. What it keeps of them stays in memory that
#: is used again and again: a long sequence in pieces takes less time than in one, and time that is
#: proportional to its length.
_PIECE = 64


class _Gated(RecurrentNetwork):
    """A network of `torch.nn`, ``rnn.network``, which runs all layers and directions itself."""

    gates: ClassVar[int]
    kind: ClassVar[Callable[..., nn.RNNBase]]
    cell: ClassVar[Callable[..., Any]]

    network: nn.RNNBase

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        def network(features: int) -> nn.RNNBase:
            made = type(self).kind(
                features,
                hidden_size,
                num_layers,
                bias=bias,
                dropout=dropout if num_layers > 1 else 0.0,  # torch warns of it in one layer
                bidirectional=bidirectional,
                device=device,
                dtype=dtype,
            )
            if generator is not None:
                bound = hidden_size**-0.5
                for parameter in made.parameters():
                    nn.init.uniform_(parameter, -bound, bound, generator=generator)
            return made

        super().__init__(
            network,
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.bias = bias

    def _make_layers(self, layer: Callable[[int], nn.Module]) -> None:
        network = layer(self.input_size)
        assert isinstance(network, nn.RNNBase)
        self.network = network

    @property
    def _like(self) -> Tensor:
        weight: Any = self.network.weight_ih_l0
        return weight

    def _run(
        self,
        x: Tensor,
        states: Sequence[Tensor | None],
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, list[Tensor], None]:
        first: Any = None
        if states[0] is not None:
            first = self._state([part.contiguous() for part in states if part is not None])
        if lengths is None or x.shape[1] == 0:
            output, last = self._in_pieces(x, first)
        else:
            steps = checked_lengths(lengths, *x.shape[:2]).cpu()  # where torch wants them
            packed = pack_padded_sequence(x, steps, enforce_sorted=False)
            output, last = self.network(packed, first)
            output, _ = pad_packed_sequence(output, total_length=len(x))
        return output, list(last) if isinstance(last, tuple) else [last], None

    def _in_pieces(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The network over `(T, B, features)`, on the CPU in pieces that hand the state on.

        Whole where pieces are not the same thing: backwards, and with random masks of dropout.
        """
        drops = self.training and self.network.dropout > 0
        if x.device.type != "cpu" or len(x) <= _PIECE or self.directions > 1 or drops:
            return self.network(x, state)
        outputs = []
        for piece in x.split(_PIECE):
            output, state = self.network(piece, state)
            outputs.append(output)
        return torch.cat(outputs), state

    def layer_step(self, index: int) -> LayerStep:
        """One step of layer and direction `index`, by the cell function of torch."""
        layer, direction = divmod(index, self.directions)
        suffix = f"l{layer}{'_reverse' if direction else ''}"
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.bias else [])]
        weights = [getattr(self.network, f"{name}_{suffix}") for name in names]
        cell, H = type(self).cell, self.hidden_size

        def step(x: Tensor, parts: Parts) -> tuple[Tensor, ...]:
            before = [x.new_zeros(len(x), H) if part is None else part for part in parts]
            after = cell(x, before if len(before) > 1 else before[0], *weights)
            return tuple(after) if isinstance(after, tuple) else (after,)

        return step


class LSTM(_Gated):
    """`torch.nn.LSTM` under the interface of `RecurrentNetwork`; its state is a pair (h, c).

    The output is h_t. Learned first states are ``rnn.h0`` and ``rnn.c0``.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        bias: Whether the gates have biases (torch has two of each).
        batch_first: Whether sequences are `(B, T, features)`.
        dropout: Probability of dropping a unit between layers.
        bidirectional: Whether a second recurrence per layer runs backwards.
        forget_bias: Start of the forget gate's bias: ``"torch"`` as torch draws it (about 0; the
            code of expRNN), a number, in the first of the two biases and 0 in the second (1.0 is
            TensorFlow's, of scoRNN and EURNN), or ``"split"``, 0.5 in both (asRNN).
        learnable_h0: Whether the first state is learned.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ConfigurationError: If `forget_bias` is none of these, or there is no bias to set.

    Example:
        >>> import torch
        >>> from stiefel.models import LSTM
        >>> rnn = LSTM(10, 68, forget_bias=1.0)
        >>> output, (h, c) = rnn(torch.randn(50, 8, 10), lengths=[50, 3, 4, 5, 6, 7, 8, 9])
        >>> output.shape, h.shape, rnn.expected_parameters()
        (torch.Size([50, 8, 68]), torch.Size([1, 8, 68]), 21760)
    """

    state_names = ("h0", "c0")
    gates = 4
    kind = nn.LSTM
    cell = torch.lstm_cell

    c0: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        forget_bias: float | str = "torch",
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        starts = _forget_starts(forget_bias, bias)
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            learnable_h0=learnable_h0,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        self.forget_bias = forget_bias
        if starts is not None:
            with torch.no_grad():
                for name, parameter in self.network.named_parameters():
                    kind = name.partition("_l")[0]
                    if kind in starts:  # gates in the order input, forget, cell, output
                        parameter[hidden_size : 2 * hidden_size] = starts[kind]

    def _shown(self) -> list[str]:
        return [f"forget_bias={self.forget_bias!r}"]


def _forget_starts(forget_bias: float | str, bias: bool) -> dict[str, float] | None:
    """The forget gate's start in each of the two biases; None leaves torch's."""
    if forget_bias == "torch":
        return None
    if not bias:
        raise ConfigurationError(
            f"bias=False leaves no bias to start at forget_bias={forget_bias!r}: leave one out"
        )
    if forget_bias == "split":
        return {"bias_ih": 0.5, "bias_hh": 0.5}
    if isinstance(forget_bias, str):
        raise ConfigurationError(
            f"expected forget_bias 'torch', 'split' or a number, got {forget_bias!r}"
        )
    return {"bias_ih": float(forget_bias), "bias_hh": 0.0}


class GRU(_Gated):
    """`torch.nn.GRU` under the interface of `RecurrentNetwork`; its state is h.

    torch's form has two biases, the recurrent one within the reset gate's reach: Keras calls it
    ``reset_after=True``. The original GRU has one bias less.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        bias: Whether the gates have biases.
        batch_first: Whether sequences are `(B, T, features)`.
        dropout: Probability of dropping a unit between layers.
        bidirectional: Whether a second recurrence per layer runs backwards.
        learnable_h0: Whether the first state is learned.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Example:
        >>> import torch
        >>> from stiefel.models import GRU
        >>> output, h_n = GRU(10, 64)(torch.randn(50, 8, 10))
        >>> output.shape, h_n.shape
        (torch.Size([50, 8, 64]), torch.Size([1, 8, 64]))
    """

    gates = 3
    kind = nn.GRU
    cell = torch.gru_cell
