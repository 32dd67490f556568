"""Gradient and retraction in one: fewer thin products and temporaries than one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.geometry.factors import cholesky_qr_factor, triangular_quotient
from stiefel.geometry.linear import inverse_near_identity, plus_product, readable, solve

__all__ = ["DESCENTS", "cayley_descent", "cholesky_qr_descent"]

#: Largest |u|_F^2 of a step u for which one Cholesky factorisation is enough.
_SHORT = 1.0


def cayley_descent(X: Tensor, G: Tensor, rate: float | Tensor, metric: str) -> Tensor:
    r"""``R_X(rate grad)`` for the Cayley retraction R, without forming the gradient.

    The gradient ``u = rate (G - X G^H X)`` (canonical) or ``rate (G - X sym(X^H G))`` (Euclidean)
    enters the p x p form of `stiefel.geometry.cayley_retraction` through ``A = skew(X^H u)`` and
    ``B = u - X X^H u`` alone. With T = X^H G both are known in closed form:
    ``A = rate (T - T^H)``, half of that in the Euclidean metric, and ``B = rate (G - X T)``. Then
    ``C = B^H B, D = A - C/2, M = I - D/2, R = X + (B + X D) M^-1``: five thin products.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients, same shape.
        rate: Signed step size: ``-lr`` to descend.
        metric: ``"canonical"`` or ``"euclidean"``.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_gradient, cayley_descent, cayley_retraction, haar
        >>> X, G = haar(5, 2, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
        >>> Y = cayley_retraction(X, -0.1 * canonical_gradient(X, G))
        >>> torch.allclose(cayley_descent(X, G, -0.1, "canonical"), Y)
        True
    """
    n, p = X.shape[-2:]
    T = X.mH @ G
    A = (T - T.mH).mul_(rate if metric == "canonical" else rate / 2)
    if n == p:  # B = 0, and A and M commute
        M = torch.eye(p, dtype=X.dtype, device=X.device) - A / 2
        return X + X @ solve(M, A)
    if isinstance(rate, Tensor):
        B = plus_product(G, X, T, alpha=-1).mul_(rate)
    else:
        B = plus_product(G, X, T, beta=rate, alpha=-rate)
    D = A.sub_(B.mH @ B, alpha=0.5)
    W = plus_product(B, X, D)
    return plus_product(X, W, inverse_near_identity(D.div_(2)))


def cholesky_qr_descent(X: Tensor, G: Tensor, rate: float | Tensor, metric: str) -> Tensor:
    r"""``R_X(rate grad)`` for the QR retraction, by Cholesky factors.

    With T = X^H G the point before it is orthonormalised is ``Y = X + rate (G - X K)``, where
    K = T^H (canonical) or (T + T^H)/2 (Euclidean). For a tangent step u, ``Y^H Y = I + u^H u``: its
    condition number is at most 1 + |u|_F^2. While that is at most 2, ``Y R^-1`` with
    ``R^H R = Y^H Y`` is orthonormal to rounding after one factorisation; the errors of X do not
    add up, for the Gram matrix is that of Y as it is. For longer steps, and on accelerators, where
    the length is not read, `stiefel.geometry.cholesky_qr_factor` makes two.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients, same shape.
        rate: Signed step size: ``-lr`` to descend.
        metric: ``"canonical"`` or ``"euclidean"``.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cholesky_qr_descent, haar
        >>> from stiefel.geometry import euclidean_gradient, qr_retraction
        >>> X, G = haar(5, 2, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
        >>> Y = qr_retraction(X, -0.1 * euclidean_gradient(X, G))
        >>> torch.allclose(cholesky_qr_descent(X, G, -0.1, "euclidean"), Y)
        True
    """
    p = X.shape[-1]
    T = X.mH @ G
    K = T.mH if metric == "canonical" else (T + T.mH) / 2
    if isinstance(rate, Tensor):
        Y = plus_product(G, X, K, alpha=-1).mul_(rate).add_(X)
    else:
        Y = plus_product(torch.add(X, G, alpha=rate), X, K, alpha=-rate)
    if not readable(Y) or Y.numel() == 0:
        return cholesky_qr_factor(Y)
    S = Y.mH @ Y
    longest = S.diagonal(dim1=-2, dim2=-1).real.sum(-1).amax() - p
    return triangular_quotient(Y, S) if bool(longest <= _SHORT) else cholesky_qr_factor(Y)


#: Gradient and retraction in one, where that is cheaper: ``descent(X, G, rate, metric)``.
DESCENTS: dict[str, Callable[[Tensor, Tensor, float | Tensor, str], Tensor]] = {
    "cayley": cayley_descent,
    "cholesky_qr": cholesky_qr_descent,
}
