"""Steepest tangent directions in the spectral norm: matrix signs, and a dual ascent."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry import gram_polar_factor, skew, tangent_projection
from stiefel.numerics import double_dtype, real_dtype
from stiefel.optim.near import largest_part

__all__ = [
    "dual_ascent",
    "matrix_sign",
    "projected_direction",
    "steepest_direction",
    "tangent_part_above_rounding",
]


def tangent_part_above_rounding(X: Tensor, G: Tensor) -> Tensor:
    """The tangent part of G at X; zero where it is no more than the rounding of its normal part.

    A direction of fixed length would make a step of that rounding.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient matrices, same shape.

    Returns:
        Same shape.
    """
    u = tangent_projection(X, G)
    floor = 4 * X.shape[-2] ** 0.5 * torch.finfo(X.dtype).eps
    return torch.where(largest_part(u) <= floor * largest_part(G), 0, u)


def _or_zero(A: Tensor) -> Tensor:
    """A, and zeros in the place of what is not finite: `torch.linalg.eigh` raises on that.

    The matrices beside it are not finite either, so the results are not, and the optimizer sees it.
    """
    return torch.where(torch.isfinite(A), A, 0)


def matrix_sign(Z: Tensor) -> Tensor:
    r"""``msign(Z) = U sign(S) V^H`` for ``Z = U S V^H``: zero singular values stay zero.

    The polar factor W of Z, from the convergent iterations of `stiefel.geometry`, completes a
    rank-deficient Z to orthonormal columns; what it adds lies in the null space of ``Q = W^H Z``,
    the positive semidefinite factor, whose eigenvalues are the singular values of Z without a
    square. It is taken away: ``msign(Z) = W - W V_0 V_0^H``, V_0 the eigenvectors of Q below
    ``4 max(n, p) eps |Z|_2``.

    Args:
        Z: Matrices of any scale and rank, shape ``(..., n, p)``, n >= p.

    Returns:
        Same shape; zero for zero.
    """
    Z = Z / largest_part(Z)
    W = gram_polar_factor(Z)
    Q = W.mH @ Z
    q, V = torch.linalg.eigh(_or_zero(Q + Q.mH) / 2)
    floor = 4 * max(Z.shape[-2:]) * torch.finfo(real_dtype(Z.dtype)).eps
    null = q <= floor * q.amax(-1, keepdim=True)
    V0 = torch.where(null.unsqueeze(-2), V, 0)
    return W - (W @ V0) @ V0.mH


def dual_ascent(X: Tensor, G: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    r"""The steepest tangent direction in the spectral norm by its dual, for n > p.

    The minimum of ``Re <G, A>`` over ``|A|_2 <= 1`` and ``X^H A + A^H X = 0`` is the maximum of
    ``-|G + X (L + L^H)|_*`` over all L, and ``A = -msign(Z)`` with ``Z = G + X (L + L^H)`` at the
    best L (Bernstein, Modular manifolds, 2025). Dual ascent is ``L <- L + a (X^H A + A^H X)``,
    from ``L + L^H = -sym(X^H G)``, where Z is the tangent part of G.

    Here a is a number for each entry in the eigenvectors of ``Q = (Z^H Z)^(1/2)``,
    ``a_ij = q_i q_j / (2 (q_i + q_j))``, which makes the new Z the minimum over L of
    ``tr(Z^H Z Q^-1)``, an upper model of the nuclear norm: the norm goes down at every iteration,
    and no step size is chosen. That minimum says ``X^H Z Q^-1 + Q^-1 Z^H X = 0``, so
    ``-Z Q^-1``, with the Q before, is tangent as it is, and its singular values tend to 1, or to
    a number below 1 where Z loses rank and msign is not determined.

    All iterations are in p x p matrices, in float64. Singular values of Z below 7e-5 of the
    largest (float64: 1e-6) count as that.

    Args:
        X: Points, shape ``(..., n, p)``, n > p.
        G: Ambient gradients, same shape, entries of order one.
        iterations: How many, at least 1.

    Returns:
        A of spectral norm 1 (0 where the tangent part of G is zero), and the last Z, whose nuclear
        norm bounds ``-Re <G, A>`` from above; both ``(..., n, p)``.
    """
    T = X.mH @ G
    N = G - X @ T
    wide = double_dtype(X.dtype)
    K = skew(T).to(wide)  # Z = N + X K, and K = skew(X^H G) + a Hermitian matrix
    C = N.to(wide)
    C = C.mH @ C
    small = max(torch.finfo(X.dtype).eps ** 0.6, 1e-6) ** 2
    V, q = K, K
    for _ in range(iterations):
        squares, V = torch.linalg.eigh(_or_zero(K.mH @ K + C))
        squares = squares.clamp_min(0)
        q = (squares + small * squares.amax(-1, keepdim=True)).sqrt()
        q = torch.where(q > 0, q, 1)
        J = V.mH @ K @ V
        D = (J * q.unsqueeze(-1) + J.mH * q.unsqueeze(-2)) / (q.unsqueeze(-1) + q.unsqueeze(-2))
        K = K - V @ D @ V.mH
    R = (V / q.unsqueeze(-2)) @ V.mH
    size = (
        torch.linalg.eigvalsh(_or_zero(R @ (K.mH @ K + C) @ R))[..., -1:, None].clamp_min(0).sqrt()
    )
    R = R / torch.where(size > 0, size, 1)
    A = -(N @ R.to(X.dtype) + X @ (K @ R).to(X.dtype))
    return A, N + X @ K.to(X.dtype)


def steepest_direction(X: Tensor, G: Tensor, iterations: int) -> Tensor:
    r"""The tangent direction of steepest descent in the spectral norm, of unit length.

    Square matrices: ``A = -X msign(skew(X^H G))``, the exact solution (of odd order the real skew
    matrix is singular: that direction does not move). Otherwise the A of `dual_ascent`. A last
    tangent projection takes rounding away: A is tangent to the rounding of one product, after any
    number of iterations.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients of any scale, same shape.
        iterations: Iterations of the dual ascent, at least 1; not used for square matrices.

    Returns:
        A, same shape; zero where the tangent part of G is zero.
    """
    if X.shape[-2] == X.shape[-1]:
        return -X @ skew(matrix_sign(skew(X.mH @ (G / largest_part(G)))))
    u = tangent_part_above_rounding(X, G)
    return tangent_projection(X, dual_ascent(X, u / largest_part(u), iterations)[0])


def projected_direction(X: Tensor, G: Tensor) -> Tensor:
    r"""The tangent projection of ``-msign`` of the tangent part of G, in one shot.

    For square matrices it equals `steepest_direction`. For others it is not the steepest
    direction, and its spectral norm is between 0 and ``2 / sqrt(3)``, not 1.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients of any scale, same shape.

    Returns:
        A, same shape.
    """
    if X.shape[-2] == X.shape[-1]:
        return steepest_direction(X, G, 1)
    return -tangent_projection(X, matrix_sign(tangent_part_above_rounding(X, G)))
