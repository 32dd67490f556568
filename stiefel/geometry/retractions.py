"""Retractions: R_X(u) is a point, R_X(0) = X and dR_X(0)[u] = u.

A new retraction is one function here and one line in `RETRACTIONS`. Each takes a tangent vector;
normal parts of u are dropped, not added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.geometry.factors import cholesky_qr_factor, qr_factor
from stiefel.geometry.guard import guarded
from stiefel.geometry.inverse_root import gram_polar_factor
from stiefel.geometry.linear import inverse, solve
from stiefel.geometry.tangent import skew, tangent_projection

__all__ = [
    "RETRACTIONS",
    "cayley_retraction",
    "cholesky_qr_retraction",
    "polar_retraction",
    "qr_retraction",
]


def cayley_parts(X: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The p x p ingredients A, C, M and the n x p matrix B of the Cayley retraction.

    S = X^H u, A = (S - S^H)/2, B = u - X S, C = B^H B, M = I - A/2 + C/4. On square matrices
    B = 0 and C = 0. To first order in its rounding errors X^H X - I, B is made orthogonal to X
    all the same, by B = u - X (2 S - X^H X S): else they add up over large steps.
    """
    n, p = X.shape[-2:]
    S = X.mH @ u
    A = skew(S)
    identity = torch.eye(p, dtype=X.dtype, device=X.device)
    if n == p:
        zero = torch.zeros_like(A)
        return A, zero, identity - A / 2, zero
    B = u - X @ (2 * S - (X.mH @ X) @ S)
    C = B.mH @ B
    return A, C, identity - A / 2 + C / 4, B


@guarded
def cayley_retraction(X: Tensor, u: Tensor) -> Tensor:
    """The Cayley retraction in its p x p form, which does not drift.

    With S = X^H u, A = (S - S^H)/2, B = u - X S, C = B^H B and M = I - A/2 + C/4, always
    invertible: ``R(u) = X + (B + X (A - C/2)) M^-1``. It equals
    ``(I - W/2)^-1 (I + W/2) X`` with ``W = P u X^H - X u^H P``, ``P = I - X X^H / 2``
    (Wen and Yin, Math. Program. 142 (2013)). Third order for the canonical exponential, second for
    the Euclidean one.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cayley_retraction
        >>> u = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=torch.float64)
        >>> cayley_retraction(torch.eye(2, dtype=torch.float64), u)  # by 2 arctan(1)
        tensor([[ 0., -1.],
                [ 1.,  0.]], dtype=torch.float64)
    """
    A, C, M, B = cayley_parts(X, u)
    if X.shape[-2] == X.shape[-1]:
        return X + X @ solve(M, A)  # A and M commute
    return X + (B + X @ (A - C / 2)) @ inverse(M)  # the Hermitian part of M is at least I


@guarded
def qr_retraction(X: Tensor, u: Tensor) -> Tensor:
    """The QR retraction ``R(u) = qf(X + u)``, R with positive diagonal; second order.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape; projected first (a normal part would move the point).

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, qr_retraction, random_tangent
        >>> from stiefel.geometry import orthonormality_residual
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> Y = qr_retraction(X, random_tangent(X))
        >>> bool(orthonormality_residual(Y) < 1e-14)
        True
    """
    return qr_factor(X + tangent_projection(X, u))


@guarded
def cholesky_qr_retraction(X: Tensor, u: Tensor) -> Tensor:
    """The QR retraction computed by two Cholesky factorisations: the same point, batched.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape; projected first.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cholesky_qr_retraction, haar, qr_retraction, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = random_tangent(X)
        >>> torch.allclose(cholesky_qr_retraction(X, u), qr_retraction(X, u))
        True
    """
    return cholesky_qr_factor(X + tangent_projection(X, u))


@guarded
def polar_retraction(X: Tensor, u: Tensor) -> Tensor:
    """The polar (projection) retraction: the point nearest to X + u, by `gram_polar_factor`.

    ``R(u) = (X + u)(I + u^H u)^(-1/2)`` for tangent u. Third order for the Euclidean exponential,
    second for the canonical one.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape; projected first.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, polar_factor, polar_retraction, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u = random_tangent(X)
        >>> torch.allclose(polar_retraction(X, u), polar_factor(X + u))
        True
    """
    return gram_polar_factor(X + tangent_projection(X, u))


#: Every retraction by its name. (``"exp"`` is the exponential of the manifold's own metric.)
RETRACTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cayley": cayley_retraction,
    "qr": qr_retraction,
    "cholesky_qr": cholesky_qr_retraction,
    "polar": polar_retraction,
}
