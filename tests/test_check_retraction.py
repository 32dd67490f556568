"""The check of a retraction: ours have the orders of the table, planted faults are named."""

from __future__ import annotations

import math

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.diagnostics import check_retraction
from stiefel.errors import ConfigurationError, DiagnosisError, OffManifoldError, ShapeError
from tests.registry import DOUBLE, MANIFOLDS, RETRACTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

ORDER = "order of |R(tu) - exp(tu)|"
DERIVATIVE = {"derivative at zero is the identity", "order of |R(tu) - x - tu|"}


def failures(report):
    return {finding.name for finding in report.failures}


@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
@pytest.mark.parametrize("case", RETRACTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_the_orders_are_those_of_the_registry(case, metric, dtype):
    R, manifold = geometry.RETRACTIONS[case.name], stiefel.Stiefel(metric)
    order = case.orders[metric]
    shapes, points = [(7, 3), (2, 3, 6, 2)], 1 if dtype.is_complex else 2
    report = check_retraction(R, manifold, shapes=shapes, points=points, order=order, dtype=dtype)
    assert report.ok, str(report)
    assert abs(report[ORDER].measured - order) < 0.1
    assert not report.skipped
    special = [(6, 6), (1, 1), (2, 4, 4)] + ([] if dtype.is_complex else [(5, 1)])
    report = check_retraction(
        R, manifold, shapes=special, points=points, order=case.special_order, dtype=dtype
    )
    assert report.ok, str(report)
    if order == 2 and not dtype.is_complex:
        claimed = check_retraction(R, manifold, shapes=[(7, 3)], points=1, order=3, dtype=dtype)
        assert failures(claimed) == {ORDER}


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_every_manifold_of_ours_passes(manifold):
    report = check_retraction(manifold, points=1)
    assert report.ok, str(report)
    if manifold.retraction == "exp":
        assert report[ORDER].measured == math.inf  # it is rounding at every step


@pytest.mark.parametrize(
    "manifold",
    [
        geoopt.EuclideanStiefel(),
        geoopt.EuclideanStiefelExact(),
        geoopt.Sphere(),
        geoopt.SymmetricPositiveDefinite(),
        geoopt.PoincareBall(),
        geoopt.Euclidean(),
    ],
    ids=str,
)
def test_what_is_right_in_geoopt_passes(manifold):
    report = check_retraction(manifold)
    assert report.ok, str(report)


def test_geoopt_canonical_is_condemned_and_the_reason_is_named():
    report = check_retraction(geoopt.CanonicalStiefel())
    assert failures(report) == DERIVATIVE
    limit = report["derivative at zero is the identity"]
    assert 0.6 < limit.measured < 1.01
    assert "missing projector I - x x^H / 2" in limit.meaning
    assert abs(report["order of |R(tu) - x - tu|"].measured - 1) < 0.01
    assert report["R(x, u) is on the manifold"].ok
    assert any("expmap does not start along u" in reason for reason in report.skipped)
    with pytest.raises(DiagnosisError, match="no retraction"):
        report.raise_for_failures()


class TestPlantedFaults:
    def test_a_factor(self):
        def scaled(X, u):
            return geometry.polar_retraction(X, 1.01 * u)

        report = check_retraction(scaled, shapes=[(7, 3)])
        assert failures(report) == {*DERIVATIVE, ORDER}
        assert report["derivative at zero is the identity"].measured == pytest.approx(0.01)
        assert report.subject.startswith("retraction scaled on Stiefel")

    def test_a_factor_too_small_for_a_slope(self):
        report = check_retraction(
            lambda X, u: geometry.polar_retraction(X, (1 + 1e-6) * u), shapes=[(7, 3)]
        )
        assert "derivative at zero is the identity" in failures(report)

    def test_qr_without_signs(self):
        report = check_retraction(lambda X, u: torch.linalg.qr(X + u)[0])
        assert "R(x, 0) = x" in failures(report)
        assert "diagonal was not made positive" in report["R(x, 0) = x"].meaning

    def test_leaving_the_manifold(self):
        report = check_retraction(lambda X, u: X + u)
        assert failures(report) == {"R(x, u) is on the manifold"}

    def test_mixing_the_members_of_a_batch(self):
        def mixed(X, u):
            return geometry.polar_retraction(X, u.mean(0, keepdim=True) if u.ndim > 2 else u)

        report = check_retraction(mixed, shapes=[(7, 3)])
        assert failures(report) == {"a batch gives what its members give"}

    def test_working_in_place(self):
        def in_place(X, u):
            return X.copy_(geometry.polar_retraction(X, u))

        report = check_retraction(in_place, shapes=[(7, 3)])
        assert failures(report) == {"arguments changed by R(x, 0)", "arguments changed by R(x, u)"}

    def test_an_error_at_some_steps(self):
        def short_steps_only(X, u):
            if 0 < u.norm() < 1e-5:
                raise RuntimeError("too short")
            return geometry.polar_retraction(X, u)

        report = check_retraction(short_steps_only, shapes=[(7, 3)])
        assert "R(x, tu) raised RuntimeError: too short" in str(report)

    def test_a_wrong_shape(self):
        report = check_retraction(lambda X, u: (X + u)[..., :1], shapes=[(7, 3)])
        assert failures(report) == {"shape of R(x, u) is that of x"}

    def test_an_error_inside(self):
        def broken(X, u):
            raise RuntimeError("no such step")

        report = check_retraction(broken, shapes=[(7, 3)])
        assert "R(x, 0) raised RuntimeError: no such step" in str(report)

    def test_nan_at_zero(self):
        report = check_retraction(
            lambda X, u: geometry.polar_retraction(X, u * (u.norm() / u.norm())), shapes=[(7, 3)]
        )
        assert "R(x, 0) = x" in failures(report)

    def test_nothing_is_passed_that_was_not_measured(self):
        """Order 3 is claimed where neither exponential nor embedded metric can confirm it."""

        class NoExponential(stiefel.Stiefel):
            def expmap(self, x, u):
                raise NotImplementedError

        report = check_retraction(NoExponential("canonical"), shapes=[(7, 3)], order=3)
        assert failures(report) == {"order"}
        assert "could not be measured" in report["order"].meaning
        assert check_retraction(NoExponential("canonical"), shapes=[(7, 3)]).skipped


@pytest.mark.parametrize(("retraction", "order"), [("polar", 3), ("cayley", 2), ("qr", 2)])
def test_the_order_without_an_exponential_is_that_of_the_tangential_part(retraction, order):
    class NoExponential(stiefel.Stiefel):
        def expmap(self, x, u):
            raise NotImplementedError

    manifold = NoExponential("euclidean", retraction)
    report = check_retraction(manifold, shapes=[(7, 3)], order=order)
    assert report.ok, str(report)
    assert abs(report["order of tangential |R(tu) - x - tu|"].measured - order) < 0.1


def test_a_wrong_projection_does_not_spoil_the_verdict():
    """Tangent vectors come from projx: geoopt's canonical proju doubles part of them."""

    class CayleyOnTheirs(geoopt.CanonicalStiefel):
        def retr(self, x, u):
            return geometry.cayley_retraction(x, u)

    assert check_retraction(CayleyOnTheirs()).ok


def test_given_points():
    X = stiefel.Stiefel().random(4, 6, 3)
    report = check_retraction(geometry.cayley_retraction, X=X, order=3)
    assert report.ok, str(report)
    assert "(4, 6, 3)" in report.curves[0].name
    Z = stiefel.Stiefel().random(6, 3, dtype=torch.complex128)
    assert check_retraction(retraction=geometry.qr_retraction, X=Z).ok
    assert check_retraction(manifold=stiefel.Stiefel(), X=Z).ok


def test_a_function_on_another_manifold_and_a_parameter_that_knows_its_own():
    sphere = geoopt.Sphere()

    def normalised(x, u):
        return (x + u) / (x + u).norm(dim=-1, keepdim=True)

    assert check_retraction(normalised, sphere, order=3).ok
    x = geoopt.ManifoldParameter(sphere.random(5), sphere)
    report = check_retraction(normalised, X=x)
    assert report.ok, str(report)
    assert "Sphere" in report.subject


def test_the_report_draws_its_curves(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    report = check_retraction(geometry.cayley_retraction, shapes=[(7, 3)])
    assert [curve.order for curve in report.curves] == [2, 2]
    report.draw(tmp_path / "slopes.png")
    assert (tmp_path / "slopes.png").stat().st_size > 5000


class TestRefusals:
    def test_neither_function_nor_manifold(self):
        with pytest.raises(ConfigurationError, match="expected a manifold, got NoneType"):
            check_retraction()
        with pytest.raises(ConfigurationError, match="expected a manifold, got str"):
            check_retraction("cayley")
        with pytest.raises(ConfigurationError, match="got the class Stiefel"):
            check_retraction(stiefel.Stiefel)

    def test_two_manifolds(self):
        with pytest.raises(ConfigurationError, match="give one manifold"):
            check_retraction(stiefel.Stiefel(), stiefel.Stiefel())

    def test_order(self):
        with pytest.raises(ConfigurationError, match=r"order 2 or 3.*got 1"):
            check_retraction(geometry.qr_retraction, order=1)

    def test_a_point_of_no_named_manifold(self):
        with pytest.raises(OffManifoldError, match="no manifold was named"):
            check_retraction(lambda x, u: x + u, X=torch.ones(3))
        with pytest.raises(ShapeError, match="is refused"):
            check_retraction(geometry.qr_retraction, shapes=[(2, 5)])
