"""The door: it keeps what it can, says what it cannot, and never surprises."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    RepresentationError,
    ShapeError,
    UnknownNameError,
)
from stiefel.parameter import SHORT_FORMS, via_names
from stiefel.parametrizations import CHARTS, CWY


def only(model):
    (constraint,) = stiefel.constraints(model)
    return constraint


def linear(n, m=None, dtype=torch.float64):
    return nn.Linear(m or n, n, bias=False, dtype=dtype)


def with_value(W):
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=W.dtype)
    with torch.no_grad():
        layer.weight.copy_(W)
    return layer


@pytest.mark.parametrize("via", ["cwy", "riemannian"])
@pytest.mark.parametrize("determinant", [1, -1])
@pytest.mark.parametrize("n", [1, 2, 5, 6])
class TestKeepsTheCurrentValue:
    def test_orthogonal_value_is_kept_exactly(self, via, determinant, n):
        Q = geometry.haar(n, dtype=torch.float64, determinant=determinant)
        layer = stiefel.orthogonal(with_value(Q), via=via, init="keep")
        assert (layer.weight - Q).abs().max() < 1e-13
        assert only(layer).projected_distance == 0.0

    def test_other_values_are_projected_without_a_warning(self, via, determinant, n):
        Q = geometry.haar(n, dtype=torch.float64, determinant=determinant)
        S = torch.diag(torch.rand(n, dtype=torch.float64) + 0.5)
        W = Q @ S
        layer = stiefel.orthogonal(with_value(W), via=via)
        assert (layer.weight - Q).abs().max() < 1e-13
        assert only(layer).projected_distance == pytest.approx(float((W - Q).norm()), rel=1e-10)


def takes_tall(via):
    chart = CHARTS.get(SHORT_FORMS.get(via, (via, {}))[0])
    return chart is None or chart.tall


@pytest.mark.parametrize("via", via_names())
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 1), (1, 4)])
def test_tall_and_wide(via, shape):
    W = torch.randn(*shape, dtype=torch.float64)
    if not takes_tall(via):
        with pytest.raises(ConfigurationError, match=r"square matrices only.*via='tcwy'"):
            stiefel.orthogonal(with_value(W), via=via)
        return
    layer = stiefel.orthogonal(with_value(W), via=via)
    twin = stiefel.orthogonal(with_value(W.mT.contiguous()), via=via)
    assert (layer.weight - twin.weight.mT).abs().max() < 1e-13
    gram = layer.weight.mT @ layer.weight if shape[0] > shape[1] else layer.weight @ layer.weight.mT
    assert (gram - torch.eye(min(shape), dtype=torch.float64)).abs().max() < 1e-13


def test_the_default_never_raises_and_never_warns():
    for n, m in [(64, 64), (64, 32), (32, 64), (1, 1), (1, 3)]:
        stiefel.orthogonal(nn.Linear(m, n))
    zero = nn.Linear(4, 4)
    nn.init.zeros_(zero.weight)
    stiefel.orthogonal(zero)
    assert geometry.orthonormality_residual(zero.weight) < 1e-6


class TestFallback:
    def test_one_warning_names_chart_reason_and_remedy(self):
        with pytest.warns(UserWarning, match=r"chart 'cwy'.*rank.*reflections.*init=") as record:
            layer = stiefel.orthogonal(linear(6), reflections=2)
        assert len(record) == 1
        assert record[0].filename == __file__
        assert torch.linalg.matrix_rank(layer.weight.detach() - torch.eye(6), atol=1e-9) == 2

    def test_the_charts_own_start_is_taken_in_silence_when_asked_for(self):
        layer = stiefel.orthogonal(linear(6), reflections=2, init="chart")
        difference = layer.weight.detach() - torch.eye(6)
        assert torch.linalg.matrix_rank(difference, atol=1e-9) == 2

    def test_keep_raises(self):
        layer = linear(6)
        before = layer.weight.detach().clone()
        with pytest.raises(RepresentationError, match="rank"):
            stiefel.orthogonal(layer, reflections=2, init="keep")
        assert torch.equal(layer.weight, before)
        assert type(layer) is nn.Linear

    def test_a_product_of_few_reflections_is_kept(self):
        Q = CWY(7, reflections=3)(torch.randn(7, 3, dtype=torch.float64))
        layer = stiefel.orthogonal(with_value(Q.detach()), reflections=3, init="keep")
        assert (layer.weight - Q).abs().max() < 1e-12

    def test_nan_values(self):
        layer = linear(3)
        with torch.no_grad():
            layer.weight[0, 0] = torch.nan
        with pytest.raises(RepresentationError, match="finite"):
            stiefel.orthogonal(layer, init="keep")
        with pytest.warns(UserWarning, match="NaN"):
            stiefel.orthogonal(layer)
        assert torch.isfinite(layer.weight).all()

    @pytest.mark.parametrize("via", ["cwy", "riemannian"])
    def test_forced_determinant(self, via):
        Q = geometry.haar(5, dtype=torch.float64, determinant=1)
        kept = stiefel.orthogonal(with_value(Q), via=via, determinant=1, init="keep")
        assert (kept.weight - Q).abs().max() < 1e-13
        with pytest.raises(RepresentationError, match=r"determinant \+1.*determinant=-1"):
            stiefel.orthogonal(with_value(Q), via=via, determinant=-1, init="keep")
        with pytest.warns(UserWarning, match="determinant"):
            other = stiefel.orthogonal(with_value(Q), via=via, determinant=-1)
        assert torch.linalg.det(other.weight).item() == pytest.approx(-1)
        with pytest.raises(RepresentationError):
            other.weight = Q
        assert torch.linalg.det(other.weight).item() == pytest.approx(-1)


class TestInit:
    @pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
    @pytest.mark.parametrize("init", ["haar", "henaff", "cayley", nn.init.orthogonal_])
    @pytest.mark.parametrize("determinant", [None, 1, -1])
    def test_named_and_callable(self, via, init, determinant):
        layer = stiefel.orthogonal(linear(6), via=via, init=init, determinant=determinant)
        Q = layer.weight
        assert geometry.orthonormality_residual(Q) < 1e-12
        if determinant is not None:
            assert torch.linalg.det(Q).item() == pytest.approx(determinant)

    def test_the_same_point_through_every_chart(self):
        values = []
        for via in ["cwy", "rgd-c-c", "rgd-e-qr"]:
            g = torch.Generator().manual_seed(5)
            values.append(stiefel.orthogonal(linear(8), via=via, init="henaff", generator=g).weight)
        assert (values[0] - values[1]).abs().max() < 1e-12
        assert torch.equal(values[1], values[2])


class TestViews:
    @pytest.mark.parametrize("via", ["tcwy", "rgd-c-c"])
    def test_convolution(self, via):
        conv = stiefel.orthogonal(nn.Conv2d(3, 4, (3, 5), dtype=torch.float64), via=via)
        c = only(conv)
        assert c.point.shape == (45, 4)
        K = conv.weight.permute(2, 3, 1, 0).reshape(45, 4) * 15**0.5
        assert (K - c.point).abs().max() < 1e-13
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        y = nn.functional.conv2d(x, conv.weight, padding=(1, 2))
        assert (y.flatten(1).norm(dim=1) <= x.flatten(1).norm(dim=1) + 1e-12).all()
        custom = stiefel.orthogonal(
            nn.Conv2d(3, 4, 3, dtype=torch.float64), via=via, view=("convolution", 1.0)
        )
        K = custom.weight.permute(2, 3, 1, 0).reshape(27, 4)
        assert geometry.orthonormality_residual(K) < 1e-12

    def test_wide_kernels_get_orthonormal_rows(self):
        conv = stiefel.orthogonal(nn.Conv1d(1, 5, 3, dtype=torch.float64))
        K = conv.weight.permute(2, 1, 0).reshape(3, 5) * 3**0.5
        assert geometry.orthonormality_residual(K.mT) < 1e-12

    @pytest.mark.parametrize("via", ["cwy", "rgd-e-c"])
    def test_blocks(self, via):
        lstm = stiefel.orthogonal(
            nn.LSTMCell(3, 5, dtype=torch.float64), "weight_hh", via=via, view=("blocks", 4)
        )
        assert only(lstm).point.shape == (4, 5, 5)
        for gate in lstm.weight_hh.chunk(4):
            assert geometry.orthonormality_residual(gate) < 1e-12

    @pytest.mark.parametrize("via", ["cwy", "tcwy", "rgd-c-qr"])
    def test_leading_dimensions_are_a_batch(self, via):
        module = nn.Module()
        module.heads = nn.Parameter(torch.randn(2, 3, 5, 4, dtype=torch.float64))
        stiefel.orthogonal(module, "heads", via=via)
        assert module.heads.shape == (2, 3, 5, 4)
        assert geometry.orthonormality_residual(module.heads).max() < 1e-12

    def test_batches_keep_each_determinant(self):
        W = torch.stack([geometry.haar(4, dtype=torch.float64, determinant=d) for d in (1, -1, 1)])
        module = nn.Module()
        module.W = nn.Parameter(W)
        stiefel.orthogonal(module, "W", init="keep")
        assert (module.W - W).abs().max() < 1e-13


class TestComplex:
    @pytest.mark.parametrize("via", ["cwy", "tcwy", "rgd-c-c", "rgd-e-qr"])
    def test_unitary_values_are_kept(self, via):
        n = 5 if via == "tcwy" else 3
        Q = geometry.haar(n, 3, dtype=torch.complex128)
        layer = stiefel.orthogonal(with_value(Q), via=via, init="keep")
        assert (layer.weight - Q).abs().max() < 1e-12
        layer(torch.randn(2, 3, dtype=torch.complex128)).abs().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())


class TestLowPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
    def test_the_first_forward_works(self, via, dtype):
        layer = stiefel.orthogonal(nn.Linear(8, 8, dtype=dtype), via=via)
        out = layer(torch.randn(2, 8, dtype=dtype))
        assert out.dtype == dtype
        out.sum().backward()
        assert geometry.orthonormality_residual(layer.weight) < stiefel.tolerance(dtype, 8, 8)

    def test_weight_dtype(self):
        layer = stiefel.orthogonal(
            nn.Linear(8, 8, dtype=torch.bfloat16), weight_dtype=torch.float32
        )
        assert layer.weight.dtype == torch.float32
        assert geometry.orthonormality_residual(layer.weight) < 1e-5


class TestAssigning:
    @pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
    def test_assign_and_setattr(self, via):
        layer = stiefel.orthogonal(linear(4), via=via)
        (leaf,) = only(layer).leaves
        for determinant in (1, -1):
            Q = geometry.haar(4, dtype=torch.float64, determinant=determinant)
            only(layer).assign(Q)
            assert (layer.weight - Q).abs().max() < 1e-13
            layer.weight = Q.mT
            assert (layer.weight - Q.mT).abs().max() < 1e-13
        assert only(layer).leaves[0] is leaf
        layer.weight = 3 * Q
        assert (layer.weight - Q).abs().max() < 1e-13
        assert only(layer).projected_distance == pytest.approx(2 * 2.0)

    def test_a_change_in_place_shows_at_once(self):
        layer = stiefel.orthogonal(linear(4))
        before = layer.weight.detach().clone()
        with torch.no_grad():
            only(layer).leaves[0].normal_()
        assert not torch.allclose(layer.weight, before)

    def test_bad_values_change_nothing(self):
        layer = stiefel.orthogonal(linear(4))
        before = layer.weight.detach().clone()
        with pytest.raises(ShapeError, match=r"\(4, 4\).*\(3, 4\)"):
            layer.weight = torch.eye(3, 4, dtype=torch.float64)
        with pytest.raises(NonFiniteError):
            layer.weight = torch.full((4, 4), torch.nan, dtype=torch.float64)
        with pytest.raises(DtypeError):
            layer.weight = torch.eye(4, dtype=torch.complex128)
        assert torch.equal(layer.weight, before)


class TestBadInput:
    def test_unknown_names_list_the_valid_ones(self):
        with pytest.raises(UnknownNameError, match=r"cwy, .*rgd-c-c.*tcwy.*\. Did you mean 'cwy'"):
            stiefel.orthogonal(linear(4), via="cyw")
        with pytest.raises(UnknownNameError, match=r"cayley, chart, haar, henaff, identity, keep"):
            stiefel.orthogonal(linear(4), init="har")
        with pytest.raises(UnknownNameError, match=r"blocks, convolution, matrix"):
            stiefel.orthogonal(linear(4), view="conv")

    def test_unknown_options_list_the_valid_ones(self):
        with pytest.raises(ConfigurationError, match=r"no option 'reflection'.*reflections"):
            stiefel.orthogonal(linear(4), reflection=2)
        with pytest.raises(ConfigurationError, match="short form"):
            stiefel.orthogonal(linear(4), via="rgd-c-c", retraction="qr")

    def test_missing_weight_lists_what_is_there(self):
        with pytest.raises(ConfigurationError, match=r"0\.weight"):
            stiefel.orthogonal(nn.Sequential(nn.Linear(2, 2)))

    def test_vectors_integers_foreign_parametrizations(self):
        with pytest.raises(ShapeError, match=r"shape \(4,\)"):
            stiefel.orthogonal(nn.Linear(3, 4), "bias")
        module = nn.Module()
        module.register_buffer("W", torch.eye(3, dtype=torch.int64))
        with pytest.raises(DtypeError, match="int64"):
            stiefel.orthogonal(module, "W")
        theirs = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
        with pytest.raises(ConfigurationError, match="remove_parametrizations"):
            stiefel.orthogonal(theirs)

    @pytest.mark.parametrize("view", [5, (), ("matrix", 3), ("blocks", 2.0), "blocks"])
    def test_views_that_are_none(self, view):
        with pytest.raises(ValueError, match=r"view|blocks"):
            stiefel.orthogonal(linear(4), view=view)

    def test_values_of_the_wrong_kind(self):
        with pytest.raises(UnknownNameError, match="init 5"):
            stiefel.orthogonal(linear(4), init=5)
        with pytest.raises(ConfigurationError, match=r"reflections.*2\.5"):
            stiefel.orthogonal(linear(4), reflections=2.5)
        for dtype in (torch.int32, torch.complex64):
            with pytest.raises(DtypeError, match="expected"):
                stiefel.orthogonal(linear(4), weight_dtype=dtype)

    def test_a_parametrization_on_top_is_refused(self):
        layer = stiefel.orthogonal(linear(4))
        W = layer.weight.detach().clone()
        with pytest.raises(ConfigurationError, match=r"release"):
            nn.utils.parametrizations.spectral_norm(layer)
        assert torch.equal(layer.weight, W)

    def test_reflections_and_determinants_out_of_range(self):
        with pytest.raises(ConfigurationError, match="reflections"):
            stiefel.orthogonal(linear(4), reflections=5)
        with pytest.raises(ConfigurationError, match=r"\+1 or -1"):
            stiefel.orthogonal(linear(4), determinant=2)
        with pytest.raises(ConfigurationError, match="square"):
            stiefel.orthogonal(linear(4, 2), determinant=1)
        with pytest.raises(ConfigurationError, match="real"):
            stiefel.orthogonal(nn.Linear(3, 3, dtype=torch.complex64), determinant=1)

    def test_tcwy_refuses_square(self):
        with pytest.raises(ConfigurationError, match="cwy"):
            stiefel.orthogonal(linear(4), via="tcwy")


def test_buffers_stay_buffers():
    module = nn.Module()
    module.register_buffer("W", torch.randn(4, 4))
    stiefel.orthogonal(module, "W")
    assert not list(module.parameters())
    assert geometry.orthonormality_residual(module.W) < 1e-6


def test_frozen_stays_frozen():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    for via in ("cwy", "rgd-c-c"):
        stiefel.orthogonal(layer, via=via)
        assert not only(layer).leaves[0].requires_grad


def test_weight_decay_never_breaks_a_constraint():
    for via in ("cwy", "tcwy"):
        layer = stiefel.orthogonal(nn.Linear(4, 6), via=via)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.5)
        for _ in range(100):
            optimizer.zero_grad()
            layer(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        assert geometry.orthonormality_residual(layer.weight) < stiefel.tolerance(
            torch.float32, 6, 4
        )


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = stiefel.orthogonal(nn.Linear(8, 8))
        layer(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weight_dtype": "float32"}, DtypeError),
        ({"weight_dtype": torch.float8_e4m3fn}, DtypeError),
        ({"determinant": 1.0}, ConfigurationError),
        ({"determinant": torch.tensor([1, 1])}, ConfigurationError),
        ({"reflections": True}, ConfigurationError),
        ({"via": "polar", "method": ["exact"]}, UnknownNameError),
    ],
)
def test_values_of_the_wrong_kind_are_refused(options, error):
    with pytest.raises(error):
        stiefel.orthogonal(nn.Linear(4, 4), **options)
