"""`stiefel.optim.minimize`: what every method reaches on problems with a known optimum."""

from __future__ import annotations

import itertools
import math
import time

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import MinimizeResult, minimize
from stiefel.optim.solvers import SOLVERS
from stiefel.optim.solvers.components import GeooptComponent

METHODS = sorted(SOLVERS)
#: geoopt's manifolds have no Hessian of their own; differences of gradients need none.
FOREIGN = {"trust-region": {"hessian": "differences"}}
D = torch.float64


def gap(result, least):
    return (result.fun - least) / abs(least)


# ------------------------------------------------------------- four problems, small
def pca(n=24, p=15, dtype=D):
    """The p largest eigenvalues of Q D Q^H, condition number 100."""
    values = torch.logspace(0, -2, n, dtype=D)
    Q = geometry.haar(n, n, dtype=dtype)
    A = (Q * values.to(dtype)) @ Q.mH
    return lambda X: -(X.conj() * (A @ X)).sum().real, (n, p), -values[:p].sum().item()


def procrustes(n=12):
    """The nearest A X to B, over the component of O(n) that holds the minimum."""
    A, B = torch.randn(2, n, n, dtype=D)
    W = geometry.polar_factor(A.mT @ B)
    return lambda X: (A @ X - B).square().sum(), W, (A @ W - B).square().sum().item()


def brockett(n=10):
    """tr(X^T A X N): the largest weight at the smallest eigenvalue."""
    A = torch.randn(n, n, dtype=D)
    A, N = A + A.mT, torch.arange(n, 0, -1, dtype=D)
    return (
        lambda X: (X * (A @ X) * N).sum(),
        (n, n),
        (torch.linalg.eigvalsh(A) * N).sum().item(),
    )


def joint_diagonalisation(n=8, count=5):
    """Matrices that one rotation diagonalises exactly."""
    Q = geometry.haar(n, n, dtype=D)
    C = (Q * torch.randn(count, 1, n, dtype=D)) @ Q.mT
    return lambda X: -(X * (C @ X)).sum(-2).square().sum(), (n, n), -C.square().sum().item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", [pca, procrustes, brockett, joint_diagonalisation])
def test_the_optimum_is_reached(method, problem):
    f, start, least = problem()
    if problem is procrustes:
        sign = torch.linalg.det(start).sign().item()
        X0 = geometry.haar(*start.shape, dtype=D, determinant=int(sign))
    else:
        X0 = geometry.haar(*start, dtype=D)
    result = minimize(f, X0, method=method)
    assert result.success, result.message
    assert abs(gap(result, least)) < 1e-10
    assert result.feasibility < stiefel.tolerance(D, *X0.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", ["euclidean", "canonical"])
@pytest.mark.parametrize("retraction", [*geometry.RETRACTIONS, "exp"])
def test_every_metric_and_retraction(method, inner, retraction):
    f, shape, least = pca(10, 4)
    manifold = stiefel.Stiefel(inner, retraction)
    result = minimize(f, geometry.haar(*shape, dtype=D), manifold=manifold, method=method)
    assert result.success, result.message
    assert abs(gap(result, least)) < 1e-10
    assert manifold.check_point_on_manifold(result.x)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("retraction", ["cholesky_qr", "cayley", "polar"])
def test_complex(method, retraction):
    f, shape, least = pca(10, 4, torch.complex128)
    X0 = geometry.haar(*shape, dtype=torch.complex128)
    manifold = stiefel.Stiefel("euclidean", retraction)
    result = minimize(f, X0, manifold=manifold, method=method)
    assert result.success, result.message
    assert abs(gap(result, least)) < 1e-10
    assert isinstance(result.fun, float)


@pytest.mark.parametrize("method", METHODS)
def test_single_precision(method):
    f, shape, least = pca(12, 4)
    X0 = geometry.haar(*shape, dtype=torch.float32)
    result = minimize(lambda X: f(X.double()).float(), X0, method=method)
    assert result.success, result.message
    assert result.x.dtype == torch.float32
    assert abs(gap(result, least)) < 1e-6
    assert result.feasibility < stiefel.tolerance(torch.float32, *shape)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_a_product_of_one_f(method):
    values = torch.linspace(1, 3, 8, dtype=D)
    Q = geometry.haar(8, 8, (2, 3), dtype=D)
    A = (Q * values) @ Q.mT
    X0 = geometry.haar(8, 2, (2, 3), dtype=D)
    result = minimize(lambda X: (X * (A @ X)).sum(), X0, method=method)
    assert result.success, result.message
    assert abs(gap(result, 6 * values[:2].sum().item())) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_a_product_of_different_manifolds(method):
    """|M - U diag(s) V^T|^2 over two frames and a free vector: the truncated singular values."""
    M = torch.randn(7, 6, dtype=D)
    least = torch.linalg.svdvals(M)[2:].square().sum().item()

    def f(U, s, V):
        return (M - (U * s) @ V.mT).square().sum()

    start = (geometry.haar(7, 2, dtype=D), torch.ones(2, dtype=D), geometry.haar(6, 2, dtype=D))
    manifolds = [stiefel.Stiefel("canonical"), "euclidean", None]
    result = minimize(f, start, manifold=manifolds, method=method)
    assert isinstance(result.x, tuple)
    assert result.success, result.message
    assert abs(gap(result, least)) < 1e-10


def test_inner_products_of_a_batch_are_those_of_its_points():
    ball = geoopt.PoincareBall(torch.tensor(1.0, dtype=D))
    X, u, v = ball.random(4, 3, dtype=D), torch.randn(4, 3, dtype=D), torch.randn(4, 3, dtype=D)
    expected = sum(float(ball.inner(x, a, b)) for x, a, b in zip(X, u, v, strict=True))
    assert float(GeooptComponent(ball).inner(X, u, v)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_manifolds_of_geoopt(method):
    A = torch.diag(torch.linspace(1, 2, 6, dtype=D))
    x0 = geometry.haar(6, 1, dtype=D)[:, 0]
    result = minimize(
        lambda x: x @ A @ x, x0, manifold=geoopt.Sphere(), method=method, **FOREIGN.get(method, {})
    )
    assert result.success, result.message
    assert abs(gap(result, 1.0)) < 1e-10
    assert result.feasibility < 1e-14


@pytest.mark.parametrize("method", METHODS)
def test_free_tensors_rosenbrock(method):
    def rosenbrock(x):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    x0 = torch.tensor([-1.2, 1.0, -0.5, 0.8], dtype=D)
    result = minimize(rosenbrock, x0, manifold="euclidean", method=method, tol=1e-10)
    assert result.success, result.message
    torch.testing.assert_close(result.x, torch.ones(4, dtype=D), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------ what comes back
@pytest.mark.parametrize("method", METHODS)
def test_the_result(method):
    f, shape, _ = pca(10, 4)
    X0 = stiefel.ManifoldParameter(geometry.haar(*shape, dtype=D))
    before = X0.detach().clone()
    result = minimize(f, X0, method=method)
    assert isinstance(result, MinimizeResult)
    assert result.success
    assert result.status == 0
    assert isinstance(result.x, stiefel.ManifoldParameter)
    assert result.x.manifold == X0.manifold
    assert torch.equal(X0, before)
    assert X0.grad is None
    history = result.history
    assert {len(values) for values in history.values()} == {result.nit + 1}
    assert result.nfev > result.nit
    assert result.ngev > 0
    assert history["fun"][0] == f(before).item()
    assert history["seconds"] == sorted(history["seconds"])
    assert history["fun"][-1] == pytest.approx(result.fun, rel=1e-14)
    G = torch.autograd.grad(f(result.x), result.x)[0]
    gradient = X0.manifold.egrad2rgrad(result.x, G).detach()
    norm = X0.manifold.inner(result.x.detach(), gradient).sqrt().item()
    assert norm == pytest.approx(result.grad_norm, rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_are_the_same(method):
    f, shape, _ = pca(10, 4)
    X0 = geometry.haar(*shape, dtype=D)
    one, two = (minimize(f, X0, method=method) for _ in range(2))
    assert torch.equal(one.x, two.x)
    assert one.history["fun"] == two.history["fun"]


@pytest.mark.parametrize("method", [m for m in METHODS if m != "barzilai-borwein"])
def test_f_falls_at_each_step(method):
    f, shape, _ = brockett()
    values = minimize(f, geometry.haar(*shape, dtype=D), method=method).history["fun"]
    slack = 1e-13 * abs(values[-1])
    assert all(b <= a + slack for a, b in itertools.pairwise(values))


def test_barzilai_borwein_without_memory_falls_at_each_step():
    f, shape, _ = brockett()
    X0 = geometry.haar(*shape, dtype=D)
    values = minimize(f, X0, memory=0.0).history["fun"]
    slack = 1e-13 * abs(values[-1])
    assert all(b <= a + slack for a, b in itertools.pairwise(values))
    values = minimize(f, X0).history["fun"]
    assert any(b > a + slack for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("method", METHODS)
def test_limits(method):
    f, shape, _ = pca()
    X0 = geometry.haar(*shape, dtype=D)
    short = minimize(f, X0, method=method, max_iterations=3)
    assert (short.status, short.nit, short.success) == (1, 3, False)
    assert "max_iterations" in short.message

    def slow(X):
        time.sleep(0.02)
        return f(X)

    late = minimize(slow, X0, method=method, max_seconds=0.1)
    assert (late.status, late.success) == (2, False)
    assert late.nit < 6
    seen = []

    def stop(state):
        seen.append((state.nit, state.fun))
        return state.nit == 2

    stopped = minimize(f, X0, method=method, callback=stop)
    assert (stopped.status, stopped.success) == (4, False)
    assert [nit for nit, _ in seen] == [0, 1, 2]
    assert [value for _, value in seen] == stopped.history["fun"]

    def raises(state):
        raise StopIteration

    assert minimize(f, X0, method=method, callback=raises).nit == 0


@pytest.mark.parametrize("method", METHODS)
def test_an_impossible_tolerance_ends_without_a_claim(method):
    f, shape, least = pca(10, 4)
    X0 = geometry.haar(*shape, dtype=D)
    result = minimize(f, X0, method=method, tol=1e-30, max_iterations=5000)
    assert result.status == 3, result.message
    assert not result.success
    assert "rounding" in result.message
    assert abs(gap(result, least)) < 1e-13


@pytest.mark.parametrize("method", METHODS)
def test_a_start_at_the_optimum(method):
    A = torch.diag(torch.arange(1.0, 7.0, dtype=D))
    result = minimize(lambda X: (X * (A @ X)).sum(), torch.eye(6, 2, dtype=D), method=method)
    assert result.success
    assert result.nit == 0
    assert result.fun == 3.0


@pytest.mark.parametrize("method", METHODS)
def test_a_large_constant_hides_no_minimum(method):
    """f - c + c in floating point: noise far above the last place of the value that comes back."""
    f, shape, least = pca(10, 4)
    X0 = geometry.haar(*shape, dtype=D)
    result = minimize(lambda X: (f(X) + 1e6) - 1e6, X0, method=method)
    assert result.success, result.message
    assert abs(gap(result, least)) < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_into_nonsense_is_shortened(method, bad):
    """A wall: f is not finite beyond the wall."""
    A = torch.diag(torch.linspace(1, 3, 6, dtype=D))

    def f(X):
        value = (X * (A @ X)).sum()
        wall = X[0, 0] - 0.5
        return value - 0.1 * torch.log(wall) if wall > 0 else value * bad

    result = minimize(f, torch.eye(6, 2, dtype=D), method=method)
    assert result.success, result.message
    assert result.x[0, 0] > 0.5


# ------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_the_user(method):
    A = torch.diag(torch.linspace(1, 2, 8, dtype=D))
    X0 = geometry.haar(8, 3, dtype=D)

    def f(X):
        return (X * (A @ X)).sum()

    auto = minimize(f, X0, method=method)
    both = minimize(lambda X: (f(X), 2 * A @ X), X0, method=method, gradient=True)
    apart = minimize(f, X0, method=method, gradient=lambda X: 2 * A @ X)
    for result in (auto, both, apart):
        assert result.success
        assert abs(gap(result, A.diagonal()[:3].sum().item())) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_gradient_is_not_a_success(method):
    A = torch.diag(torch.linspace(1, 2, 8, dtype=D))
    X0 = geometry.haar(8, 3, dtype=D)
    f = lambda X: ((X * (A @ X)).sum(), -2 * A @ X)  # noqa: E731
    result = minimize(f, X0, method=method, gradient=True)
    assert not result.success
    assert result.status in (3, 5)
    assert "gradient" in result.message
    assert "rounding" not in result.message
