"""Gradient and retraction in one: fewer thin products and temporaries than one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.linear import inverse_near_identity, plus_product, solve

__all__ = ["cayley_descent"]


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
