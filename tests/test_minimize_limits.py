"""`stiefel.optim.minimize`: functions that misbehave, and numbers at the end of the range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import DtypeError, NonFiniteError
from stiefel.optim import hessian_vector_product, minimize
from stiefel.optim.solvers import SOLVERS

D = torch.float64
C = torch.arange(1.0, 7.0, dtype=D)
METHODS = sorted(SOLVERS)


def f(X):
    return (X.square() * C.to(X.dtype)[:, None]).sum()


@pytest.fixture
def X0():
    return geometry.haar(6, 2, dtype=D)


@pytest.mark.parametrize("gradient", [None, lambda X: (2 * C[:, None] * X, X.zero_())[0]])
@pytest.mark.parametrize("method", METHODS)
def test_a_function_that_writes_into_its_argument_moves_no_point(X0, method, gradient):
    def g(X):
        X = X.detach() if gradient else X
        value = f(X)
        X.data.mul_(1.01) if gradient is None else X.mul_(1.01)
        return value

    options = {"hessian": "differences"} if method == "trust-region" else {}
    before = X0.clone()
    result = minimize(g, X0, method=method, gradient=gradient, max_iterations=50, **options)
    assert torch.equal(X0, before)
    assert result.feasibility <= stiefel.tolerance(D, 6, 2)
    assert result.fun == pytest.approx(f(result.x).item(), rel=1e-12)


def test_a_hessian_product_leaves_the_point_alone(X0):
    before = X0.clone()
    hessian_vector_product(lambda X: (f(X), X.data.zero_())[0], X0, torch.ones_like(X0))
    assert torch.equal(X0, before)


def test_vectors_of_another_dtype_are_refused(X0):
    with pytest.raises(DtypeError, match=r"torch.float64.*of the points, got.*torch.float32"):
        hessian_vector_product(f, X0, torch.ones(6, 2))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_towards_minus_infinity_is_no_success(method):
    X0 = geometry.haar(6, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    result = minimize(lambda X: X[0, 0].abs().log(), X0, method=method, max_iterations=300)
    assert not result.success, result.message


@pytest.mark.parametrize(("dtype", "factor"), [(D, 1e-200), (D, 1e200), (torch.float32, 1e-30)])
def test_a_gradient_whose_square_leaves_the_range_is_refused(X0, dtype, factor):
    with pytest.raises(NonFiniteError, match="multiply f by a number"):
        minimize(lambda X: factor * f(X), X0.to(dtype))


@pytest.mark.parametrize("yes", [True, np.bool_(True), torch.tensor(True)])
def test_a_callback_may_answer_with_any_bool(X0, yes):
    assert minimize(f, X0, callback=lambda state: yes).nit == 0
    assert minimize(f, X0, callback=lambda state: np.bool_(False)).success


@pytest.mark.parametrize("method", METHODS)
def test_a_point_near_a_thick_manifold_is_projected_first(X0, method):
    near = stiefel.ManifoldParameter(1.05 * X0, stiefel.Stiefel("euclidean", tolerance=0.5))
    result = minimize(f, near, method=method)
    assert result.success, result.message
    assert result.fun == pytest.approx(3.0, abs=1e-9)
    assert result.feasibility <= stiefel.tolerance(D, 6, 2)


@pytest.mark.parametrize("method", METHODS)
def test_one_number(method):
    start = torch.tensor(0.0, dtype=D)
    result = minimize(lambda x: (x - 1) ** 2, start, manifold="euclidean", method=method)
    assert result.success
    assert float(result.x) == pytest.approx(1.0, abs=1e-8)
