"""The exponential of the canonical metric at a tall point, by products of thin and p x p matrices.

For a tangent vector u = N + B A at B (A = B^H u skew, B^H N = 0) with S = N^H N and any alpha > 0,

    exp_B(u) = [B, N / alpha] exp(M) [I; 0],    M = [[A, -S / alpha], [alpha I, 0]].

M is similar to the skew matrix [[A, -R^H], [R, 0]], N = Q R, of the form with a QR factorisation
(Edelman, Arias, Smith, SIAM J. Matrix Anal. Appl. 20 (1998)), but needs none: the map is smooth at
N = 0. The result does not depend on alpha; alpha of the size of |N| balances M, which is not
normal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel.geometry.exponential_polynomial import TAYLOR
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.linear import add_product_, saturated
from stiefel.geometry.scaling_squaring import (
    SATURATION,
    flat,
    halvings,
    least_halvings,
    powers_of_half,
    refine,
    scale,
    squarings,
    unsquare,
)
from stiefel.geometry.spectral import gram_norm, overestimate, skew_norm
from stiefel.numerics import double_dtype, real_dtype, tolerance

__all__ = ["frame_exponential"]

#: Norm of M up to which the Taylor polynomial is exact to rounding in float32.
_SINGLE_REACH = 1.2
#: Norm of M above which float32 does not do: rounding errors grow with the norm.
_LARGE = 12.0
#: Norm of M beyond which geodesics are followed no further: float64 has lost its angles there.
_FARTHEST = 1e5
#: Residual above which Newton-Schulz steps are not to be relied on.
_LOST = 0.3
#: Newton-Schulz steps after a large M where nothing may be read: at `_FARTHEST` the residual before
#: them is below 1e-2, and one step squares it.
_BLIND_STEPS = 3
#: Least alpha: below it M is small as it is, and quotients by alpha would lose the range of dtypes.
_LEAST_ALPHA = 1e-3


def _plain_square(E: Tensor, k: int) -> Tensor:
    return E @ E


class _Tangent(NamedTuple):
    """A tangent vector ``u = N + B A`` and its sizes; a batch of them."""

    N: Tensor
    A: Tensor
    S: Tensor
    #: A bound on |N|, later what balances M, and a bound on |M|.
    alpha: Tensor
    norm: Tensor


def _projected(Z: Tensor, B: Tensor) -> _Tangent:
    """The tangent vector of coordinates Z at B."""
    Z = saturated(Z, SATURATION[Z.dtype])
    a = B.mH @ Z
    N = Z - B @ a
    A = (a - a.mH.resolve_conj()) / math.sqrt(2)
    S = N.mH @ N
    alpha = gram_norm(S)
    return _Tangent(N, A, S, alpha, skew_norm(A) + alpha)


def _widened(u: _Tangent) -> _Tangent:
    """A, S and the sizes in float64; S anew from N, which stays as it is."""
    double = double_dtype(u.A.dtype)
    N = u.N.to(double)
    return _Tangent(u.N, u.A.to(double), N.mH @ N, u.alpha.double(), u.norm.double())


def _shortened(u: _Tangent, most: float) -> tuple[_Tangent, Tensor]:
    """u with |M| of at most `most`, and by what it was multiplied."""
    shrink = (most / u.norm).clamp_max(1)
    factor = shrink[..., None, None]
    N = u.N * factor.to(u.N.real.dtype)
    A, S = u.A * factor, u.S * factor.square()
    return _Tangent(N, A, S, u.alpha * shrink, u.norm * shrink), factor


def _block(u: _Tangent) -> Tensor:
    """M = [[A, -S / alpha], [alpha I, 0]]."""
    p = u.S.shape[-1]
    M = torch.zeros(*u.S.shape[:-2], 2 * p, 2 * p, dtype=u.S.dtype, device=u.S.device)
    M[..., :p, :p] = u.A
    M[..., :p, p:] = -u.S / u.alpha[..., None, None]
    M[..., p:, :p].diagonal(dim1=-2, dim2=-1).copy_(u.alpha[..., None].expand(*u.S.shape[:-1]))
    return M


class _Parts:
    """N and the scaled M for coordinates Z at B: what both directions need.

    Attributes:
        N: The normal part.
        alpha: What balances M, shape ``(..., 1, 1)``.
        M: The block matrix times `factor`.
        s: How often exp(M) is squared.
        factor: 2^-s.
        shrink: What u was multiplied by, 1 where it is not too long.
        large: Whether |M| is too large for float32.
    """

    def __init__(self, Z: Tensor, B: Tensor, max_angle: float | None) -> None:
        u, most = _projected(Z, B), _FARTHEST
        if max_angle is None:
            self.large = bool((u.norm > _LARGE).any())
        else:
            p = Z.shape[-1]
            over = overestimate(p, complex=Z.is_complex()) + p**0.125
            most = min(most, max_angle * over)
            self.large = most > _LARGE
        single = real_dtype(Z.dtype) == torch.float32
        if single and self.large:
            u = _widened(u)
        self.shrink = torch.ones_like(u.norm[..., None, None])
        if self.large or max_angle is not None:
            u, self.shrink = _shortened(u, most)
        u = u._replace(alpha=u.alpha.clamp_min(_LEAST_ALPHA))
        self.N, self.alpha = u.N, u.alpha[..., None, None]
        reach = _SINGLE_REACH if single and not self.large else TAYLOR.reach
        M = _block(u)
        if max_angle is None:
            self.s = halvings(u.norm, reach)
            self.factor = powers_of_half(self.s, M.dtype)
        else:
            self.s = least_halvings(most, reach)
            self.factor = torch.full_like(u.norm, 0.5**self.s)
        self.M = scale(M, self.factor)


def _orthonormal(X: Tensor, *, large: bool, blind: bool) -> Tensor:
    """One Newton-Schulz step; after a large M more of them, or the polar factor, where needed.

    Which it takes is read from the residual, but if `blind`: the number of steps is fixed then.
    """
    if blind:
        for _ in range(_BLIND_STEPS if large else 1):
            X = refine(X)
        return X
    X = refine(X)
    if not large:
        return X
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    for _ in range(4):
        residual = float((X.mH @ X - eye).abs().amax())
        if residual <= tolerance(X.dtype, *X.shape[-2:]) / 4:
            return X
        if not residual < _LOST:
            break
        X = refine(X)
    U, _, Vh = torch.linalg.svd(torch.nan_to_num(X), full_matrices=False)
    return U @ Vh


def _forward_fake(Z: Tensor, B: Tensor, max_angle: float | None) -> list[Tensor]:
    return [Z.new_empty(Z.shape)]


@kernel_op(
    "frame_exponential",
    "(Tensor Z, Tensor B, float? max_angle) -> Tensor[]",
    fake=_forward_fake,
)
def _forward(Z: Tensor, B: Tensor, max_angle: float | None) -> list[Tensor]:
    """X = B E11 + N E21 / alpha with E = exp(M)."""
    if Z.numel() == 0:
        return [torch.zeros_like(Z)]
    shape, p = Z.shape, Z.shape[-1]
    Z, B = flat(Z), flat(B)
    parts = _Parts(Z, B, max_angle)
    E = squarings(TAYLOR.evaluate(parts.M)[0], parts.s, _plain_square)[-1]
    E11, E21 = E[..., :p, :p], E[..., p:, :p] / parts.alpha
    X = B @ E11.to(Z.dtype) + parts.N @ E21.to(Z.dtype)
    return [_orthonormal(X, large=parts.large, blind=max_angle is not None).reshape(shape)]


@kernel_op(
    "frame_exponential_backward",
    "(Tensor G, Tensor Z, Tensor B, float? max_angle) -> Tensor[]",
    fake=lambda G, Z, B, max_angle: [Z.new_empty(Z.shape)],
)
def _backward(G: Tensor, Z: Tensor, B: Tensor, max_angle: float | None) -> list[Tensor]:
    """Back through X, the squarings, the polynomial, M, and the projections; alpha is constant."""
    if Z.numel() == 0:
        return [torch.zeros_like(Z)]
    shape, p = Z.shape, Z.shape[-1]
    G, Z, B = flat(G), flat(Z), flat(B)
    parts = _Parts(Z, B, max_angle)
    N, M, s, alpha = parts.N, parts.M, parts.s, parts.alpha
    E0, M2, M3, M6 = TAYLOR.evaluate(M)
    E21 = squarings(E0, s, _plain_square)[-1][..., p:, :p] / alpha
    GE = torch.zeros_like(M)
    GE[..., :p, :p] = B.mH @ G
    GE[..., p:, :p] = (N.mH @ G).to(M.dtype) / alpha
    G1, G2, G3, *_ = TAYLOR.cotangents(unsquare(GE, E0, s, _plain_square), M, M2, M3, M6)
    adjoint = M.mH.resolve_conj()
    add_product_(G2, G3, adjoint)
    add_product_(G1, M2.mH.resolve_conj(), G3)
    add_product_(G1, G2, adjoint)
    dM = scale(add_product_(G1, adjoint, G2), parts.factor)
    dA, dS = dM[..., :p, :p], dM[..., :p, p:] / -alpha
    da = ((dA - dA.mH.resolve_conj()) / math.sqrt(2)).to(Z.dtype)
    dS = (dS + dS.mH.resolve_conj()).to(Z.dtype)
    shrink = parts.shrink.to(Z.real.dtype)
    da, dN = da * shrink, (G @ E21.mH.to(Z.dtype) + N @ dS) * shrink
    return [(dN + B @ (da - B.mH @ dN)).reshape(shape)]


_frame_exponential = differentiable(_forward, _backward, name="frame_exponential")


def frame_exponential(Z: Tensor, B: Tensor, *, max_angle: float | None = None) -> Tensor:
    """The exponential of the canonical metric at B, of free coordinates Z.

    With a = B^H Z the tangent vector is ``u = (Z - B a) + B (a - a^H) / sqrt(2)``: a self-adjoint
    map whose square takes a Euclidean gradient to that of the canonical metric, so that a step of
    gradient descent from Z = 0 is one along the geodesic, at the same rate. Memory and work are
    O(n p) and O(n p^2 + p^3); the result is orthonormal to rounding for Z of any size (beyond a
    length of 1e5, where no angle is left, u is shortened to it).

    Args:
        Z: Coordinates in float32 or better, shape ``(..., n, p)``, n >= p.
        B: Matrices with orthonormal columns, same shape and dtype; a constant: it has no gradient.
        max_angle: A bound on the spectral norms of A and of N, if one is known: the same products
            are then taken whatever Z is, and nothing is read back to the host. A longer u is
            shortened, so that the result stays orthonormal; the factor counts as a constant in
            the derivative.

    Returns:
        Shape ``(..., n, p)``.

    Raises:
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import frame_exponential
        >>> B = torch.eye(3, 1, dtype=torch.float64)
        >>> Z = torch.tensor([[0.0], [torch.pi / 2], [0.0]], dtype=torch.float64)
        >>> frame_exponential(Z, B).mT.round(decimals=9) + 0.0
        tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    return _frame_exponential(Z, B, max_angle)
