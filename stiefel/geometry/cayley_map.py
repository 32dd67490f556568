"""The Cayley map of free coordinates, with a backward pass of two products and no solve.

``Q = F (I + A)^-1 (I - A) D`` (Helfrich, Willmott, Ye, ICML 2018), A skew-Hermitian, D and F
diagonal with entries +-1. torch, geotorch and others write ``(I + A/2) (I - A/2)^-1``: the same map
at -A/2 (`stiefel.parametrizations.conventions` translates).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.linear import inverse, saturated
from stiefel.geometry.polish import polish
from stiefel.geometry.skew_coordinates import skew_from_coordinates, skew_to_coordinates
from stiefel.numerics import double_dtype, full_precision

__all__ = ["cayley_coordinates", "cayley_map"]

#: Elimination by halves, without pivots, is trusted while every row of A is at most this long: its
#: error grows like the square of the length, and faster for some.
_GENTLE = {torch.float32: 4.0, torch.complex64: 4.0, torch.float64: 64.0, torch.complex128: 64.0}
#: The same where the arithmetic is in float64 and the result in float32.
_GENTLE_IN_DOUBLE = 1e3
#: Larger entries of A act as this one: the matrix is the same to float32 rounding, and the LU
#: factorisation in float64 stays so accurate that the polish converges.
_SATURATION = 1e8
#: Matrices up to this size are inverted at once.
_LEAF = 64


# ------------------------------------------------------------------------------ the inverse


def _eliminate(M: Tensor) -> Tensor:
    """M^-1 by halves, M with a Hermitian part of at least I: products but for small inverses.

    [[M1, B], [C, D]]: N = M1^-1, S = D - C N B; the inverse has S^-1 below, then
    -S^-1 C N, -N B S^-1 and N + N B S^-1 C N. S inherits the bound on the Hermitian part.
    """
    n = M.shape[-1]
    if n <= _LEAF:
        return inverse(M)
    h = n // 2
    B, C = M[..., :h, h:], M[..., h:, :h]
    N = _eliminate(M[..., :h, :h])
    T = N @ B
    S = _eliminate(M[..., h:, h:] - C @ T)
    lower = (S @ (C @ N)).neg_()
    result = torch.empty_like(M)
    result[..., :h, :h] = N.sub_(T @ lower)
    result[..., :h, h:] = (T @ S).neg_()
    result[..., h:, :h] = lower
    result[..., h:, h:] = S
    return result


def _polish(C: Tensor) -> Tensor:
    """C <- C (3 I - C^H C) / 2 until C is unitary within rounding; its derivative on them is I.

    On a GPU always three times: the question would stop the stream.
    """
    small = 8 * torch.finfo(C.dtype).eps
    for _ in range(3):
        R = C.mH @ C
        R.diagonal(dim1=-2, dim2=-1).sub_(1)
        if C.device.type == "cpu" and bool(R.abs().amax() <= small):
            break
        C = C - C @ R / 2
    return C


def _transform_(A: Tensor, invert: Callable[[Tensor], Tensor]) -> Tensor:
    """2 (I + A)^-1 - I; overwrites A."""
    A.diagonal(dim1=-2, dim2=-1).add_(1)
    C = invert(A).mul_(2)
    C.diagonal(dim1=-2, dim2=-1).sub_(1)
    return C


def _cayley(A: Tensor) -> Tensor:
    """C(A), unitary within rounding for every finite A; overwrites A.

    An error E in A leaves |C^H C - I| <= 4 |E + E^H| / 2, and E grows with A. So on the CPU
    short rows go through `_eliminate`, longer ones through `_eliminate` in float64. All others,
    and on a GPU everything (the question would stop the stream), go through LU with pivots in
    float64 and the polish.
    """
    dtype = A.dtype
    if A.numel() == 0:
        return A
    longest = math.inf
    if A.device.type == "cpu":
        longest = float(torch.linalg.vector_norm(A, dim=-1).amax())
    if longest <= _GENTLE[dtype]:
        return _transform_(A, _eliminate)
    A = A.to(double_dtype(A.dtype))
    if A.dtype != dtype and longest <= _GENTLE_IN_DOUBLE:
        return _transform_(A, _eliminate).to(dtype)
    return _polish(_transform_(saturated(A, _SATURATION), inverse).to(dtype))


# -------------------------------------------------------------------------------- the kernel


def _signs_(Z: Tensor, flip: Tensor | None, negative: int, *, rows: bool) -> Tensor:
    """D Z F in place (`rows`), or F Z D: D negates the last `negative`, F the last by `flip`."""
    if negative:
        (Z.mT if rows else Z)[..., -negative:].neg_()
    if flip is not None:
        last = (Z if rows else Z.mT)[..., -1]
        last.mul_(flip.to(Z.dtype).unsqueeze(-1))
    return Z


@kernel_op(
    "cayley_map",
    "(Tensor V, Tensor? flip, int negative) -> Tensor[]",
    fake=lambda V, flip, negative: [V.new_empty(V.shape)],
)
def _forward(V: Tensor, flip: Tensor | None, negative: int) -> list[Tensor]:
    """Q = F C(A) D."""
    return [_signs_(_cayley(skew_from_coordinates(V)), flip, negative, rows=False)]


@kernel_op(
    "cayley_map_backward",
    "(Tensor G, Tensor Q, Tensor V, Tensor? flip, int negative) -> Tensor[]",
    fake=lambda G, Q, V, flip, negative: [V.new_empty(V.shape)],
)
def _backward(G: Tensor, Q: Tensor, V: Tensor, flip: Tensor | None, negative: int) -> list[Tensor]:
    """With E = D F and P = (Q + E) / sqrt(2): Z = D P^H G P^H F, dA = Z^H - Z.

    The gradient of C at the dense A is -2 M^H (F G D) M^H with M = (I + A)^-1 = (I + C) / 2
    = F (E + Q) D / 2, which is -Z. Coordinates take dA above the diagonal, dA_kk / sqrt(2) on it.
    """
    E = torch.ones(Q.shape[:-1], dtype=Q.dtype, device=Q.device)
    if negative:
        E[..., -negative:] = -1
    if flip is not None:
        E[..., -1] *= flip.to(E.dtype)
    P = Q * math.sqrt(0.5)
    P.diagonal(dim1=-2, dim2=-1).add_(E, alpha=math.sqrt(0.5))
    Z = _signs_(P.mH @ (G @ P.mH), flip, negative, rows=True)
    return [skew_to_coordinates(Z.mH.resolve_conj().contiguous().sub_(Z))]


_map = differentiable(_forward, _backward, name="cayley_map", keep_result=True)


def cayley_map(V: Tensor, *, flip: Tensor | None = None, negative: int = 0) -> Tensor:
    """``Q = F C(A) D`` with ``C(A) = (I + A)^-1 (I - A) = 2 (I + A)^-1 - I``.

    A is skew-Hermitian, made of the strict upper triangle of V: ``A = T - T^H``; for complex V,
    ``A_kk = i sqrt(2) Im V_kk`` besides. Every other entry of V has a zero gradient. These
    coordinates are orthonormal in the canonical metric ``tr(A^H A) / 2``. With
    dL = Re tr(G^H dQ) and M = (I + A)^-1 = (I + C) / 2, the derivative is

        dA = Z^H - Z,   Z = 2 M^H (F G D) M^H:

    two products, for M is made of Q. Q is unitary within rounding for every finite V; entries
    beyond 1e8 act as 1e8. Eigenvalues of F Q D are never -1: they are (1 - i a) / (1 + i a) for
    eigenvalues i a of A.

    Args:
        V: Coordinates, shape ``(..., n, n)``.
        flip: +1 or -1 of each matrix, shape ``(...)``: F = diag(1, ..., 1, flip).
        negative: How many entries of D are -1, the last ones.

    Returns:
        Orthogonal (unitary) matrices, shape ``(..., n, n)``; det = flip (-1)^negative for real V.

    Raises:
        ShapeError: If V is not square or `flip` or `negative` does not fit.
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cayley_map
        >>> cayley_map(torch.tensor([[0.0, 1.0], [5.0, 7.0]])).round(decimals=5) + 0.0
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    if V.ndim < 2 or V.shape[-1] != V.shape[-2]:
        raise ShapeError(f"expected square matrices (..., n, n) of coordinates, got {V.shape}")
    if flip is not None and flip.shape != V.shape[:-2]:
        raise ShapeError(
            f"expected flip of shape {tuple(V.shape[:-2])}, one for each matrix, got "
            f"{tuple(flip.shape)}"
        )
    if not 0 <= negative <= V.shape[-1]:
        raise ShapeError(f"expected 0 <= negative <= n = {V.shape[-1]}, got {negative}")
    return _map(V, flip, negative)


@full_precision()
def cayley_coordinates(K: Tensor) -> Tensor:
    """Coordinates V with ``cayley_map(V) = K``: A = (I - K) (I + K)^-1 = 2 (I + K)^-1 - I.

    Computed in float64, from the unitary matrix nearest to K. They grow without bound as an
    eigenvalue of K comes near to -1; at -1 they are infinite or meaningless: map them back to see.

    Args:
        K: Orthogonal (unitary) matrices, shape ``(..., n, n)``.

    Returns:
        Coordinates, same shape and dtype, zero where they do not count.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cayley_coordinates, cayley_map, haar
        >>> K = haar(4, dtype=torch.float64, determinant=1)
        >>> torch.allclose(cayley_map(cayley_coordinates(K)), K)
        True
    """
    double = double_dtype(K.dtype)
    eye = torch.eye(K.shape[-1], dtype=double, device=K.device)
    A = 2 * inverse(eye + polish(K.to(double), 2)) - eye
    return skew_to_coordinates((A - A.mH) / 2).to(K.dtype)
