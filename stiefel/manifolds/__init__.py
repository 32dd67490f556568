"""Manifolds in geoopt's interface, made of the functions of `stiefel.geometry`.

The only floor that imports geoopt.
"""

from stiefel.manifolds.base import (
    GeooptManifoldParameter,
    Manifold,
    ManifoldTensor,
)
from stiefel.manifolds.kinds import is_stiefel
from stiefel.manifolds.parameter import ManifoldParameter, restore_manifold
from stiefel.manifolds.stiefel import Stiefel, auto_retraction
from stiefel.manifolds.tolerances import tolerance_on

__all__ = [
    "GeooptManifoldParameter",
    "Manifold",
    "ManifoldParameter",
    "ManifoldTensor",
    "Stiefel",
    "auto_retraction",
    "is_stiefel",
    "restore_manifold",
    "tolerance_on",
]
