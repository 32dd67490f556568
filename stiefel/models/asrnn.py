"""Adaptive-saturated recurrent networks, evaluated as Elman networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, unknown
from stiefel.geometry import product
from stiefel.init import Initializer, fill_, haar_
from stiefel.models.base import RecurrentNetwork, decode
from stiefel.models.layer import Constrained, start_weight
from stiefel.models.rollout import rollout
from stiefel.models.step import LayerStep, Parts, elman_step, exact
from stiefel.numerics import compute_dtype, full_precision
from stiefel.parametrizations import Parametrization

__all__ = ["ASRNN", "AdaptiveLayer"]

_RECURRENT = ("orthogonal", "free")
#: Charts whose differential is not onto at the identity: `stiefel.init.identity_` is near it.
_DEGENERATE_AT_IDENTITY = frozenset({"cwy", "householder", "hr", "givens", "eurnn"})


class AdaptiveLayer(nn.Module):
    """One direction of one layer of an `ASRNN`, where the arguments are explained.

    ``recurrent.weight`` is W_hh `(H, H)`, ``mixing.weight`` is U_f `(H, H)`, `s` gives
    D_f = diag(|s| + eps), ``input.weight`` is W_xh `(H, K)` and ``input.bias`` b.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool,
        via: str | Parametrization | None,
        init: str | Initializer | None,
        mixing_init: str | Initializer | None,
        input_init: Initializer | None,
        recurrent: str,
        saturation: tuple[float, float, float],
        determinant: int | None,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input = nn.Linear(input_size, hidden_size, bias=bias, **empty)
        self.recurrent = nn.Linear(hidden_size, hidden_size, bias=False, **empty)
        self.mixing = nn.Linear(hidden_size, hidden_size, bias=False, **empty)
        self.s = nn.Parameter(torch.empty(hidden_size, **empty))
        a, b, self.eps = saturation
        with torch.no_grad():
            fill_(
                self.input.weight, haar_ if input_init is None else input_init, generator=generator
            )
            if self.input.bias is not None:
                nn.init.zeros_(self.input.bias)
            self.s.uniform_(a, b, generator=generator)
        free = recurrent == "free"
        start_weight(
            self.recurrent,
            None if free else via,
            init,
            determinant=determinant,
            generator=generator,
            options={} if free else options,
        )
        name = via if via is None or isinstance(via, str) else via.name
        degenerate = name in _DEGENERATE_AT_IDENTITY
        start_weight(
            self.mixing,
            via,
            mixing_init,
            default="identity" if degenerate else nn.init.eye_,
            generator=generator,
            options=options,
        )

    @full_precision()
    def elman(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """The weights of the Elman form, in float32 or float64.

        Returns:
            W_f W_xh `(H, K)`, M = W_f W_hh W_f^-1 `(H, H)`, W_f b or None, U_f, and the diagonal
            of D_f `(H,)`, with W_f = U_f D_f and W_f^-1 = D_f^-1 U_f^T.
        """
        working = compute_dtype(self.s.dtype)
        U = self.mixing.weight.to(working)
        d = self.s.to(working).abs() + self.eps
        bias = None if self.input.bias is None else U @ (d * self.input.bias.to(working))
        kernel = U @ (d.unsqueeze(-1) * self.input.weight.to(working))
        scaled = d.unsqueeze(-1) * self.recurrent.weight.to(working) / d
        return kernel, U @ scaled @ U.mT, bias, U, d

    def forward(
        self,
        x: Tensor,
        h0: Tensor | None = None,
        lengths: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs `x` `(T, B, K)` from `h0` `(B, H)`; the weights are read once.

        Returns:
            The states `(T, B, H)` and the last state `(B, H)`.
        """
        saturated, end, decoder = self.coded(x, h0, lengths, reverse)
        return decode(saturated, decoder).to(x.dtype), end

    def coded(
        self,
        x: Tensor,
        h0: Tensor | None = None,
        lengths: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states a_t = W_f h_t `(T, B, H)`, the last state h, and R = U_f D_f^-1, h = a R."""
        kernel, M, bias, U, d = self.elman()
        # a_t = tanh(M a_{t-1} + W_f (W_xh x_t + b)), W_f h = U_f D_f h
        a0 = None if h0 is None else product(h0.to(d.dtype) * d, U.mT)
        saturated, end = rollout(
            x.to(d.dtype),
            kernel,
            M,
            nonlinearity="tanh",
            bias=bias,
            h0=a0,
            lengths=lengths,
            reverse=reverse,
        )
        decoder = U / d  # rows: h = a W_f^-T = a U_f D_f^-1
        return saturated, product(end, decoder).to(x.dtype), decoder

    def stepper(self) -> LayerStep:
        """One step of this layer, as a function that holds the weights read here.

        The state between steps is h, so that a step has one product more than the Elman form.
        """
        kernel, M, bias, U, d = self.elman()
        elman = elman_step(kernel, M, nonlinearity="tanh", bias=bias)
        encoder, decoder = (U * d).mT, U / d  # rows: a = h W_f^T = h D_f U_f^T, h = a U_f D_f^-1

        def step(x: Tensor, parts: Parts) -> tuple[Tensor, ...]:
            (h,) = parts
            a = None if h is None else exact(h.to(d.dtype), encoder)
            (after,) = elman(x.to(d.dtype), (a,))
            return (exact(after, decoder).to(x.dtype),)

        return step


class ASRNN(Constrained, RecurrentNetwork):
    """The adaptive-saturated RNN: h_t = W_f^-1 tanh(W_f (W_xh x_t + W_hh h_{t-1} + b)).

    W_f = U_f D_f with U_f orthogonal and D_f = diag(|s| + eps) (Nguyen-Duy, Pham and Nguyen 2023):
    the smaller D_f, the closer to a linear network that forgets nothing, the larger, the more it
    saturates. W_hh and U_f both go through `stiefel.orthogonal`. With a_t = W_f h_t it is the
    Elman network a_t = tanh(M a_{t-1} + W_f (W_xh x_t + b)), M = W_f W_hh W_f^-1, which is how it
    is computed: one product a step instead of three. W_f^-1 = D_f^-1 U_f^T is never inverted.

    It starts with W_xh semi-orthogonal, b = 0, W_hh as `init` says, U_f = I and s ~ U(a, b). With
    ``a=0, b=0, eps=1e-5``, the published start for copying, s is 0 and has no gradient: |s| has
    derivative 0 there, so that D_f = eps I is frozen and the network is a nearly linear
    orthogonal RNN for ever. The default ``a=b=0.02, eps=0.01`` is published for pixel MNIST, and
    ``a=0.8, b=3`` with a small eps for text.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        bias: Whether there is a bias b.
        batch_first: Whether sequences are `(B, T, features)`.
        dropout: Probability of dropping a unit between layers.
        bidirectional: Whether a second recurrence per layer runs backwards.
        via: How W_hh and U_f are trained, anything that ``stiefel.orthogonal(via=)`` takes, or
            None for plain weights with the same start.
        init: Start of W_hh, as `OrthogonalRNN`: Henaff if None, ``"cayley"`` for pixels.
        a: Least start of s.
        b: Largest start of s.
        eps: What D_f keeps above zero.
        recurrent: ``"orthogonal"``, or ``"free"`` for a plain W_hh with the same start.
        mixing_init: Start of U_f. None is the identity; products of reflections or rotations,
            whose differential degenerates there, start near it (noise of 1e-2), and charts that
            do not hold it take their own start.
        input_init: A callable that fills W_xh; semi-orthogonal if None.
        determinant: +1 or -1 fixes the component of W_hh.
        learnable_h0: Whether the first state is learned.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the metric, for both weights.

    Raises:
        UnknownNameError: If `via`, `init` or `recurrent` is unknown.
        ConfigurationError: If options do not go together, eps <= 0 or not 0 <= a <= b.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import ASRNN
        >>> rnn = ASRNN(1, 122, via="exprnn", init="cayley")
        >>> output, h_n = rnn(torch.rand(28, 8, 1))
        >>> output.shape, rnn.expected_parameters(effective=True)
        (torch.Size([28, 8, 122]), 15128)
    """

    ends_linear = True
    constrained = ("recurrent", "mixing")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        via: str | Parametrization | None = "cwy",
        init: str | Initializer | None = None,
        *,
        a: float = 0.02,
        b: float = 0.02,
        eps: float = 0.01,
        recurrent: str = "orthogonal",
        mixing_init: str | Initializer | None = None,
        input_init: Initializer | None = None,
        determinant: int | None = None,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if recurrent not in _RECURRENT:
            raise unknown("recurrent", recurrent, _RECURRENT)
        _check_saturation(a, b, eps)

        def layer(features: int) -> AdaptiveLayer:
            return AdaptiveLayer(
                features,
                hidden_size,
                bias=bias,
                via=via,
                init=init,
                mixing_init=mixing_init,
                input_init=input_init,
                recurrent=recurrent,
                saturation=(a, b, eps),
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
        self.recurrent = recurrent

    def _shown(self) -> list[str]:
        return [f"via={self.via!r}", f"recurrent={self.recurrent!r}"]


def _check_saturation(a: float, b: float, eps: float) -> None:
    if not (0 <= a <= b and math.isfinite(b)):
        raise ConfigurationError(
            f"expected 0 <= a <= b, the bounds of the start of s, got a = {a}, b = {b}"
        )
    if not (eps > 0 and math.isfinite(eps)):
        raise ConfigurationError(
            f"expected eps > 0, got {eps}: D_f = |s| + eps is divided by, and s may pass through "
            "zero while it trains; 1e-5 is small"
        )
