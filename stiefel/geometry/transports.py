"""Vector transports: carry a tangent vector at X to the point R_X(u)."""

from __future__ import annotations

from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.linear import solve
from stiefel.geometry.retractions import cayley_parts
from stiefel.geometry.tangent import tangent_projection

__all__ = ["cayley_transport", "projection_transport"]


def projection_transport(Y: Tensor, z: Tensor) -> Tensor:
    """Transport by projection: the tangent part, at the new point `Y`, of the vector `z`.

    Args:
        Y: The points arrived at, shape ``(..., n, p)``.
        z: Tangent vectors at the points left, same shape.

    Returns:
        Tangent vectors at `Y`, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar, projection_transport, random_tangent
        >>> from stiefel.geometry import tangency_residual
        >>> X, Y = haar(5, 2, (2,), dtype=torch.float64)
        >>> z = random_tangent(X)
        >>> bool(tangency_residual(Y, projection_transport(Y, z)) < 1e-14)
        True
    """
    return tangent_projection(Y, z)


@guarded
def cayley_transport(X: Tensor, u: Tensor, z: Tensor) -> Tensor:
    """Transport along the Cayley retraction; it keeps all Euclidean and canonical inner products.

    ``a = X^H z, b = B^H z, M beta = (A - C/2) a - b: T z = z + B (a + beta/2) + X beta`` with the
    A, B, C, M of `cayley_retraction`.

    Args:
        X: The points left, shape ``(..., n, p)``.
        u: The tangent vectors that were retracted, same shape.
        z: Tangent vectors at `X`, same shape.

    Returns:
        Tangent vectors at ``cayley_retraction(X, u)``, same shape.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cayley_transport, haar, random_tangent
        >>> X = haar(5, 2, dtype=torch.float64)
        >>> u, z = random_tangent(X), random_tangent(X)
        >>> torch.allclose(cayley_transport(X, u, z).norm(), z.norm())
        True
    """
    A, C, M, B = cayley_parts(X, u)
    a = X.mH @ z
    if X.shape[-2] == X.shape[-1]:
        return z + X @ solve(M, A @ a)
    b = B.mH @ z
    beta = solve(M, (A - C / 2) @ a - b)
    return z + B @ (a + beta / 2) + X @ beta
