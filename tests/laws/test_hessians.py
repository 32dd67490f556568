"""Laws of the Riemannian Hessians, over manifolds, shapes and dtypes."""

from __future__ import annotations

import geoopt
import pytest
import torch

from stiefel import geometry
from stiefel.errors import ConfigurationError, ShapeError, UnknownNameError
from stiefel.geometry.metrics import _real_inner
from stiefel.manifolds import ManifoldParameter, Stiefel
from stiefel.optim import hessian_vector_product
from stiefel.optim.solvers.second_order import DERIVATIVES
from tests.points import sample
from tests.registry import DOUBLE, MANIFOLDS, SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")

#: The Hessian knows the metric only; `expmap` is its geodesic.
ONE_EACH = [manifold for manifold in MANIFOLDS if manifold.retraction == "exp"]
each_manifold = pytest.mark.parametrize("manifold", ONE_EACH, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DOUBLE, ids=str)


def quartic(X):
    """A function without symmetries: a quadratic, a quartic and a linear form."""
    *_, n, p = X.shape
    draw = torch.Generator(device=X.device).manual_seed(5)
    C = torch.randn(n, n, dtype=X.dtype, device=X.device, generator=draw)
    M = torch.randn(n, p, dtype=X.dtype, device=X.device, generator=draw)

    def f(X):
        square = (C @ X).abs().square() if X.is_complex() else (C @ X).square()
        return square.sum() + square.square().sum() / 10 + 3 * _real_inner(M, X).sum()

    return f


def second_derivative(function, h=2e-3):
    """By differences of order four."""
    values = [function(k * h) for k in (-2, -1, 0, 1, 2)]
    weights = (-1, 16, -30, 16, -1)
    return sum(w * v for w, v in zip(weights, values, strict=True)) / (12 * h * h)


@each_manifold
@each_shape
@each_dtype
def test_second_derivative_along_the_geodesic(manifold, shape, dtype, device):
    X, u, _ = sample(shape, dtype, device)
    f = quartic(X)
    H = hessian_vector_product(f, X, u, manifold=manifold)
    expected = second_derivative(lambda t: f(manifold.expmap(X, t * u)))
    assert geometry.tangency_residual(X, H).max() < 1e-11
    assert (manifold.inner(X, H, u).sum() - expected).abs() < 1e-6 * (1 + expected.abs())


@each_manifold
@each_shape
@each_dtype
def test_self_adjoint_and_linear(manifold, shape, dtype, device):
    X, u, _ = sample(shape, dtype, device)
    v = geometry.random_tangent(X)
    f = quartic(X)
    Hu, Hv, both = (
        hessian_vector_product(f, X, w, manifold=manifold) for w in (u, v, 2 * u - 3 * v)
    )
    left, right = manifold.inner(X, Hu, v).sum(), manifold.inner(X, u, Hv).sum()
    assert (left - right).abs() < 1e-10 * (1 + left.abs())
    assert (both - 2 * Hu + 3 * Hv).abs().max() < 1e-10 * (1 + both.abs().max())


@each_manifold
@each_dtype
@pytest.mark.parametrize("given", [False, True], ids=["autograd", "gradient"])
@pytest.mark.parametrize("how", [*DERIVATIVES, "function"])
def test_every_way_gives_the_same(manifold, dtype, given, how, device):
    X, u, _ = sample(((2,), 6, 3), dtype, device)
    C = torch.randn(6, 6, dtype=dtype, device=device)
    C = C.mH @ C

    def f(X):
        return (X.conj() * (C @ X)).sum().real ** 2

    def gradient(X):
        return 4 * (X.conj() * (C @ X)).sum().real * (C @ X)

    def hessian(X, u):
        return 4 * (
            (X.conj() * (C @ X)).sum().real * (C @ u)
            + 2 * (u.conj() * (C @ X)).sum().real * (C @ X)
        )

    expected = hessian_vector_product(f, X, u, manifold=manifold)
    got = hessian_vector_product(
        f,
        X,
        u,
        manifold=manifold,
        gradient=gradient if given else None,
        hessian=hessian if how == "function" else how,
    )
    bound = 1e-6 if how == "differences" else 1e-12
    assert (got - expected).abs().max() < bound * expected.abs().max()


@each_manifold
def test_a_product_is_one_manifold(manifold, device):
    """The mixed derivatives are there, and the types of the arguments are kept."""
    X, u, _ = sample(((), 5, 2), torch.float64, device)
    Y, v = (
        torch.randn(2, 3, dtype=X.dtype, device=device),
        torch.randn(2, 3, device=device).double(),
    )

    def f(X, Y):
        return (X @ Y).sin().sum()

    point = [ManifoldParameter(X, manifold), Y]
    H = hessian_vector_product(f, point, [u, v], manifold=[None, "euclidean"])
    assert isinstance(H, list)
    expected = second_derivative(lambda t: f(manifold.expmap(X, t * u), Y + t * v))
    total = manifold.inner(X, H[0], u) + (H[1] * v).sum()
    assert (total - expected).abs() < 1e-7
    for how in ("forward", "differences"):
        again = hessian_vector_product(f, point, [u, v], manifold=[None, "euclidean"], hessian=how)
        assert max((a - b).abs().max() for a, b in zip(H, again, strict=True)) < 1e-8


def test_normal_parts_are_dropped_and_linear_functions_bend_with_the_manifold(device):
    X, u, normal = sample(((), 5, 2), torch.float64, device)
    M = torch.randn_like(X)
    plain = hessian_vector_product(lambda X: (M * X).sum(), X, u)
    assert (
        hessian_vector_product(lambda X: (M * X).sum(), X, u + normal) - plain
    ).abs().max() < 1e-13
    assert (plain - geometry.euclidean_hessian(X, M, 0 * M, u)).abs().max() < 1e-14
    assert plain.abs().max() > 1e-3


class TestRefusals:
    def test_what_is_differentiable_once_names_the_way_out(self):
        X, u, _ = sample(((), 5, 2), torch.float64, torch.device("cpu"))
        target = geometry.haar(5, 2, dtype=torch.float64)

        def f(X):
            return Stiefel().dist(X, target) ** 2 / 2

        with pytest.raises(Exception, match="hand-written first derivative"):
            hessian_vector_product(f, X, u)
        H = hessian_vector_product(f, X, u, manifold=Stiefel(), hessian="differences")
        assert geometry.tangency_residual(X, H) < 1e-9

    def test_gradients_without_a_graph(self):
        X, u, _ = sample(((), 5, 2), torch.float64, torch.device("cpu"))
        with pytest.raises(ConfigurationError, match="hessian='differences'"):
            hessian_vector_product(
                lambda X: X.square().sum(), X, u, gradient=lambda X: 2 * X.detach()
            )

    def test_manifolds_that_have_no_hessian(self):
        sphere = geoopt.Sphere()
        x = sphere.random(5, dtype=torch.float64).as_subclass(torch.Tensor)
        u = sphere.proju(x, torch.randn(5, dtype=torch.float64))
        A = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
        with pytest.raises(ConfigurationError, match=r"ehess2rhess.*differences"):
            hessian_vector_product(lambda x: x @ A @ x, x, u, manifold=sphere)
        got = hessian_vector_product(
            lambda x: x @ A @ x, x, u, manifold=sphere, hessian="differences"
        )
        expected = 2 * sphere.proju(x, A @ u - (x @ A @ x) * u)
        assert (got - expected).abs().max() < 1e-7

    def test_names_and_shapes(self):
        X, u, _ = sample(((), 5, 2), torch.float64, torch.device("cpu"))
        with pytest.raises(UnknownNameError, match="autograd"):
            hessian_vector_product(lambda X: X.sum(), X, u, hessian="autgrad")
        with pytest.raises(ShapeError, match=r"\(5, 2\).*\(5, 1\)"):
            hessian_vector_product(lambda X: X.sum(), X, u[:, :1])
