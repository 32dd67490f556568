"""The doorway to geoopt: the only names of it that the rest of the library uses."""

from __future__ import annotations

from geoopt import ManifoldParameter as GeooptManifoldParameter
from geoopt import ManifoldTensor
from geoopt.manifolds import Manifold

__all__ = ["GeooptManifoldParameter", "Manifold", "ManifoldTensor"]
