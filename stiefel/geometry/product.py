"""The full-precision matrix product: the primitive of maps that are differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stiefel.geometry.kernel import apply_reverse, kernel_op

__all__ = ["product"]


def _fake(A: Tensor, B: Tensor) -> list[Tensor]:
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return [A.new_empty(*batch, A.shape[-2], B.shape[-1])]


@kernel_op("product", "(Tensor A, Tensor B) -> Tensor[]", fake=_fake)
def _product(A: Tensor, B: Tensor) -> list[Tensor]:
    return [A @ B]


def _sum_to(G: Tensor, shape: torch.Size) -> Tensor:
    """Sums over the batch dimensions that were broadcast."""
    return G.sum_to_size(shape) if G.shape != shape else G


class _Product(torch.autograd.Function):
    """C = A B; dL = Re tr(G^H dC) gives G B^H and A^H G, again by this function."""

    @staticmethod
    def forward(A: Tensor, B: Tensor) -> Tensor:
        return _product(A, B)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (G,), (A, B) = grads, ctx.saved_tensors
        dA = dB = None
        if ctx.needs_input_grad[0]:
            dA = _sum_to(product(G, B.mH), A.shape)
        if ctx.needs_input_grad[1]:
            dB = _sum_to(product(A.mH, G), B.shape)
        return dA, dB

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Any, int]:
        rank = max(X.ndim - (dim is not None) for X, dim in zip(args, in_dims, strict=True))
        moved = []
        for X, dim in zip(args, in_dims, strict=True):
            X = X.expand(info.batch_size, *X.shape) if dim is None else X.movedim(dim, 0)
            missing = rank + 1 - X.ndim  # batch dimensions that only the other factor has
            moved.append(X.reshape(X.shape[0], *(1,) * missing, *X.shape[1:]))
        return _Product.apply(*moved), 0


def product(A: Tensor, B: Tensor) -> Tensor:
    """The matrix product A B in full precision, forward and backward.

    Autocast and reduced float32 precision (`torch.set_float32_matmul_precision`) do not reach it,
    nor its derivatives, of any order.

    Args:
        A: Shape ``(..., n, k)``, float32 or better, real or complex.
        B: Shape ``(..., k, m)``, of the same dtype; batch dimensions are broadcast.

    Returns:
        Shape ``(..., n, m)``.

    Example:
        >>> import torch
        >>> from stiefel.geometry import product
        >>> A, B = torch.ones(2, 3), torch.ones(3, 2)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print((A @ B).dtype, product(A, B).dtype)
        torch.bfloat16 torch.float32
    """
    return apply_reverse(_Product, A, B, name="a product in full precision", remedy="use A @ B")
