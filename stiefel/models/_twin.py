"""The real twin of a recurrence with complex weights, of twice the size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.errors import DtypeError
from stiefel.geometry import realify, realify_vector
from stiefel.numerics import real_dtype

__all__ = ["Factors", "from_twin", "one_precision", "real_twin"]

#: Q; or U, Y and the diagonal F (None for I) of Q = F - Y U^H.
Factors = tuple[Tensor, Tensor | None, Tensor | None]


def real_twin(
    x: Tensor, kernel: Tensor, bias: Tensor | None, h0: Tensor | None, factors: Factors
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Factors]:
    """The same recurrence on [Re h, Im h]: Q becomes [[Re Q, -Im Q], [Im Q, Re Q]].

    Args:
        x: Inputs `(T, B, K)`, real or complex.
        kernel: V `(H, K)`, complex.
        bias: b `(H,)`, complex, or None.
        h0: First state `(B, H)`, complex, or None.
        factors: Q `(H, H)`, or U, Y `(H, L)` and a diagonal; complex.

    Returns:
        The same five, real, with 2 H units.
    """
    if x.is_complex():
        x, kernel = realify_vector(x), realify(kernel)
    else:
        kernel = torch.cat([kernel.real, kernel.imag])
    bias, h0 = (None if each is None else realify_vector(each) for each in (bias, h0))
    left, right, sign = factors
    # Q = F - Y U^H, and the twin of U^H is the transpose of the twin of U
    twin = (
        realify(left),
        None if right is None else realify(right),
        None if sign is None else torch.cat([sign.real, sign.real]),
    )
    return x, kernel, bias, h0, twin


def from_twin(twin: Tensor) -> Tensor:
    """`(..., H)` complex of `(..., 2 H)` real."""
    return torch.complex(*(half.contiguous() for half in twin.chunk(2, dim=-1)))


def one_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A conversion as `Module.to` has it, of a network of complex and of real tensors.

    Both kinds get one precision, and stay what they are: torch's ``.double()`` would leave the
    complex ones alone, and ``.to(torch.complex128)`` make the real ones complex.
    """

    def convert(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        if not tensor.is_complex():
            return new.real.contiguous() if new.is_complex() else new
        if not new.is_complex():
            raise DtypeError(
                f"expected a complex dtype for a complex network, got {new.dtype}: use .double() "
                "or .float(), which change its precision and keep it complex"
            )
        real = fn(tensor.new_empty(0, dtype=real_dtype(tensor.dtype)))
        if real.is_complex():
            return new
        if real.dtype not in (torch.float32, torch.float64):
            raise DtypeError(
                f"expected float32 or float64 for a complex network, got {real.dtype}: there are "
                "no complex numbers of that precision"
            )
        return new.to(torch.complex64 if real.dtype == torch.float32 else torch.complex128)

    return convert
