"""The polar factor by products alone: the Newton-Schulz iteration, scaled, to full accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.inverse_root import scaled, svd_pairs
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.polar_gradient import keeps_left, polar_gradient
from stiefel.numerics import real_dtype

__all__ = ["newton_schulz_factor"]

#: Steps after which a matrix goes to the SVD: condition numbers up to about 1e8 need fewer.
_MOST_STEPS = 40
#: Where nothing is known of the smallest singular value, relative to the largest.
_GUESS = 1e-3
#: Largest factor before a step. A singular value 1 becomes 0.35 then and small ones grow 2.4-fold;
#: at sqrt(3) growth would be 2.6-fold, but the singular value 1 would lose all its digits.
_MOST_SCALE = 1.6


def _cubic(x: Tensor) -> Tensor:
    return x * (3 - x * x) / 2


def _step(X: Tensor, S: Tensor, rho: Tensor) -> Tensor:
    """``rho X (3 I - rho^2 X^H X) / 2``, S = X^H X, rho of shape (batch)."""
    rho = rho[:, None, None]
    T = S * (-(rho**3) / 2)
    T.diagonal(dim1=-2, dim2=-1).add_(1.5 * rho[..., 0])
    return X @ T


def _distance(S: Tensor) -> Tensor:
    """``|S - I|_F`` of each matrix."""
    off = S.clone()
    off.diagonal(dim1=-2, dim2=-1).sub_(1)
    return torch.linalg.vector_norm(off, dim=(-2, -1))


def _iterate(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a batch (B, n, p), and which of them are done."""
    real = real_dtype(Z.dtype)
    W, done = Z.clone(), torch.zeros(len(Z), dtype=torch.bool, device=Z.device)
    S = Z.mH @ Z
    rows = S.abs().sum(-1).amax(-1)  # |S|_2 <= min(|S|_1, |S|_F)
    bound = torch.minimum(rows, torch.linalg.vector_norm(S, dim=(-2, -1)))
    bound = torch.where(bound > 0, bound, 1).sqrt()[:, None, None]
    X, S = Z / bound, S / bound**2
    index = torch.arange(len(Z), device=Z.device)
    low = torch.full((len(Z),), _GUESS, dtype=real, device=Z.device)
    near = torch.finfo(real).eps ** 0.5 / 2  # the step after leaves its square
    for _ in range(_MOST_STEPS):
        r = _distance(S)
        low = torch.maximum(low, (1 - r).clamp_min(0).sqrt())  # singular values are at most 1
        rho = (3 / (1 + low + low * low)).sqrt().clamp_max(_MOST_SCALE)
        rho = torch.where(r < near, 1, rho)
        X = _step(X, S, rho)
        low = torch.minimum(_cubic(rho * low), _cubic(rho))
        ended = r < near
        count = int(ended.sum())
        if 2 * count > len(X):
            W[index[ended]], done[index[ended]] = X[ended], True
            X, index, low = X[~ended], index[~ended], low[~ended]
        if len(X) == 0:
            break
        S = X.mH @ X
    return W, done


def newton_schulz(Z: Tensor) -> Tensor:
    """Polar factors of finite matrices ``(..., n, p)`` with entries of order one."""
    n, p = Z.shape[-2:]
    if n > 4 * p:
        Q, Z = torch.linalg.qr(Z)
        return Q @ newton_schulz(Z)
    flat = Z.reshape(-1, n, p)
    W, done = _iterate(flat)
    if not bool(done.all()):
        U, _, V = svd_pairs(flat[~done])
        W[~done] = U @ V.mH
    return W.reshape(Z.shape)


@kernel_op("newton_schulz", "(Tensor Z) -> Tensor[]", fake=lambda Z: [Z.new_empty(Z.shape)])
def _newton_schulz(Z: Tensor) -> list[Tensor]:
    Z, _, bad = scaled(Z)
    W = newton_schulz(Z)
    return [torch.where(bad, torch.nan, W) if bool(bad.any()) else W]


@kernel_op(
    "newton_schulz_backward",
    "(Tensor grad, Tensor W, Tensor Z) -> Tensor[]",
    fake=lambda grad, W, Z: [Z.new_empty(Z.shape)],
)
def _newton_schulz_backward(grad: Tensor, W: Tensor, Z: Tensor) -> list[Tensor]:
    """The exact derivative, from the eigenvalues s of P = W^H Z, the singular values of Z."""
    Z, scale, bad = scaled(Z)
    P = W.mH @ Z
    P = torch.where(bad, 0, (P + P.mH.resolve_conj()) / 2)
    s, V = torch.linalg.eigh(P)
    U = W @ V if keeps_left(*Z.shape[-2:]) else V.new_empty(*V.shape[:-2], 0, V.shape[-1])
    return [polar_gradient(grad, W, U, s.clamp_min(0) * scale.squeeze(-1), V)]


_newton_schulz_factor = differentiable(
    _newton_schulz, _newton_schulz_backward, name="newton_schulz_factor", keep_result=True
)


@guarded
def newton_schulz_factor(Z: Tensor) -> Tensor:
    """The polar factor of `Z` by the scaled Newton-Schulz iteration, products of matrices alone.

    ``X <- rho X (3 I - rho^2 X^H X) / 2`` from ``X = Z / b``, b a bound of the spectral norm:
    the cubic whose singular values converge to 1 (Björck and Bowie, SIAM J. Numer. Anal. 8 (1971)),
    with the scaling of Chen and Chow (Argonne preprint ANL/MCS-P5059-0114 (2014)),
    ``rho^2 = 3 / (1 + l + l^2)`` for singular values in [l, 1], at most 1.6. It runs until
    ``X^H X`` is the identity to rounding: 5 to 15 steps, more for nearly singular matrices; what
    has not converged then, a rank-deficient Z above all, is taken from a singular value
    decomposition. Many more rows than columns are reduced by a QR decomposition first. The
    backward pass is the derivative of the polar factor itself, see `polar_factor`.

    Args:
        Z: Matrices of any scale, shape ``(..., n, p)``, n >= p.

    Returns:
        W, shape ``(..., n, p)``, orthonormal columns; NaN where Z is not finite.

    Raises:
        ShapeError: If n < p.
        DoubleBackwardError: In a second derivative.
    """
    return _newton_schulz_factor(Z)
