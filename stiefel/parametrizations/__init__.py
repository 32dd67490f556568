"""Charts: free coordinates whose map is a matrix with orthonormal columns, one chart a file."""

from stiefel.parametrizations.base import Move, Parametrization
from stiefel.parametrizations.cayley import Cayley
from stiefel.parametrizations.component import OneComponent
from stiefel.parametrizations.cwy import CWY
from stiefel.parametrizations.givens import Givens
from stiefel.parametrizations.householder import HouseholderProduct
from stiefel.parametrizations.matrix_exp import MatrixExp
from stiefel.parametrizations.own import OWN
from stiefel.parametrizations.polar import Polar
from stiefel.parametrizations.proxy import ProxyChart
from stiefel.parametrizations.tcwy import TCWY
from stiefel.parametrizations.urnn import URNN

__all__ = [
    "CHARTS",
    "CWY",
    "OWN",
    "TCWY",
    "URNN",
    "Cayley",
    "Givens",
    "HouseholderProduct",
    "MatrixExp",
    "Move",
    "OneComponent",
    "Parametrization",
    "Polar",
    "ProxyChart",
]

#: Charts by the name that ``via=`` takes.
CHARTS: dict[str, type[Parametrization]] = {
    "cayley": Cayley,
    "cwy": CWY,
    "givens": Givens,
    "householder": HouseholderProduct,
    "matrix_exp": MatrixExp,
    "own": OWN,
    "polar": Polar,
    "tcwy": TCWY,
    "urnn": URNN,
}
