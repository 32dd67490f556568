"""Charts: free coordinates whose map is a matrix with orthonormal columns, one chart a file."""

from stiefel.parametrizations.base import Move, Parametrization
from stiefel.parametrizations.cwy import CWY
from stiefel.parametrizations.tcwy import TCWY

__all__ = ["CHARTS", "CWY", "TCWY", "Move", "Parametrization"]

#: Charts by the name that ``via=`` takes.
CHARTS: dict[str, type[Parametrization]] = {"cwy": CWY, "tcwy": TCWY}
