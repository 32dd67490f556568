"""The trust region: how fast it converges, where it ends, and what it refuses."""

from __future__ import annotations

import math
from itertools import pairwise

import geoopt
import pytest
import torch

from stiefel import geometry
from stiefel.errors import ConfigurationError, NonFiniteError, UnknownNameError
from stiefel.manifolds import Stiefel
from stiefel.optim import minimize
from tests.registry import METRICS

pytestmark = pytest.mark.usefixtures("one_thread")


def brockett(n=10, p=3, dtype=torch.float64, spread=1.0):
    """``tr(X^H A X N)`` with an isolated, nondegenerate minimum, and its value."""
    Q = geometry.haar(n, dtype=dtype)
    values = torch.linspace(1, 1 + spread * n, n, dtype=torch.float64)
    A = (Q * values.to(dtype)) @ Q.mH
    N = torch.arange(p, 0, -1, dtype=torch.float64)

    def f(X):
        return ((X.conj() * (A @ X)).sum(-2).real * N).sum()

    return f, float((values[:p] * N).sum())


def orders(norms, least=1e-10, most=1e-1):
    """log g_(k+1) / log g_k type quotients: the observed orders of the last steps."""
    tail = [g for g in norms if least < g < most]
    assert len(tail) >= 3, norms
    logs = [math.log(g) for g in tail]
    return [(c - b) / (b - a) for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("retraction", ["cayley", "cholesky_qr", "polar", "exp"])
def test_convergence_is_quadratic(metric, dtype, retraction):
    f, least = brockett(dtype=dtype)
    start = minimize(f, geometry.haar(10, 3, dtype=dtype), method="barzilai-borwein", tol=1e-3).x
    result = minimize(
        f,
        start,
        manifold=Stiefel(metric, retraction),
        method="trust-region",
        tol=1e-14,
        max_iterations=40,
    )
    scale = result.history["grad_norm"][0]
    norms = [g / scale for g in result.history["grad_norm"]]
    assert min(norms) < 1e-10
    steps = [(a, b) for a, b in pairwise(norms) if 1e-5 < a < 0.9]
    assert steps
    for before, after in steps:  # with order two, g -> 10 g^2 at most, down to rounding
        assert after <= 10 * before**2 + 1e-10
    assert math.isclose(result.fun, least, rel_tol=1e-13)


@pytest.mark.parametrize("theta", [1.0, 0.0])
def test_order_of_convergence_is_that_of_the_forcing(theta):
    """theta = 0 stops the inner iteration at a fixed fraction: linear; theta = 1: quadratic."""
    f, _ = brockett(14, 4, spread=3.0)
    X0 = geometry.haar(14, 4, dtype=torch.float64)
    result = minimize(
        f, X0, method="trust-region", theta=theta, kappa=0.3, tol=1e-13, max_iterations=60
    )
    scale = result.history["grad_norm"][0]
    seen = orders([g / scale for g in result.history["grad_norm"]], 1e-9, 3e-1)
    assert (max(seen[-2:]) > 1.6) if theta else (seen[-1] < 1.5)


@pytest.mark.parametrize("hessian", ["forward", "differences"])
@pytest.mark.parametrize("metric", METRICS)
def test_other_hessians_reach_the_minimum(hessian, metric):
    f, least = brockett()
    X0 = geometry.haar(10, 3, dtype=torch.float64)
    result = minimize(f, X0, manifold=Stiefel(metric), method="trust-region", hessian=hessian)
    assert result.success
    assert math.isclose(result.fun, least, rel_tol=1e-12)


def test_a_hessian_in_closed_form_and_a_product_with_free_tensors():
    A = torch.randn(8, 5, dtype=torch.float64)

    def f(X, Y):
        return (A - X @ Y).square().sum()

    X0 = (geometry.haar(8, 2, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64))
    result = minimize(f, X0, manifold=[None, "euclidean"], method="trust-region")
    assert result.success
    least = torch.linalg.svdvals(A)[2:].square().sum().item()
    assert math.isclose(result.fun, least, rel_tol=1e-12)

    def hessian(X, Y, u, v):
        R, dR = X @ Y - A, u @ Y + X @ v
        return 2 * (dR @ Y.mT + R @ v.mT), 2 * (u.mT @ R + X.mT @ dR)

    again = minimize(f, X0, manifold=[None, "euclidean"], method="trust-region", hessian=hessian)
    assert again.nit == result.nit
    assert math.isclose(again.fun, least, rel_tol=1e-12)


def test_negative_curvature_leads_away_from_a_saddle():
    A = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    saddle = torch.eye(6, dtype=torch.float64)[:, 3:5]
    X0 = geometry.polar_retraction(saddle, 1e-4 * geometry.random_tangent(saddle))
    result = minimize(lambda X: (X * (A @ X)).sum(), X0, method="trust-region")
    assert result.success
    assert math.isclose(result.fun, 3.0, rel_tol=1e-12)


def test_f_never_rises_beyond_rounding_and_values_are_kept_at_rounding_level():
    """With tol=0 the steps go on at the rounding level of f, and end there of themselves."""
    f, least = brockett(spread=50.0)
    X0 = geometry.haar(10, 3, dtype=torch.float64)
    result = minimize(f, X0, method="trust-region", tol=0.0, max_iterations=300)
    values = result.history["fun"]
    assert all(b <= a + 1e-11 * abs(a) for a, b in pairwise(values))
    assert math.isclose(result.fun, least, rel_tol=1e-13)
    assert result.grad_norm < 1e-10 * abs(least)
    assert result.status == 3
    assert result.nit < 60


def test_single_precision():
    f, least = brockett()
    X0 = geometry.haar(10, 3, dtype=torch.float32)
    result = minimize(lambda X: f(X.double()).float(), X0, method="trust-region")
    assert result.success
    assert math.isclose(result.fun, least, rel_tol=1e-5)


def test_geoopt_manifolds_by_differences():
    sphere = geoopt.Sphere()
    A = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    x0 = sphere.random(6, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="differences"):
        minimize(lambda x: x @ A @ x, x0, manifold=sphere, method="trust-region")
    result = minimize(
        lambda x: x @ A @ x, x0, manifold=sphere, method="trust-region", hessian="differences"
    )
    assert result.success
    assert math.isclose(result.fun, 1.0, rel_tol=1e-12)


@pytest.mark.parametrize(
    "options", [{"accept": 0.3}, {"accept": -1.0}, {"radius": 0.0}, {"radius": 5.0}]
)
def test_options_out_of_range(options):
    f, _ = brockett()
    with pytest.raises(ConfigurationError, match="expected 0 <"):
        minimize(f, geometry.haar(10, 3, dtype=torch.float64), method="trust-region", **options)


def test_unknown_names_and_functions_that_are_not_finite():
    f, _ = brockett()
    X0 = geometry.haar(10, 3, dtype=torch.float64)
    with pytest.raises(UnknownNameError, match="kappa"):
        minimize(f, X0, method="trust-region", kapa=0.1)
    with pytest.raises(NonFiniteError):
        minimize(lambda X: (X * math.inf).sum(), X0, method="trust-region")
    barrier = minimize(
        lambda X: f(X) - 1e-3 * (X[0, 0] - X0[0, 0] + 0.05).log(), X0, method="trust-region"
    )
    assert math.isfinite(barrier.fun)
