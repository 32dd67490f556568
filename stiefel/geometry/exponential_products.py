"""The exponential of skew matrices by products alone, forward and backward.

Scaling and squaring, ``exp(A) = exp(A / 2^s)^(2^s)``, with a polynomial of degree 12 that is made
for the imaginary interval where the spectrum of a skew matrix lies, four products in all; then one
Newton-Schulz step, which takes the result to orthonormality whatever was lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stiefel.geometry.exponential_polynomial import (
    ECONOMISED_DOUBLE,
    ECONOMISED_SINGLE,
    Polynomial,
    add_product_,
)
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.spectral import skew_norm
from stiefel.numerics import real_dtype

__all__ = ["skew_exponential"]

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


def scale(A: Tensor, s: Tensor) -> Tensor:
    """A / 2^s."""
    factor = torch.exp2(-s.to(real_dtype(A.dtype)))
    return A * factor[..., None, None]


def flat(A: Tensor) -> Tensor:
    """One matrix, or one batch dimension of them."""
    if A.shape[:-2].numel() == 1:
        return A.reshape(A.shape[-2:])
    return A.reshape(-1, *A.shape[-2:])


def refine(X: Tensor) -> Tensor:
    """X (3 I - X^H X) / 2: two products; the identity on tangent vectors where X is orthonormal."""
    return add_product_(X.clone(), X, X.mH @ X, beta=1.5, alpha=-0.5)


def _parts(s: Tensor) -> Iterator[Tensor | None]:
    """For each squaring which matrices take part: their indices, or None for all of them."""
    least, most = (int(bound) for bound in s.aminmax())
    for k in range(most):
        yield None if k < least else (s > k).nonzero().squeeze(-1)


def squared(E: Tensor, k: int) -> Tensor:
    """E E of unitary matrices, refined at every third squaring."""
    E = E @ E
    return refine(E) if k % _STRIDE == _STRIDE - 1 else E


def squarings(
    E: Tensor, s: Tensor, square: Callable[[Tensor, int], Tensor] = squared
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
    G: Tensor, E: Tensor, s: Tensor, square: Callable[[Tensor, int], Tensor] = squared
) -> Tensor:
    """The cotangent of E_0 from that of E_s: G_k = E_k^H G_{k+1} + G_{k+1} E_k^H."""
    parts = list(_parts(s))
    chain = squarings(E, s.clamp_max(max(len(parts) - 1, 0)), square)
    for k in reversed(range(len(parts))):
        part, adjoint = parts[k], chain[k].mH.resolve_conj()
        if part is None:
            G = add_product_(adjoint @ G, G, adjoint)
        else:
            F, H = adjoint.index_select(0, part), G.index_select(0, part)
            G = G.index_copy(0, part, add_product_(F @ H, H, F))
    return G


def _forward_fake(A: Tensor, base: Tensor | None, max_angle: float | None) -> tuple[Tensor, ...]:
    new = [A.new_empty(A.shape) for _ in range(5)]
    return *new, A.new_empty(A.shape[:-2], dtype=torch.int64)


@kernel_op(
    "skew_exponential",
    "(Tensor A, Tensor? base, float? max_angle)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_forward_fake,
)
def _forward(A: Tensor, base: Tensor | None, max_angle: float | None) -> tuple[Tensor, ...]:
    """X = base exp(A); keeps A2, A3, A6 and E_0 of the scaled A, and s."""
    if A.numel() == 0:
        return _forward_fake(A, base, max_angle)
    shape, polynomial = A.shape, polynomial_for(A.dtype)
    A = flat(A)
    norm = A.new_full(A.shape[:-2], max_angle or 0.0, dtype=real_dtype(A.dtype))
    s = halvings(skew_norm(A) if max_angle is None else norm, polynomial.reach)
    E0, A2, A3, A6 = polynomial.evaluate(scale(A, s))
    E = squarings(E0, s)[-1]
    X = refine(E if base is None else flat(base) @ E)
    return *(T.reshape(shape) for T in (X, A2, A3, A6, E0)), s.reshape(shape[:-2])


def _backward_fake(G, A2, A3, A6, E0, s, A, base, max_angle) -> list[Tensor]:
    return [A.new_empty(A.shape)]


@kernel_op(
    "skew_exponential_backward",
    "(Tensor G, Tensor A2, Tensor A3, Tensor A6, Tensor E0, Tensor s, Tensor A, Tensor? base,"
    " float? max_angle) -> Tensor[]",
    fake=_backward_fake,
)
def _backward(
    G: Tensor,
    A2: Tensor,
    A3: Tensor,
    A6: Tensor,
    E0: Tensor,
    s: Tensor,
    A: Tensor,
    base: Tensor | None,
    max_angle: float | None,
) -> list[Tensor]:
    """G_k = E_k^H G_{k+1} + G_{k+1} E_k^H, then back through the polynomial.

    Only the skew part of the result counts, so only the skew part H3 of the cotangent of A3 and
    the Hermitian part H2 of that of A2 do; with P = A H3 their share is
    skew(A (2 P + P^H - 2 H2)): two products in place of four.
    """
    if A.numel() == 0:
        return [torch.zeros_like(A)]
    shape, polynomial = A.shape, polynomial_for(A.dtype)
    A, G = flat(A), flat(G)
    s = s.reshape(A.shape[:-2])
    A2, A3, A6, E0 = (flat(T) for T in (A2, A3, A6, E0))
    if base is not None:
        G = flat(base).mH @ G
    G = unsquare(G, E0, s)
    A = scale(A, s)
    G1, G2, G3 = polynomial.cotangents(G, A, A2, A3, A6)
    H3 = (G3 - G3.mH.resolve_conj()).div_(2)
    H2x2 = G2 + G2.mH.resolve_conj()
    P = A @ H3
    inner = P.mH.resolve_conj().add(P, alpha=2).sub_(H2x2)
    dA = add_product_(G1, A, inner)
    dA = (dA - dA.mH.resolve_conj()).div_(2)
    return [scale(dA, s).reshape(shape)]


_skew_exponential = differentiable(_forward, _backward, name="skew_exponential")


def skew_exponential(
    A: Tensor, base: Tensor | None = None, *, max_angle: float | None = None
) -> Tensor:
    """``base exp(A)`` for skew(-Hermitian) A, by products.

    The result is orthonormal to rounding for A of any size; its angles are as accurate as
    ``|A|`` rounding errors allow. The derivative is that along skew directions: the gradient is
    skew.

    Args:
        A: Skew-Hermitian matrices in float32 or better, shape ``(..., n, n)``; not checked.
        base: Matrices with orthonormal columns, same shape; the identity by default.
        max_angle: A bound on the spectral norms of A, if one is known: nothing is estimated then
            and the same products are taken whatever A is. A norm above it costs accuracy.

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
    return _skew_exponential(A, base, max_angle)
