"""The doorway to geoopt: the only names of it that the rest of the library uses."""

from __future__ import annotations

from geoopt import ManifoldParameter as GeooptManifoldParameter
from geoopt import ManifoldTensor
from geoopt.manifolds import Manifold
from geoopt.manifolds import Stiefel as GeooptStiefel

__all__ = ["GeooptManifoldParameter", "GeooptStiefel", "Manifold", "ManifoldTensor"]
