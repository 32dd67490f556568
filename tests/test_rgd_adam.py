"""RGDAdam against the formulae of its paper with dense n x n matrices, in float64."""

from __future__ import annotations

import copy

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError
from stiefel.geometry.skew_step import inverse_of_one_minus
from stiefel.optim import RGDAdam
from tests.registry import DOUBLE, SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")
METRICS = ["euclidean", "canonical"]


def leaf_on(*shape, inner="euclidean", dtype=torch.float64, device="cpu", tolerance=None):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    manifold = stiefel.Stiefel(inner, "cayley", tolerance=tolerance)
    return stiefel.ManifoldParameter(value, manifold)


def noise(leaf, scale=1.0):
    return scale * torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def dense_transform(W, X, alpha):
    eye = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    return torch.linalg.solve(eye + alpha / 2 * W, (eye - alpha / 2 * W) @ X)


class DenseCayleyAdam:
    """Li, Fuxin, Todorovic (2020), algorithm 2, with W as an n x n matrix."""

    def __init__(self, X, inner, lr, betas=(0.9, 0.99), eps=1e-8, q=0.5, **options):
        self.X, self.inner, self.lr, self.eps, self.q = X, inner, lr, eps, q
        self.b1, self.b2 = betas
        self.iterations = options.get("iterations")
        self.amsgrad = options.get("amsgrad", False)
        self.sign = -1 if options.get("maximize") else 1
        self.M, self.k = torch.zeros_like(X), 0
        self.v = self.most = torch.zeros(*X.shape[:-2], 1, 1, dtype=torch.float64, device=X.device)

    @staticmethod
    def skew_of(M, X):
        half = M @ X.mH - X @ (X.mH @ M @ X.mH) / 2
        return half - half.mH

    def step(self, G):
        X, b1, b2 = self.X, self.b1, self.b2
        self.k += 1
        M = b1 * self.M + (1 - b1) * G
        self.v = b2 * self.v + (1 - b2) * (G.abs() ** 2).sum((-2, -1), keepdim=True)
        self.most = torch.maximum(self.most, self.v)
        second = (self.most if self.amsgrad else self.v) / (1 - b2**self.k)
        r = (1 - b1**self.k) * torch.sqrt(second + self.eps)
        W = self.skew_of(M, X)
        if self.inner == "canonical":  # G X^H - X G^H in place of the Euclidean gradient's W
            W = self.skew_of(b1 * self.M, X) + (1 - b1) * (G @ X.mH - X @ G.mH)
        W = W / r
        assert (W + W.mH).abs().max() < 1e-13
        self.M = r * W @ X
        norm = torch.linalg.matrix_norm(W, keepdim=True)
        self.W, self.alpha = W, (2 * self.q / (norm + self.eps)).clamp(max=self.lr)
        a = self.sign * self.alpha
        if self.iterations is None:
            self.X = dense_transform(W, X, a)
            return
        Y = X - a * W @ X
        for _ in range(self.iterations):
            Y = X - a / 2 * W @ (X + Y)
        self.X = Y


@pytest.mark.parametrize("inner", METRICS)
@pytest.mark.parametrize("shape", [*SHAPES, ((3,), 5, 1), ((), 30, 20)], ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 50.0},  # the bound of the step holds
        {"lr": 50.0, "q": 0.9},
        {"iterations": 2},
        {"iterations": 5, "lr": 50.0},
        {"iterations": 0},
        {"amsgrad": True, "betas": (0.5, 0.3), "eps": 1e-2},
        {"maximize": True, "betas": (0.0, 0.0)},
        {"maximize": True, "iterations": 2},
    ],
    ids=str,
)
def test_steps_are_those_of_the_paper_with_dense_matrices(inner, shape, dtype, options, device):
    batch, n, p = shape
    # the sweeps leave the manifold; the tolerance keeps the base class from mending them
    thick = 0.9 if "iterations" in options else None
    leaf = leaf_on(*batch, n, p, inner=inner, dtype=dtype, device=device, tolerance=thick)
    options = {"lr": 0.2, **options}
    optimizer = RGDAdam([leaf], **options)
    dense = DenseCayleyAdam(leaf.detach().clone(), inner, **options)
    for scale in (1.0, 0.1, 3.0, 1.0):
        leaf.grad = noise(leaf, scale)
        before = leaf.grad.clone()
        dense.step(leaf.grad)
        optimizer.step()
        assert torch.equal(leaf.grad, before)
        assert (leaf.detach() - dense.X).abs().max() < 1e-12
    state = optimizer.state[leaf]
    assert (state["exp_avg"] - dense.M).abs().max() < 1e-12
    assert (state["exp_avg_sq"] - dense.v).abs().max() < 1e-11
    assert state["step"] == 4
    if options.get("amsgrad"):
        assert (state["max_exp_avg_sq"] - dense.most).abs().max() < 1e-11
        assert (dense.most > dense.v).any()
    if options["lr"] > 1:  # n = p = 1 over the reals is two points: W = 0
        factor = dense.alpha * torch.linalg.matrix_norm(dense.W, 2, keepdim=True) / 2
        assert (factor <= options.get("q", 0.5)).all()
        assert (n, dtype) == (1, torch.float64) or (dense.alpha < options["lr"]).all()


@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_stored_momentum_is_the_tangent_part_of_the_average(dtype, device):
    leaf = leaf_on(7, 3, dtype=dtype, device=device)
    X, G = leaf.detach().clone(), noise(leaf)
    leaf.grad = G
    optimizer = RGDAdam([leaf], lr=0.1, betas=(0.8, 0.99))
    optimizer.step()
    expected = geometry.tangent_projection(X, 0.2 * G)
    assert (optimizer.state[leaf]["exp_avg"] - expected).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
@pytest.mark.parametrize("lr", [0.3, 50.0])
def test_every_sweep_shrinks_the_error_by_the_contraction_factor(dtype, lr, device):
    start = leaf_on(9, 3, dtype=dtype, device=device, tolerance=0.9)
    G = noise(start)
    dense = DenseCayleyAdam(start.detach().clone(), "euclidean", lr)
    dense.step(G)
    c = float(dense.alpha) * float(torch.linalg.matrix_norm(dense.W, 2)) / 2
    assert c < 0.5
    last = None
    for sweeps in range(6):
        leaf = copy.deepcopy(start)
        leaf.grad = G.clone()
        RGDAdam([leaf], lr=lr, iterations=sweeps).step()
        error = float(torch.linalg.matrix_norm(leaf.detach() - dense.X, 2))
        assert error <= 2 * c ** (sweeps + 2)
        drift = geometry.orthonormality_residual(leaf.detach())
        assert 0 < drift <= 4 * c ** (sweeps + 2) + 4 * c ** (2 * sweeps + 4)
        if last is not None:
            assert error <= c * last * (1 + 1e-9)
        last = error


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_the_error_of_the_sweeps_is_of_order_sweeps_plus_two(sweeps, device):
    start = leaf_on(9, 3, device=device, tolerance=0.9)
    G, errors = noise(start), []
    for lr in (0.2, 0.1):
        exact, near = copy.deepcopy(start), copy.deepcopy(start)
        exact.grad, near.grad = G.clone(), G.clone()
        RGDAdam([exact], lr=lr).step()
        RGDAdam([near], lr=lr, iterations=sweeps).step()
        errors.append(float((exact - near).detach().norm()))
    slope = torch.log2(torch.tensor(errors[0] / errors[1]))
    assert slope == pytest.approx(sweeps + 2, abs=0.1)


@pytest.mark.parametrize("iterations", [None, 2])
@pytest.mark.parametrize(("eps", "bound"), [(1e-8, 1e-6), (1e-30, 1e-13)])
def test_the_first_step_does_not_depend_on_the_size_of_the_gradient(iterations, eps, bound, device):
    start = leaf_on(9, 3, device=device, tolerance=0.9)
    G, ends = noise(start, 0.1), []
    for scale in (1.0, 10.0):
        leaf = copy.deepcopy(start)
        leaf.grad = scale * G
        RGDAdam([leaf], lr=0.1, eps=eps, iterations=iterations).step()
        ends.append(leaf.detach())
    assert (ends[0] - start.detach()).norm() > 0.05
    assert (ends[0] - ends[1]).abs().max() < bound


def test_the_exact_step_does_not_drift_and_the_sweeps_do(device):
    """lr 0.4, 500 steps, two sweeps: the paper's iteration is off by a few thousandths."""
    exact, near = (leaf_on(20, 5, device=device, tolerance=t) for t in (None, 0.5))
    pair = [RGDAdam([exact], lr=0.4), RGDAdam([near], lr=0.4, iterations=2)]
    for _ in range(500):
        for leaf, optimizer in zip((exact, near), pair, strict=True):
            leaf.grad = noise(leaf)
            optimizer.step()
    assert geometry.orthonormality_residual(exact) < 1e-13
    assert 1e-5 < geometry.orthonormality_residual(near) < 5e-2


def test_on_a_manifold_of_the_usual_tolerance_the_sweeps_are_projected(device):
    """The step is that of the sweeps, then the nearest point."""
    leaf = leaf_on(12, 4, device=device)
    thick = copy.deepcopy(leaf)
    thick.manifold = stiefel.Stiefel("euclidean", "cayley", tolerance=0.5)
    thick.grad = noise(leaf)
    leaf.grad = thick.grad.clone()
    for one in (leaf, thick):
        RGDAdam([one], lr=0.4, iterations=2).step()
    assert geometry.orthonormality_residual(thick.detach()) > 1e-9
    assert geometry.orthonormality_residual(leaf.detach()) < 1e-14
    assert (leaf - geometry.polar_factor(thick.detach())).abs().max() < 1e-14


def test_nothing_of_size_n_by_n_is_made(device):
    """A dense W would have 1e10 entries."""
    leaf = leaf_on(100_000, 2, dtype=torch.float32, device=device)
    for iterations in (None, 2):
        leaf.grad = noise(leaf)
        RGDAdam([leaf], lr=1e-3, iterations=iterations).step()
    assert leaf.manifold.check_point_on_manifold(leaf)


@pytest.mark.parametrize("iterations", [None, 2])
def test_zero_and_huge_gradients(iterations, device):
    leaf = leaf_on(3, 8, 2, dtype=torch.float32, device=device, tolerance=1e-2)
    start = leaf.detach().clone()
    optimizer = RGDAdam([leaf], lr=0.1, iterations=iterations)
    leaf.grad = torch.zeros_like(start)
    optimizer.step()
    assert torch.equal(leaf.detach(), start)
    leaf.grad = noise(leaf)
    leaf.grad[1] *= 1e25  # its square overflows
    leaf.grad[2] = 0
    optimizer.step()
    moved = (leaf.detach() - start).norm(dim=(-2, -1))
    assert moved[0] > 0.01
    assert moved[2] == 0
    assert all(torch.isfinite(value).all() for value in optimizer.state[leaf].values())
    for _ in range(20):  # and the parameter goes on
        before = leaf.detach().clone()
        leaf.grad = noise(leaf, 1e20)
        optimizer.step()
    assert (leaf.detach() - before).norm(dim=(-2, -1)).min() > 1e-3


def test_rate_as_a_tensor_and_groups_of_their_own(device):
    leaf = leaf_on(6, 2, device=device)
    leaf.grad = noise(leaf)
    twins = [copy.deepcopy(leaf) for _ in range(3)]
    for twin in twins:
        twin.grad = leaf.grad.clone()
    RGDAdam([leaf], lr=0.25).step()
    RGDAdam([twins[0]], lr=torch.tensor(0.25)).step()
    RGDAdam([twins[1]], lr=torch.tensor([0.25], dtype=torch.float64)).step()
    optimizer = RGDAdam([leaf_on(5, 2, device=device)], lr=0.25)
    optimizer.add_param_group({"params": [twins[2]], "iterations": None})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.99)
    optimizer.step()
    for twin in twins:
        assert (twin - leaf).abs().max() < 1e-15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (1.0, 0.9)}, "two numbers"),
        ({"betas": 0.9}, "two numbers"),
        ({"q": 1.0}, "between 0 and 1"),
        ({"q": 0.0}, "between 0 and 1"),
        ({"iterations": -1}, "count >= 0"),
        ({"iterations": 1.5}, "count >= 0"),
        ({"iterations": True}, "count >= 0"),
        ({"eps": 0.0}, "eps > 0"),
        ({"lr": -1.0}, "lr >= 0"),
        ({"weight_decay": 0.1}, "no point of the manifold"),
    ],
    ids=str,
)
def test_bad_options(options, words):
    with pytest.raises(ConfigurationError, match=words):
        RGDAdam([leaf_on(5, 2)], **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    "leaf",
    [
        stiefel.ManifoldParameter(torch.eye(4, 2), stiefel.Stiefel("euclidean", "qr")),
        geoopt.ManifoldParameter(torch.eye(4, 2), geoopt.EuclideanStiefel()),
    ],
    ids=["qr", "geoopt"],
)
def test_other_retractions_and_manifolds_are_sent_to_riemannian_adam(leaf):
    with pytest.raises(ConfigurationError, match=r"retraction='cayley'.*RiemannianAdam"):
        RGDAdam([leaf], lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, *DOUBLE], ids=str)
@pytest.mark.parametrize("radius", [0.3, 0.5, 0.99])
@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5), (2, 2, 1, 1), (2, 70, 70)], ids=str)
def test_inverse_by_products_is_the_inverse(dtype, radius, shape, device):
    E = torch.randn(shape, dtype=dtype, device=device)
    E = E * radius / torch.linalg.matrix_norm(E, 2, keepdim=True)
    eye = torch.eye(shape[-1], dtype=dtype, device=device)
    error = (inverse_of_one_minus(E, radius) @ (eye - E) - eye).abs().max()
    assert error < 50 * torch.finfo(dtype).eps / (1 - radius)
