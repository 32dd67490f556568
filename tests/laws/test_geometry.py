"""Laws of the geometric maps, over shapes and dtypes."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch

from stiefel import geometry
from stiefel.geometry.retractions import cayley_parts
from stiefel.numerics import tolerance
from tests.points import eye_like, sample, wide_bound
from tests.registry import METRICS, RETRACTIONS, TRANSPORTS


class TestTangent:
    def test_projection_is_linear_idempotent_self_adjoint(self, shape, dtype, device):
        X, *_ = sample(shape, dtype, device)
        Z, Y = torch.randn_like(X), torch.randn_like(X)
        P = geometry.tangent_projection
        bound = 10 * wide_bound(X)
        assert (P(X, 2 * Z - 3 * Y) - 2 * P(X, Z) + 3 * P(X, Y)).abs().max() < bound
        assert (P(X, P(X, Z)) - P(X, Z)).abs().max() < bound
        left = geometry.euclidean_inner(X, P(X, Z), Y)
        right = geometry.euclidean_inner(X, Z, P(X, Y))
        assert (left - right).abs().max() < bound * X.numel()

    def test_projection_lands_in_the_tangent_space_and_drops_normal_parts(
        self, shape, dtype, device
    ):
        X, u, normal = sample(shape, dtype, device)
        bound = 10 * wide_bound(X)
        assert (
            geometry.tangency_residual(X, geometry.tangent_projection(X, torch.randn_like(X))).max()
            < bound
        )
        assert (geometry.tangent_projection(X, u + normal) - u).abs().max() < bound


@pytest.mark.parametrize("metric", METRICS)
class TestMetrics:
    def test_gradient_represents_the_differential(self, metric, shape, dtype, device):
        X, v, _ = sample(shape, dtype, device)
        inner, gradient = METRICS[metric]
        G = torch.randn_like(X)
        differential = geometry.euclidean_inner(X, G, v)
        assert (inner(X, gradient(X, G), v) - differential).abs().max() < 20 * wide_bound(X)

    def test_gradient_is_tangent(self, metric, shape, dtype, device):
        X, *_ = sample(shape, dtype, device)
        r = METRICS[metric][1](X, torch.randn_like(X))
        assert geometry.tangency_residual(X, r).max() < 20 * wide_bound(X)

    def test_inner_is_real_symmetric_positive(self, metric, shape, double, device):
        X, u, _ = sample(shape, double, device)
        v = geometry.random_tangent(X)
        inner = METRICS[metric][0]
        assert not inner(X, u, v).is_complex()
        assert (inner(X, u, v) - inner(X, v, u)).abs().max() < 1e-12
        assert (inner(X, v, v) >= 0).all()


@pytest.mark.parametrize("case", RETRACTIONS, ids=lambda c: c.name)
class TestRetractions:
    def test_stays_on_the_manifold_for_steps_of_any_size(self, case, shape, dtype, device):
        for scale in (0.0, 1e-6, 1.0, 1e3):
            X, u, _ = sample(shape, dtype, device, scale)
            Y = geometry.RETRACTIONS[case.name](X, u)
            assert geometry.orthonormality_residual(Y).max() < wide_bound(X), scale

    def test_fixes_the_point_at_zero(self, case, shape, dtype, device):
        X, u, _ = sample(shape, dtype, device)
        Y = geometry.RETRACTIONS[case.name](X, torch.zeros_like(u))
        assert (Y - X).abs().max() < wide_bound(X)

    @pytest.mark.parametrize("metric", METRICS)
    def test_has_its_order(self, case, metric, shape, double, device):
        X, u, _ = sample(shape, double, device)
        n, p = X.shape[-2:]
        special = p == n or (p == 1 and not double.is_complex)
        order = case.special_order if special else case.orders[metric]
        R, exp = geometry.RETRACTIONS[case.name], geometry.EXPONENTIALS[metric]
        small, large = 2e-3, 2e-2
        near = float((R(X, small * u) - exp(X, small * u)).norm())
        far = float((R(X, large * u) - exp(X, large * u)).norm())
        if far > 1e-13:  # an error at rounding level passes
            assert math.log(far / near) / math.log(large / small) > order - 0.1

    def test_normal_parts_are_dropped(self, case, shape, double, device):
        X, u, normal = sample(shape, double, device)
        R = geometry.RETRACTIONS[case.name]
        assert (R(X, u + normal) - R(X, u)).abs().max() < 1e-12

    def test_gradcheck(self, case, device):
        X, u, _ = sample(((2,), 4, 2), torch.float64, device)
        X.requires_grad_()
        u.requires_grad_()
        assert torch.autograd.gradcheck(geometry.RETRACTIONS[case.name], (X, u))
        Q, v, _ = sample(((), 3, 3), torch.complex128, device)
        v.requires_grad_()
        assert torch.autograd.gradcheck(lambda v: geometry.RETRACTIONS[case.name](Q, v), (v,))

    def test_batch_equals_loop(self, case, double, device):
        X, u, _ = sample(((2, 3), 6, 2), double, device)
        R = geometry.RETRACTIONS[case.name]
        whole = R(X, u)
        for i in range(2):
            for j in range(3):
                assert (R(X[i, j], u[i, j]) - whole[i, j]).abs().max() < 1e-13

    def test_empty_batch(self, case, device):
        X = torch.empty(0, 5, 2, device=device)
        assert geometry.RETRACTIONS[case.name](X, X).shape == (0, 5, 2)


def test_qr_and_cholesky_qr_are_the_same_retraction(shape, double, device):
    X, u, _ = sample(shape, double, device, 3.0)
    assert (
        geometry.qr_retraction(X, u) - geometry.cholesky_qr_retraction(X, u)
    ).abs().max() < 1e-12


def test_cayley_equals_the_dense_form(shape, double, device):
    """(I - W/2)^-1 (I + W/2) X with W = P u X^H - X u^H P, P = I - X X^H / 2."""
    X, u, _ = sample(shape, double, device, 2.0)
    identity = eye_like(X)
    P = identity - X @ X.mH / 2
    W = P @ u @ X.mH - X @ u.mH @ P
    dense = torch.linalg.solve(identity - W / 2, (identity + W / 2) @ X)
    assert (geometry.cayley_retraction(X, u) - dense).abs().max() < 1e-12


def test_cayley_step_matrix_is_far_from_singular(shape, double, device):
    X, u, _ = sample(shape, double, device, 50.0)
    *_, M, _ = cayley_parts(X, u)
    assert torch.linalg.svdvals(M).min() >= 1 - 1e-12


@pytest.mark.parametrize("shape", [((3,), 200, 200), ((3,), 300, 160)], ids=str)
def test_large_batches_equal_the_loop_whatever_the_threads(shape, device):
    """Batched LU of torch 2.13 is silently wrong here once the number of threads was set."""
    X, u, _ = sample(shape, torch.float64, device)
    torch.set_num_threads(torch.get_num_threads())
    z = geometry.random_tangent(X)
    moved, carried = geometry.cayley_retraction(X, u), geometry.cayley_transport(X, u, z)
    for k in range(3):
        assert (geometry.cayley_retraction(X[k], u[k]) - moved[k]).abs().max() < 1e-12
        assert (geometry.cayley_transport(X[k], u[k], z[k]) - carried[k]).abs().max() < 1e-12


@pytest.mark.parametrize("metric", METRICS)
class TestExponentials:
    def test_stays_on_the_manifold(self, metric, shape, double, device):
        X, u, _ = sample(shape, double, device, 2.0)
        Y = geometry.EXPONENTIALS[metric](X, u)
        assert geometry.orthonormality_residual(Y).max() < 1e-12

    def test_is_a_geodesic(self, metric, shape, double, device):
        """Its speed is constant, and running on from the middle arrives at the same end."""
        X, u, _ = sample(shape, double, device, 1.5)
        exp, inner = geometry.EXPONENTIALS[metric], METRICS[metric][0]

        def curve(t):
            return exp(X, t * u)

        t = torch.tensor(0.6, dtype=torch.float64, device=device)
        h = 1e-6
        velocity = (curve(t + h) - curve(t - h)) / (2 * h)
        middle = curve(t)
        speed = inner(middle, velocity, velocity)
        assert (speed - inner(X, u, u)).abs().max() < 1e-7
        onward = exp(middle, 0.4 * geometry.tangent_projection(middle, velocity))
        assert (onward - curve(1.0)).abs().max() < 1e-7

    def test_gradient_at_zero_is_finite_and_the_identity(self, metric, device):
        X, u, _ = sample(((), 5, 2), torch.float64, device)
        zero = torch.zeros_like(X, requires_grad=True)
        G = torch.randn_like(X)
        (g,) = torch.autograd.grad((G * geometry.EXPONENTIALS[metric](X, zero)).sum(), zero)
        assert torch.isfinite(g).all()
        assert ((g * u).sum() - (G * u).sum()).abs() < 1e-12

    def test_gradcheck(self, metric, device):
        X, u, _ = sample(((2,), 4, 2), torch.float64, device)
        assert torch.autograd.gradcheck(
            geometry.EXPONENTIALS[metric], (X.requires_grad_(), u.requires_grad_())
        )


@pytest.mark.parametrize("metric", geometry.EXPONENTIALS)
@pytest.mark.parametrize("angle", [1e-3, 0.02, 0.05, 0.09, 0.3, 2.0])
def test_small_single_turns_are_exact(metric, angle, device):
    """A single float64 matrix of norm 0.05 is where torch's matrix exponential loses six digits."""
    c, s = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64, device=device)
    u = torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64, device=device)
    exp = geometry.EXPONENTIALS[metric]
    assert (exp(torch.eye(2, dtype=torch.float64, device=device), u) - turn).abs().max() < 1e-15
    ahead = exp(torch.eye(3, 2, dtype=torch.float64, device=device), torch.cat([u, 0 * u[:1]]))
    assert (ahead[:2] - turn).abs().max() < 2e-15


class TestTransports:
    @pytest.mark.parametrize("name", TRANSPORTS)
    def test_lands_in_the_tangent_space_and_is_linear(self, name, shape, dtype, device):
        retraction, transport = TRANSPORTS[name]
        X, u, _ = sample(shape, dtype, device)
        Y, z, w = geometry.RETRACTIONS[retraction](X, u), *map(geometry.random_tangent, (X, X))
        Tz, Tw = transport(X, u, z), transport(X, u, w)
        assert geometry.tangency_residual(Y, Tz).max() < 20 * wide_bound(X)
        assert (transport(X, u, 2 * z - w) - 2 * Tz + Tw).abs().max() < 20 * wide_bound(X)
        assert (transport(X, torch.zeros_like(u), z) - z).abs().max() < 20 * wide_bound(X)

    def test_cayley_is_isometric_in_both_metrics(self, shape, dtype, device):
        X, u, _ = sample(shape, dtype, device)
        z, w = geometry.random_tangent(X), geometry.random_tangent(X)
        Y = geometry.cayley_retraction(X, u)
        Tz, Tw = geometry.cayley_transport(X, u, z), geometry.cayley_transport(X, u, w)
        assert geometry.tangency_residual(Y, Tz).max() < 20 * wide_bound(X)
        for inner, _ in METRICS.values():
            assert (inner(Y, Tz, Tw) - inner(X, z, w)).abs().max() < 100 * wide_bound(X)

    def test_cayley_equals_the_dense_form(self, shape, double, device):
        X, u, _ = sample(shape, double, device)
        z = geometry.random_tangent(X)
        identity = eye_like(X)
        P = identity - X @ X.mH / 2
        W = P @ u @ X.mH - X @ u.mH @ P
        dense = torch.linalg.solve(identity - W / 2, (identity + W / 2) @ z)
        assert (geometry.cayley_transport(X, u, z) - dense).abs().max() < 1e-12

    def test_cayley_carries_the_velocity_of_its_own_curve(self, shape, double, device):
        X, u, _ = sample(shape, double, device, 0.5)
        h = 1e-6
        R = geometry.cayley_retraction
        start = (R(X, h * u) - R(X, -h * u)) / (2 * h)
        assert (start - u).abs().max() < 1e-8


def test_residual_is_measured_in_float64_even_under_autocast(device):
    X = geometry.haar(64, 64, dtype=torch.float64, device=device).float()
    plain = geometry.orthonormality_residual(X)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(geometry.orthonormality_residual(X), plain)
    assert plain.dtype == torch.float64
    assert plain < 1e-6


@pytest.mark.parametrize("name", geometry.RETRACTIONS)
@pytest.mark.parametrize("guard", ["autocast", "precision", "cuda tf32", "mkldnn bf16", "tf32"])
def test_reduced_precision_never_reaches_a_retraction(name, guard, device):
    X, u, _ = sample(((), 64, 16), torch.float32, device)
    expected = geometry.RETRACTIONS[name](X, u)
    if guard == "autocast":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = geometry.RETRACTIONS[name](X, u)
    elif guard != "precision":  # torch's newer settings
        holder = {
            "cuda tf32": torch.backends.cuda.matmul,
            "mkldnn bf16": torch.backends.mkldnn.matmul,
            "tf32": torch.backends,
        }[guard]
        before = holder.fp32_precision
        holder.fp32_precision = guard.split()[-1]
        try:
            got = geometry.RETRACTIONS[name](X, u)
            assert holder.fp32_precision == guard.split()[-1]
        finally:
            holder.fp32_precision = before
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            got = geometry.RETRACTIONS[name](X, u)
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", geometry.RETRACTIONS)
def test_sixteen_bit_points_are_moved_in_float32(name, device):
    X, u, _ = sample(((), 16, 4), torch.float32, device)
    got = geometry.RETRACTIONS[name](X.bfloat16(), u.bfloat16())
    assert got.dtype == torch.bfloat16
    assert geometry.orthonormality_residual(got).max() < tolerance(torch.bfloat16, 16, 4)


@pytest.mark.parametrize("name", geometry.RETRACTIONS)
@pytest.mark.parametrize("lr", [0.01, 0.1])
@pytest.mark.usefixtures("one_thread")
def test_ten_thousand_noisy_steps_do_not_drift(name, lr, device):
    X, *_ = sample(((), 64, 16), torch.float32, device)
    for _ in range(10_000):
        G = torch.randn_like(X)
        X = geometry.RETRACTIONS[name](X, -lr * geometry.canonical_gradient(X, G))
    assert geometry.orthonormality_residual(X) < 1e-5


def test_geoopt_canonical_retraction_is_not_one(device):
    """The law that tells: |(R(x, t u) - x)/t - u| must vanish with t. Membership cannot see it."""
    X, u, _ = sample(((), 8, 3), torch.float64, device)
    theirs = geoopt.CanonicalStiefel()
    t = 1e-6
    assert ((theirs.retr(X, t * u) - X) / t - u).norm() / u.norm() > 0.1
    for name, R in geometry.RETRACTIONS.items():
        assert ((R(X, t * u) - X) / t - u).norm() / u.norm() < 1e-5, name


class TestBadInput:
    @pytest.mark.parametrize("name", geometry.RETRACTIONS)
    def test_wide_points_are_refused_with_a_remedy(self, name):
        with pytest.raises(ValueError, match=r"n >= p, got \(2, 5\).*transpose"):
            geometry.RETRACTIONS[name](torch.randn(2, 5), torch.randn(2, 5))

    def test_vectors_are_refused(self):
        with pytest.raises(ValueError, match=r"got \(5,\)"):
            geometry.tangent_projection(torch.randn(5), torch.randn(5))

    def test_mixed_dtypes_are_refused(self):
        with pytest.raises(TypeError, match=r"one dtype and device.*float32.*float64"):
            geometry.cayley_retraction(torch.eye(4, 2), torch.zeros(4, 2, dtype=torch.float64))

    @pytest.mark.parametrize("name", geometry.RETRACTIONS)
    def test_vectors_of_another_size_are_refused(self, name):
        for size in ((5, 3), (5, 1), (2,)):
            with pytest.raises(ValueError, match=r"size \(5, 2\)"):
                geometry.RETRACTIONS[name](torch.eye(5, 2), torch.zeros(size))

    def test_a_rank_deficient_matrix_has_no_cholesky_qr(self):
        assert torch.isnan(geometry.cholesky_qr_factor(torch.ones(5, 2))).all()

    def test_integers_are_refused(self):
        with pytest.raises(TypeError, match="floating point or complex"):
            geometry.polar_factor(torch.eye(3, dtype=torch.int64))

    def test_haar_sizes(self):
        with pytest.raises(ValueError, match="n = 2, p = 3"):
            geometry.haar(2, 3)
        with pytest.raises(ValueError, match="square"):
            geometry.haar(4, 2, determinant=1)
        with pytest.raises(TypeError, match="real"):
            geometry.haar(4, dtype=torch.complex64, determinant=1)
