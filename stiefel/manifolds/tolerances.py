"""How far a point may be off a manifold, whoever's manifold it is."""

from __future__ import annotations

import torch

from stiefel.manifolds.base import Manifold
from stiefel.manifolds.stiefel import Stiefel
from stiefel.numerics import tolerance

__all__ = ["tolerance_on"]


def tolerance_on(manifold: Manifold, dtype: torch.dtype, n: int, p: int) -> float:
    """The largest entry of a residual at which X ``(..., n, p)`` counts as a point of a manifold.

    Args:
        manifold: Ours, which may say it itself, or another of geoopt's.
        dtype: Dtype of X.
        n: Rows.
        p: Columns.

    Returns:
        The bound.

    Example:
        >>> import torch
        >>> import stiefel
        >>> from stiefel.manifolds import tolerance_on
        >>> on = tolerance_on(stiefel.Stiefel(), torch.float32, 5, 2)
        >>> on == stiefel.tolerance(torch.float32, 5, 2)
        True
        >>> tolerance_on(stiefel.Stiefel(tolerance=0.5), torch.float32, 5, 2)
        0.5
    """
    if isinstance(manifold, Stiefel):
        return manifold.tolerance_for(dtype, n, p)
    return tolerance(dtype, n, p)
