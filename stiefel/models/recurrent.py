"""Recurrent networks with orthogonal recurrent weights."""

from __future__ import annotations

from typing import Any

import torch

from stiefel.errors import unknown
from stiefel.models.activations import NONLINEARITIES, check_complex
from stiefel.models.base import RecurrentNetwork
from stiefel.models.layer import Constrained, Initializer, RecurrentLayer
from stiefel.parametrizations import Parametrization

__all__ = ["OrthogonalRNN"]


class OrthogonalRNN(Constrained, RecurrentNetwork):
    """An Elman network with orthogonal recurrent weights: h_t = sigma(Q h_{t-1} + V x_t + b).

    Called like `torch.nn.RNN`, with the same shapes, and with the cell of methods C1 inside:
    modReLU without an additive bias by default, a Kaiming-normal input kernel, a Henaff start of
    Q, h_0 = 0. Every recurrent weight goes through `stiefel.orthogonal` and is read, as an
    operator, once per sequence; nothing is kept between calls. The recurrence itself runs in
    float32 or float64 even under autocast (`stiefel.models.rollout`).

    With a complex `dtype` it is a unitary RNN (uRNN and EURNN by ``via="urnn"`` and ``"eurnn"``,
    any other complex chart as well): states, kernel and Q are complex, inputs real or complex,
    modReLU acts on the modulus with a real bias, ``sigma(z) = z / |z| relu(|z| + beta)``, and the
    only other nonlinearity is the identity. The real twin of twice the size
    (`stiefel.geometry.realify`) takes the same steps. `SequenceModel` reads [Re h, Im h] out, with
    a real head: ``.double()`` and ``.float()`` change the precision of both and keep the network
    complex.

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
        dtype: Dtype of the parameters. A complex one makes a unitary network: see above.
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

    takes_complex = True

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
        if nonlinearity not in NONLINEARITIES:
            raise unknown("nonlinearity", nonlinearity, NONLINEARITIES)
        check_complex(nonlinearity, dtype)
        bias = nonlinearity != "modrelu" if bias is None else bias

        def layer(features: int) -> RecurrentLayer:
            return RecurrentLayer(
                features,
                hidden_size,
                nonlinearity=nonlinearity,
                bias=bias,
                via=via,
                init=init,
                input_init=input_init,
                determinant=determinant,
                generator=generator,
                device=device,
                dtype=dtype,
                options=options,
            )

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
        return [f"nonlinearity={self.nonlinearity!r}", f"via={self.via!r}"]
