"""Laws of logarithms and distances, over manifolds, shapes and dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from stiefel import geometry
from stiefel.errors import DoubleBackwardError, RepresentationError, ShapeError
from stiefel.manifolds import Stiefel
from tests.points import sample
from tests.registry import DOUBLE, MANIFOLDS, METRICS, SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")

#: Logarithm and distance know the metric only.
ONE_EACH = [manifold for manifold in MANIFOLDS if manifold.retraction == "exp"]
each_manifold = pytest.mark.parametrize("manifold", ONE_EACH, ids=str)
each_shape = pytest.mark.parametrize("shape", [s for s in SHAPES if s[1:] != (1, 1)], ids=str)
each_dtype = pytest.mark.parametrize("dtype", DOUBLE, ids=str)


def near(X, length):
    """A point at that canonical or Euclidean length or less, and in the component of X."""
    u = geometry.random_tangent(X)
    u = length * u / torch.linalg.matrix_norm(u, keepdim=True)
    return geometry.cayley_retraction(X, u)


@each_manifold
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
def test_logarithm_and_exponential_undo_each_other(manifold, shape, dtype, device):
    X, u, _ = sample(shape, dtype, device, 1.5)
    Y = manifold.expmap(X, u)
    v = manifold.logmap(X, Y)
    assert v.dtype == dtype
    assert v.device == X.device
    assert (v - u).abs().max() < 1e-10
    assert (manifold.expmap(X, v) - Y).abs().max() < 1e-10
    assert geometry.tangency_residual(X, v).max() < 1e-12


@each_manifold
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
def test_distance_along_a_geodesic_is_the_time_run(manifold, shape, dtype, device):
    X, u, _ = sample(shape, dtype, device)
    speed = manifold.inner(X, u).sqrt()
    for t in (0.0, 1e-3, 0.3, 1.0, 1.5):
        d = manifold.dist(X, manifold.expmap(X, t * u))
        assert d.shape == shape[0]
        assert d.dtype == torch.float64
        assert (d - t * speed).abs().max() < 1e-10
    assert manifold.dist(X, X, keepdim=True).shape == (*shape[0], 1, 1)


@each_manifold
@each_shape
@each_dtype
def test_distance_is_one(manifold, shape, dtype, device):
    """Zero between equal points, symmetric, positive, and a detour is longer."""
    X, *_ = sample(shape, dtype, device)
    Y = near(X, 0.9)
    Z = near(Y, 0.7)
    assert manifold.dist(X, X).max() == 0
    d = manifold.dist(X, Y)
    assert d.min() > 0.1
    assert (manifold.dist(Y, X) - d).abs().max() < 1e-10
    assert (manifold.dist(X, Z) <= d + manifold.dist(Y, Z) + 1e-10).all()


@each_dtype
@pytest.mark.parametrize("size", [(4, 4), (6, 1)])
def test_square_matrices_and_spheres_have_one_geodesic(size, dtype, device):
    """Real p = 1: one distance; square: that of the Euclidean metric is sqrt(2) times larger."""
    X, u, _ = sample(((3,), *size), dtype, device)
    Y = geometry.canonical_exponential(X, u)
    canonical, euclidean = Stiefel("canonical"), Stiefel("euclidean")
    if size[1] == 1 and dtype.is_complex:
        assert (canonical.dist(X, Y) <= euclidean.dist(X, Y) + 1e-12).all()
        return
    ratio = 1.0 if size[1] == 1 else math.sqrt(2)
    assert (canonical.logmap(X, Y) - euclidean.logmap(X, Y)).abs().max() < 1e-11
    assert (euclidean.dist(X, Y) - ratio * canonical.dist(X, Y)).abs().max() < 1e-11


@each_manifold
@each_shape
@each_dtype
def test_gradients_are_the_unit_velocities_at_the_ends(manifold, shape, dtype, device):
    X, u, _ = sample(shape, dtype, device)
    Y = manifold.expmap(X, u)
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    manifold.dist(x, y).sum().backward()
    length = manifold.inner(X, u, keepdim=True).sqrt()
    assert (manifold.egrad2rgrad(X, x.grad) + u / length).abs().max() < 1e-10
    back = manifold.logmap(Y, X)
    assert (manifold.egrad2rgrad(Y, y.grad) + back / length).abs().max() < 1e-10
    v, h = geometry.random_tangent(Y), 1e-5
    moved = [manifold.dist(X, manifold.expmap(Y, sign * h * v)) for sign in (1, -1)]
    slope = (moved[0] - moved[1]) / (2 * h)
    expected = manifold.inner(Y, manifold.egrad2rgrad(Y, y.grad), v)
    assert (slope - expected).abs().max() < 1e-6


@each_manifold
def test_gradient_at_equal_points_is_zero_and_a_second_one_is_refused(manifold, device):
    X, u, _ = sample(((), 5, 2), torch.float64, device)
    x = X.clone().requires_grad_()
    manifold.dist(x, X).backward()
    assert (x.grad == 0).all()
    Y = manifold.expmap(X, u)
    (g,) = torch.autograd.grad(manifold.dist(x, Y), x, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="distance"):
        g.sum().backward()


@each_manifold
def test_distance_survives_vmap_and_functional_gradients(manifold, device):
    X, u, _ = sample(((3,), 5, 2), torch.float64, device)
    Y = manifold.expmap(X, u)
    expected = manifold.dist(X, Y)
    assert torch.equal(torch.vmap(manifold.dist)(X, Y), expected)
    assert torch.equal(torch.vmap(lambda y: manifold.dist(X[0], y))(Y)[0], expected[0])
    gradient = torch.func.grad(lambda y: manifold.dist(X, y).sum())(Y)
    assert ((manifold.inner(Y, manifold.egrad2rgrad(Y, gradient)) - 1).abs() < 1e-10).all()


@each_manifold
@each_dtype
def test_far_points_are_reached_with_a_small_residual(manifold, dtype, device):
    B, X = (geometry.haar(9, 4, (6,), dtype=dtype, device=device) for _ in range(2))
    u, residual = geometry.LOGARITHMS[manifold.metric](B, X, return_residual=True)
    assert residual.shape == (6,)
    assert residual.max() <= 1e-9
    assert (manifold.expmap(B, u) - X).abs().max() <= 2 * residual.max() + 1e-13


@pytest.mark.parametrize("metric", METRICS)
def test_residual_is_what_the_geodesic_misses(metric, device):
    B, u, _ = sample(((2, 3), 7, 3), torch.float64, device)
    X = geometry.EXPONENTIALS[metric](B, u)
    v, residual = geometry.LOGARITHMS[metric](B, X, return_residual=True)
    miss = (geometry.EXPONENTIALS[metric](B, v) - X).abs().amax((-2, -1))
    assert residual.dtype == torch.float64
    assert ((miss - residual).abs() < 1e-12).all()


def test_failures_state_the_residual(monkeypatch, device):
    B, X = (geometry.haar(9, 4, dtype=torch.float64, device=device) for _ in range(2))
    monkeypatch.setattr("stiefel.geometry.shooting._STEPS", 2)
    with pytest.raises(RepresentationError, match=r"residual .*e-0.*too far"):
        Stiefel("euclidean").dist(B, X)
    with pytest.raises(ShapeError, match="broadcast"):
        Stiefel().dist(geometry.haar(9, 4, (2,)), geometry.haar(9, 4, (3,)))
    with pytest.raises(RepresentationError, match="determinant"):
        Stiefel().dist(torch.eye(3), -torch.eye(3))


def test_single_precision_points_are_measured_in_double(device):
    X, u, _ = sample(((), 40, 5), torch.float32, device)
    for manifold in ONE_EACH:
        d = manifold.dist(X, manifold.expmap(X, u))
        assert d.dtype == torch.float32
        assert abs(d - manifold.inner(X, u).sqrt()) < 1e-5
        assert manifold.dist(X, X) == 0
