"""One abstraction: a constrained weight is a point on a manifold, read as ``module.weight``.

Whether it is trained through a chart or moved along the manifold is known on this floor and
nowhere above it.
"""

from stiefel.parameter.constraint import Constraint, constraints, operator
from stiefel.parameter.conversion import RebaseSchedule, attach, convert, release
from stiefel.parameter.door import orthogonal
from stiefel.parameter.riemannian import Riemannian
from stiefel.parameter.storage import ConstraintList
from stiefel.parameter.via import SHORT_FORMS, via_names
from stiefel.parameter.views import VIEWS, BlockView, ConvolutionView, MatrixView, View

__all__ = [
    "SHORT_FORMS",
    "VIEWS",
    "BlockView",
    "Constraint",
    "ConstraintList",
    "ConvolutionView",
    "MatrixView",
    "RebaseSchedule",
    "Riemannian",
    "View",
    "attach",
    "constraints",
    "convert",
    "operator",
    "orthogonal",
    "release",
    "via_names",
]
