"""ConvNERU: a convolutional recurrent network whose kernel cannot raise the norm of its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, unknown
from stiefel.init import Initializer, fill_
from stiefel.models.activations import NONLINEARITIES, activate
from stiefel.models.convolution import SameConv2d, as_kernel_size, convolve, start_kernel
from stiefel.models.frames import FrameRNN
from stiefel.models.layer import Constrained
from stiefel.parametrizations import Parametrization

__all__ = ["KERNELS", "ConvNERU", "ConvNERULayer"]

#: How a recurrent kernel is held: on the Stiefel manifold, free, or not there at all.
KERNELS = ("stiefel", "free", "zeros")


class ConvNERULayer(nn.Module):
    """One layer: G_t = sigma(K * G_{t-1} + b + K_in * X_t). See `ConvNERU` for the arguments.

    ``recurrent.weight`` is K `(f, f, kh, kw)`, and ``recurrent`` None with ``kernel="zeros"``;
    ``input.weight`` is K_in `(f, channels, kh, kw)` and ``input.bias`` b.
    """

    recurrent: SameConv2d | None

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: tuple[int, int],
        *,
        kernel: str,
        via: str | Parametrization | None,
        padding_mode: str,
        nonlinearity: str,
        bias: bool,
        init: str | Initializer | None,
        input_init: Initializer | None,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.nonlinearity, self.padding_mode = nonlinearity, padding_mode
        same: dict[str, Any] = {"padding_mode": padding_mode, "device": device, "dtype": dtype}
        self.input = SameConv2d(in_channels, hidden_channels, kernel_size, bias=bias, **same)
        self._start_input(input_init, generator)
        self.recurrent = None
        if kernel == "zeros":
            if options or init is not None:
                raise ConfigurationError(
                    f"kernel='zeros' has no recurrent kernel: expected no init= and no options, "
                    f"got init={init!r} and {sorted(options)}"
                )
            return
        self.recurrent = SameConv2d(
            hidden_channels, hidden_channels, kernel_size, bias=False, **same
        )
        start_kernel(
            self.recurrent,
            constrained=kernel == "stiefel",
            via=via,
            init=init,
            generator=generator,
            options=options,
        )

    def _start_input(
        self, input_init: Initializer | None, generator: torch.Generator | None
    ) -> None:
        """K_in Glorot-uniform, b = 0."""
        if input_init is None:
            nn.init.xavier_uniform_(self.input.weight, generator=generator)
        else:
            fill_(self.input.weight, input_init, generator=generator)
        if self.input.bias is not None:
            nn.init.zeros_(self.input.bias)

    @property
    def input_weight(self) -> Tensor:
        """K_in, whose dtype and device are those of the layer."""
        return self.input.weight

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None, within: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs `x` `(T, B, channels, H, W)` from G_0 `(B, f, H, W)`; reads the kernel once.

        Returns:
            The states `(T, B, f, H, W)`, and the last one of each sequence `(B, f, H, W)`.
        """
        steps, batch = x.shape[:2]
        drive = self.input(x.flatten(0, 1)).unflatten(0, (steps, batch))  # b + K_in * X_t, all t
        with torch.autocast(x.device.type, enabled=False):
            return self._walk(drive.to(self.input_weight.dtype), state, within)

    def _walk(
        self, drive: Tensor, state: tuple[Tensor, ...] | None, within: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """G_t = sigma(K * G_{t-1} + U_t) over U `(T, B, f, H, W)`."""
        kernel = None if self.recurrent is None else self.recurrent.weight.contiguous()
        still = [None] * len(drive) if within is None else within.unbind(0)
        G = None if state is None else state[0]
        states = []
        for U, active in zip(drive.unbind(0), still, strict=True):
            z = U
            if kernel is not None and G is not None:
                z = U + convolve(G, kernel, None, self.padding_mode)
            new = activate(self.nonlinearity, z)
            G = new if active is None or G is None else torch.where(active, new, G)
            states.append(G)
        assert G is not None
        return torch.stack(states), (G,)


class ConvNERU(Constrained, FrameRNN):
    """A convolutional network with a norm-bounded state: G_t = sigma(K * G_{t-1} + b + K_in * X_t).

    The convolutional non-exploding recurrent unit of Likhosherstov, Davis, Choromanski and Weller
    (2021). With the kernel as a matrix Khat `(kh kw f, f)`, rows ordered by tap and then by input
    channel, ``sqrt(kh kw) Khat`` has orthonormal columns, hence for zero and for circular padding
    ``|K * G| <= |G|``: an output pixel is Khat^T of its patch, and a pixel lies in at most kh kw
    patches. All nonlinearities allowed here have |sigma(x)| <= |x| and |sigma'| <= 1, so

        |G_t| <= |G_{t-1}| + |B| + |K_in * X_t|    and    |dC/dG_t| <= |dC/dG_T|

    for a loss C of the last state: neither states nor gradients explode. They may vanish, for a
    random kernel of the constraint shrinks an image by about one half a step: ``init="box"``
    starts at the kernel that keeps constant images.

    Called like `torch.nn.RNN`, with frames in place of vectors. The input convolution runs over
    all frames at once, the recurrent one step by step with the kernel read once per sequence.
    Layer l is ``rnn.layers[l]``, its recurrent kernel ``rnn.layers[l].recurrent.weight``. Under
    autocast the recurrence stays in the dtype of the parameters; on a GPU
    ``torch.backends.cudnn.allow_tf32 = False`` makes its float32 convolutions exact.

    Args:
        in_channels: Channels of the frames.
        hidden_channels: Channels of the state, f.
        kernel_size: Rows and columns of both kernels, one number or two, odd or even.
        num_layers: Layers, each fed with the states of the one below.
        kernel: ``"stiefel"``; ``"free"`` for an unconstrained kernel; ``"zeros"`` for none at all,
            with which a state depends on its own frame only.
        via: How a kernel on the manifold is trained, anything that ``stiefel.orthogonal(via=)``
            takes for tall weights, or None for a plain one with the same start. Not used by the
            other kernels.
        padding_mode: ``"zeros"`` or ``"circular"``.
        nonlinearity: ``"relu"``, ``"abs"``, ``"tanh"``, ``"leaky_relu"`` or ``"identity"``.
        bias: Whether there is a bias b, zero at the start.
        init: Start of the recurrent kernel: a name of `stiefel.init.INITIALIZERS` or ``"box"``
            (see `box_`), or a callable that fills the point ``(kh kw f, f)``. None is Haar,
            and for a free kernel ``"glorot"``, Glorot-uniform; a free kernel that starts at
            ``"haar"`` is the published Orth-Init, and a callable fills it as `(f, f, kh, kw)`.
        input_init: A callable that fills K_in; Glorot-uniform if None.
        batch_first: Whether sequences are `(B, T, C, H, W)` instead of `(T, B, C, H, W)`.
        learnable_h0: Whether the first state is learned, one number for each layer and channel,
            ``rnn.h0`` `(layers, f)`, zero at the start.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the metric, such as ``retraction=``.

    Raises:
        UnknownNameError: If `kernel`, `nonlinearity`, `padding_mode`, `via` or `init` is unknown.
        ConfigurationError: If options do not go together, or the nonlinearity can raise a norm.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import ConvNERU
        >>> rnn = ConvNERU(1, 8, 3, via="cwy")
        >>> output, state = rnn(torch.rand(5, 2, 1, 16, 16))
        >>> output.shape, state.shape
        (torch.Size([5, 2, 8, 16, 16]), torch.Size([1, 2, 8, 16, 16]))
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int | Sequence[int] = 3,
        num_layers: int = 1,
        *,
        kernel: str = "stiefel",
        via: str | Parametrization | None = "cwy",
        padding_mode: str = "zeros",
        nonlinearity: str = "relu",
        bias: bool = True,
        init: str | Initializer | None = None,
        input_init: Initializer | None = None,
        batch_first: bool = False,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if kernel not in KERNELS:
            raise unknown("kernel", kernel, KERNELS)
        _check_nonlinearity(nonlinearity)
        layer_options: dict[str, Any] = {
            "kernel": kernel,
            "via": via,
            "padding_mode": padding_mode,
            "nonlinearity": nonlinearity,
            "bias": bias,
            "init": init,
            "input_init": input_init,
            "generator": generator,
            "device": device,
            "dtype": dtype,
            "options": options,
        }
        size = as_kernel_size(kernel_size)
        super().__init__(
            lambda channels: ConvNERULayer(channels, hidden_channels, size, **layer_options),
            in_channels,
            hidden_channels,
            num_layers,
            batch_first=batch_first,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.kernel, self.kernel_size = kernel, size
        self.padding_mode, self.nonlinearity = padding_mode, nonlinearity

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        how = f", via={self.via!r}" if self.kernel == "stiefel" else ""
        return (
            f"{self.in_channels}, {self.hidden_channels}, {self.kernel_size}, "
            f"kernel={self.kernel!r}{how}, padding_mode={self.padding_mode!r}, "
            f"nonlinearity={self.nonlinearity!r}"
        )


def _check_nonlinearity(nonlinearity: str) -> None:
    """Holds a nonlinearity to |sigma(x)| <= |x| and |sigma'| <= 1."""
    admissible = [name for name in NONLINEARITIES if name != "modrelu"]
    if nonlinearity == "modrelu":
        raise ConfigurationError(
            "expected a nonlinearity with |sigma(x)| <= |x|, one of "
            f"{', '.join(admissible)}, got 'modrelu', which raises |x| by its bias where that is "
            "positive: the bound on the state would not hold"
        )
    if nonlinearity not in admissible:
        raise unknown("nonlinearity", nonlinearity, admissible)
