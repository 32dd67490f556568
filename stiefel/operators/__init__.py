"""Matrix-free orthogonal maps: products with columns and rows, the transpose, the dense form."""

from stiefel.operators.base import LinearOperator, Operator, Transposed
from stiefel.operators.compact_wy import CompactWY
from stiefel.operators.dense import Dense

__all__ = ["CompactWY", "Dense", "LinearOperator", "Operator", "Transposed"]
