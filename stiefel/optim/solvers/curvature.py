"""The least curvature of a problem at a point, as far as a few Hessian products can see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stiefel.optim.solvers.problem import Tangent
from stiefel.optim.solvers.second_order import Hessian

__all__ = ["Curvature", "least_curvature"]

#: Hessian products that are spent on the look, at most.
_PRODUCTS = 16
#: Of the vector that the look begins with: a number that no point is likely to be drawn by.
_SEED = 1_618_033_988


@dataclass(frozen=True)
class Curvature:
    """What a look for negative curvature has met.

    Attributes:
        least: The least curvature.
        noise: The size below which one counts as zero: eps^(1/3) times the largest that was met, or
            times the norm of the gradient of f in the surrounding space where that is larger.
        products: Hessian products spent.
    """

    least: float
    noise: float
    products: int


def least_curvature(hessian: Hessian, products: int = _PRODUCTS) -> Curvature:
    r"""The least ``<u, Hess[u]>`` over the unit tangent vectors u of a Krylov space.

    With an orthonormal basis ``q_1, ..., q_k`` of the space of z, Hess[z], Hess^2[z], ..., z random
    and tangent, it is the smallest eigenvalue of ``T_ij = <q_i, Hess[q_j]>`` (Lanczos). The least
    curvature of all is at most that: a negative one is a proof, any other is not.

    Args:
        hessian: The Hessian at the point.
        products: How many products are spent at most.

    Returns:
        What was met; NaN without tangent vectors or where a product is not finite.
    """
    problem, e = hessian.problem, hessian.e
    generator = torch.Generator().manual_seed(_SEED)
    z = tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device) for x in e.X)
    r, size = problem.project(e.X, z), math.sqrt(sum(x.numel() for x in e.X))
    basis: list[Tangent] = []
    images: list[Tangent] = []
    while len(basis) < products:
        length = problem.norm(e.X, r)
        if not length > math.sqrt(problem.eps) * size:  # the space is invariant
            break
        basis.append(problem.combine(1 / length, r))
        images.append(hessian(basis[-1]))
        r, size = images[-1], problem.norm(e.X, images[-1])
        for _ in range(2):  # once is not enough to be orthogonal to rounding
            along = problem.inners(e.X, [(q, r) for q in basis])
            for q, part in zip(basis, along, strict=True):
                r = problem.combine(1, r, -part, q)
    unknown = Curvature(math.nan, math.nan, len(basis))
    if not basis:
        return unknown
    rows = [problem.inners(e.X, [(q, Hq) for Hq in images]) for q in basis]
    T = torch.tensor(rows, dtype=torch.float64)
    if not bool(T.isfinite().all()):
        return unknown
    curvatures = torch.linalg.eigvalsh((T + T.mT) / 2)
    largest = max(float(curvatures.abs().max()), e.scale)
    return Curvature(float(curvatures[0]), problem.eps ** (1 / 3) * largest, len(basis))
