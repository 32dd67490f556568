"""Polar factors and their gradients by products alone: near a point, and in large batches."""

from __future__ import annotations

import pytest
import torch

from stiefel.geometry import (
    haar,
    orthonormality_residual,
    polar_factor,
)
from stiefel.geometry.lyapunov import lyapunov_near_identity, squared_smith
from stiefel.numerics import tolerance
from tests.proxies import (
    COMPLEX,
    REAL,
    each_safe,
    value_and_gradient,
)


class TestProducts:
    """Proxies near a point, and many small ones, are done without eigenvalues."""

    @staticmethod
    def near(*sizes, dtype=REAL):
        *batch, n, p = sizes
        noise = torch.randn(sizes, dtype=dtype) / n**0.5
        return 3 * (haar(n, p, tuple(batch), dtype=dtype) + 0.01 * noise)

    @each_safe
    @pytest.mark.parametrize("sizes", [(1024, 16, 16), (40, 12, 5), (90, 90), (3, 200, 120)])
    @pytest.mark.parametrize("dtype", [torch.float32, REAL, torch.complex64])
    def test_near_a_point_nothing_is_decomposed(self, factor, sizes, dtype, monkeypatch):
        Z, G = self.near(*sizes, dtype=dtype), torch.randn(sizes, dtype=dtype)
        double = COMPLEX if dtype.is_complex else REAL
        exact, slope = value_and_gradient(polar_factor, Z.to(double), G.to(double))
        for name in ("eigh", "svd", "qr"):
            monkeypatch.setattr(torch.linalg, name, None)
        W, g = value_and_gradient(factor, Z, G)
        eps = torch.finfo(dtype).eps
        assert orthonormality_residual(W).max() < tolerance(dtype, *sizes[-2:])
        # in double precision the decomposition compared with is the less accurate one
        rounding = (30 if dtype == double else 5) * eps
        assert (W - exact).abs().max() < rounding
        assert (g - slope).norm() < rounding * slope.norm()

    @each_safe
    @pytest.mark.parametrize("sizes", [(300, 16, 16), (300, 20, 14), (40, 36, 36), (1000, 3, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, REAL, COMPLEX])
    def test_many_small_gaussian_ones(self, factor, sizes, dtype):
        Z, G = torch.randn(2, *sizes, dtype=dtype)
        double = COMPLEX if dtype.is_complex else REAL
        W, g = value_and_gradient(factor, Z, G)
        exact, slope = value_and_gradient(polar_factor, Z.to(double), G.to(double))
        values = torch.linalg.svdvals(Z.to(double))
        rounding = torch.finfo(dtype).eps * (values[:, 0] / values[:, -1] + 10)
        assert orthonormality_residual(W).max() < tolerance(dtype, *sizes[-2:])
        assert ((W - exact).norm(dim=(-2, -1)) < 10 * rounding).all()
        error = (g - slope).norm(dim=(-2, -1)) / slope.norm(dim=(-2, -1)).clamp_min(1e-30)
        assert (error < 10 * rounding).all()

    @each_safe
    def test_singular_and_not_finite_ones_among_many(self, factor):
        Z, G = torch.randn(2, 64, 6, 6)
        Z[3], Z[5, 0, 0], Z[9] = 0, float("nan"), 1e-25 * Z[9]
        Z[7, :, 2] = Z[7, :, 4]
        W, g = value_and_gradient(factor, Z, G)
        fine = torch.arange(64) != 5
        assert orthonormality_residual(W[fine]).max() < 1e-5
        assert W[5].isnan().all()
        assert (g[3] == 0).all()
        assert g[fine].isfinite().all()
        alone, slope = value_and_gradient(factor, Z[8], G[8])
        assert (W[8] - alone).abs().max() < 1e-4
        assert (g[8] - slope).norm() < 1e-3 * slope.norm()

    @each_safe
    @pytest.mark.parametrize("dtype", [REAL, COMPLEX])
    @pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
    def test_gradcheck_of_many(self, factor, dtype, sizes):
        Z = torch.randn(32, *sizes, dtype=dtype)
        for proxy in (Z, self.near(32, *sizes, dtype=dtype)):
            assert torch.autograd.gradcheck(factor, (proxy.requires_grad_(),), fast_mode=True)

    @pytest.mark.parametrize("dtype", [REAL, COMPLEX])
    def test_lyapunov(self, dtype):
        """Solutions satisfy the equation where they are said to, and only ill ones are refused."""
        K = torch.randn(4, 9, 9, dtype=dtype)
        K = K - K.mH
        V = haar(9, batch=(4,), dtype=dtype)
        s = torch.stack([torch.linspace(least, 1, 9, dtype=REAL) for least in (0.9, 0.1, 1e-3, 0)])
        P = V * s.to(dtype)[:, None] @ V.mH
        for solve, reached in ((lyapunov_near_identity, 1), (squared_smith, 3)):
            F, solved = solve((P + P.mH) / 2, K.clone())
            assert solved.tolist() == [i < reached for i in range(4)]
            left = (P @ F + F @ P - K)[solved]
            assert left.abs().max() < 1e-12
