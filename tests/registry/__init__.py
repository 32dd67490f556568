"""Everything that the laws run over. A new piece is a line here and one file in the library.

Wide matrices exist above the charts only: `tests/contracts/test_door.py` holds every ``via`` to the
transpose of its tall twin.
"""

from tests.registry.charts import CHARTS, ChartCase
from tests.registry.geometry import (
    DOUBLE,
    DTYPES,
    MANIFOLDS,
    METRICS,
    RETRACTIONS,
    SHAPES,
    TRANSPORTS,
    RetractionCase,
)
from tests.registry.networks import MODELS, NETWORKS, SQUARE_VIAS, NetworkCase
from tests.registry.operators import OPERATOR_DTYPES, OPERATORS
from tests.registry.optimizers import BY_RETRACTION, OPTIMIZERS, RGD_MANIFOLDS, OptimizerCase

__all__ = [
    "BY_RETRACTION",
    "CHARTS",
    "DOUBLE",
    "DTYPES",
    "MANIFOLDS",
    "METRICS",
    "MODELS",
    "NETWORKS",
    "OPERATORS",
    "OPERATOR_DTYPES",
    "OPTIMIZERS",
    "RETRACTIONS",
    "RGD_MANIFOLDS",
    "SHAPES",
    "SQUARE_VIAS",
    "TRANSPORTS",
    "ChartCase",
    "NetworkCase",
    "OptimizerCase",
    "RetractionCase",
]
