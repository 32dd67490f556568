"""Laws of the factors of a matrix, and of random points."""

from __future__ import annotations

import math

import pytest
import torch

from stiefel import geometry
from stiefel.numerics import tolerance
from tests.points import wide_bound
from tests.registry import DOUBLE


class TestFactors:
    def test_qr_factor_leaves_a_triangular_factor_of_positive_diagonal(self, shape, double, device):
        batch, n, p = shape
        Z = torch.randn(*batch, n, p, dtype=double, device=device)
        for factor in (geometry.qr_factor, geometry.cholesky_qr_factor):
            R = factor(Z).mH @ Z
            assert R.tril(-1).abs().max() < 1e-11
            diagonal = R.diagonal(dim1=-2, dim2=-1)
            assert (diagonal.real > 0).all()
            if double.is_complex:
                assert diagonal.imag.abs().max() < 1e-11

    def test_polar_factor_is_the_nearest_point(self, shape, double, device):
        batch, n, p = shape
        Z = torch.randn(*batch, n, p, dtype=double, device=device)
        W = geometry.polar_factor(Z)
        P = W.mH @ Z
        assert (P - P.mH).abs().max() < 1e-12
        assert torch.linalg.eigvalsh(P).min() > 0
        assert (W @ P - Z).abs().max() < 1e-12

    @pytest.mark.parametrize(
        "factor", [geometry.polar_factor, geometry.qr_factor, geometry.cholesky_qr_factor]
    )
    @pytest.mark.parametrize("dtype", DOUBLE, ids=str)
    def test_gradcheck(self, factor, dtype, device):
        Z = torch.randn(2, 4, 3, dtype=dtype, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(factor, (Z,))

    def test_polar_gradient_is_finite_at_repeated_singular_values(self, device):
        Z = torch.eye(5, 3, dtype=torch.float64, device=device, requires_grad=True)
        G = torch.randn(5, 3, dtype=torch.float64, device=device)
        (g,) = torch.autograd.grad((G * geometry.polar_factor(Z)).sum(), Z)
        expected = G - Z @ geometry.sym(Z.mT @ G)  # the derivative there is the projection
        assert (g - expected).abs().max() < 1e-12

    def test_polar_second_derivative_is_refused(self, device):
        from stiefel.errors import DoubleBackwardError

        Z = torch.randn(4, 2, dtype=torch.float64, device=device, requires_grad=True)
        (g,) = torch.autograd.grad(geometry.polar_factor(Z).sum(), Z, create_graph=True)
        with pytest.raises(DoubleBackwardError, match="first derivative only"):
            g.sum().backward()

    def test_polar_under_vmap(self, device):
        Z = torch.randn(3, 4, 2, dtype=torch.float64, device=device)
        mapped = torch.vmap(geometry.polar_factor)(Z)
        assert (mapped - geometry.polar_factor(Z)).abs().max() < 1e-14
        G = torch.func.vmap(torch.func.grad(lambda z: geometry.polar_factor(z).sin().sum()))(Z)
        loop = torch.stack(
            [torch.func.grad(lambda z: geometry.polar_factor(z).sin().sum())(z) for z in Z]
        )
        assert (G - loop).abs().max() < 1e-13


class TestHaar:
    def test_moments(self, device):
        """Entries have mean 0 and second moment 1/n; without a sign fix the mean is -0.5."""
        n, count = 4, 20_000
        Q = geometry.haar(n, n, (count,), dtype=torch.float64, device=device)
        sigma = 1 / math.sqrt(n * count)
        assert Q.mean(0).abs().max() < 5 * sigma
        assert (Q.square().mean(0) - 1 / n).abs().max() < 5 * math.sqrt(2) / n / math.sqrt(count)
        traces = Q.diagonal(dim1=-2, dim2=-1).sum(-1)
        assert abs(float(traces.square().mean()) - 1) < 5 * math.sqrt(2 / count)
        assert 0.47 < float((torch.linalg.det(Q) > 0).double().mean()) < 0.53

    @pytest.mark.parametrize("determinant", [1, -1])
    def test_determinant(self, determinant, device):
        Q = geometry.haar(
            5, batch=(7,), dtype=torch.float64, device=device, determinant=determinant
        )
        assert (torch.linalg.det(Q) - determinant).abs().max() < 1e-12

    def test_on_the_manifold_and_reproducible(self, shape, dtype, device):
        batch, n, p = shape

        def draw():
            g = torch.Generator(device=device).manual_seed(3)
            return geometry.haar(n, p, batch, dtype=dtype, device=device, generator=g)

        assert geometry.orthonormality_residual(draw()).max() < wide_bound(draw())
        assert torch.equal(draw(), draw())

    def test_half_precision_is_drawn_in_float32(self, device):
        X = geometry.haar(8, 3, dtype=torch.bfloat16, device=device)
        assert X.dtype == torch.bfloat16
        assert geometry.orthonormality_residual(X).max() < tolerance(X.dtype, 8, 3)
