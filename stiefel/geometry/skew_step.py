"""The step of Cayley Adam: along a skew matrix W = N X^H - X N^H that is never formed.

W has rank 2p at most, so that its Frobenius norm, its Cayley transform and the fixed-point sweeps
that approach it are matters of p x p matrices; what is n x p is made by a handful of products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel.geometry.linear import add_product, inverse
from stiefel.geometry.tangent import skew, sym

__all__ = ["bounded_cayley_step", "bounded_sweep_step", "inverse_of_one_minus"]

#: Up to this size batches of p x p matrices are inverted by products: LU has a fixed cost for each.
_BY_PRODUCTS = 64


def inverse_of_one_minus(E: Tensor, radius: float) -> Tensor:
    """``(I - E)^-1`` for matrices whose spectral norm is at most `radius` < 1.

    A batch of small matrices is summed as ``(I + E)(I + E^2)(I + E^4)...`` until
    ``radius^(2^k) / (1 - radius)`` is below rounding: the number of products is known from the
    bound, nothing is read. Other matrices are inverted by LU.

    Args:
        E: Matrices, shape ``(..., p, p)``.
        radius: Bound on their spectral norms.

    Returns:
        Matrices, same shape.
    """
    p = E.shape[-1]
    one = torch.eye(p, dtype=E.dtype, device=E.device)
    if E.ndim == 2 or p > _BY_PRODUCTS:
        return inverse(one - E)
    enough = math.log(torch.finfo(E.dtype).eps / 2 * (1 - radius)) / math.log(radius)
    P, terms, shape = one + E, 2, E.shape
    P, E = P.reshape(-1, p, p), E.reshape(-1, p, p)
    while terms < enough:
        E = E @ E
        P = torch.baddbmm(P, P, E)
        terms *= 2
    return P.reshape(shape)


def _bounded_rate(norm: Tensor, r: Tensor, lr: float | Tensor, q: float, eps: float) -> Tensor:
    """``alpha / r`` with ``alpha = min(lr, 2q / (|W|_F + eps))`` and ``|W|_F = norm / r``."""
    most = 2 * q / (norm / r + eps)
    return torch.clamp(most, max=lr) / r


def _trace(K: Tensor) -> Tensor:
    """Real part of the trace, shape ``(..., 1, 1)``."""
    return K.diagonal(dim1=-2, dim2=-1).sum(-1).real[..., None, None]


def _square(K: Tensor) -> Tensor:
    """Squared Frobenius norm, shape ``(..., 1, 1)``."""
    return torch.linalg.vector_norm(K, dim=(-2, -1), keepdim=True).square()


def bounded_cayley_step(
    X: Tensor,
    Z: Tensor,
    T: Tensor | None,
    r: Tensor,
    lr: float | Tensor,
    sign: int,
    q: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    r"""The Cayley transform of a skew matrix, its angle bounded, and the momentum it projects.

    With the skew matrix ``W = (N X^H - X N^H) / r``, ``N = Z - X X^H Z / 2``
    (Li, Fuxin, Todorovic, ICLR 2020), the new point is
    ``(I - s W/2)^-1 (I + s W/2) X``, ``s = sign min(lr, 2q / (|W|_F + eps))``, and ``r W X`` is
    the tangent projection of Z. In p x p matrices, by the form of
    `stiefel.geometry.cayley_retraction`: ``S = X^H Z, A = skew(S), B = Z - X S, C = B^H B``,
    ``|r W|_F^2 = |A|_F^2 + 2 tr C``, and with ``rho = s / r``
    ``Y = X + (B + X (A - rho C/2)) rho (I - E)^-1``, ``E = rho A/2 - rho^2 C/4``. The bound on s
    makes ``|E|_2 <= q``.

    Args:
        X: Points, shape ``(..., n, p)``.
        Z: Ambient matrices, same shape.
        T: None, or p x p matrices ``(..., p, p)``: the tangent vector is then the projection of Z
            plus ``X skew(T)``.
        r: Positive real numbers, shape ``(..., 1, 1)``.
        lr: Largest step, not negative.
        sign: 1 to go along W, -1 to go against it.
        q: Bound on ``s |W|_2 / 2``, between 0 and 1.
        eps: Keeps the bound finite at W = 0.

    Returns:
        The new points Y, and ``r W X``, tangent at X; both ``(..., n, p)``.
    """
    n, p = X.shape[-2:]
    shape = X.shape
    if X.ndim > 3:
        X, Z, r = (K.reshape(-1, *K.shape[-2:]) for K in (X, Z, r))
        T = T if T is None else T.reshape(-1, p, p)
    S = X.mH @ Z
    A = skew(S) if T is None else skew(S + T)
    if n == p:  # B = 0
        rho = sign * _bounded_rate(_square(A).sqrt(), r, lr, q, eps)
        half = A * (rho / 2)
        Y = add_product(X, X, 2 * half @ inverse_of_one_minus(half, q))
        return Y.reshape(shape), (X @ A).reshape(shape)
    B = add_product(Z, X, S, alpha=-1)
    C = B.mH @ B
    rho = sign * _bounded_rate((_square(A) + 2 * _trace(C)).sqrt(), r, lr, q, eps)
    M = B.baddbmm_(X, A) if B.ndim == 3 else B.addmm_(X, A)
    half = C * (rho / 2)
    K = inverse_of_one_minus((A - half) * (rho / 2), q)
    Y = add_product(X, add_product(M, X, half, alpha=-1), K * rho)
    return Y.reshape(shape), M.reshape(shape)


def bounded_sweep_step(
    X: Tensor,
    Z: Tensor,
    T: Tensor | None,
    r: Tensor,
    lr: float | Tensor,
    sign: int,
    q: float,
    eps: float,
    sweeps: int,
) -> tuple[Tensor, Tensor]:
    r"""`bounded_cayley_step` by fixed-point sweeps: the iteration of Cayley Adam as it stands.

    ``Y_0 = X + s W X, Y_i = X + s/2 W (X + Y_(i-1))``. Every Y_i is ``X + N K + X L``, so a sweep
    is a few p x p products with the Gram matrices of N and X: n x n nothing, n x p nothing. The
    Gram matrix of X is used as it is, so that W is skew, and all is as with dense matrices, for
    an X that is not quite orthonormal too. N may be changed by X times a Hermitian matrix without
    a change of W; it is chosen so that nothing cancels in |W|.

    With ``c = s |W|_2 / 2 <= q`` the distance to the Cayley transform after i sweeps is at most
    ``2 c^(i+2)`` in the spectral norm.

    Args:
        X: Points, shape ``(..., n, p)``.
        Z: Ambient matrices, same shape.
        T: None, or p x p matrices, as for `bounded_cayley_step`.
        r: Positive real numbers, shape ``(..., 1, 1)``.
        lr: Largest step, not negative.
        sign: 1 to go along W, -1 to go against it.
        q: Bound on ``s |W|_2 / 2``, between 0 and 1.
        eps: Keeps the bound finite at W = 0.
        sweeps: Number of sweeps, not negative.

    Returns:
        The matrices ``Y_sweeps``, and ``r W X``; both ``(..., n, p)``.
    """
    XX, S = X.mH @ X, X.mH @ Z
    J = S if T is None else S - T
    H = sym(S) + skew(J) / 2
    N = Z - X @ H
    XN = S - XX @ H
    NX, NN = XN.mH, N.mH @ N
    norm = (2 * (_trace(NN @ XX) - _trace(XN @ XN))).clamp(min=0).sqrt()
    rho = sign * _bounded_rate(norm, r, lr, q, eps)
    two = 2 * torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    K, L = rho * XX, -rho * NX
    for _ in range(sweeps):
        a, b = XX @ (two + L) + XN @ K, NX @ (two + L) + NN @ K  # X^H and N^H times X + Y
        K, L = rho / 2 * a, -rho / 2 * b
    return X + N @ K + X @ L, N @ XX - X @ NX
