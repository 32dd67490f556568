"""How fast plain and accelerated RGD converge, against the rates that the Hessian gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import RGD
from tests.registry import DOUBLE, MANIFOLDS

EIGENVALUES = torch.arange(1.0, 9.0, dtype=torch.float64)
COLUMNS = 3
#: Eigenvalues of the Hessian of tr(X^H C X) across the orbit of minimisers, in either metric:
#: 2 (c_j - c_i) for a direction that mixes column i <= p of the minimiser with c_j, j > p.
HESSIAN = [2 * float(c - b) for b in EIGENVALUES[:COLUMNS] for c in EIGENVALUES[COLUMNS:]]
OPTIONS = [{}, {"momentum": 0.3}, {"momentum": 0.3, "nesterov": True}]
every = pytest.mark.parametrize(
    "manifold", MANIFOLDS, ids=[f"{m.metric}-{m.retraction}" for m in MANIFOLDS]
)


def linear_rate(lr: float, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The largest modulus among the eigenvalues of the step, linearised at the minimiser.

    With x the error along an eigenvector of the Hessian, h its eigenvalue and b the momentum:
    ``b' = m b + h x``, then ``x' = x - lr b'``, or ``x' = x - lr (h x + m b')`` with Nesterov.
    """
    moduli = []
    for h in HESSIAN:
        new_b = np.array([h, momentum])
        direction = np.array([h, 0.0]) + momentum * new_b if nesterov else new_b
        step = np.stack([np.array([1.0, 0.0]) - lr * direction, new_b])
        moduli.append(np.abs(np.linalg.eigvals(step)).max())
    return max(moduli)


def gaps(manifold, dtype, device, lr, steps, **options):
    """f(X_k) - min f, divided by min f, for k = 1 ... steps."""
    basis = geometry.haar(8, 8, dtype=dtype, device=device)
    values = EIGENVALUES.to(device)
    C = basis @ torch.diag(values).to(dtype) @ basis.mH
    start = basis[:, :COLUMNS] @ geometry.haar(COLUMNS, COLUMNS, dtype=dtype, device=device)
    u = geometry.random_tangent(start)
    X = stiefel.ManifoldParameter(manifold.retr(start, 0.1 * u / u.abs().max()), manifold)
    optimizer = RGD([X], lr=lr, **options)
    least = float(values[:COLUMNS].sum())
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        (X.conj() * (C @ X)).real.sum().backward()
        optimizer.step()
        # the gap of a subspace, without cancellation: sum over the other eigenvectors
        others = basis.mH[COLUMNS:] @ X.detach()
        within = basis.mH[:COLUMNS] @ X.detach()
        above = (others.abs() ** 2 * (values[COLUMNS:, None] - values[COLUMNS - 1])).sum()
        lost = 1 - (within.abs() ** 2).sum(-1)
        below = (lost * (values[COLUMNS - 1] - values[:COLUMNS])).sum()
        history.append(float(above + below) / least)
    return history


def slope(history, first, last):
    """Least squares slope of the logarithm of the gaps from step `first` to `last`."""
    logs = [math.log(gap) for gap in history[first:last]]
    return float(np.polyfit(range(first, last), logs, 1)[0])


@every
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_rgd_converges_linearly_at_the_rate_of_the_hessian(manifold, options, dtype, device):
    """Gaps are squares of errors: their logarithm falls by 2 log(rate) a step."""
    lr = 0.05
    history = gaps(manifold, dtype, device, lr, 70, **options)
    predicted = 2 * math.log(linear_rate(lr, **options))
    assert slope(history, 40, 70) == pytest.approx(predicted, rel=0.01)


@every
def test_the_best_constant_rate_contracts_as_the_condition_number_says(manifold, device):
    """lr = 2 / (h_min + h_max): the errors shrink by (k - 1) / (k + 1), k = h_max / h_min."""
    least, most = min(HESSIAN), max(HESSIAN)
    lr, condition = 2 / (least + most), most / least
    factor = (condition - 1) / (condition + 1)
    assert linear_rate(lr) == pytest.approx(factor)
    history = gaps(manifold, torch.float64, device, lr, 40)
    assert slope(history, 20, 40) == pytest.approx(2 * math.log(factor), rel=0.02)


@every
def test_beyond_twice_the_inverse_of_the_largest_eigenvalue_it_does_not_converge(manifold, device):
    history = gaps(manifold, torch.float64, device, 2.2 / max(HESSIAN), 120)
    assert min(history[60:]) > 1e-4
