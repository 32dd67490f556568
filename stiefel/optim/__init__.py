"""Optimizers for constrained weights, and `build`, which makes one for a whole model."""

from stiefel.optim.averaging import AveragedModel
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.build import build
from stiefel.optim.clipping import clip_grad_norm_
from stiefel.optim.combined import CombinedOptimizer
from stiefel.optim.hessian_product import hessian_vector_product
from stiefel.optim.landing import Landing
from stiefel.optim.muon import StiefelMuon
from stiefel.optim.pogo import POGO
from stiefel.optim.rgd import RGD
from stiefel.optim.rgd_adam import RGDAdam
from stiefel.optim.riemannian_adam import RiemannianAdam
from stiefel.optim.solvers import MinimizeResult, minimize

__all__ = [
    "POGO",
    "RGD",
    "AveragedModel",
    "CombinedOptimizer",
    "Landing",
    "MinimizeResult",
    "RGDAdam",
    "RiemannianAdam",
    "RiemannianOptimizer",
    "StiefelMuon",
    "build",
    "clip_grad_norm_",
    "hessian_vector_product",
    "minimize",
]
