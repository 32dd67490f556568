"""Gradient and Cayley retraction in one: five thin products, two n x p temporaries."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.linear import inverse, solve

__all__ = ["cayley_descent"]


def cayley_descent(X: Tensor, G: Tensor, rate: float | Tensor, metric: str) -> Tensor:
    r"""``R_X(rate grad)`` for the Cayley retraction R, without forming the gradient.

    The gradient ``u = rate (G - X G^H X)`` (canonical) or ``rate (G - X sym(X^H G))`` (Euclidean)
    enters the p x p form of `stiefel.geometry.cayley_retraction` through ``A = skew(X^H u)`` and
    ``B = u - X X^H u`` alone. With T = X^H G both are known in closed form:
    ``A = rate (T - T^H)``, half of that in the Euclidean metric, and ``B = rate (G - X T)``. Then
    ``C = B^H B, M = I - A/2 + C/4, R = X + (B + X (A - C/2)) M^-1``.

    Args:
        X: Points, shape ``(..., n, p)``.
        G: Ambient gradients, same shape.
        rate: Signed step size: ``-lr`` to descend.
        metric: ``"canonical"`` or ``"euclidean"``.

    Returns:
        Points, same shape.
    """
    n, p = X.shape[-2:]
    T = X.mH @ G
    A = (T - T.mH).mul_(rate if metric == "canonical" else rate / 2)
    M = torch.eye(p, dtype=X.dtype, device=X.device) - A / 2
    if n == p:
        return X + X @ solve(M, A)  # B = 0, and A and M commute
    B = _plus_product(G, X, T, alpha=-1).mul_(rate)
    C = B.mH @ B
    W = _plus_product(B, X, A - C / 2)
    return _plus_product(X, W, inverse(M + C / 4))


def _plus_product(Z: Tensor, X: Tensor, K: Tensor, alpha: int = 1) -> Tensor:
    """``Z + alpha X K`` in one pass, for ``(..., n, p)`` and ``(..., p, p)``."""
    if Z.ndim == 2:
        return torch.addmm(Z, X, K, alpha=alpha)
    Z3, X3, K3 = (A.reshape(-1, *A.shape[-2:]) for A in (Z, X, K))
    return torch.baddbmm(Z3, X3, K3, alpha=alpha).reshape(Z.shape)
