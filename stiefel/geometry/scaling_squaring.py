"""Scaling and squaring of exponentials, ``exp(A) = exp(A / 2^s)^(2^s)``, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stiefel.geometry.linear import add_product, add_product_
from stiefel.numerics import real_dtype

__all__ = [
    "SATURATION",
    "by_pieces",
    "flat",
    "halvings",
    "least_halvings",
    "powers_of_half",
    "refine",
    "scale",
    "squarings",
    "unsquare",
]

#: Entries of a piece of a batch of small matrices.
_PIECE = 131072
#: Squarings between two Newton-Schulz steps: each doubles the distance from orthonormality.
_STRIDE = 3
#: More squarings than this leave nothing of the angles in any dtype.
_MOST = 80
#: Larger coordinates act as these: nothing is left of their angles, and their squares are finite.
SATURATION = {
    torch.float32: 1e12,
    torch.complex64: 1e12,
    torch.float64: 1e16,
    torch.complex128: 1e16,
}


def halvings(norm: Tensor, reach: float) -> Tensor:
    """The smallest s >= 0 with norm / 2^s <= reach; integers of the shape of `norm`."""
    s = torch.log2((norm / reach).clamp_min(1)).ceil()
    return torch.nan_to_num(s, nan=0.0, posinf=0.0).clamp_max(_MOST).to(torch.int64)


def least_halvings(norm: float, reach: float) -> int:
    """The same for one number."""
    return max(0, min(math.ceil(math.log2(norm / reach)), _MOST))


def scale(A: Tensor, factor: Tensor) -> Tensor:
    """Each matrix times a real factor."""
    return A * factor[..., None, None]


def powers_of_half(s: Tensor, dtype: torch.dtype) -> Tensor:
    """2^-s in the real dtype of `dtype`."""
    return torch.exp2(-s.to(real_dtype(dtype)))


def flat(A: Tensor) -> Tensor:
    """One matrix, or one batch dimension of them."""
    if A.shape[:-2].numel() == 1:
        return A.reshape(A.shape[-2:])
    return A.reshape(-1, *A.shape[-2:])


def by_pieces(
    body: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None, options: tuple[Any, ...]
) -> list[Tensor]:
    """Applies a body to flat tensors: large batches of small matrices on the CPU in pieces.

    What a piece needs stays in the cache, and its memory is not returned to the system and asked
    for again at every step.
    """
    first = tensors[0]
    assert first is not None
    size = first.shape[-2:].numel()
    step = max(_PIECE // size, 1)
    if first.device.type != "cpu" or 8 * size > _PIECE or first.numel() <= 2 * _PIECE:
        return list(body(*tensors, *options))
    count = -(-first.shape[0] // step)
    pieces = [[None] * count if T is None else T.split(step) for T in tensors]
    results = [body(*piece, *options) for piece in zip(*pieces, strict=True)]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def refine(X: Tensor, work: Tensor | None = None) -> Tensor:
    """X (3 I - X^H X) / 2: two products; the identity on tangent vectors where X is orthonormal.

    `work` is memory for X^H X.
    """
    return add_product(X, X, torch.matmul(X.mH, X, out=work), beta=1.5, alpha=-0.5)


def _parts(s: Tensor | int) -> Iterator[Tensor | None]:
    """For each squaring which matrices take part: their indices, or None for all of them."""
    if isinstance(s, int):
        yield from [None] * s
        return
    least, most = (int(bound) for bound in s.aminmax())
    for k in range(most):
        yield None if k < least else (s > k).nonzero().squeeze(-1)


def _refined_square(E: Tensor, k: int) -> Tensor:
    """E E of unitary matrices, refined at every third squaring."""
    E = E @ E
    return refine(E) if k % _STRIDE == _STRIDE - 1 else E


def squarings(
    E: Tensor, s: Tensor | int, square: Callable[[Tensor, int], Tensor] = _refined_square
) -> list[Tensor]:
    """E_0, E_1 = E_0^2, ..., E_s; a matrix that needs fewer squarings stays as it is."""
    chain = [E]
    for k, part in enumerate(_parts(s)):
        if part is None:
            E = square(E, k)
        else:
            E = E.index_copy(0, part, square(E.index_select(0, part), k))
        chain.append(E)
    return chain


def unsquare(
    G: Tensor, E: Tensor, s: Tensor | int, square: Callable[[Tensor, int], Tensor] = _refined_square
) -> Tensor:
    """The cotangent of E_0 from that of E_s: G_k = E_k^H G_{k+1} + G_{k+1} E_k^H."""
    parts = list(_parts(s))
    last = max(len(parts) - 1, 0)
    chain = squarings(E, min(s, last) if isinstance(s, int) else s.clamp_max(last), square)
    for k in reversed(range(len(parts))):
        part, F = parts[k], chain[k]
        if part is None:
            G = add_product_(F.mH @ G, G, F.mH)
        else:
            F, H = F.index_select(0, part), G.index_select(0, part)
            G = G.index_copy(0, part, add_product_(F.mH @ H, H, F.mH))
    return G
