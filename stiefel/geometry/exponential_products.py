"""The exponential of skew matrices by products alone, forward and backward.

Scaling and squaring, ``exp(A) = exp(A / 2^s)^(2^s)``, with a polynomial of degree 12 that is made
for the imaginary interval where the spectrum of a skew matrix lies, four products in all; then one
Newton-Schulz step, which takes the result to orthonormality whatever was lost on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.exponential_polynomial import (
    ECONOMISED_DOUBLE,
    ECONOMISED_SINGLE,
    Polynomial,
)
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.linear import add_product_, adjoint, saturated
from stiefel.geometry.scaling_squaring import (
    SATURATION,
    by_pieces,
    flat,
    halvings,
    least_halvings,
    powers_of_half,
    refine,
    scale,
    squarings,
    unsquare,
)
from stiefel.geometry.skew_coordinates import skew_from_coordinates, skew_to_coordinates
from stiefel.geometry.spectral import moderate, norm_and_square, overestimate
from stiefel.geometry.tangent import skew
from stiefel.numerics import real_dtype

__all__ = ["exponential_of_coordinates", "skew_exponential"]


def _polynomial_for(dtype: torch.dtype) -> Polynomial:
    """The economised polynomial of a working dtype."""
    single = real_dtype(dtype) == torch.float32
    return ECONOMISED_SINGLE if single else ECONOMISED_DOUBLE


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
    polynomial = _polynomial_for(V.dtype)
    tame = max_angle is None and moderate(V)
    work = torch.empty_like(V, memory_format=torch.contiguous_format)
    A = skew_from_coordinates(V if tame else saturated(V, SATURATION[V.dtype]), work)
    norm, A2 = norm_and_square(A, scaled=not tame)
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
    E0, A2, A3, A6 = polynomial.evaluate(A, A2, work)
    E = squarings(E0, s)[-1]
    X, free = (E, work) if base is None else (torch.matmul(base, E, out=work), E)
    return refine(X, free), A, A2, A3, A6, factor


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
    the Hermitian part H2 of that of A2 do; with P = 2 A H3 their share is
    skew(A (P + P^H / 2 - 2 H2)): two products in place of four.
    """
    polynomial = _polynomial_for(A.dtype)
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
    G1, G2, G3, free, P = polynomial.cotangents(G, A, A2, A3, A6)
    P = torch.matmul(A, G3.sub_(adjoint(G3, free)), out=P)  # A (2 H3)
    half = adjoint(torch.sub(P, G2, alpha=2, out=free), G3)
    M = add_product_(G1, A, P.sub_(G2).add_(half, alpha=0.5))
    D = M.sub_(adjoint(M, free))
    D = scale(D, factor) if scaled else D
    return (skew_to_coordinates(D, D),)


_exponential = differentiable(_forward, _backward, name="exponential_of_coordinates")


def exponential_of_coordinates(
    V: Tensor, base: Tensor | None = None, *, max_angle: float | None = None
) -> Tensor:
    """``base exp(A)`` by products, A = T - T^H with T the strict upper triangle of V.

    For complex V, ``A_kk = i sqrt(2) Im V_kk`` besides; every other entry of V has a zero gradient.
    These coordinates are orthonormal in the canonical metric ``tr(A^H A) / 2``. The result is
    orthonormal to rounding for V of any size; its angles are as accurate as ``|A|`` rounding
    errors allow. Entries beyond 1e12 (1e16 in float64), which leave no angle, act as that.

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
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import exponential_of_coordinates
        >>> V = torch.tensor([[0.0, torch.pi / 2], [0.0, 0.0]], dtype=torch.float64)
        >>> exponential_of_coordinates(V).round(decimals=9) + 0.0
        tensor([[ 0.,  1.],
                [-1.,  0.]], dtype=torch.float64)
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
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import skew_exponential
        >>> A = torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]], dtype=torch.float64)
        >>> skew_exponential(A).round(decimals=9) + 0.0
        tensor([[ 0., -1.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    return exponential_of_coordinates(skew_to_coordinates(skew(A)), base, max_angle=max_angle)
