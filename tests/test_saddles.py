"""`minimize` started where it need not move: minima, saddles and maxima."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import hessian_vector_product, minimize
from stiefel.optim.solvers import SOLVERS, Hessian, Problem
from stiefel.optim.solvers.curvature import least_curvature
from stiefel.optim.solvers.starts import components_of

METHODS = sorted(SOLVERS)
D, C = torch.float64, torch.complex128


def trace(X):
    """tr(X^H A X) with A = diag(1, ..., 6)."""
    A = torch.arange(1.0, 7.0, dtype=X.real.dtype)
    return (X.conj() * (A[:, None] * X)).sum().real


def eigenvectors(*numbers, dtype=D):
    return torch.eye(6, dtype=dtype)[:, list(numbers)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", [(0, 1), (3, 4), (4, 5)], ids=["minimum", "saddle", "maximum"])
def test_a_stationary_start_is_said_to_be_one(method, start):
    X0 = eigenvectors(*start)
    result = minimize(trace, X0, method=method)
    assert result.success
    assert result.nit == 0
    assert torch.equal(result.x, X0)
    assert "stationary to first order" in result.message
    assert "no step was made" in result.message
    assert math.isnan(result.curvature) == (method != "trust-region")


def test_nothing_is_said_of_the_start_after_a_step():
    result = minimize(trace, geometry.haar(6, 2, dtype=D))
    assert result.success
    assert "stationary to first order" in result.message
    assert "no step" not in result.message


#: The Hessian at eigenvectors of A has the curvatures 2 (a_k - a_j) out of their span.
@pytest.mark.parametrize(("start", "least"), [((3, 4), -8.0), ((4, 5), -10.0), ((0, 2), -2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, D, C], ids=str)
@pytest.mark.parametrize("inner", ["canonical", "euclidean"])
def test_negative_curvature_is_met(start, least, dtype, inner):
    manifold = stiefel.Stiefel(inner, "qr")
    X0 = eigenvectors(*start, dtype=dtype)
    result = minimize(trace, X0, manifold=manifold, method="trust-region")
    assert result.curvature == pytest.approx(least, rel=1e-5)
    assert "it is no minimum" in result.message
    beside = manifold.retr(X0, 1e-3 * manifold.proju(X0, torch.randn_like(X0)))
    again = minimize(trace, beside, manifold=manifold, method="trust-region")
    assert again.fun == pytest.approx(3.0, rel=1e-5)
    assert "no negative curvature" in again.message


@pytest.mark.parametrize("how", ["autograd", "forward", "differences"])
def test_at_a_minimum_there_is_none(how):
    result = minimize(trace, geometry.haar(6, 2, dtype=D), method="trust-region", hessian=how)
    assert result.success
    assert result.curvature > -1e-4
    assert "no negative curvature" in result.message


def test_a_manifold_of_geoopt_is_looked_at_by_differences():
    def f(x):
        return trace(x[:, None])

    options = {"manifold": geoopt.Sphere(), "method": "trust-region", "hessian": "differences"}
    result = minimize(f, torch.eye(6, dtype=D)[3], **options)
    assert result.curvature == pytest.approx(-6.0, rel=1e-4)
    assert minimize(f, torch.eye(6, dtype=D)[0], **options).curvature == pytest.approx(2, rel=1e-4)


def _numbers(x):
    return (torch.view_as_real(x) if x.is_complex() else x).flatten()


def _like(x, numbers):
    if x.is_complex():
        return torch.view_as_complex(numbers.reshape(*x.shape, 2))
    return numbers.view(x.shape)


@pytest.mark.parametrize("dtype", [D, C], ids=str)
@pytest.mark.parametrize("manifold", [None, "euclidean"])
def test_it_is_the_least_eigenvalue_where_the_products_suffice(dtype, manifold):
    A = torch.randn(3, 3, dtype=dtype)
    B = torch.randn(3, 2, dtype=dtype)

    def f(X, y):
        return ((A @ X).abs() ** 3).sum() + (B.mH @ X).abs().square().sum() * y.abs().sum() ** 2

    points = (geometry.haar(3, 2, dtype=dtype), torch.randn(2, dtype=D))
    kinds = [manifold, "euclidean"]
    components = components_of(points, kinds)
    problem = Problem(f, components)
    found = least_curvature(Hessian(problem, problem.evaluate(points), "autograd"))

    sizes = [x.numel() * (2 if x.is_complex() else 1) for x in points]

    def product(v):
        u = [_like(x, a) for x, a in zip(points, v.split(sizes), strict=True)]
        return torch.cat(
            [_numbers(a) for a in hessian_vector_product(f, points, u, manifold=kinds)]
        )

    H = torch.stack([product(v) for v in torch.eye(sum(sizes), dtype=D)])
    eigenvalues = torch.linalg.eigvalsh((H + H.mT) / 2)
    tangent = sum(
        stiefel.geometry.manifold_dimension(3, 2, dtype.is_complex) if kind is None else size
        for kind, size in zip(kinds, sizes, strict=True)
    )
    normal = len(eigenvalues) - tangent  # eigenvalues zero that are no curvatures
    kept = eigenvalues[eigenvalues.abs().argsort()[normal:]]
    assert found.products == tangent
    assert found.least == pytest.approx(float(kept.min()), rel=1e-6)


def test_a_manifold_without_directions_has_no_curvature():
    X0 = torch.ones(1, 1, dtype=D)
    result = minimize(lambda X: X.sum(), X0, method="trust-region")
    assert result.success
    assert math.isnan(result.curvature)
    assert "curvature" not in result.message
