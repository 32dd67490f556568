"""ConvLSTM: the gated baseline of the video models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, ShapeError, unknown
from stiefel.models.convolution import SameConv2d, as_kernel_size, convolve
from stiefel.models.frames import FrameRNN

__all__ = ["ConvLSTM", "ConvLSTMLayer"]

_NORMS = (None, "instance")


class ConvLSTMLayer(nn.Module):
    """One layer of a `ConvLSTM`; see there for the formulae and the arguments.

    ``gates.weight`` is the one kernel `(4 f, f_in + f, kh, kw)` over input and state, gates in
    the order i, j, f, o; ``peepholes`` is `(3, f, H, W)` or `(3, f, 1, 1)`, for i, f, o.
    """

    peepholes: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: tuple[int, int],
        *,
        padding_mode: str,
        bias: bool,
        forget_bias: float,
        peepholes: bool | tuple[int, int],
        norm: str | None,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_channels, self.forget_bias = in_channels, forget_bias
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gates = SameConv2d(
            in_channels + hidden_channels,
            4 * hidden_channels,
            kernel_size,
            bias=bias and norm is None,  # a norm takes a constant away
            padding_mode=padding_mode,
            **empty,
        )
        nn.init.trunc_normal_(self.gates.weight, std=0.02, a=-0.04, b=0.04, generator=generator)
        if self.gates.bias is not None:
            nn.init.zeros_(self.gates.bias)
        size = (1, 1) if isinstance(peepholes, bool) else tuple(peepholes)
        weights = torch.zeros(3, hidden_channels, *size, **empty) if peepholes else None
        self.register_parameter("peepholes", None if weights is None else nn.Parameter(weights))
        self.gate_norm: nn.Module = nn.Identity()
        self.cell_norm: nn.Module = nn.Identity()
        if norm == "instance":  # groups of one channel
            self.gate_norm = nn.GroupNorm(4 * hidden_channels, 4 * hidden_channels, **empty)
            self.cell_norm = nn.GroupNorm(hidden_channels, hidden_channels, **empty)

    @property
    def input_weight(self) -> Tensor:
        """The kernel, whose dtype and device are those of the layer."""
        return self.gates.weight

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None, within: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs `x` `(T, B, channels, H, W)` from (h_0, c_0); reads the kernel once.

        The convolution over (x_t, h_{t-1}) is the sum of one over x_t, taken for all frames at
        once, and one over h_{t-1}.

        Returns:
            The states h `(T, B, f, H, W)`, and the last (h, c) of each sequence `(B, f, H, W)`.
        """
        self._check_peepholes(x)
        steps, batch = x.shape[:2]
        weight, mode = self.gates.weight, self.gates.padding_mode
        of_input = weight[:, : self.in_channels].contiguous()
        of_state = weight[:, self.in_channels :].contiguous()
        drive = convolve(x.flatten(0, 1), of_input, self.gates.bias, mode)
        drive = drive.unflatten(0, (steps, batch))
        still = [None] * steps if within is None else within.unbind(0)
        h, c = (None, None) if state is None else state
        states = []
        for U, active in zip(drive.unbind(0), still, strict=True):
            z = U if h is None else U + convolve(h, of_state, None, mode)
            new_h, new_c = self._step(self.gate_norm(z), c)
            new_h, new_c = new_h.to(x.dtype), new_c.to(x.dtype)  # autocast would narrow them
            if active is None or h is None or c is None:
                h, c = new_h, new_c
            else:
                h, c = torch.where(active, new_h, h), torch.where(active, new_c, c)
            states.append(h)
        assert h is not None
        assert c is not None
        return torch.stack(states), (h, c)

    def _step(self, gates: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gates `(B, 4 f, H, W)` and c_{t-1}, None for zero, to h_t and c_t."""
        i, j, f, o = gates.chunk(4, dim=1)
        if self.peepholes is not None and c is not None:
            i, f = i + self.peepholes[0] * c, f + self.peepholes[1] * c
        new = torch.sigmoid(i) * torch.tanh(j)
        if c is not None:
            new = c * torch.sigmoid(f + self.forget_bias) + new
        c_t: Tensor = self.cell_norm(new)
        if self.peepholes is not None:
            o = o + self.peepholes[2] * c_t
        return torch.tanh(c_t) * torch.sigmoid(o), c_t

    def _check_peepholes(self, x: Tensor) -> None:
        if self.peepholes is None or self.peepholes.shape[-2:] == (1, 1):
            return
        if self.peepholes.shape[-2:] != x.shape[-2:]:
            raise ShapeError(
                f"expected frames of {tuple(self.peepholes.shape[-2:])} pixels, for which the "
                f"peepholes were made, got {tuple(x.shape[-2:])}: peepholes=True has one weight a "
                "channel and takes frames of any size"
            )


class ConvLSTM(FrameRNN):
    """A convolutional LSTM (Shi et al., 2015), the baseline of `ConvNERU`.

    One convolution over the channels of X_t and h_{t-1} gives the gates i, j, f, o:

        c_t = c_{t-1} sigmoid(f + 1) + sigmoid(i) tanh(j),    h_t = tanh(c_t) sigmoid(o)

    with a kernel drawn from a normal of standard deviation 0.02, cut off at two deviations, and a
    zero bias: the cell of video prediction networks (Lee et al., 2018), which has no peepholes.
    With them i and f also get w_i c_{t-1} and w_f c_{t-1}, and o gets w_o c_t. Without them it has
    exactly four times the kernel weights of a `ConvNERU` of the same sizes. Parameters:
    4 kh kw (f_in + f) f + 4 f; 10 f with a norm instead of 4 f; peepholes 3 f H W.

    The interface is that of `ConvNERU`, with a state (h, c). Layer l is ``rnn.layers[l]``.

    Args:
        in_channels: Channels of the frames.
        hidden_channels: Channels of the state, f.
        kernel_size: Rows and columns of the kernel, one number or two, odd or even.
        num_layers: Layers, each fed with the states h of the one below.
        padding_mode: ``"zeros"`` or ``"circular"``.
        bias: Whether the convolution has a bias; with a norm it has none.
        forget_bias: What is added to the forget gate.
        peepholes: Whether the gates see the cell: True for one weight a channel, or ``(H, W)``
            for one weight a channel and pixel, as Shi et al. have it. Zero at the start.
        norm: ``"instance"`` normalises the four gates and the cell over each image, with learned
            scale and shift.
        batch_first: Whether sequences are `(B, T, C, H, W)` instead of `(T, B, C, H, W)`.
        learnable_h0: Whether the first state is learned, ``rnn.h0`` and ``rnn.c0`` `(layers, f)`,
            zero at the start.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        UnknownNameError: If `norm` or `padding_mode` is unknown.
        ConfigurationError: If a size is not a positive integer.

    Example:
        >>> import torch
        >>> from stiefel.models import ConvLSTM
        >>> rnn = ConvLSTM(1, 8, 3)
        >>> output, (h, c) = rnn(torch.rand(5, 2, 1, 16, 16))
        >>> output.shape, h.shape
        (torch.Size([5, 2, 8, 16, 16]), torch.Size([1, 2, 8, 16, 16]))
    """

    state_names = ("h0", "c0")

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int | Sequence[int] = 3,
        num_layers: int = 1,
        *,
        padding_mode: str = "zeros",
        bias: bool = True,
        forget_bias: float = 1.0,
        peepholes: bool | tuple[int, int] = False,
        norm: str | None = None,
        batch_first: bool = False,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if norm not in _NORMS:
            raise unknown("norm", norm, [str(name) for name in _NORMS])
        if not isinstance(peepholes, bool) and (len(peepholes) != 2 or min(peepholes) < 1):
            raise ConfigurationError(
                f"expected peepholes to be True, False or the (H, W) of the frames, got {peepholes}"
            )
        size = as_kernel_size(kernel_size)
        layer_options: dict[str, Any] = {
            "padding_mode": padding_mode,
            "bias": bias,
            "forget_bias": forget_bias,
            "peepholes": peepholes,
            "norm": norm,
            "generator": generator,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(
            lambda channels: ConvLSTMLayer(channels, hidden_channels, size, **layer_options),
            in_channels,
            hidden_channels,
            num_layers,
            batch_first=batch_first,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.kernel_size, self.padding_mode, self.norm = size, padding_mode, norm

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return (
            f"{self.in_channels}, {self.hidden_channels}, {self.kernel_size}, "
            f"padding_mode={self.padding_mode!r}, norm={self.norm!r}"
        )
