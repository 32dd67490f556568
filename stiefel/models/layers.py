"""Layers with orthogonal weights that take the place of torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stiefel.errors import RepresentationError
from stiefel.init import Initializer
from stiefel.parameter import orthogonal
from stiefel.parametrizations import Parametrization

__all__ = ["OrthogonalConv2d", "OrthogonalLinear"]


class OrthogonalLinear(nn.Linear):
    """`torch.nn.Linear` whose weight has orthonormal columns, or rows where it is wide.

    With as many outputs as inputs the layer turns its input and keeps every norm; with more it
    embeds, keeping norms too; with fewer it projects, and norms do not grow. The same as
    ``stiefel.orthogonal(torch.nn.Linear(...), via=via, init="haar")``.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        bias: Whether there is an additive bias, as in `torch.nn.Linear`.
        via: How the weight is trained, anything that ``stiefel.orthogonal(via=)`` takes.
        init: Start of the weight, as ``stiefel.orthogonal(init=)`` takes it; None is ``"haar"``
            where the chart can hold every point, else the chart's own start.
        determinant: +1 or -1 fixes the component of a real square weight.
        weight_dtype: Dtype of the emitted weight; the stored dtype by default.
        generator: Source of randomness of the start.
        device: Device of the parameters.
        dtype: Dtype of the parameters, real or complex.
        **options: Options of the chart or the metric, such as ``reflections=``.

    Raises:
        UnknownNameError: If `via` or `init` is unknown.
        ConfigurationError: If options do not go together.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import OrthogonalLinear
        >>> layer = OrthogonalLinear(16, 16, bias=False, via="rgd-c-c")
        >>> x = torch.randn(3, 16)
        >>> torch.allclose(layer(x).norm(dim=1), x.norm(dim=1), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        via: str | Parametrization = "cwy",
        init: str | Initializer | None = None,
        *,
        determinant: int | None = None,
        weight_dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        given = {"determinant": determinant, "weight_dtype": weight_dtype, "generator": generator}
        _constrain(self, via, init, **given, **options)


class OrthogonalConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` whose kernel, read as a matrix, is orthonormal up to a factor.

    The kernel ``(out, in, kh, kw)`` read as ``(kh kw in, out)`` is ``scale`` times a matrix with
    orthonormal columns (rows where there are more outputs than ``kh kw in``).

    *What this is not*: the convolution as an operator on images is not orthogonal. A kernel with
    orthonormal columns and the default scale ``1 / sqrt(kh kw)`` never increases the norm of an
    image with stride one and zero or circular padding, and most images it shrinks: a Haar kernel
    of 3 x 3 taps has an operator norm well below 1. It keeps norms for 1 x 1 kernels only. An
    operator that keeps all norms needs a kernel that is orthogonal at every frequency, which this
    layer does not have. With ``scale=1`` the rows of the unfolded kernel are orthonormal, as in
    penalties of kernel orthogonality, and the operator norm is at most ``sqrt(kh kw)``.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: As in `torch.nn.Conv2d`.
        stride: As in `torch.nn.Conv2d`.
        padding: As in `torch.nn.Conv2d`.
        dilation: As in `torch.nn.Conv2d`.
        groups: As in `torch.nn.Conv2d`; the kernel is then ``(out, in / groups, kh, kw)``, and all
            outputs together are orthonormal.
        bias: As in `torch.nn.Conv2d`.
        padding_mode: As in `torch.nn.Conv2d`.
        via: How the kernel is trained, anything that ``stiefel.orthogonal(via=)`` takes.
        init: As in `OrthogonalLinear`.
        scale: Factor between the matrix and the kernel; None is ``1 / sqrt(kh kw)``.
        weight_dtype: Dtype of the emitted kernel; the stored dtype by default.
        generator: Source of randomness of the start.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the metric.

    Raises:
        UnknownNameError: If `via` or `init` is unknown.
        ConfigurationError: If options do not go together, or `scale` is not positive.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import OrthogonalConv2d
        >>> layer = OrthogonalConv2d(8, 8, 3, padding=1, bias=False, via="tcwy")
        >>> x = torch.randn(2, 8, 12, 12)
        >>> bool(layer(x).norm() < x.norm())
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | str | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        via: str | Parametrization = "cwy",
        init: str | Initializer | None = None,
        *,
        scale: float | None = None,
        weight_dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,  # pyright: ignore[reportArgumentType]
            stride,  # pyright: ignore[reportArgumentType]
            padding,  # pyright: ignore[reportArgumentType]
            dilation,  # pyright: ignore[reportArgumentType]
            groups,
            bias,
            padding_mode,  # pyright: ignore[reportArgumentType]
            device=device,
            dtype=dtype,
        )
        view = "convolution" if scale is None else ("convolution", scale)
        given = {"view": view, "weight_dtype": weight_dtype, "generator": generator}
        _constrain(self, via, init, **given, **options)


def _constrain(
    module: nn.Module, via: str | Parametrization, init: str | Initializer | None, **options: Any
) -> None:
    """Constrains the weight; a Haar start, or the chart's own where it cannot hold every point."""
    if init is not None:
        orthogonal(module, via=via, init=init, **options)
        return
    try:
        orthogonal(module, via=via, init="haar", **options)
    except RepresentationError:
        orthogonal(module, via=via, init="chart", **options)
