"""Orthogonal, unitary and orthonormal-column weights for PyTorch.

A constrained weight is a point on a manifold, read as ``module.weight``. It is trained through a
chart (free coordinates, any optimizer) or as itself (moved along the manifold by a Riemannian
optimizer), and one word, ``via=``, chooses. The command line and the experiments behind it are in
`stiefel.cli` and `stiefel.experiments`, which are not loaded from here.
"""

from stiefel import (
    diagnostics,
    errors,
    geometry,
    init,
    manifolds,
    models,
    operators,
    optim,
    parametrizations,
)
from stiefel.manifolds import ManifoldParameter, Stiefel
from stiefel.numerics import tolerance
from stiefel.parameter import (
    Constraint,
    attach,
    constraints,
    convert,
    operator,
    orthogonal,
    release,
)

__version__ = "0.1.0"

__all__ = [
    "Constraint",
    "ManifoldParameter",
    "Stiefel",
    "attach",
    "constraints",
    "convert",
    "diagnostics",
    "errors",
    "geometry",
    "init",
    "manifolds",
    "models",
    "operator",
    "operators",
    "optim",
    "orthogonal",
    "parametrizations",
    "release",
    "tolerance",
]
