"""Matrix-free orthogonal maps: products with columns and rows, the transpose, the dense form."""

from stiefel.operators.base import LinearOperator, Operator, Transposed
from stiefel.operators.compact_wy import CompactWY
from stiefel.operators.dense import Dense
from stiefel.operators.fourier_reflections import FourierReflections
from stiefel.operators.givens import Rotations

__all__ = [
    "CompactWY",
    "Dense",
    "FourierReflections",
    "LinearOperator",
    "Operator",
    "Rotations",
    "Transposed",
]
