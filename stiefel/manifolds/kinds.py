"""Which manifold a manifold is, whoever's class it is."""

from __future__ import annotations

from stiefel.manifolds.base import GeooptStiefel, Manifold
from stiefel.manifolds.stiefel import Stiefel

__all__ = ["is_stiefel"]


def is_stiefel(manifold: Manifold | None) -> bool:
    """Whether the points of a manifold are the matrices with orthonormal columns.

    Args:
        manifold: Ours, one of geoopt's, or None for no manifold.

    Returns:
        True for `stiefel.Stiefel` and for both Stiefel manifolds of geoopt, in any metric. What
        needs the metric, the retraction or the tolerance asks for `stiefel.Stiefel` itself.

    Example:
        >>> import geoopt, stiefel
        >>> from stiefel.manifolds import is_stiefel
        >>> [is_stiefel(m) for m in (stiefel.Stiefel(), geoopt.Stiefel(), geoopt.Sphere(), None)]
        [True, True, False, False]
    """
    return isinstance(manifold, Stiefel | GeooptStiefel)
