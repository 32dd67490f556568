"""Curves and line searches: exact slopes, the conditions of a step, work at rounding level."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch

from stiefel import geometry
from stiefel.manifolds import Stiefel
from stiefel.optim.solvers.components import component_of
from stiefel.optim.solvers.line_search import armijo, strong_wolfe
from stiefel.optim.solvers.problem import Problem

D = torch.float64
RETRACTIONS = [*geometry.RETRACTIONS, "exp"]


def path_on(manifold, X, f):
    """A problem, f at X, and a random tangent direction."""
    problem = Problem(f, [component_of(manifold)])
    e = problem.evaluate((X,))
    d = problem.project(e.X, (torch.randn_like(X),))
    return problem, e, d


@pytest.mark.parametrize("inner", ["euclidean", "canonical"])
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("shape", [(6, 3), (5, 5), (4, 1), (2, 6, 2)])
@pytest.mark.parametrize("dtype", [D, torch.complex128])
def test_slopes_are_derivatives_of_f_along_the_retraction(inner, retraction, shape, dtype):
    *batch, n, p = shape
    X, W = geometry.haar(n, p, tuple(batch), dtype=dtype), torch.randn(shape, dtype=dtype)
    manifold = Stiefel(inner, retraction)
    f = lambda Y: (W.conj() * Y).sum().real + Y.abs().pow(4).sum()  # noqa: E731
    problem, e, d = path_on(manifold, X, f)
    path = problem.curve(e, d)
    for t in (0.0, 0.3, 2.0):
        here = path.at(t)
        torch.testing.assert_close(here.X[0], manifold.retr(X, t * d[0]), rtol=0, atol=1e-12)
        h = 1e-5
        numeric = (path.at(t + h).f - path.at(t - h).f) / (2 * h)
        assert path.slope(here) == pytest.approx(numeric, rel=1e-7, abs=1e-7)
    assert path.slope(path.at(0.0)) == pytest.approx(problem.inner(e.X, e.gradient, d), abs=1e-12)


@pytest.mark.parametrize(
    ("manifold", "shape"), [(geoopt.Sphere(), (2, 5)), (geoopt.Euclidean(1), (4,)), (None, (3, 2))]
)
def test_slopes_on_other_manifolds(manifold, shape):
    X = torch.randn(shape, dtype=D)
    X = X if manifold is None else manifold.projx(X)
    problem, e, d = path_on(manifold, X, lambda x: x.pow(3).sum())
    path, h = problem.curve(e, d), 1e-5
    numeric = (path.at(0.4 + h).f - path.at(0.4 - h).f) / (2 * h)
    assert path.slope(path.at(0.4)) == pytest.approx(numeric, rel=1e-7)


@pytest.mark.parametrize("inner", ["euclidean", "canonical"])
def test_gradient_norms_and_inner_products(inner):
    manifold, X = Stiefel(inner), geometry.haar(6, 3, dtype=D)
    problem, e, d = path_on(manifold, X, lambda Y: Y.pow(3).sum())
    gradient = manifold.egrad2rgrad(X, e.G[0])
    torch.testing.assert_close(e.gradient[0], gradient)
    assert e.squared == pytest.approx(manifold.inner(X, gradient).item())
    assert problem.inner(X=e.X, u=d, v=e.gradient) == pytest.approx((d[0] * e.G[0]).sum().item())


@pytest.mark.parametrize("first", [1e-6, 1e-2, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("curvature", [0.05, 0.9])
def test_strong_wolfe_conditions(first, curvature):
    A = torch.diag(torch.linspace(1, 50, 8, dtype=D))
    X = geometry.haar(8, 3, dtype=D)
    problem, e, _ = path_on(Stiefel("euclidean", "qr"), X, lambda Y: (Y * (A @ Y)).sum())
    new = strong_wolfe(problem.descent(e), -e.squared, first, slack=0.0, curvature=curvature)
    assert new is not None
    assert new.f <= e.f - 1e-4 * new.t * e.squared
    assert abs(problem.descent(e).slope(new)) <= curvature * e.squared


def walled(x):
    """x^2 / 2 - x, not finite beyond 3."""
    return (x * x / 2 - x).sum() if x.sum() < 3 else x.sum() * math.nan


@pytest.mark.parametrize("search", [armijo, strong_wolfe])
def test_trials_that_are_not_finite_are_shortened(search):
    problem, e, _ = path_on(None, torch.zeros(1, dtype=D), walled)
    new = search(problem.descent(e), -e.squared, 1e6, slack=0.0)
    assert new is not None
    assert -0.5 <= new.f < 0


@pytest.mark.parametrize("search", [armijo, strong_wolfe])
def test_no_step_uphill(search):
    problem = Problem(lambda x: ((x * x).sum(), -2 * x), [component_of(None)], gradient=True)
    e = problem.evaluate((torch.ones(2, dtype=D),))
    assert search(problem.descent(e), -e.squared, 1.0, slack=problem.slack(e.f)) is None


def test_strong_wolfe_works_below_the_rounding_of_f():
    """1 + x^2 at x = 1e-9: all values are equal, the slopes find the minimum."""
    problem, e, _ = path_on(None, torch.full((1,), 1e-9, dtype=D), lambda x: 1 + (x * x).sum())
    new = strong_wolfe(
        problem.descent(e), -e.squared, 1e-3, slack=problem.slack(e.f), curvature=0.01
    )
    assert new is not None
    assert abs(new.X[0].item()) <= 1e-11


def test_a_non_monotone_reference_allows_a_rise():
    problem, e, _ = path_on(None, torch.ones(1, dtype=D), lambda x: (x * x).sum())
    path = problem.descent(e)
    assert armijo(path, -e.squared, 1.5, slack=0.0, reference=10.0).f == 4.0
    assert armijo(path, -e.squared, 1.5, slack=0.0).f < 1.0
