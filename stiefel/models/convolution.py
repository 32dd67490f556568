"""Convolutions that keep the size of an image, and starts of their kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, RepresentationError, ShapeError, unknown
from stiefel.geometry import haar
from stiefel.init import INITIALIZERS, Initializer, fill_
from stiefel.numerics import compute_dtype
from stiefel.parameter import orthogonal, release
from stiefel.parametrizations import Parametrization

__all__ = ["PADDING_MODES", "SameConv2d", "as_kernel_size", "box_", "convolve", "start_kernel"]

#: What lies around an image: zeros, or the image itself, repeated.
PADDING_MODES = ("zeros", "circular")


def as_kernel_size(kernel_size: int | Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a kernel, from one odd or even size or from two.

    Raises:
        ConfigurationError: If it is neither one nor two positive integers.
    """
    given = kernel_size if isinstance(kernel_size, Sequence) else (kernel_size, kernel_size)
    sizes = tuple(given)
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigurationError(
            f"expected kernel_size to be a positive integer or two of them, got {kernel_size!r}"
        )
    return sizes[0], sizes[1]


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, padding_mode: str) -> Tensor:
    """Convolves images with SAME padding and stride one: the result has the size of the input.

    Of the k - 1 rows that a kernel of k rows needs, (k - 1) // 2 stand before the image and the
    rest behind it: equally many on both sides for odd k, one more behind for even k, as
    TensorFlow and torch's ``padding="same"`` have it.

    Args:
        x: Images `(B, in, H, W)`.
        kernel: `(out, in, kh, kw)`.
        bias: `(out,)` or None.
        padding_mode: ``"zeros"`` or ``"circular"``.

    Returns:
        `(B, out, H, W)`.

    Raises:
        ShapeError: If a circular padding would go round the image more than once.
    """
    kh, kw = kernel.shape[-2:]
    if padding_mode == "zeros" and kh % 2 and kw % 2:
        return nn.functional.conv2d(x, kernel, bias, padding=(kh // 2, kw // 2))
    top, left = (kh - 1) // 2, (kw - 1) // 2
    pads = (left, kw - 1 - left, top, kh - 1 - top)  # the last dimension first
    if padding_mode == "zeros":
        return nn.functional.conv2d(nn.functional.pad(x, pads), kernel, bias)
    if pads[1] > x.shape[-1] or pads[3] > x.shape[-2]:
        raise ShapeError(
            f"expected images of at least {pads[3]} x {pads[1]} pixels, for a circular padding of "
            f"a {kh} x {kw} kernel goes round once, got {x.shape[-2]} x {x.shape[-1]}: take a "
            "smaller kernel or padding_mode='zeros'"
        )
    return nn.functional.conv2d(nn.functional.pad(x, pads, mode="circular"), kernel, bias)


class SameConv2d(nn.Conv2d):
    """A `torch.nn.Conv2d` of stride one whose output has the size of its input (see `convolve`).

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Size of the kernel, odd or even.
        bias: Whether there is a bias.
        padding_mode: ``"zeros"`` or ``"circular"``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        UnknownNameError: If `padding_mode` is unknown.
        ConfigurationError: If `kernel_size` is not one or two positive integers.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if padding_mode not in PADDING_MODES:
            raise unknown("padding_mode", padding_mode, PADDING_MODES)
        super().__init__(
            in_channels,
            out_channels,
            as_kernel_size(kernel_size),
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Convolves images, `(B, in, H, W)` -> `(B, out, H, W)`."""
        return convolve(input, self.weight, self.bias, self.padding_mode)


@torch.no_grad()
def box_(tensor: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills with the box kernel: one Haar matrix over all taps, K[l, m] = Q / (kh kw).

    The only kernel of the Stiefel constraint that keeps the norm of an image which is constant
    (with circular padding): it averages the kh x kw neighbours and turns the channels by Q. Haar
    kernels shrink images, by a factor of about one half a step. Unpublished.

    Args:
        tensor: The point ``(n, p)`` of a kernel, n = kh kw p, as ``init=`` of `stiefel.orthogonal`
            gives it; or any ``(..., n, p)`` with n a multiple of p. It gets n / p copies of Q
            below each other, over sqrt(n / p): orthonormal columns.
        generator: Source of randomness.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the number of rows is no multiple of the number of columns.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.models import box_
        >>> conv = torch.nn.Conv2d(4, 4, 3, bias=False, padding=1, padding_mode="circular")
        >>> conv = stiefel.orthogonal(conv, init=box_)
        >>> flat = torch.randn(1, 4, 1, 1).expand(1, 4, 6, 6)
        >>> torch.allclose(conv(flat).norm(), flat.norm(), rtol=1e-4)
        True
    """
    if tensor.ndim < 2 or tensor.shape[-2] % tensor.shape[-1]:
        raise ShapeError(
            "expected a point (..., n, p) with n a multiple of p, as of a kernel with as many "
            f"input as output channels, got {tuple(tensor.shape)}"
        )
    *batch, n, p = tensor.shape
    Q = haar(
        p,
        p,
        tuple(batch),
        dtype=compute_dtype(tensor.dtype),
        device=tensor.device,
        generator=generator,
    )
    copies = n // p
    return tensor.copy_(torch.cat([Q] * copies, dim=-2) / math.sqrt(copies))


def start_kernel(
    conv: nn.Conv2d,
    *,
    constrained: bool,
    via: str | Parametrization | None,
    init: str | Initializer | None,
    generator: torch.Generator | None,
    options: dict[str, Any],
) -> None:
    """Starts a recurrent kernel `(f, f, kh, kw)`, and constrains it through the one door.

    Args:
        conv: The convolution that holds it.
        constrained: Whether the kernel is of a constrained method: one that starts, and with a
            `via` also stays, with orthonormal columns.
        via: How it is trained; None for a plain weight.
        init: None is Haar, or the chart's own start where the chart cannot hold it; for a free
            kernel Glorot-uniform. A callable fills the point, of a free kernel the kernel itself.
        generator: Source of randomness.
        options: Options of the chart or the metric.
    """
    plain = not constrained or via is None
    if plain and options:
        raise ConfigurationError(
            f"a kernel that is not constrained takes no options, got {sorted(options)}: they "
            "belong to a chart or a metric, with kernel='stiefel' and via="
        )
    if "weight_dtype" in options:
        raise ConfigurationError(
            "a recurrence computes in the dtype of its weights: expected no weight_dtype=, got "
            f"{options['weight_dtype']}. Convert the whole model with .to(...)"
        )
    if isinstance(init, str) and init not in (*INITIALIZERS, "box", "glorot"):
        raise unknown("init", init, [*INITIALIZERS, "box", "glorot"])
    if not constrained and (init is None or init == "glorot"):
        nn.init.xavier_uniform_(conv.weight, generator=generator)
        return
    if init == "glorot":
        raise ConfigurationError(
            "init='glorot' is for kernel='free': its kernel has no orthonormal columns. Expected "
            "'haar', 'box' or another start on the manifold"
        )
    if not constrained and callable(init):
        fill_(conv.weight, init, generator=generator)
        return
    kind = "riemannian" if plain or via is None else via
    door: dict[str, Any] = {"view": "convolution", "generator": generator, **options}
    try:
        start = box_ if init == "box" else "haar" if init is None else init
        orthogonal(conv, via=kind, init=start, **door)
    except RepresentationError:
        if init is not None:
            raise
        orthogonal(conv, via=kind, init="chart", **door)
    if plain:
        release(conv)
