"""The polar factor by products alone: the Newton-Schulz iteration, scaled, to full accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.polar_gradient import gradient_by_products
from stiefel.geometry.proxy_scale import scaled, svd_pairs

__all__ = ["newton_schulz_factor"]

#: Steps after which a matrix goes to the SVD: condition numbers up to about 1e8 need fewer.
_MOST_STEPS = 40
#: Where nothing is known of the smallest singular value it is taken to be this, divided by the
#: number of columns, of the largest one, as of Gaussian matrices.
_GUESS = 0.2
#: Where that was too much, and a few steps did not help.
_SMALLER = 0.1
#: Where |X^H X - I|_F is less no factor is taken: it says too little of single eigenvalues.
_CLOSE = 0.1
#: Where it is less than this for all, the first step needs no bounds of the singular values.
_NEAR = 0.5
#: Largest factor before a step. A singular value 1 becomes 0.35 then and small ones grow 2.4-fold;
#: at sqrt(3) growth would be 2.6-fold, but the singular value 1 would lose all its digits.
_MOST_SCALE = 1.6


def _cubic(x: Tensor) -> Tensor:
    return x * (3 - x * x) / 2


def _step(X: Tensor, E: Tensor, rho: Tensor, out: Tensor) -> Tensor:
    """``rho X (3 I - rho^2 X^H X) / 2`` in `out`; E = X^H X - I is overwritten, rho is (batch)."""
    cube = rho**3 / 2
    T = E.mul_(-cube[:, None, None])
    T.diagonal(dim1=-2, dim2=-1).add_((1.5 * rho - cube)[:, None])
    return torch.bmm(X, T, out=out)


def _away(S: Tensor) -> tuple[Tensor, Tensor]:
    """E = S - I (in the place of S), and ``|E|_F`` of each matrix."""
    S.diagonal(dim1=-2, dim2=-1).sub_(1)
    return S, torch.linalg.vector_norm(S, dim=(-2, -1))


def _first_bounds(S: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the eigenvalues of each Gram matrix S (B, p, p): most, and least relative to most.

    All are within ``c |S / c - I|_F`` of their mean c; where that says nothing of the least one, it
    is taken to be that of a square Gaussian matrix.
    """
    p = S.shape[-1]
    c = S.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    size = torch.linalg.vector_norm(S, dim=(-2, -1))
    width = (
        (size.square() - p * c.square()).clamp_min(p * torch.finfo(c.dtype).eps * c.square()).sqrt()
    )
    most = torch.minimum(c + width, size)  # |S|_2 <= |S|_F
    most = torch.where(most > 0, most, 1)
    return most, ((c - width) / most).clamp_min((_GUESS / p) ** 2)


def _least(low: Tensor, r: Tensor, p: int) -> Tensor:
    """What the least singular value is taken to be, from a guess and r = |X^H X - I|_F."""
    known = (1 - r).clamp_min(0).sqrt()  # for singular values are at most 1
    low = torch.maximum(low, known)
    too_high = r > p**0.5 * (1 - low * low)
    return torch.where(too_high, known.clamp_min(_SMALLER), low)


def _begin(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X with singular values of at most 1, X^H X, and what the least one is taken to be.

    X is a multiple of Z or, where all are near orthonormal, Z after a step.
    """
    S = Z.mH @ Z
    diagonal = S.diagonal(dim1=-2, dim2=-1).clone()
    E, r = _away(S)
    if bool((r < _NEAR).all()):  # singular values lie within the roots of 1 - r and 1 + r
        X = torch.baddbmm(Z, Z, E, alpha=-0.5)
        low = torch.minimum(_cubic((1 - r).sqrt()), _cubic((1 + r).sqrt()))
        return X, torch.bmm(X.mH, X, out=E), low
    S.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    most, least = _first_bounds(S)
    return Z / most.sqrt()[:, None, None], S.div_(most[:, None, None]), least.sqrt()


def _iterate(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a batch (B, n, p), and which of them are done."""
    X, S, low = _begin(Z)
    Y = torch.empty_like(X)  # memory is used again: to allocate it takes longer than a product
    W, done, index = None, torch.zeros(len(Z), dtype=torch.bool, device=Z.device), None
    near = torch.finfo(low.dtype).eps ** 0.5 / 2  # the step after leaves its square
    for _ in range(_MOST_STEPS):
        E, r = _away(S)
        if bool((r < _CLOSE).all()):
            X, Y = torch.baddbmm(X, X, E, alpha=-0.5, out=Y), X
        else:
            low = _least(low, r, Z.shape[-1])
            rho = (3 / (1 + low + low * low)).sqrt().clamp_max(_MOST_SCALE)
            rho = torch.where(r < _CLOSE, 1, rho)
            X, Y = _step(X, E, rho, out=Y), X
            low = torch.minimum(_cubic(rho * low), _cubic(rho))
        ended = r < near
        count = int(ended.sum())
        if count == len(Z):
            return X, ended
        if 4 * count > 3 * len(X):
            if W is None or index is None:
                W, index = torch.empty_like(Z), torch.arange(len(Z), device=Z.device)
            W[index[ended]], done[index[ended]] = X[ended], True
            X, index, low = X[~ended], index[~ended], low[~ended]
            Y, S = torch.empty_like(X), S[: len(X)]
        if len(X) == 0:
            break
        S = torch.bmm(X.mH, X, out=S)
    return torch.empty_like(Z) if W is None else W, done


def newton_schulz(Z: Tensor) -> Tensor:
    """Polar factors of finite matrices ``(..., n, p)`` with entries of order one."""
    n, p = Z.shape[-2:]
    if n > 4 * p:
        Q, Z = torch.linalg.qr(Z)
        return Q @ newton_schulz(Z)
    flat = Z.reshape(-1, n, p).contiguous()
    W, done = _iterate(flat)
    if not bool(done.all()):
        U, _, V = svd_pairs(flat[~done])
        W[~done] = U @ V.mH
    return W.reshape(Z.shape)


@kernel_op("newton_schulz", "(Tensor Z) -> Tensor[]", fake=lambda Z: [Z.new_empty(Z.shape)])
def _newton_schulz(Z: Tensor) -> list[Tensor]:
    Z, _, bad = scaled(Z)
    W = newton_schulz(Z)
    return [W if bad is None else torch.where(bad, torch.nan, W)]


@kernel_op(
    "newton_schulz_backward",
    "(Tensor grad, Tensor W, Tensor Z) -> Tensor[]",
    fake=lambda grad, W, Z: [Z.new_empty(Z.shape)],
)
def _newton_schulz_backward(grad: Tensor, W: Tensor, Z: Tensor) -> list[Tensor]:
    return [gradient_by_products(grad, W, Z)]


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
    ``X^H X`` is the identity to rounding: 2 or 3 steps near orthonormal matrices and their
    multiples, 8 to 15 otherwise, more for nearly singular matrices; what has not converged then, a
    rank-deficient Z above all, is taken from a singular value decomposition. Many more rows than
    columns are reduced by a QR decomposition first. The backward pass is the derivative of the
    polar factor itself, see `polar_factor`; it is made of products too near orthonormal matrices
    and for many small ones (32 or more, of at most 40 columns), of eigenvalues elsewhere.

    Args:
        Z: Matrices of any scale, shape ``(..., n, p)``, n >= p.

    Returns:
        W, shape ``(..., n, p)``, orthonormal columns; NaN where Z is not finite.

    Raises:
        ShapeError: If n < p.
        DoubleBackwardError: In a second derivative.

    Example:
        >>> import torch
        >>> from stiefel.geometry import newton_schulz_factor, polar_factor
        >>> Z = torch.randn(7, 3, dtype=torch.float64)
        >>> torch.allclose(newton_schulz_factor(Z), polar_factor(Z))
        True
    """
    return _newton_schulz_factor(Z)
