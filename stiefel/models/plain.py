"""Recurrent networks with plain recurrent weights, known by how they start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, unknown
from stiefel.init import Initializer, fill_, initializer
from stiefel.models.activations import NONLINEARITIES
from stiefel.models.base import RecurrentNetwork
from stiefel.models.layer import RecurrentLayer

__all__ = ["IRNN", "PlainRNN"]


class PlainRNN(RecurrentNetwork):
    """An Elman network whose recurrent weight is free: h_t = sigma(W h_{t-1} + V x_t + b).

    Only the start of W is special. With ``init="haar"`` it is the orthogonal-start network
    (RNN-orth) of the papers, with ``init="glorot"`` their plain RNN; `IRNN` starts at the
    identity. Shapes, lengths and states are those of `RecurrentNetwork`.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        nonlinearity: As `OrthogonalRNN`; ``"tanh"`` by default.
        bias: Whether there is an additive bias b, zero at the start; None for all nonlinearities
            but modReLU, whose own bias is the only one.
        batch_first: Whether sequences are `(B, T, features)`.
        dropout: Probability of dropping a unit between layers.
        bidirectional: Whether a second recurrence per layer runs backwards.
        init: Start of W: ``"glorot"`` (uniform), a name of `stiefel.init.INITIALIZERS`, or a
            callable ``init(tensor, *, generator=)``; it need not be orthogonal.
        input_init: A callable that fills V; Kaiming-normal (fan in, relu) if None.
        learnable_h0: Whether the first state is learned.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        UnknownNameError: If `nonlinearity` or `init` is unknown.
        ConfigurationError: If a size or the dropout is out of range.

    Example:
        >>> import torch
        >>> from stiefel.models import PlainRNN
        >>> rnn = PlainRNN(10, 64, init="haar")
        >>> output, h_n = rnn(torch.randn(50, 8, 10))
        >>> output.shape, h_n.shape
        (torch.Size([50, 8, 64]), torch.Size([1, 8, 64]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool | None = None,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        init: str | Initializer = "glorot",
        input_init: Initializer | None = None,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if nonlinearity not in NONLINEARITIES:
            raise unknown("nonlinearity", nonlinearity, NONLINEARITIES)
        bias = nonlinearity != "modrelu" if bias is None else bias
        start = nn.init.xavier_uniform_ if init == "glorot" else initializer(init, ("glorot",))

        def layer(features: int) -> RecurrentLayer:
            made = RecurrentLayer(
                features,
                hidden_size,
                nonlinearity=nonlinearity,
                bias=bias,
                via=None,
                init=nn.init.eye_,
                input_init=input_init,
                determinant=None,
                generator=generator,
                device=device,
                dtype=dtype,
                options={},
            )
            with torch.no_grad():
                fill_(made.recurrent.weight, start, generator=generator)
            return made

        super().__init__(
            layer,
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
        self.nonlinearity, self.bias = nonlinearity, bias

    def _shown(self) -> list[str]:
        return [f"nonlinearity={self.nonlinearity!r}"]


class IRNN(PlainRNN):
    """ReLU, and a recurrent weight that starts at the identity (Le, Jaitly and Hinton 2015).

    h_t = relu(W h_{t-1} + V x_t + b) with W = alpha I at the start, V ~ N(0, 0.001^2) and b = 0: a
    new network adds up its inputs, and the gradient of a sum is the sum of gradients however long
    the sequence is. W is then trained freely. With `noise` it starts near the identity,
    W = alpha I + noise N(0, 1).

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        scale: alpha; smaller, such as 0.01, for tasks of short memory.
        noise: Standard deviation of what is added to every entry of W.
        input_std: Standard deviation of V.
        **options: Those of `PlainRNN`, but for `init`, `input_init` and `nonlinearity`.

    Raises:
        ConfigurationError: If `noise` or `input_std` is negative, or an option of the start is
            given twice.

    Example:
        >>> import torch
        >>> from stiefel.models import IRNN
        >>> rnn = IRNN(1, 100)
        >>> bool((rnn.layers[0].recurrent.weight == torch.eye(100)).all())
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        scale: float = 1.0,
        noise: float = 0.0,
        input_std: float = 1e-3,
        **options: Any,
    ) -> None:
        for name, value in (("noise", noise), ("input_std", input_std)):
            if value < 0:
                raise ConfigurationError(f"expected {name} to be at least 0, got {value}")
        given = sorted({"init", "input_init", "nonlinearity"} & set(options))
        if given:
            raise ConfigurationError(
                f"an IRNN is known by its start and its ReLU: expected no {', '.join(given)}; use "
                "scale=, noise= and input_std=, or PlainRNN for another network"
            )

        def start(W: Tensor, generator: torch.Generator | None = None) -> Tensor:
            W.normal_(0, noise, generator=generator) if noise else W.zero_()
            W.diagonal().add_(scale)
            return W

        def kernel(V: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return nn.init.normal_(V, 0, input_std, generator=generator)

        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            "relu",
            init=start,
            input_init=kernel,
            **options,
        )
