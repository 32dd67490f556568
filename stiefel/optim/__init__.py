"""Optimizers for constrained weights, and `build`, which makes one for a whole model."""

from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.build import build
from stiefel.optim.combined import CombinedOptimizer
from stiefel.optim.hessian_product import hessian_vector_product
from stiefel.optim.rgd import RGD
from stiefel.optim.solvers import MinimizeResult, minimize

__all__ = [
    "RGD",
    "CombinedOptimizer",
    "MinimizeResult",
    "RiemannianOptimizer",
    "build",
    "hessian_vector_product",
    "minimize",
]
