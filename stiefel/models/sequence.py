"""A recurrent network with a linear head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefel.errors import unknown
from stiefel.geometry import product, realify_vector
from stiefel.models.base import RecurrentNetwork
from stiefel.models.counts import Counted

__all__ = ["HEAD_INITIALIZERS", "SequenceModel"]

#: Starts of the head: Kaiming-normal with zero bias, or that of `torch.nn.Linear`.
HEAD_INITIALIZERS = ("kaiming", "default")
_READOUTS = ("all", "last")


class SequenceModel(Counted):
    """Logits of a sequence, ``Linear(h_t)``: for each step, or from the last state only.

    The head of a complex network is real and takes [Re h, Im h], as in uRNN.

    Args:
        rnn: An `OrthogonalRNN`, or anything called like `torch.nn.RNN` (LSTM and GRU included).
        out_features: Number of logits, C.
        head_init: ``"kaiming"``: Kaiming-normal weight (fan in, relu) and zero bias, as published
            for the copying task; ``"default"``: that of `torch.nn.Linear`, as for pixel MNIST.
        readout: ``"all"`` for logits of every step, ``"last"`` for those of the last state of the
            last layer, at each sequence's own length.
        generator: Source of randomness of the head's start.

    Raises:
        UnknownNameError: If `head_init` or `readout` is unknown.

    Example:
        >>> import torch
        >>> from stiefel.models import OrthogonalRNN, SequenceModel
        >>> model = SequenceModel(OrthogonalRNN(1, 32), 10, head_init="default", readout="last")
        >>> model(torch.rand(28, 4, 1)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        rnn: nn.Module,
        out_features: int,
        *,
        head_init: str = "kaiming",
        readout: str = "all",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if head_init not in HEAD_INITIALIZERS:
            raise unknown("head_init", head_init, HEAD_INITIALIZERS)
        if readout not in _READOUTS:
            raise unknown("readout", readout, _READOUTS)
        self.rnn, self.readout = rnn, readout
        self.directions = 2 if getattr(rnn, "bidirectional", False) else 1
        parameters = list(rnn.parameters())
        self.complex = any(parameter.is_complex() for parameter in parameters)
        features: Any = getattr(rnn, "proj_size", 0) or rnn.hidden_size
        self.head = nn.Linear(
            features * self.directions * (2 if self.complex else 1),
            out_features,
            device=parameters[0].device,
            dtype=parameters[0].dtype.to_real(),
        )
        self._start(head_init, generator)

    def _start(self, head_init: str, generator: torch.Generator | None) -> None:
        if head_init == "kaiming":
            nn.init.kaiming_normal_(self.head.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(self.head.bias)
            return
        bound = self.head.in_features**-0.5
        nn.init.uniform_(self.head.weight, -bound, bound, generator=generator)
        nn.init.uniform_(self.head.bias, -bound, bound, generator=generator)

    def forward(
        self,
        x: Tensor | PackedSequence,
        h0: Any = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor | PackedSequence:
        """Computes the logits.

        Args:
            x: What the recurrent network takes.
            h0: Its first states, or None.
            lengths: Steps of each sequence of a padded batch, for an `OrthogonalRNN`.

        Returns:
            Logits of every step, in the layout of `x` with C features (packed if `x` is), or of
            the last states, `(B, C)`, unbatched `(C,)`.
        """
        arguments = (x, h0) if lengths is None else (x, h0, lengths)
        output, state, decoder = self._run(*arguments)
        if self.readout == "last":
            return self._logits(self._last(state))
        if isinstance(output, PackedSequence):
            return output._replace(data=self._logits(output.data, decoder))
        return self._logits(output, decoder)

    def _run(self, *arguments: Any) -> tuple[Any, Any, Tensor | None]:
        """Output, state, and the linear map that the output of some networks still needs."""
        rnn, head = self.rnn, self.head
        heard = _hooked(rnn) or _hooked(head) or type(head) is not nn.Linear
        if isinstance(rnn, RecurrentNetwork) and rnn.ends_linear and not heard:
            return rnn.coded(*arguments)
        return (*self.rnn(*arguments), None)

    def _logits(self, h: Tensor, decoder: Tensor | None = None) -> Tensor:
        """The head on h, or on [Re h, Im h]; on h R without making it, for W (h R) = h (W R^T)."""
        if decoder is not None:
            weight = product(self.head.weight.to(decoder.dtype), decoder.mT)
            bias = self.head.bias.to(decoder.dtype)
            return nn.functional.linear(h, weight, bias).to(self.head.weight.dtype)
        return self.head(realify_vector(h) if self.complex else h)

    def _last(self, state: Any) -> Tensor:
        """Last states of the last layer, directions side by side."""
        hidden: Tensor = state[0] if isinstance(state, tuple) else state
        return torch.cat(hidden[-self.directions :].unbind(0), dim=-1)


def _hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the calls of a module, which then have to be made."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
