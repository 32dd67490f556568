"""Exact exponentials (geodesics) of the canonical and the Euclidean metric, smooth at u = 0.

Both use phi1(M) = (e^M - I) M^-1, read off as the top right block of exp [[M, I], [0, 0]], so no
QR factorisation of a vanishing normal part is needed and the derivative at u = 0 is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.linear import matrix_exponential
from stiefel.geometry.tangent import skew

__all__ = ["EXPONENTIALS", "canonical_exponential", "euclidean_exponential"]


def _phi1(M: Tensor) -> Tensor:
    """phi1(M) = (e^M - I) M^-1, shape ``(..., k, k)``, defined for singular M too."""
    k = M.shape[-1]
    identity = torch.eye(k, dtype=M.dtype, device=M.device).expand_as(M)
    top = torch.cat([M, identity], dim=-1)
    block = torch.cat([top, torch.zeros_like(top)], dim=-2)
    return matrix_exponential(block)[..., :k, k:]


def _square_exponential(X: Tensor, u: Tensor) -> Tensor:
    """Both metrics agree on square matrices: X exp(X^H u)."""
    return X @ matrix_exponential(skew(X.mH @ u))


@guarded
def canonical_exponential(X: Tensor, u: Tensor) -> Tensor:
    """The geodesic of the canonical metric at time one.

    ``Pu = u - X X^H u / 2, U = [Pu, X], V = [X, -Pu]: exp_X(u) = X + U phi1(V^H U) V^H X``.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_exponential
        >>> X, u = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [torch.pi / 2]])
        >>> canonical_exponential(X, u).round(decimals=6).abs()  # a quarter of a circle
        tensor([[0.],
                [1.]])
    """
    if X.shape[-2] == X.shape[-1]:
        return _square_exponential(X, u)
    X, u = torch.broadcast_tensors(X, u)
    Pu = u - X @ (X.mH @ u) / 2
    U = torch.cat([Pu, X], dim=-1)
    V = torch.cat([X, -Pu], dim=-1)
    return X + U @ (_phi1(V.mH @ U) @ (V.mH @ X))


@guarded
def euclidean_exponential(X: Tensor, u: Tensor) -> Tensor:
    """The geodesic of the Euclidean (embedded) metric at time one.

    ``A = X^H u, U = [u, X], V = [X, -u]: exp_X(u) = (X + U phi1(V^H U) V^H X) e^(-A)``.

    Args:
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, same shape.

    Returns:
        Points, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_exponential
        >>> X, u = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [torch.pi / 2]])
        >>> euclidean_exponential(X, u).round(decimals=6).abs()
        tensor([[0.],
                [1.]])
    """
    if X.shape[-2] == X.shape[-1]:
        return _square_exponential(X, u)
    X, u = torch.broadcast_tensors(X, u)
    A = skew(X.mH @ u)
    U = torch.cat([u, X], dim=-1)
    V = torch.cat([X, -u], dim=-1)
    ahead = X + U @ (_phi1(V.mH @ U) @ (V.mH @ X))
    return ahead @ matrix_exponential(-A)


#: The exponential of each metric.
EXPONENTIALS = {"canonical": canonical_exponential, "euclidean": euclidean_exponential}
