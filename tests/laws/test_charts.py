"""Laws of the charts, over the registry: every claim of a chart is run here."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    OffManifoldError,
    RepresentationError,
    ShapeError,
)
from stiefel.geometry import haar, orthonormality_residual
from stiefel.numerics import tolerance
from stiefel.operators import Operator
from stiefel.parameter.riemannian import Riemannian
from stiefel.parametrizations import CHARTS as CHARTS_BY_NAME
from tests.chart_cases import (
    both_components,
    bound_for,
    every,
    every_batched,
    every_double,
    every_inverting,
    every_real,
    random_base,
    random_originals,
    tuple_of,
)
from tests.registry import CHARTS, DOUBLE


def test_every_chart_is_in_the_registry():
    assert {case.name for case in CHARTS} == set(CHARTS_BY_NAME)
    assert all(CHARTS_BY_NAME[case.name].name == case.name for case in CHARTS)


@pytest.mark.parametrize("name", CHARTS_BY_NAME)
def test_class_attributes_claim_what_the_registry_runs(name):
    chart, cases = CHARTS_BY_NAME[name], [case for case in CHARTS if case.name == name]
    shapes = [shape for case in cases for shape in case.shapes]
    assert chart.complex == any(dtype.is_complex for case in cases for dtype in case.dtypes)
    assert chart.tall == any(n > p for _, n, p in shapes)
    assert chart.batched == any(batch != () for batch, _, _ in shapes)
    for case in cases:
        assert all(case.make(shape).inverts == case.inverts for shape in case.shapes)


class Narrow(CHARTS_BY_NAME["own"]):
    """A chart that covers as little as a chart can."""

    name, complex, tall, batched = "narrow", False, False, False


@pytest.mark.parametrize(
    ("claim", "ask"),
    [
        ("complex", lambda: Narrow(3).check_point(torch.eye(3, dtype=torch.complex64))),
        ("tall", lambda: Narrow(3, 2)),
        ("batched", lambda: Narrow(3, batch=(2,))),
    ],
)
def test_what_a_chart_does_not_cover_is_refused_with_charts_that_do(claim, ask):
    with pytest.raises((ConfigurationError, DtypeError), match="chart 'narrow' covers") as caught:
        ask()
    named = re.findall(r"'(\w+)'", str(caught.value).partition("via=")[2])
    ways = {**CHARTS_BY_NAME, "riemannian": Riemannian}
    assert named
    assert all(getattr(ways[name], claim) for name in named)


@every
def test_weight_is_on_the_manifold(case, shape, device):
    chart = case.make(shape).to(device)
    for dtype in case.dtypes:
        for _ in both_components(case, chart, dtype, device):
            X = chart(*random_originals(chart, dtype, device, scale=3.0))
            assert X.shape == chart.shape
            assert X.dtype == dtype
            assert orthonormality_residual(X).max() <= tolerance(dtype, chart.n, chart.p)


@every_inverting
def test_right_inverse_is_exact(case, shape, device):
    chart = case.make(shape).to(device)
    for dtype in case.dtypes:
        for _ in both_components(case, chart, dtype, device):
            points = [chart.start(dtype, device)]
            if (case.onto or case.almost) and (chart.p < chart.n or dtype.is_complex):
                points.append(haar(chart.n, chart.p, chart.batch, dtype=dtype, device=device))
            elif case.onto or case.almost:
                sign = torch.linalg.det(points[0]).sign()
                points.append(haar(chart.n, chart.p, chart.batch, dtype=dtype, determinant=sign))
            for X in points:
                chart.set_base(X)
                assert chart.obstacle(X) is None
                before, buffers = X.clone(), copy.deepcopy(chart.state_dict())
                originals = tuple_of(chart.right_inverse(X))
                assert torch.equal(X, before)
                assert all(torch.equal(buffers[k], v) for k, v in chart.state_dict().items())
                empty = tuple_of(chart.empty_originals(dtype, device))
                assert [o.shape for o in originals] == [o.shape for o in empty]
                assert [o.dtype for o in originals] == [o.dtype for o in empty]
                assert (chart(*originals) - X).abs().max() <= bound_for(chart, dtype)


@every
def test_special_points_are_represented_or_refused_with_a_reason(case, shape, device):
    chart = case.make(shape).to(device)
    E = torch.eye(chart.n, chart.p, dtype=torch.float64, device=device).expand(chart.shape)
    for X in (E, -E, E.flip(-1), E.to(torch.complex128), 1j * E):
        if not any(dtype.is_complex == X.is_complex() for dtype in case.dtypes):
            continue
        if chart.n == chart.p and not X.is_complex():
            chart.set_determinant(torch.linalg.det(X).sign())
        chart.set_base(X)
        reason = chart.obstacle(X)
        if reason is None:
            difference = chart(*tuple_of(chart.right_inverse(X))) - X
            assert difference.abs().max() <= bound_for(chart, X.dtype)
        else:
            assert not case.onto
            with pytest.raises(RepresentationError) as caught:
                chart.right_inverse(X)
            assert str(caught.value) == reason


@every
def test_operator_is_the_weight(case, shape, device):
    chart = case.make(shape).to(device)
    for dtype in case.dtypes:
        for _ in both_components(case, chart, dtype, device):
            originals = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device))
            X, op = chart(*originals), chart.operator(*originals)
            bound = 20 * bound_for(chart, dtype)
            assert isinstance(op, Operator)
            assert op.shape == X.shape
            assert op.mT.shape == X.mT.shape
            assert op.dtype == X.dtype
            assert (op.to_dense() - X).abs().max() <= bound
            assert (op.mT.to_dense() - X.mT).abs().max() <= bound
            columns = torch.randn(*chart.batch, chart.p, 2, dtype=dtype, device=device)
            rows = torch.randn(*chart.batch, 2, chart.n, dtype=dtype, device=device)
            assert (op @ columns - X @ columns).abs().max() <= bound
            assert (rows @ op - rows @ X).abs().max() <= bound
            assert (columns.mT @ op.mT - columns.mT @ X.mT).abs().max() <= bound
            assert (op.mT @ rows.mT - X.mT @ rows.mT).abs().max() <= bound
            if not chart.batch:
                assert (op @ columns[:, 0] - X @ columns[:, 0]).abs().max() <= bound
                assert (rows[0] @ op - rows[0] @ X).abs().max() <= bound
            ours = torch.autograd.grad((op @ columns).abs().square().sum(), originals)
            theirs = torch.autograd.grad((X @ columns).abs().square().sum(), originals)
            for g, h in zip(ours, theirs, strict=True):
                assert bool(((g - h).abs() <= 50 * bound).all())
            with pytest.raises(ShapeError, match="operator"):
                _ = op @ torch.zeros(*chart.batch, chart.p + 1, 2, dtype=dtype, device=device)
            with pytest.raises(ShapeError, match="operator"):
                _ = torch.zeros(*chart.batch, 2, chart.n + 1, dtype=dtype, device=device) @ op


@every_double
def test_gradcheck(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    for _ in both_components(case, chart, dtype, device):
        originals = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device))
        fast = originals[0].numel() > 15
        assert torch.autograd.gradcheck(chart, originals, fast_mode=fast)


@every_batched
def test_batch_is_a_loop(case, shape, device):
    _, n, p = shape
    batched, single = case.make(((3,), n, p)).to(device), case.make(((), n, p)).to(device)
    for dtype in case.dtypes:
        signs = torch.tensor([1, -1, -1])
        batched.set_determinant(signs)
        originals = random_originals(batched, dtype, device)
        together = batched(*originals)
        inverse = tuple_of(batched.right_inverse(together)) if case.inverts else originals
        for i in range(3):
            single.set_determinant(signs[i])
            alone = single(*(o[i] for o in originals))
            bound = bound_for(batched, dtype)
            assert (together[i] - alone).abs().max() <= bound
            assert (single(*(o[i] for o in inverse)) - alone).abs().max() <= 4 * bound


@every_batched
def test_empty_batch(case, shape, device):
    chart = case.make(((0,), *shape[1:])).to(device)
    dtype = case.dtypes[0]
    originals = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device))
    X = chart(*originals)
    assert X.shape == chart.shape
    X.sum().backward()
    assert originals[0].grad.shape == originals[0].shape
    if case.inverts:
        assert chart.obstacle(X) is None
        assert tuple_of(chart.right_inverse(X))[0].shape == originals[0].shape


@every_inverting
def test_wrong_points_are_refused(case, shape, device):
    chart = case.make(shape).to(device)
    X = chart.start(torch.float32, device)
    chart.set_base(X)
    with pytest.raises(ShapeError, match="expected a weight of shape"):
        chart.right_inverse(X[..., None])
    with pytest.raises(OffManifoldError, match=r"tolerance.*polar_factor"):
        chart.right_inverse(1.01 * X)
    with pytest.raises(NonFiniteError, match="NaN"):
        chart.right_inverse(X + float("nan"))
    if chart.n == chart.p and case.component:
        Y = torch.cat([X[..., :-1, :], -X[..., -1:, :]], dim=-2)
        assert chart.obstacle(Y) is not None
        with pytest.raises(RepresentationError, match=r"determinant|rank"):
            chart.right_inverse(Y)


@every
def test_rebase_keeps_the_weight_and_moves_the_gradient(case, shape, device):
    chart = case.make(shape).to(device)
    for dtype in (d for d in DOUBLE if d in case.dtypes):
        random_base(chart, dtype, device)
        old = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device, scale=5.0))
        X = chart(*old)
        new, move = chart.rebase(old)
        new = tuple(o.requires_grad_() for o in new)
        G = torch.randn_like(X)
        bound = 20 * bound_for(chart, dtype)
        assert (chart(*new) - X).abs().max() <= bound
        before = torch.autograd.grad(X, old, G)  # the old graph is still valid
        after = torch.autograd.grad(chart(*new), new, G)
        for i, (g, h) in enumerate(zip(before, after, strict=True)):
            for key in ("exp_avg", "momentum_buffer"):
                moved = move(i, key, g)
                assert (moved is not None) == ("linear" in case.carries)
                assert moved is None or bool(((moved - h).abs() <= bound).all())
            squared = move(i, "exp_avg_sq", g.abs().square())
            assert (squared is not None) == ("squared" in case.carries)
            assert squared is None or bool(((squared - h.abs().square()).abs() <= bound).all())
            step = torch.tensor(7.0)
            assert torch.equal(move(i, "step", step), step)


@every
def test_empty_originals_live_anywhere(case, shape):
    chart = case.make(shape)
    for dtype in case.dtypes:
        meta = tuple_of(chart.empty_originals(dtype, "meta"))
        assert all(original.is_meta for original in meta)
        assert chart.to("meta")(*meta).shape == chart.shape
        chart = case.make(shape)


@every_real
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_computed_in_thirty_two(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    random_base(chart, dtype, device)
    V = random_originals(chart, dtype, device)
    exact = chart(*(o.float() for o in V))
    assert orthonormality_residual(exact).max() <= tolerance(torch.float32, chart.n, chart.p)
    assert chart(*V).dtype == dtype
    assert torch.equal(chart(*V), exact.to(dtype))
    assert torch.equal(chart.operator(*V).to_dense(), exact.to(dtype))
    X = exact.to(dtype)
    if case.inverts:
        back = chart(*tuple_of(chart.right_inverse(X)))
        assert back.dtype == dtype
        assert (back - X).abs().max() <= bound_for(chart, dtype)
    chart.weight_dtype = torch.float32
    assert torch.equal(chart(*V), exact)
    chart.weight_dtype = torch.float64
    assert chart(*V).dtype == chart.operator(*V).dtype == torch.float64


@every
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_settings_change_nothing(case, shape, precision, device):
    chart = case.make(shape).to(device)
    dtype = torch.float32 if torch.float32 in case.dtypes else torch.complex64
    random_base(chart, dtype, device)
    V = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device))
    X, op = chart(*V), chart.operator(*V).to_dense()
    G = torch.randn_like(X)
    g = torch.autograd.grad(X, V, G)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            Y, oq = chart(*V), chart.operator(*V).to_dense()
            h = torch.autograd.grad(Y, V, G)
            inverse = tuple_of(chart.right_inverse(X)) if case.inverts else V
    finally:
        torch.set_float32_matmul_precision("highest")
    assert Y.dtype == dtype
    assert torch.equal(X, Y)
    assert torch.equal(op, oq)
    assert all(torch.equal(a, b) for a, b in zip(g, h, strict=True))
    assert (chart(*inverse) - X).abs().max() <= bound_for(chart, torch.float32)


@every_real
def test_decay_and_large_steps_keep_the_constraint(case, shape, device):
    """AdamW with weight decay, from a random start: the weight is on the manifold all along."""
    chart = case.make(shape).to(device)
    random_base(chart, torch.float32, device)
    originals = [
        torch.nn.Parameter(original) for original in random_originals(chart, torch.float32, device)
    ]
    G = haar(chart.n, chart.p, chart.batch, device=device)
    optimizer = torch.optim.AdamW(originals, lr=0.1, weight_decay=0.1)
    bound = tolerance(torch.float32, chart.n, chart.p)
    for step in range(100):
        X = chart(*originals)
        assert orthonormality_residual(X).max() <= bound, step
        optimizer.zero_grad()
        ((X - G).square().sum() + X[..., 0, :].sum()).backward()
        assert all(bool(original.grad.isfinite().all()) for original in originals)
        optimizer.step()
    with torch.no_grad():
        for original in originals:
            original.zero_()
    X = chart(*originals)
    X.sum().backward()
    assert orthonormality_residual(X).max() <= bound
    assert all(bool(original.grad.isfinite().all()) for original in originals)
