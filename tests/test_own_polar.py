"""The charts OWN and Polar: values, gradients, extreme proxies, rebasing."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch

import stiefel
from stiefel.errors import ConfigurationError, RepresentationError, UnknownNameError
from stiefel.geometry import (
    gram_polar_factor,
    haar,
    newton_schulz_factor,
    orthonormality_residual,
    polar_factor,
    tangency_residual,
)
from stiefel.numerics import tolerance
from stiefel.parametrizations import OWN, Polar
from tests.proxies import (
    COMPLEX,
    FACTORS,
    REAL,
    each_factor,
    each_safe,
    value_and_gradient,
    with_values,
)


class TestFactors:
    @each_factor
    @pytest.mark.parametrize("dtype", [REAL, COMPLEX])
    @pytest.mark.parametrize("sizes", [(6, 6), (9, 4), (40, 5), (80, 80), (150, 70)])
    def test_is_the_polar_factor_of_scipy(self, factor, dtype, sizes):
        Z = torch.randn(sizes, dtype=dtype)
        expected = torch.from_numpy(scipy.linalg.polar(Z.numpy())[0])
        assert (factor(Z) - expected).abs().max() < 1e-12
        assert orthonormality_residual(factor(Z)) < tolerance(dtype, *sizes)

    def test_gram_factor_is_the_formula(self):
        """W = Z P L^(-1/2) P^T, and its derivative with Kd of the eigenvalues."""
        Z, dZ = torch.randn(2, 7, 3, dtype=REAL)
        lam, P = torch.linalg.eigh(Z.mT @ Z)
        root = lam.sqrt()
        S = P * (1 / root) @ P.mT
        assert (gram_polar_factor(Z) - Z @ S).abs().max() < 1e-12
        Kd = -1 / (root[:, None] * root * (root[:, None] + root))
        dS = P @ (Kd * (P.mT @ (dZ.mT @ Z + Z.mT @ dZ) @ P)) @ P.mT
        G = torch.randn(7, 3, dtype=REAL)
        _, g = value_and_gradient(gram_polar_factor, Z, G)
        assert abs((g * dZ).sum() - (G * (dZ @ S + Z @ dS)).sum()) < 1e-11

    @each_factor
    @pytest.mark.parametrize("dtype", [REAL, COMPLEX])
    @pytest.mark.parametrize("sizes", [(4, 4), (6, 3), (13, 2)])
    def test_gradcheck_where_singular_values_repeat(self, factor, dtype, sizes):
        n, p = sizes
        for Z in (torch.eye(n, p, dtype=dtype), haar(n, p, dtype=dtype), 3 * haar(n, p)):
            assert torch.autograd.gradcheck(factor, (Z.to(dtype).requires_grad_(),))
        Z = with_values(n, torch.tensor([2.0, 2.0, 1.0, 1.0])[:p], dtype)
        assert torch.autograd.gradcheck(factor, (Z.requires_grad_(),))

    @each_factor
    @pytest.mark.parametrize("sizes", [(512, 512), (2000, 50), (200, 70), (16, 16)])
    def test_single_precision(self, factor, sizes):
        """Residuals of at most 1e-5; values and gradients those of the exact map."""
        Z, G = torch.randn(2, *sizes)
        W, g = value_and_gradient(factor, Z, G)
        exact, slope = value_and_gradient(polar_factor, Z.double(), G.double())
        assert orthonormality_residual(W) < 1e-5
        values = torch.linalg.svdvals(Z.double())
        condition = float(values[0] / values[-1])
        assert (W - exact).abs().max() < 1e-6 + 1e-8 * condition
        assert (g - slope).norm() < (1e-5 + 1e-6 * condition) * slope.norm()
        assert tangency_residual(exact, slope) < 1e-9 * slope.norm()

    @each_factor
    def test_gradient_in_single_precision_is_that_of_finite_differences(self, factor):
        Z, G, dZ = torch.randn(3, 90, 90)
        _, g = value_and_gradient(factor, Z, G)
        step = 1e-6 * dZ.double()
        above, below = polar_factor(Z.double() + step), polar_factor(Z.double() - step)
        slope = ((above - below) * G.double()).sum() / 2e-6
        assert abs((g.double() * dZ).sum() - slope) < 1e-3 * g.norm() * dZ.norm()

    @each_safe
    @pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
    @pytest.mark.parametrize("sizes", [(90, 90), (300, 20), (8, 8)])
    def test_any_scale(self, factor, scale, sizes):
        Z, G = torch.randn(2, *sizes)
        W, g = value_and_gradient(factor, Z, G)
        scaled, slope = value_and_gradient(factor, scale * Z, G)
        assert (scaled - W).abs().max() < 1e-4
        assert orthonormality_residual(scaled) < 1e-5
        assert ((slope * scale) - g).norm() < 1e-2 * g.norm()

    @each_safe
    @pytest.mark.parametrize("least", [1e-4, 1e-6, 1e-9, 0])
    @pytest.mark.parametrize("dtype", [torch.float32, REAL, torch.complex64])
    @pytest.mark.parametrize("sizes", [(70, 70), (12, 12), (400, 30)])
    def test_nearly_dependent_columns(self, factor, least, dtype, sizes):
        n, p = sizes
        s = torch.logspace(0, -12, p, dtype=REAL).clamp_min(least)
        if least == 0:
            s[p // 2 :] = 0
        Z = with_values(n, s, COMPLEX if dtype.is_complex else REAL).to(dtype)
        W, g = value_and_gradient(factor, Z, torch.randn(n, p, dtype=dtype))
        assert orthonormality_residual(W) < tolerance(dtype, n, p)
        assert g.isfinite().all()
        if dtype == REAL and least >= 1e-6:
            assert (W - polar_factor(Z)).abs().max() < 1e-15 / least

    @each_safe
    def test_nothing_is_lost_where_the_others_of_a_batch_are_singular(self, factor):
        good = torch.randn(70, 70)
        duplicate = torch.randn(70, 70)
        duplicate[:, 3] = duplicate[:, 60]
        Z = torch.stack([torch.zeros(70, 70), good, 1e-25 * torch.eye(70), duplicate, 0 * good])
        W, g = value_and_gradient(factor, Z, torch.randn(5, 70, 70))
        assert orthonormality_residual(W).max() < 1e-5
        assert g.isfinite().all()
        assert (g[0] == 0).all()
        assert (W[1] - polar_factor(good)).abs().max() < 1e-5
        assert (W[2] - torch.eye(70)).abs().max() < 1e-6
        assert torch.equal(W[0], W[4])
        assert torch.equal(factor(Z), W)

    @each_safe
    @pytest.mark.parametrize("batch", [(), (40,)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, REAL, COMPLEX])
    def test_below_the_normal_numbers(self, factor, dtype, batch):
        """The gradient would overflow; it is zero."""
        least = torch.finfo(dtype).tiny / 100
        Z = least * torch.randn(*batch, 6, 3, dtype=dtype)
        W, g = value_and_gradient(factor, Z, torch.randn_like(Z))
        assert orthonormality_residual(W).max() < tolerance(dtype, 6, 3)
        assert (g == 0).all()
        double = COMPLEX if dtype.is_complex else REAL
        if double != dtype:
            assert (W - polar_factor(Z.to(double))).abs().max() < 1e-3

    @each_factor
    def test_not_finite_is_seen_and_stays_where_it_is(self, factor):
        Z = torch.randn(3, 5, 4)
        Z[1, 2, 2] = float("nan")
        Z[2, 0, 0] = float("inf")
        W = factor(Z)
        assert orthonormality_residual(W[0]) < 1e-5
        assert W[1:].isnan().all()

    @pytest.mark.parametrize("factor", FACTORS, ids=lambda f: f.__name__)
    def test_memory_of_a_tall_weight(self, factor):
        """What is kept for the backward pass is a few frames, and no matrix of n x n."""
        n, p = 30_000, 50
        Z = torch.randn(n, p, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            W = factor(Z)
        assert sum(kept) <= 3 * n * p
        W.sum().backward()
        assert orthonormality_residual(W) < 1e-5

    def test_steps_of_newton_schulz(self, monkeypatch):
        from stiefel.geometry import newton_schulz

        count = []
        step = newton_schulz._step
        counted = lambda *args, **options: count.append(1) or step(*args, **options)  # noqa: E731
        monkeypatch.setattr(newton_schulz, "_step", counted)
        for Z, most in [
            (7 * haar(40, dtype=REAL), 2),
            (haar(40, dtype=REAL) + 0.01 * torch.randn(40, 40, dtype=REAL) / 40**0.5, 5),
            (torch.randn(60, 40, dtype=REAL), 16),
            (with_values(40, torch.logspace(0, -7, 40, dtype=REAL)), 40),
        ]:
            count.clear()
            W = newton_schulz_factor(Z)
            assert len(count) <= most
            assert orthonormality_residual(W) < 1e-14 * 40


class TestOWN:
    @pytest.mark.parametrize("dtype", [REAL, COMPLEX])
    @pytest.mark.parametrize("sizes", [(2, 1), (5, 4), (7, 3), (60, 10)])
    def test_centred(self, dtype, sizes):
        n, p = sizes
        V = torch.randn(3, n, p, dtype=dtype) + 5
        W = OWN(n, p, batch=(3,), center=True)(V)
        centred = V - V.mean(-2, keepdim=True)
        assert orthonormality_residual(W).max() < 1e-12
        assert W.sum(-2).abs().max() < 1e-12
        assert (W - polar_factor(centred)).abs().max() < 1e-12

    @pytest.mark.parametrize("proxy", ["zero", "constant", "repeated"])
    def test_centred_stays_centred_where_columns_are_dependent(self, proxy):
        V = torch.zeros(8, 5)
        if proxy == "constant":
            V += 3
        if proxy == "repeated":
            V = torch.randn(8, 2)[:, [0, 1, 0, 1, 0]]
        V.requires_grad_()
        W = OWN(8, 5, center=True)(V)
        assert orthonormality_residual(W) < 1e-5
        assert W.sum(-2).abs().max() < 1e-5
        W.square().sum().backward()
        assert V.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, REAL, COMPLEX])
    def test_centred_proxies_of_huge_entries(self, dtype):
        Z = torch.randn(40, 9, 3, dtype=dtype)
        Z = (Z / torch.view_as_real(Z + 0j).abs().max()).requires_grad_()
        chart = OWN(9, 3, batch=(40,), center=True)
        W, huge = chart(Z), chart(torch.finfo(dtype).max * Z)
        assert (huge - W).abs().max() < 1e3 * torch.finfo(dtype).eps
        (g,) = torch.autograd.grad(huge, Z, torch.randn_like(W))
        assert g.isfinite().all()

    def test_centred_reaches_centred_points_only(self):
        with pytest.raises(ConfigurationError, match=r"p <= n - 1, got 6 x 6"):
            OWN(6, center=True)
        chart = OWN(6, 3, center=True)
        X = chart.start(REAL)
        assert torch.equal(chart.right_inverse(X), X)
        with pytest.raises(RepresentationError, match="center=False"):
            chart.right_inverse(haar(6, 3, dtype=REAL))
        layer = torch.nn.Linear(3, 6)
        with pytest.warns(UserWarning, match="center=False"):
            stiefel.orthogonal(layer, via="own", center=True)
        assert layer.weight.sum(0).abs().max() < 1e-5

    def test_start_is_uniform(self):
        """Entries have mean 0 and second moment 1/n, centred (1 - 1/n) / (n - 1): the same."""
        n, count = 4, 20_000
        for center in (False, True):
            chart = OWN(n, 2, batch=(count,), center=center)
            W = chart.start(REAL, generator=torch.Generator().manual_seed(1))
            assert W.mean(0).abs().max() < 5 / count**0.5
            assert (W.square().mean(0) - 1 / n).abs().max() < 5 / count**0.5


class TestPolar:
    def test_unknown_method(self):
        with pytest.raises(UnknownNameError, match="newton-schulz"):
            Polar(4, method="newton")

    @pytest.mark.parametrize("method", ["newton-schulz", "exact"])
    def test_same_weights_and_gradients_as_own(self, method):
        for n, p in ((6, 6), (90, 90), (40, 7)):
            Z, G = torch.randn(2, 2, n, p, dtype=REAL)
            ours = value_and_gradient(OWN(n, p, batch=(2,)), Z, G)
            theirs = value_and_gradient(Polar(n, p, batch=(2,), method=method), Z, G)
            assert (ours[0] - theirs[0]).abs().max() < 1e-12
            assert (ours[1] - theirs[1]).norm() < 1e-10 * ours[1].norm()


class TestTraining:
    @pytest.mark.parametrize(
        ("via", "options"), [("own", {}), ("polar", {}), ("polar", {"method": "exact"})]
    )
    @pytest.mark.parametrize("sizes", [(6, 6), (8, 3)])
    def test_rebased_at_every_step_it_is_rgd(self, via, options, sizes):
        """Plain SGD at the same rate, Euclidean inner product and polar retraction."""
        n, p = sizes
        X, C = haar(n, p, dtype=REAL), torch.randn(n, n, dtype=REAL)
        B = torch.randn(n, p, dtype=REAL)

        def trained(via, **options):
            layer = torch.nn.Linear(p, n, bias=False, dtype=REAL)
            layer.weight.data.copy_(X)
            stiefel.orthogonal(layer, via=via, init="keep", **options)
            (constraint,) = stiefel.constraints(layer)
            optimizer = stiefel.optim.build(
                layer, lr=0.05, lr_orthogonal=0.05, lr_riemannian=0.05, optimizer="sgd"
            )
            for _ in range(20):
                optimizer.zero_grad()
                W = layer.weight
                ((C @ W - B).square().sum() / 2).backward()
                optimizer.step()
                constraint.rebase(optimizer)
            return layer.weight.detach()

        ours = trained(via, **options)
        theirs = trained("riemannian", inner="euclidean", retraction="polar")
        assert (theirs - X).norm() > 0.5
        assert (ours - theirs).abs().max() < 1e-11

    @pytest.mark.parametrize("via", ["own", "polar"])
    def test_momentum_follows_a_rebase_and_adam_starts_again(self, via):
        layer = stiefel.orthogonal(torch.nn.Linear(4, 4, dtype=REAL), via=via)
        (constraint,) = stiefel.constraints(layer)
        (leaf,) = constraint.leaves
        leaf.data.copy_(torch.randn(4, 4, dtype=REAL))
        G = torch.randn(4, 4, dtype=REAL)
        sgd = torch.optim.SGD([leaf], lr=0.0, momentum=0.9)
        (layer.weight * G).sum().backward()
        sgd.step()
        constraint.rebase(sgd)
        (slope,) = torch.autograd.grad((layer.weight * G).sum(), leaf)
        assert (sgd.state[leaf]["momentum_buffer"] - slope).abs().max() < 1e-12
        adam = torch.optim.Adam([leaf], lr=0.0)
        adam.step()
        constraint.rebase(adam)
        assert not adam.state[leaf]

    @pytest.mark.parametrize("via", ["own", "polar"])
    def test_the_determinant_is_chosen_by_the_value(self, via):
        for sign in (1, -1):
            layer = torch.nn.Linear(5, 5, dtype=REAL)
            stiefel.orthogonal(layer, via=via, init="haar", determinant=sign)
            assert abs(torch.linalg.det(layer.weight) - sign) < 1e-10
        with pytest.raises(RepresentationError, match="determinant"):
            stiefel.orthogonal(layer, via=via, init="keep", determinant=1)
