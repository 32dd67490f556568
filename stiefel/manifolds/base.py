"""The doorway to geoopt: the only names of it that the rest of the library uses."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # It decorates functions with torch.jit.script, which torch deprecates, to every user's eyes.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is")
    from geoopt import ManifoldParameter as GeooptManifoldParameter
    from geoopt import ManifoldTensor
    from geoopt.manifolds import Manifold
    from geoopt.manifolds import Stiefel as GeooptStiefel

__all__ = ["GeooptManifoldParameter", "GeooptStiefel", "Manifold", "ManifoldTensor"]
