"""Manifolds in geoopt's interface, made of the functions of `stiefel.geometry`.

The only floor that imports geoopt.
"""

from stiefel.manifolds.base import (
    GeooptManifoldParameter,
    GeooptStiefel,
    Manifold,
    ManifoldTensor,
)
from stiefel.manifolds.parameter import ManifoldParameter, restore_manifold
from stiefel.manifolds.stiefel import Stiefel, auto_retraction
from stiefel.manifolds.tolerances import tolerance_on

__all__ = [
    "GeooptManifoldParameter",
    "GeooptStiefel",
    "Manifold",
    "ManifoldParameter",
    "ManifoldTensor",
    "Stiefel",
    "auto_retraction",
    "restore_manifold",
    "tolerance_on",
]
