"""The differential of a chart: its singular values, exactly and estimated."""

from __future__ import annotations

import copy
import math

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import chart_differential, point_gradients, stationarity
from stiefel.diagnostics.differential import _Lifted
from stiefel.errors import ConfigurationError
from stiefel.models import OrthogonalRNN
from tests.chart_cases import over, random_base, random_originals
from tests.registry import CHARTS, DOUBLE

#: Every chart in one shape, and in a batch or a tall shape where it has one.
SHAPES = [
    (case, shape)
    for case in CHARTS
    for shape in (case.shapes[0], next((s for s in case.shapes[1:] if s[1] > 1), None))
    if shape is not None
]


def constraint_of(model):
    """The one constraint of a model."""
    (constraint,) = stiefel.constraints(model)
    return constraint


class Holder(nn.Module):
    """A weight."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))


def held(case, shape, dtype):
    """A chart of the registry at generic coordinates."""
    batch, n, p = shape
    chart = case.make(shape)
    holder = stiefel.orthogonal(Holder((*batch, n, p), dtype), via=chart, init="chart")
    random_base(chart, dtype, "cpu")
    constraint = constraint_of(holder)
    with torch.no_grad():
        values = random_originals(chart, dtype, "cpu")
        for leaf, value in zip(constraint.leaves, values, strict=True):
            leaf.copy_(value)
    return constraint


def square(via, n=12, **options):
    layer = nn.Linear(n, n, dtype=options.pop("dtype", torch.float64))
    return constraint_of(stiefel.orthogonal(layer, via=via, **options))


def real_parts(X):
    return torch.view_as_real(X).flatten() if X.is_complex() else X.flatten()


def dense_singular_values(constraint):
    """Of the differential into all matrices, not the tangent space, entry by entry."""
    chart = constraint.storage.chart
    leaves = [leaf.detach().clone().requires_grad_() for leaf in constraint.leaves]
    Y = real_parts(chart(*leaves))
    rows = []
    for y in Y:
        grads = torch.autograd.grad(y, leaves, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([real_parts(g) for g in grads]))
    return torch.linalg.svdvals(torch.stack(rows))


@over(SHAPES, *DOUBLE)
def test_the_singular_values_are_those_of_the_dense_differential(case, shape, dtype):
    constraint = held(case, shape, dtype)
    batch, n, p = shape
    found = chart_differential(constraint)
    real_dimension = n * p - p * (p + 1) // 2
    assert found.dimension == (2 * n * p - p * p if dtype.is_complex else real_dimension)
    assert found.exact
    if found.dimension == 0:
        assert math.isnan(found.smallest)
        return
    sigma = dense_singular_values(constraint)
    assert found.largest == pytest.approx(sigma[0].item(), rel=1e-9)
    count = found.dimension * math.prod(batch)  # the batch is a block diagonal of differentials
    full = len(sigma) >= count
    smallest = sigma[count - 1].item() if full else 0.0
    assert found.smallest == pytest.approx(smallest, rel=1e-7, abs=1e-10)
    if not batch:
        assert found.rank == int((sigma > 1e-8 * sigma[0]).sum())


@over([(case, case.shapes[0]) for case in CHARTS if case.shapes[0][1] > 1], *DOUBLE)
def test_pushing_is_the_adjoint_of_pulling(case, shape, dtype):
    constraint = held(case, shape, dtype)
    _, n, p = shape
    dimension = 2 * n * p - p * p if dtype.is_complex else n * p - p * (p + 1) // 2
    lifted = _Lifted(constraint.storage.chart, constraint.leaves)
    assert lifted.dimension == dimension
    X = lifted.X
    N = torch.linalg.qr(X, mode="complete").Q[..., p:]
    c, d = torch.randn(2, dimension, dtype=torch.float64)
    u, v = lifted._tangent(c, N), lifted._tangent(d, N)  # in an orthonormal basis
    for z in (u, v):
        assert (X.mH @ z + z.mH @ X).abs().max() < 1e-13
    assert (u.conj() * v).sum().real.item() == pytest.approx((c * d).sum().item())
    w = torch.randn(1, lifted.coordinates, dtype=torch.float64)
    left, right = (lifted.push(w, 1e-5).conj() * u).sum().real, (w * lifted.pull(u)).sum()
    assert left.item() == pytest.approx(right.item(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("via", ["cwy", "tcwy", "own", "matrix_exp", "polar"])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_coordinate_gradients_lie_between_the_bounds(via, dtype):
    model = stiefel.orthogonal(Holder((6, 4), dtype), via=via)
    constraint, C = constraint_of(model), torch.randn(6, 4, dtype=dtype)
    bounds = chart_differential(constraint)
    with point_gradients(model) as gradients:
        (C.conj() * model.weight).sum().abs().square().backward()
    found = stationarity(model, gradients)["weight"]
    length = math.sqrt(found.coordinate_norm_squared)
    assert bounds.smallest * found.euclidean_norm * (1 - 1e-9) <= length
    assert length <= bounds.largest * found.euclidean_norm * (1 + 1e-9)


def test_cwy_at_the_identity():
    """Equal reflections leave few directions; a Henaff start leaves them all."""
    constraint = square("cwy", determinant=1)
    with torch.no_grad():
        V = constraint.leaves[0].zero_()
        V[0] = 1
    torch.testing.assert_close(constraint.point, torch.eye(12, dtype=torch.float64))
    found = chart_differential(constraint)
    assert (found.rank, found.dimension) == (11, 66)
    assert found.smallest < 1e-12
    for dtype in (torch.float32, torch.float64):
        rnn = OrthogonalRNN(3, 12, via="cwy", init="henaff", dtype=dtype)
        found = chart_differential(constraint_of(rnn))
        assert (found.rank, found.dimension) == (66, 66)
        assert found.smallest > 1e-2


@pytest.mark.parametrize("n", [6, 7, 8])
def test_urnn_has_rank_7n_minus_7(n):
    found = chart_differential(square("urnn", n, dtype=torch.complex128, init="chart"))
    assert (found.rank, found.dimension) == (7 * n - 7, n * n)
    assert found.smallest < 1e-12


def test_points_are_their_own_coordinates():
    found = chart_differential(square("riemannian"))
    assert (found.smallest, found.largest, found.rank, found.exact) == (1, 1, 66, True)
    model = nn.Module()
    model.x = stiefel.ManifoldParameter(torch.eye(4, 2))
    assert chart_differential(constraint_of(model)).dimension == 5
    model.x = geoopt.ManifoldParameter(torch.eye(3)[0], geoopt.Sphere())
    with pytest.raises(ConfigurationError, match="Sphere"):
        chart_differential(constraint_of(model))


@pytest.mark.parametrize(("exact_below", "relative"), [(600, 1e-9), (0, 1e-4)])
def test_longer_reflection_vectors_move_the_weight_less(exact_below, relative):
    constraint = square("cwy", 8, init="haar")

    def measured():
        seeded = torch.Generator().manual_seed(0)
        return chart_differential(constraint, exact_below=exact_below, generator=seeded)

    before = measured()
    for scale in (1e-3, 64.0):
        with torch.no_grad():
            constraint.leaves[0].mul_(scale)
        after = measured()
        assert after.smallest * scale == pytest.approx(before.smallest, rel=relative)
        assert after.largest * scale == pytest.approx(before.largest, rel=relative)
        assert after.rank == before.rank
        with torch.no_grad():
            constraint.leaves[0].div_(scale)


@pytest.mark.parametrize("via", ["cwy", "cayley", "givens", "polar", "matrix_exp"])
def test_estimates_are_bounds(via):
    constraint = square(via, 9, init="haar")
    exact = chart_differential(constraint)
    for iterations in (2, 10, 20):
        found = chart_differential(constraint, exact_below=0, iterations=iterations)
        assert not found.exact
        assert found.rank is None
        assert exact.smallest * (1 - 1e-9) <= found.smallest <= found.largest
        assert found.largest <= exact.largest * (1 + 1e-9)
    assert found.largest == pytest.approx(exact.largest, rel=1e-3)
    all_of_it = chart_differential(constraint, exact_below=0, iterations=36)
    assert all_of_it.smallest == pytest.approx(exact.smallest, rel=1e-4)


def test_estimates_of_batches_and_complex_weights():
    holder = Holder((2, 4, 2), torch.complex128)
    constraint = constraint_of(stiefel.orthogonal(holder, via="cwy"))
    exact = chart_differential(constraint)
    found = chart_differential(constraint, exact_below=0, iterations=2 * exact.dimension)
    assert found.largest == pytest.approx(exact.largest, rel=1e-6)
    assert found.smallest == pytest.approx(exact.smallest, rel=1e-3)


def test_too_few_coordinates_leave_directions_out():
    constraint = square("cwy", reflections=2, init="chart")
    assert chart_differential(constraint).smallest == 0
    assert chart_differential(constraint, exact_below=0).smallest == 0
    with pytest.raises(ConfigurationError, match="two iterations"):
        chart_differential(constraint, iterations=1)


def test_what_is_not_finite_has_no_differential():
    constraint = square("matrix_exp")
    with torch.no_grad():
        constraint.leaves[0].fill_(math.nan)
    found = chart_differential(constraint)
    assert math.isnan(found.smallest)
    assert found.rank is None


@pytest.mark.parametrize("exact_below", [600, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("via", ["cwy", "matrix_exp", "givens"])
def test_the_model_is_left_alone(via, dtype, exact_below):
    layer = stiefel.orthogonal(nn.Linear(8, 8, dtype=dtype), via=via)
    layer.weight.sum().abs().backward()
    constraint = constraint_of(layer)
    before = copy.deepcopy(layer.state_dict())
    grads = [leaf.grad.clone() for leaf in constraint.leaves]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = chart_differential(constraint, exact_below=exact_below)
    assert found.largest > 0
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])
        assert value.dtype == before[key].dtype
    for leaf, grad in zip(constraint.leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad)
    twin = stiefel.orthogonal(nn.Linear(8, 8, dtype=layer.weight.real.dtype), via="cwy")
    emitted = constraint_of(stiefel.orthogonal(twin, weight_dtype=torch.bfloat16))
    assert chart_differential(emitted).rank == emitted.point.shape[-1] * 7 // 2
