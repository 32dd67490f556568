"""Deterministic solvers for full-batch problems; `stiefel.optim.minimize` is the way in."""

from stiefel.optim.solvers.barzilai_borwein import barzilai_borwein
from stiefel.optim.solvers.conjugate_gradient import conjugate_gradient
from stiefel.optim.solvers.lbfgs import lbfgs
from stiefel.optim.solvers.minimize import SOLVERS, minimize
from stiefel.optim.solvers.problem import Evaluation, Path, Problem
from stiefel.optim.solvers.result import MinimizeResult, Run, Status
from stiefel.optim.solvers.second_order import Hessian
from stiefel.optim.solvers.trust_region import trust_region

__all__ = [
    "SOLVERS",
    "Evaluation",
    "Hessian",
    "MinimizeResult",
    "Path",
    "Problem",
    "Run",
    "Status",
    "barzilai_borwein",
    "conjugate_gradient",
    "lbfgs",
    "minimize",
    "trust_region",
]
