"""Recurrent networks with orthogonal recurrent weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stiefel.errors import ConfigurationError, DtypeError, ShapeError, unknown
from stiefel.models.activations import NONLINEARITIES
from stiefel.models.layer import Initializer, RecurrentLayer
from stiefel.parametrizations import Parametrization

__all__ = ["OrthogonalRNN"]


class OrthogonalRNN(nn.Module):
    """An Elman network with orthogonal recurrent weights: h_t = sigma(Q h_{t-1} + V x_t + b).

    Called like `torch.nn.RNN`, with the same shapes, and with the cell of methods C1 inside:
    modReLU without an additive bias by default, a Kaiming-normal input kernel, a Henaff start of
    Q, h_0 = 0. Every recurrent weight goes through `stiefel.orthogonal` and is read, as an
    operator, once per sequence; nothing is kept between calls. The recurrence itself runs in
    float32 or float64 even under autocast (`stiefel.models.rollout`).

    Layer l and direction d are ``rnn.layers[l * directions + d]``, each a `RecurrentLayer`; its
    recurrent weight is ``rnn.layers[i].recurrent.weight`` `(hidden_size, hidden_size)`.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers, each fed with the output of the one below.
        nonlinearity: ``"modrelu"``, ``"abs"``, ``"relu"``, ``"leaky_relu"`` (slope 0.1),
            ``"tanh"`` or ``"identity"``.
        bias: Whether there is an additive bias b, zero at the start; None for all nonlinearities
            but modReLU, whose own bias is the only one.
        batch_first: Whether sequences are `(B, T, features)` instead of `(T, B, features)`.
        dropout: Probability of dropping a unit of the output of all layers but the last.
        bidirectional: Whether a second recurrence per layer runs backwards.
        via: How the recurrent weights are trained, anything that ``stiefel.orthogonal(via=)``
            takes, or None for plain weights with the same start.
        init: Start of the recurrent weights: a name of `stiefel.init.INITIALIZERS` (``"henaff"``,
            ``"cayley"``, ...) or a callable ``init(tensor, *, generator=, determinant=)``, exactly
            as it is or an error. None is Henaff where the chart can hold it and else the chart's
            own start (``"cwy"`` with fewer reflections than hidden units).
        input_init: A callable that fills the input kernel; Kaiming-normal (fan in, relu) if None.
        determinant: +1 or -1 fixes the component of the recurrent weights.
        learnable_h0: Whether the first state is learned, one row of ``rnn.h0`` `(layers *
            directions, H)` for each layer and direction, zero at the start.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the metric, such as ``reflections=`` or ``retraction=``.

    Raises:
        UnknownNameError: If `nonlinearity`, `via` or `init` is unknown.
        ConfigurationError: If options do not go together.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import OrthogonalRNN
        >>> rnn = OrthogonalRNN(10, 64, via="cwy")
        >>> output, h_n = rnn(torch.randn(50, 8, 10))
        >>> output.shape, h_n.shape
        (torch.Size([50, 8, 64]), torch.Size([1, 8, 64]))
    """

    h0: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "modrelu",
        bias: bool | None = None,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        via: str | Parametrization | None = "cwy",
        init: str | Initializer | None = None,
        *,
        input_init: Initializer | None = None,
        determinant: int | None = None,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if nonlinearity not in NONLINEARITIES:
            raise unknown("nonlinearity", nonlinearity, NONLINEARITIES)
        _check_sizes(input_size, hidden_size, num_layers, dropout)
        if not (torch.get_default_dtype() if dtype is None else dtype).is_floating_point:
            raise DtypeError(f"expected a real floating point dtype, got {dtype}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.nonlinearity, self.batch_first, self.dropout = nonlinearity, batch_first, dropout
        self.bidirectional = bidirectional
        self.directions = 2 if bidirectional else 1
        self.bias = nonlinearity != "modrelu" if bias is None else bias
        self.via = via if via is None or isinstance(via, str) else via.name
        self.layers = nn.ModuleList(
            RecurrentLayer(
                input_size if index < self.directions else hidden_size * self.directions,
                hidden_size,
                nonlinearity=nonlinearity,
                bias=self.bias,
                via=via,
                init=init,
                input_init=input_init,
                determinant=determinant,
                generator=generator,
                device=device,
                dtype=dtype,
                options=options,
            )
            for index in range(num_layers * self.directions)
        )
        h0 = torch.zeros(len(self.layers), hidden_size, device=device, dtype=dtype)
        self.register_parameter("h0", nn.Parameter(h0) if learnable_h0 else None)

    def forward(
        self,
        x: Tensor | PackedSequence,
        h0: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Runs a batch of sequences.

        Args:
            x: `(T, B, K)`, with batch_first `(B, T, K)`, unbatched `(T, K)`, or packed. T = 0 is
                an error; an empty batch gives empty results.
            h0: First states `(layers * directions, B, H)`, unbatched without B; those learned, or
                zero, when None.
            lengths: Steps of each sequence `(B,)`, from 1 to T, of a padded batch. The padding is
                never read and the output is zero there.

        Returns:
            The states of the last layer `(T, B, directions * H)` in the layout of `x` (packed if
            `x` is), and the last state of each layer and direction `(layers * directions, B, H)`,
            at each sequence's own last step.

        Raises:
            ShapeError: If a shape is wrong, T = 0, or a length is out of range.
            DtypeError: If dtype or device of `x` or `h0` is not that of the parameters.
        """
        if isinstance(x, PackedSequence):
            return self._forward_packed(x, h0, lengths)
        batched = self._check_input(x, lengths)
        x = self._to_dtype(x, "input")
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        states = self._first_states(h0, x.shape[1], batched)
        output, last = self._run(x, states, lengths)
        if not batched:
            return output.squeeze(1), last.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), last

    def _run(
        self, x: Tensor, states: Sequence[Tensor | None], lengths: Tensor | Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """All layers over `(T, B, features)`."""
        if lengths is not None:
            lengths = torch.as_tensor(lengths)
        ends: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                run = self._layer(index)
                output, end = run(x, states[index], lengths, direction == 1)
                outputs.append(output)
                ends.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout and layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, torch.stack(ends)

    def _forward_packed(
        self, x: PackedSequence, h0: Tensor | None, lengths: Tensor | Sequence[int] | None
    ) -> tuple[PackedSequence, Tensor]:
        """Pads in the sorted order of the pack, runs, and packs again."""
        if lengths is not None:
            raise ConfigurationError("a PackedSequence has its own lengths: leave lengths= out")
        if x.data.shape[-1] != self.input_size:
            raise self._feature_error(x.data)
        data = self._to_dtype(x.data, "input")
        padded, steps = pad_packed_sequence(PackedSequence(data, x.batch_sizes))
        states = self._first_states(h0, padded.shape[1], True)
        if h0 is not None and x.sorted_indices is not None:
            states = [None if h is None else h.index_select(0, x.sorted_indices) for h in states]
        output, last = self._run(padded, states, steps)
        packed = pack_padded_sequence(output, steps)
        if x.unsorted_indices is not None:
            last = last.index_select(1, x.unsorted_indices)
        return (
            PackedSequence(packed.data, x.batch_sizes, x.sorted_indices, x.unsorted_indices),
            last,
        )

    def _layer(self, index: int) -> RecurrentLayer:
        return cast(RecurrentLayer, self.layers[index])

    def _first_states(
        self, h0: Tensor | None, batch: int, batched: bool
    ) -> Sequence[Tensor | None]:
        """First state `(B, H)` of each layer and direction, None for zero."""
        count = len(self.layers)
        if h0 is None:
            if self.h0 is None:
                return [None] * count
            return self.h0.unsqueeze(1).expand(-1, batch, -1).unbind(0)
        wanted = (count, batch, self.hidden_size) if batched else (count, self.hidden_size)
        if tuple(h0.shape) != wanted:
            names = "(layers * directions, B, H)" if batched else "(layers * directions, H)"
            raise ShapeError(
                f"expected h0 of shape {wanted}, {names}, got {tuple(h0.shape)}; the batch is "
                "second in h0 with batch_first too"
            )
        h0 = self._to_dtype(h0, "h0")
        return (h0 if batched else h0.unsqueeze(1)).unbind(0)

    def _to_dtype(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor in the dtype of the parameters; only autocast may have changed it."""
        weight = self._layer(0).input.weight
        if tensor.device != weight.device:
            raise DtypeError(
                f"expected {name} on {weight.device}, where the parameters are, got "
                f"{tensor.device}: use {name}.to(device)"
            )
        if tensor.dtype == weight.dtype:
            return tensor
        if tensor.dtype.is_floating_point and torch.is_autocast_enabled(tensor.device.type):
            return tensor.to(weight.dtype)
        raise DtypeError(
            f"expected {name} of {weight.dtype}, as the parameters, got {tensor.dtype}: use "
            f"{name}.to({weight.dtype}) or rnn.to({tensor.dtype})"
        )

    def _feature_error(self, x: Tensor) -> ShapeError:
        layout = "(B, T, K)" if self.batch_first else "(T, B, K)"
        return ShapeError(
            f"expected an input of shape {layout} or unbatched (T, K) with K = {self.input_size} "
            f"features, got {tuple(x.shape)}"
        )

    def _check_input(self, x: Tensor, lengths: Tensor | Sequence[int] | None) -> bool:
        """Checks the shape of a padded input and says whether it is batched."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise self._feature_error(x)
        batched = x.ndim == 3
        if lengths is not None and not batched:
            raise ShapeError(
                f"lengths= is for batches, got an unbatched input of shape {tuple(x.shape)}: cut "
                "the sequence at its length instead"
            )
        if x.shape[1 if batched and self.batch_first else 0] == 0:
            raise ShapeError(
                f"expected sequences of at least one step, got an input of shape {tuple(x.shape)} "
                "with T = 0: skip empty sequences, the state after them is h0"
            )
        return batched

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        options = f"nonlinearity={self.nonlinearity!r}, via={self.via!r}"
        for name in ("num_layers", "batch_first", "dropout", "bidirectional"):
            value = getattr(self, name)
            if value not in (False, 0, 1) or value is True:
                options += f", {name}={value}"
        return f"{self.input_size}, {self.hidden_size}, {options}"


def _check_sizes(input_size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
    for name, value in (
        ("input_size", input_size),
        ("hidden_size", hidden_size),
        ("num_layers", num_layers),
    ):
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"expected {name} to be an integer of at least 1, got {value}")
    if not 0 <= dropout <= 1:
        raise ConfigurationError(f"expected a dropout probability in [0, 1], got {dropout}")
