"""The check of transports: ours pass, planted faults are named."""

from __future__ import annotations

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.diagnostics import check_transport
from stiefel.errors import ConfigurationError
from tests.registry import DOUBLE, MANIFOLDS, SHAPES, TRANSPORTS

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = [(*batch, n, p) for batch, n, p in SHAPES]
R = geometry.cayley_retraction


def size(z):
    return z.norm(dim=(-2, -1), keepdim=True)


def failures(report):
    return {finding.name for finding in report.failures}


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_every_transport_of_the_registry_passes(name, dtype):
    retraction, transport = TRANSPORTS[name]
    report = check_transport(
        transport,
        retraction=geometry.RETRACTIONS[retraction],
        isometric=name == "cayley",
        shapes=FLAT,
        points=1,
        dtype=dtype,
    )
    assert report.ok, str(report)
    assert not report.skipped
    isometric = report["transport changes inner products by"].measured < 1e-12
    assert isometric == (name == "cayley")


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_every_manifold_of_ours_passes(manifold):
    report = check_transport(manifold, points=1, shapes=[(7, 3), (4, 4)])
    assert report.ok, str(report)
    assert report["retr_transp agrees with transp_follow_retr"].ok
    assert len(report.findings) == 30


@pytest.mark.parametrize(
    "manifold",
    [
        geoopt.CanonicalStiefel(),
        geoopt.EuclideanStiefel(),
        geoopt.Sphere(),
        geoopt.Euclidean(),
        geoopt.SymmetricPositiveDefinite(),
    ],
    ids=str,
)
def test_what_is_right_in_geoopt_passes(manifold):
    report = check_transport(manifold, points=1)
    assert report.ok, str(report)
    skipped = "transp is not implemented" in report.skipped
    assert skipped == isinstance(manifold, geoopt.CanonicalStiefel)


def test_an_isometry_is_required_on_demand_only():
    projection = TRANSPORTS["projection-cayley"][1]
    options = {"retraction": R, "shapes": [(7, 3)]}
    assert check_transport(projection, **options).ok
    report = check_transport(projection, isometric=True, **options)
    assert failures(report) == {"transport changes inner products by"}


def test_between_points():
    def transport(X, Y, z):
        return geometry.projection_transport(Y, z)

    assert check_transport(transport, between_points=True).ok
    assert not check_transport(transport, shapes=[(7, 3)]).ok  # u is taken for a point


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        (lambda X, u, z: z, "is tangent at the other point"),
        (lambda X, u, z: 1.01 * geometry.cayley_transport(X, u, z), "along zero is the identity"),
        (
            lambda X, u, z: geometry.cayley_transport(X, u, z) * (1 + size(z) * size(u)),
            "is linear",
        ),
        (
            lambda X, u, z: geometry.projection_transport(R(X, u), z + size(u).sqrt() * z.flip(-2)),
            "order",
        ),
        (lambda X, u, z: geometry.cayley_transport(X, u, z)[..., :1], "shape"),
    ],
    ids=["stays", "scaled", "not linear", "rough", "shape"],
)
def test_a_planted_fault_is_found_by_its_name(transport, name):
    names = {"order": "order of |transport(tu) z - z|", "shape": "shape of transport"}
    report = check_transport(transport, retraction=R, shapes=[(7, 3)], isometric=False)
    found = failures(report)
    if "zero" in name:  # then it does not tend to the identity either
        found.remove(names["order"])
    assert found == {names.get(name, f"transport {name}")}, str(report)


class OtherPoint(stiefel.Stiefel):
    def retr_transp(self, x, u, v):
        return geometry.qr_retraction(x, u), super().retr_transp(x, u, v)[1]


class OtherVector(stiefel.Stiefel):
    def transp_follow_retr(self, x, u, v):
        return self.transp(x, self.retr(x, u), v)


def test_pairs_that_disagree_are_named():
    report = check_transport(OtherPoint(), shapes=[(7, 3)])
    assert failures(report) == {"retr_transp agrees with retr"}
    report = check_transport(OtherVector(), shapes=[(7, 3)])
    assert failures(report) == {"retr_transp agrees with transp_follow_retr"}


def test_curves_and_refusals():
    report = check_transport(geometry.cayley_transport, retraction=R, shapes=[(7, 3)])
    assert [curve.order for curve in report.curves] == [1]
    with pytest.raises(ConfigurationError, match="go with a function"):
        check_transport(stiefel.Stiefel(), retraction=R)
    with pytest.raises(ConfigurationError, match="go with a function"):
        check_transport(stiefel.Stiefel(), stiefel.Stiefel())
    with pytest.raises(ConfigurationError, match="expected a manifold, got NoneType"):
        check_transport()
    with pytest.raises(ConfigurationError, match="expected a manifold, got Tensor"):
        check_transport(torch.eye(3))
