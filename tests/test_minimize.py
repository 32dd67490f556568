"""`stiefel.optim.minimize`: what every method reaches, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import minimize
from stiefel.optim.solvers import SOLVERS

METHODS = sorted(SOLVERS)


def eigenvalue_problem(n=12, p=4, dtype=torch.float64):
    Q = geometry.haar(n, dtype=dtype)
    values = torch.linspace(1, 4, n, dtype=torch.float64).to(dtype)
    A = (Q * values) @ Q.mH
    return lambda X: (X.conj() * (A @ X)).sum().real, values[:p].real.sum().item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_smallest_eigenvalues(method, dtype):
    f, least = eigenvalue_problem(dtype=dtype)
    X0 = geometry.haar(12, 4, dtype=dtype)
    before = X0.clone()
    result = minimize(f, X0, method=method)
    assert result.success
    assert result.status == 0
    assert math.isclose(result.fun, least, rel_tol=1e-12)
    assert result.feasibility < stiefel.tolerance(dtype, 12, 4)
    assert torch.equal(X0, before)
