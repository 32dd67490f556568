"""The exponential of skew matrices by products alone, forward and backward.

Scaling and squaring, ``exp(A) = exp(A / 2^s)^(2^s)``, with a polynomial of degree 12 that is made
for the imaginary interval where the spectrum of a skew matrix lies, four products in all; then one
Newton-Schulz step, which takes the result to orthonormality whatever was lost on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stiefel.geometry.exponential_polynomial import (
    ECONOMISED_DOUBLE,
    ECONOMISED_SINGLE,
    Polynomial,
)
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.linear import add_product, add_product_, adjoint
from stiefel.geometry.skew_coordinates import skew_from_coordinates, skew_to_coordinates
from stiefel.geometry.spectral import norm_and_square, overestimate
from stiefel.geometry.tangent import skew
from stiefel.numerics import real_dtype

__all__ = ["exponential_of_coordinates", "skew_exponential"]

#: Entries of a piece of a batch of small matrices.
_PIECE = 131072
#: Squarings between two Newton-Schulz steps: each doubles the distance from orthonormality.
_STRIDE = 3
#: More squarings than this leave nothing of the angles in any dtype.
_MOST = 60


def polynomial_for(dtype: torch.dtype) -> Polynomial:
    """The economised polynomial of a working dtype."""
    single = real_dtype(dtype) == torch.float32
    return ECONOMISED_SINGLE if single else ECONOMISED_DOUBLE


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
    if first.device.type != "cpu" or 8 * size > _PIECE or first.numel() < 2 * _PIECE:
        return list(body(*tensors, *options))
    count = -(-first.shape[0] // step)
    pieces = [[None] * count if T is None else T.split(step) for T in tensors]
    results = [body(*piece, *options) for piece in zip(*pieces, strict=True)]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def refine(X: Tensor) -> Tensor:
    """X (3 I - X^H X) / 2: two products; the identity on tangent vectors where X is orthonormal."""
    return add_product(X, X, X.mH @ X, beta=1.5, alpha=-0.5)


def _parts(s: Tensor | int) -> Iterator[Tensor | None]:
    """For each squaring which matrices take part: their indices, or None for all of them."""
    if isinstance(s, int):
        yield from [None] * s
        return
    least, most = (int(bound) for bound in s.aminmax())
    for k in range(most):
        yield None if k < least else (s > k).nonzero().squeeze(-1)


def squared(E: Tensor, k: int) -> Tensor:
    """E E of unitary matrices, refined at every third squaring."""
    E = E @ E
    return refine(E) if k % _STRIDE == _STRIDE - 1 else E


def squarings(
    E: Tensor, s: Tensor | int, square: Callable[[Tensor, int], Tensor] = squared
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
    G: Tensor, E: Tensor, s: Tensor | int, square: Callable[[Tensor, int], Tensor] = squared
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


def _forward_fake(V: Tensor, base: Tensor | None, max_angle: float | None) -> tuple[Tensor, ...]:
    new = [V.new_empty(V.shape) for _ in range(5)]
    return *new, V.new_empty(V.shape[:-2], dtype=real_dtype(V.dtype))


@kernel_op(
    "exponential_of_coordinates",
    "(Tensor V, Tensor? base, float? max_angle)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_forward_fake,
)
def _forward(V: Tensor, base: Tensor | None, max_angle: float | None) -> tuple[Tensor, ...]:
    """X = base exp(A); keeps the scaled A, its A2, A3 and A6, and what A was multiplied by."""
    if V.numel() == 0:
        return _forward_fake(V, base, max_angle)
    flats = (flat(V), None if base is None else flat(base))
    *kept, factor = by_pieces(_forward_body, *flats, options=(max_angle,))
    return *(T.reshape(V.shape) for T in kept), factor.reshape(V.shape[:-2])


def _forward_body(V: Tensor, base: Tensor | None, max_angle: float | None) -> tuple[Tensor, ...]:
    polynomial = polynomial_for(V.dtype)
    A = skew_from_coordinates(V)
    norm, A2 = norm_and_square(A, branch=max_angle is None)
    if max_angle is None:
        s = halvings(norm, polynomial.reach)
        factor = powers_of_half(s, A.dtype)
        scaled = bool((s > 0).any())
    else:
        bound = max_angle * overestimate(A.shape[-1], complex=A.is_complex())
        s, scaled = least_halvings(bound, polynomial.reach), True
        factor = (bound / norm).clamp_max(1) / 2**s
    if scaled:
        A, A2 = scale(A, factor), None if A2 is None else scale(A2, factor.square())
    E0, A2, A3, A6 = polynomial.evaluate(A, A2)
    E = squarings(E0, s)[-1]
    return refine(E if base is None else base @ E), A, A2, A3, A6, factor


def _backward_fake(G, A, A2, A3, A6, factor, V, base, max_angle) -> list[Tensor]:
    return [V.new_empty(V.shape)]


@kernel_op(
    "exponential_of_coordinates_backward",
    "(Tensor G, Tensor A, Tensor A2, Tensor A3, Tensor A6, Tensor factor, Tensor V, Tensor? base,"
    " float? max_angle) -> Tensor[]",
    fake=_backward_fake,
)
def _backward(
    G: Tensor,
    A: Tensor,
    A2: Tensor,
    A3: Tensor,
    A6: Tensor,
    factor: Tensor,
    V: Tensor,
    base: Tensor | None,
    max_angle: float | None,
) -> list[Tensor]:
    """Back through the base, the squarings, and the polynomial."""
    if V.numel() == 0:
        return [torch.zeros_like(V)]
    flats = [None if T is None else flat(T) for T in (G, A, A2, A3, A6, base)]
    factor = factor.reshape(flats[0].shape[:-2])  # pyright: ignore[reportOptionalMemberAccess]
    (dV,) = by_pieces(_backward_body, *flats, factor, options=(max_angle,))
    return [dV.reshape(V.shape)]


def _backward_body(
    G: Tensor,
    A: Tensor,
    A2: Tensor,
    A3: Tensor,
    A6: Tensor,
    base: Tensor | None,
    factor: Tensor,
    max_angle: float | None,
) -> tuple[Tensor]:
    """The gradient of V.

    Only the skew part of the result counts, so only the skew part H3 of the cotangent of A3 and
    the Hermitian part H2 of that of A2 do; with P = A H3 their share is
    skew(A (2 P + P^H - 2 H2)): two products in place of four.
    """
    polynomial = polynomial_for(A.dtype)
    if max_angle is None:
        s = torch.log2(factor).round().neg().to(torch.int64)
        scaled = bool((s > 0).any())
    else:
        bound = max_angle * overestimate(A.shape[-1], complex=A.is_complex())
        s, scaled = least_halvings(bound, polynomial.reach), True
    if base is not None:
        G = base.mH @ G
    if scaled:
        G = unsquare(G, polynomial.last(A, A2, A3, A6), s)
    G1, G2, G3 = polynomial.cotangents(G, A, A2, A3, A6)
    H3 = G3.sub_(adjoint(G3)).div_(2)
    P = A @ H3
    inner = adjoint(P).add_(P, alpha=2).sub_(G2).sub_(adjoint(G2))
    M = add_product_(G1, A, inner)
    D = M.sub_(adjoint(M))
    D = scale(D, factor) if scaled else D
    return (skew_to_coordinates(D),)


_exponential = differentiable(_forward, _backward, name="exponential_of_coordinates")


def exponential_of_coordinates(
    V: Tensor, base: Tensor | None = None, *, max_angle: float | None = None
) -> Tensor:
    """``base exp(A)`` by products, A = T - T^H with T the strict upper triangle of V.

    For complex V, ``A_kk = i sqrt(2) Im V_kk`` besides; every other entry of V has a zero gradient.
    These coordinates are orthonormal in the canonical metric ``tr(A^H A) / 2``. The result is
    orthonormal to rounding for V of any size; its angles are as accurate as ``|A|`` rounding
    errors allow.

    Args:
        V: Coordinates in float32 or better, shape ``(..., n, n)``.
        base: Matrices with orthonormal columns, same shape; the identity by default. A constant:
            it has no gradient.
        max_angle: A bound on the spectral norms of A, if one is known: the same products are then
            taken whatever A is, and nothing is read back to the host. A larger A is shortened,
            so that the result stays orthonormal; the factor counts as a constant in the derivative.

    Returns:
        Shape ``(..., n, n)``.

    Raises:
        DoubleBackwardError: In a second derivative.
    """
    return _exponential(V, base, max_angle)


def skew_exponential(
    A: Tensor, base: Tensor | None = None, *, max_angle: float | None = None
) -> Tensor:
    """``base exp(A)`` for skew(-Hermitian) A: `exponential_of_coordinates` of those of A.

    The derivative is that along skew directions: the gradient is skew.

    Args:
        A: Matrices in float32 or better, shape ``(..., n, n)``, of which the skew part counts.
        base: As in `exponential_of_coordinates`.
        max_angle: As there.

    Returns:
        Shape ``(..., n, n)``.

    Raises:
        DoubleBackwardError: In a second derivative.

    Example:
        >>> import torch
        >>> from stiefel.geometry import skew_exponential
        >>> A = torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]], dtype=torch.float64)
        >>> skew_exponential(A).round(decimals=9) + 0.0
        tensor([[ 0., -1.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    return exponential_of_coordinates(skew_to_coordinates(skew(A)), base, max_angle=max_angle)
