"""The check of a manifold: ours pass, and each planted fault is found by its name."""

from __future__ import annotations

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.diagnostics import check_manifold
from stiefel.errors import (
    ConfigurationError,
    DiagnosisError,
    DtypeError,
    OffManifoldError,
    ShapeError,
)
from tests.registry import DOUBLE, MANIFOLDS, SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = [(*batch, n, p) for batch, n, p in SHAPES]


def failures(report):
    return {finding.name for finding in report.failures}


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_every_manifold_of_ours_passes(manifold, dtype):
    """All shapes where the metric is first met, two for the other retractions of the metric."""
    shapes = FLAT if manifold.retraction == "cayley" else FLAT[1:3]
    report = check_manifold(manifold, shapes=shapes, points=1, dtype=dtype)
    assert report.ok, str(report)
    assert not report.skipped
    assert {"proju is idempotent", "egrad2rgrad represents the derivative"} <= {
        finding.name for finding in report.findings
    }


@pytest.mark.parametrize(
    "manifold",
    [
        geoopt.EuclideanStiefel(),
        geoopt.EuclideanStiefelExact(),
        geoopt.Sphere(),
        geoopt.SymmetricPositiveDefinite(),
        geoopt.Euclidean(ndim=1),
    ],
    ids=str,
)
def test_what_is_right_in_geoopt_passes(manifold):
    report = check_manifold(manifold, points=1)
    assert report.ok, str(report)


def test_geoopt_canonical_is_condemned_and_the_reason_is_named():
    report = check_manifold(geoopt.CanonicalStiefel())
    assert failures(report) == {
        "proju is idempotent",
        "proju keeps tangent vectors",
        "expmap starts along u",
        "order of |expmap(tu) - x - tu|",
        "expmap keeps its speed",
        "expmap makes the energy stationary",
    }
    assert report["egrad2rgrad represents the derivative"].ok
    assert report["proju keeps tangent vectors"].measured > 0.1
    assert "egrad2rgrad) is no projection" in report["proju is idempotent"].meaning
    assert "logmap is not implemented" in report.skipped
    with pytest.raises(DiagnosisError, match="WRONG  proju is idempotent"):
        report.raise_for_failures()


class NotTangent(stiefel.Stiefel):
    def proju(self, x, u):
        return u - 0.9 * x @ (x.mH @ u + u.mH @ x) / 2


class Oblique(stiefel.Stiefel):
    """A projection onto the tangent space along a tilted complement."""

    def proju(self, x, u):
        normal = u - super().proju(x, u)
        B = torch.eye(*x.shape[-2:], dtype=x.dtype).roll(1, -2)
        return u - normal + super().proju(x, B @ x.mH @ normal)


class Affine(stiefel.Stiefel):
    def proju(self, x, u):
        return super().proju(x, u) + 0.1 * super().proju(x, torch.ones_like(u))


class HalfGradient(stiefel.Stiefel):
    def egrad2rgrad(self, x, u):
        return super().egrad2rgrad(x, u) / 2


class DoubleInner(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        return 2 * super().inner(x, u, v, keepdim=keepdim)


class NormalGradient(stiefel.Stiefel):
    def egrad2rgrad(self, x, u):
        return super().egrad2rgrad(x, u) + x


class Indefinite(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        v = u if v is None else v
        a, b = x.mH @ u, x.mH @ v
        return ((u.conj() * v).sum((-1, -2)) - 3 * (a.conj() * b).sum((-1, -2))).real


class Lopsided(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        v = u if v is None else v
        return super().inner(x, u, v) + (u * v.roll(1, -2)).sum((-1, -2))


class Quadratic(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        v = u if v is None else v
        return super().inner(x, u, v) * (1 + (u * u).sum((-1, -2)) + (v * v).sum((-1, -2)))


class Mixing(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        value = super().inner(x, u, v)
        return value if value.ndim == 0 else value.sum(0, keepdim=True).expand_as(value)


class OtherExponential(stiefel.Stiefel):
    """The metric is canonical, the geodesics are Euclidean."""

    def expmap(self, x, u):
        return geometry.EXPONENTIALS["euclidean"](x, u)


class ShortLogarithm(stiefel.Stiefel):
    def logmap(self, x, y):
        return 0.99 * super().logmap(x, y)


class LongDistance(stiefel.Stiefel):
    def dist(self, x, y, *, keepdim=False):
        return 1.01 * super().dist(x, y, keepdim=keepdim)


class OffManifold(stiefel.Stiefel):
    def random(self, *size, **options):
        return 1.1 * super().random(*size, **options)


class Gullible(stiefel.Stiefel):
    def check_point_on_manifold(self, x, *, explain=False, atol=None, rtol=None):
        return (True, None) if explain else True

    def check_vector_on_tangent(self, x, u, **options):
        return (True, None) if options.get("explain") else True


class Spread(stiefel.Stiefel):
    def inner(self, x, u, v=None, *, keepdim=False):
        return super().inner(x, u, v)[..., None]


class Overwriting(stiefel.Stiefel):
    def egrad2rgrad(self, x, u):
        return u.copy_(super().egrad2rgrad(x, u))


class Broken(stiefel.Stiefel):
    def egrad2rgrad(self, x, u):
        raise RuntimeError("no such gradient")


@pytest.mark.parametrize(
    ("manifold", "names"),
    [
        (NotTangent, {"proju gives tangent vectors", "proju is idempotent"}),
        (Oblique, {"proju is self-adjoint"}),
        (Affine, {"proju is linear", "proju keeps tangent vectors"}),
        (HalfGradient, {"egrad2rgrad represents the derivative"}),
        (DoubleInner, {"egrad2rgrad represents the derivative"}),
        (NormalGradient, {"egrad2rgrad gives tangent vectors"}),
        (Indefinite, {"inner is positive"}),
        (Lopsided, {"inner is symmetric"}),
        (Quadratic, {"inner is bilinear"}),
        (Mixing, {"a batch gives what its members give"}),
        (OtherExponential, {"expmap makes the energy stationary"}),
        (ShortLogarithm, {"logmap inverts expmap"}),
        (LongDistance, {"dist is the length of the geodesic"}),
        (OffManifold, {"random points refused", "projx keeps points"}),
        (Gullible, {"other points accepted", "other vectors accepted"}),
        (Spread, {"shape of inner is not that of the batch"}),
        (Overwriting, {"arguments changed by egrad2rgrad"}),
        (Broken, {"egrad2rgrad runs"}),
    ],
)
def test_a_planted_fault_is_found_by_its_name(manifold, names):
    report = check_manifold(manifold("canonical"), shapes=[(7, 3)], points=1)
    assert names <= failures(report), str(report)
    for name in names:
        assert report[name].meaning


def test_a_wrong_factor_is_measured():
    report = check_manifold(HalfGradient(), shapes=[(7, 3)])
    assert failures(report) == {"egrad2rgrad represents the derivative"}
    assert "0.5 times" in report["egrad2rgrad represents the derivative"].meaning


class TestWithoutUsableProjx:
    class NoProjection(stiefel.Stiefel):
        def projx(self, x):
            raise NotImplementedError

    class Doubles(stiefel.Stiefel):
        def projx(self, x):
            return 2 * super().projx(x)

    def test_it_is_skipped_and_said(self):
        report = check_manifold(self.NoProjection(), shapes=[(7, 3)])
        assert report.ok, str(report)
        assert "projx is not implemented" in report.skipped
        assert any("those of proju" in reason for reason in report.skipped)

    def test_a_wrong_one_is_named_and_blamed_alone(self):
        report = check_manifold(self.Doubles(), shapes=[(7, 3)])
        assert {"projx keeps points", "points of projx refused"} <= failures(report)
        assert all("projx" in name for name in failures(report))


def test_given_points_and_their_rounding():
    """A float32 point is moved onto the manifold in float64 before anything is measured."""
    X = stiefel.Stiefel().random(2, 5, 3)
    report = check_manifold(stiefel.Stiefel("euclidean"), X=X)
    assert report.ok, str(report)
    assert report["projx keeps points"].measured < 1e-14
    with pytest.raises(OffManifoldError):
        check_manifold(stiefel.Stiefel("euclidean"), X=X.double())


def test_the_same_numbers_each_time_and_no_traces_left():
    state = torch.get_rng_state()
    first = check_manifold(geoopt.Sphere())
    assert str(check_manifold(geoopt.Sphere())) == str(first)
    other = check_manifold(geoopt.Sphere(), generator=torch.Generator().manual_seed(5))
    assert str(other) != str(first)
    assert torch.equal(torch.get_rng_state(), state)


class TestRefusals:
    def test_no_manifold(self):
        with pytest.raises(ConfigurationError, match=r"expected a manifold, got Tensor"):
            check_manifold(torch.eye(3))
        with pytest.raises(ConfigurationError, match=r"got the class Stiefel: make one"):
            check_manifold(stiefel.Stiefel)

    def test_shapes(self):
        with pytest.raises(ShapeError, match=r"random\(2, 5\) is refused .*n >= p"):
            check_manifold(stiefel.Stiefel(), shapes=[(2, 5)])
        with pytest.raises(ShapeError, match="with 2 dimensions or more"):
            check_manifold(stiefel.Stiefel(), X=torch.ones(3))
        with pytest.raises(ConfigurationError, match="got both"):
            check_manifold(stiefel.Stiefel(), X=torch.eye(3), shapes=[(3, 3)])
        with pytest.raises(ConfigurationError, match="points=0"):
            check_manifold(stiefel.Stiefel(), points=0)

    def test_points_that_are_none(self):
        with pytest.raises(OffManifoldError, match="X is not on Stiefel"):
            check_manifold(stiefel.Stiefel(), X=torch.ones(3, 2, dtype=torch.float64))
        with pytest.raises(OffManifoldError, match="more than the rounding of"):
            check_manifold(stiefel.Stiefel(), X=1.01 * torch.eye(3, 2))

    def test_dtypes(self):
        with pytest.raises(DtypeError, match="float64 or complex128, got dtype="):
            check_manifold(stiefel.Stiefel(), dtype=torch.float32)
        with pytest.raises(DtypeError, match="floating point or complex numbers, got"):
            check_manifold(stiefel.Stiefel(), X=torch.eye(3, dtype=torch.int64))

    @pytest.mark.parametrize("shapes", [None, [(4, 3)]])
    def test_a_manifold_without_random_needs_points(self, shapes):
        class Rows(geoopt.Sphere):
            random = geoopt.Manifold.random

        for manifold in (Rows(), geoopt.Lorentz()):
            with pytest.raises(ConfigurationError, match=r"no random\(\*size\): write"):
                check_manifold(manifold, shapes=shapes)
        X = geoopt.Sphere().random(4, 3, dtype=torch.float64)
        assert check_manifold(Rows(), X=X).ok
