"""Laws of the geoopt manifolds, and what geoopt's own get wrong."""

from __future__ import annotations

import copy
import io
import pickle

import geoopt
import pytest
import torch

from stiefel import geometry
from stiefel import manifolds as stiefel
from stiefel.errors import OffManifoldError, ShapeError, UnknownNameError
from stiefel.numerics import tolerance
from tests.registry import DTYPES, MANIFOLDS, SHAPES

each_manifold = pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)


def tangent(manifold, x):
    return manifold.proju(x, torch.randn_like(x))


@each_manifold
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_points_and_vectors_stay_where_they_belong(manifold, shape, dtype, device):
    batch, n, p = shape
    x = manifold.random(*batch, n, p, dtype=dtype, device=device).as_subclass(torch.Tensor)
    u, v = tangent(manifold, x), tangent(manifold, x)
    y, transported = manifold.retr_transp(x, u / 4, v)
    assert manifold.check_point_on_manifold(x)
    assert manifold.check_point_on_manifold(y)
    assert manifold.check_vector_on_tangent(x, u)
    assert geometry.tangency_residual(y, transported).max() < 20 * tolerance(dtype, n, p)
    assert torch.equal(manifold.retr(x, u / 4), y)
    assert manifold.inner(x, u, v).shape == batch
    assert manifold.inner(x, u, v, keepdim=True).shape == (*batch, 1, 1)
    gradient = manifold.egrad2rgrad(x, torch.randn_like(x))
    assert geometry.tangency_residual(x, gradient).max() < 20 * tolerance(dtype, n, p)


@each_manifold
def test_value_equality_hash_and_copies(manifold):
    twin = stiefel.Stiefel(manifold.metric, manifold.retraction)
    assert manifold == twin
    assert hash(manifold) == hash(twin)
    assert copy.deepcopy(manifold) == manifold
    assert pickle.loads(pickle.dumps(manifold)) == manifold
    assert sum(other == manifold for other in MANIFOLDS) == 1
    assert manifold != geoopt.EuclideanStiefel()


@each_manifold
@pytest.mark.parametrize("optimizer", [geoopt.optim.RiemannianSGD, geoopt.optim.RiemannianAdam])
def test_geoopt_optimizers_run_on_it(manifold, optimizer, device):
    """They minimise tr(X^T C X), whose minimum is the sum of the smallest eigenvalues."""
    C = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64, device=device))
    x = stiefel.ManifoldParameter(
        manifold.random(6, 2, dtype=torch.float64, device=device), manifold
    )
    opt = optimizer([x], lr=0.05)
    for _ in range(400):
        opt.zero_grad()
        loss = (x * (C @ x)).sum()
        loss.backward()
        opt.step()
    assert abs(float(loss.detach()) - 3.0) < 5e-3
    assert manifold.check_point_on_manifold(x)


def test_geoopt_canonical_projection_is_not_one(device):
    theirs, ours = geoopt.CanonicalStiefel(), stiefel.Stiefel("canonical")
    x = ours.random(6, 3, dtype=torch.float64, device=device).as_subclass(torch.Tensor)
    z = torch.randn_like(x)
    once = theirs.proju(x, z)
    assert (theirs.proju(x, once) - once).norm() / once.norm() > 0.05
    once = ours.proju(x, z)
    assert (ours.proju(x, once) - once).norm() < 1e-13


def test_auto_retraction_is_fixed_when_the_manifold_is_made():
    assert stiefel.Stiefel(retraction="auto", sizes=(1024, 64)).retraction == "cayley"
    assert stiefel.Stiefel(retraction="auto", sizes=(64, 64)).retraction == "cholesky_qr"
    assert (
        stiefel.Stiefel(retraction="auto", sizes=(9, 1), device="cuda").retraction == "cholesky_qr"
    )
    with pytest.raises(ValueError, match="sizes"):
        stiefel.Stiefel(retraction="auto")


def test_a_stiefel_manifold_is_one_whoever_wrote_it():
    theirs = [geoopt.Stiefel(), geoopt.Stiefel(canonical=False), geoopt.EuclideanStiefelExact()]
    others = [geoopt.Sphere(), geoopt.Euclidean(ndim=2), geoopt.Scaled(geoopt.Stiefel()), None]
    assert all(stiefel.is_stiefel(manifold) for manifold in [*MANIFOLDS, *theirs])
    assert not any(stiefel.is_stiefel(manifold) for manifold in others)


@pytest.mark.parametrize("wrong", [{"inner": "canon"}, {"retraction": "caley"}])
def test_unknown_names_list_the_valid_ones(wrong):
    with pytest.raises(UnknownNameError, match=r"expected one of .*Did you mean"):
        stiefel.Stiefel(**wrong)


class TestManifoldParameter:
    def test_keeps_its_manifold(self, device):
        x = stiefel.ManifoldParameter(torch.eye(4, 2, device=device), stiefel.Stiefel("euclidean"))
        for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert isinstance(twin, stiefel.ManifoldParameter)
            assert twin.manifold == x.manifold
            assert twin.requires_grad
            assert torch.equal(twin, x)
            assert twin.data_ptr() != x.data_ptr()

    def test_a_drifted_point_can_be_copied(self, device):
        x = stiefel.ManifoldParameter(torch.eye(4, 2, device=device))
        with torch.no_grad():
            x.mul_(2)
        assert torch.equal(copy.deepcopy(x), x)

    def test_weights_only_loading(self, device):
        holder = torch.nn.Module()
        holder.X = stiefel.ManifoldParameter(torch.eye(4, 2, device=device))
        buffer = io.BytesIO()
        torch.save(holder.state_dict(), buffer)
        buffer.seek(0)
        assert torch.equal(
            torch.load(buffer, weights_only=True)["X"], torch.eye(4, 2, device=device)
        )

    def test_off_manifold_data_is_refused_with_numbers(self):
        with pytest.raises(OffManifoldError, match=r"\|X\^H X - I\| is 3.00e\+00.*tolerance"):
            stiefel.ManifoldParameter(2 * torch.eye(4, 2))

    def test_wide_data_is_refused(self):
        with pytest.raises(ShapeError, match=r"n >= p, got \(2, 4\)"):
            stiefel.ManifoldParameter(torch.eye(2, 4))

    def test_manifold_random_refuses_wide(self):
        with pytest.raises(ShapeError, match="n >= p"):
            stiefel.Stiefel().random(2, 4)

    def test_checks_explain_themselves(self):
        manifold = stiefel.Stiefel()
        ok, reason = manifold.check_point_on_manifold(torch.ones(3, 2), explain=True)
        assert not ok
        assert "projx" in reason
        x = torch.eye(3, 2)
        ok, reason = manifold.check_vector_on_tangent(x, torch.ones(3, 2), explain=True)
        assert not ok
        assert "proju" in reason
        with pytest.raises(OffManifoldError):
            manifold.assert_check_vector_on_tangent(x, torch.ones(3, 2))
