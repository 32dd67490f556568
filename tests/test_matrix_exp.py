"""The chart matrix_exp: bounded angles, memory, and the checks of EXPRNN and DTRIV."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import ConfigurationError, RepresentationError, UnknownNameError
from stiefel.geometry import (
    haar,
    orthonormality_residual,
)
from stiefel.geometry.skew_coordinates import skew_from_coordinates
from stiefel.numerics import tolerance
from stiefel.parametrizations import MatrixExp
from tests.oracles import skew_exponential_oracle as oracle
from tests.registry import DOUBLE

# ------------------------------------------------------------------------- a bound on angles


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [6, 2])
def test_max_angle_takes_the_same_products_for_every_argument(dtype, p):
    free, bound = MatrixExp(6, p), MatrixExp(6, p, max_angle=math.pi)
    for norm in (0.0, 1.0, 3.1):
        V = torch.randn(6, p, dtype=dtype)
        V = V * norm / (math.sqrt(2) * torch.linalg.matrix_norm(V, 2))
        assert (free(V) - bound(V)).abs().max() <= tolerance(dtype, 6, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(6, 6), (30, 30), (70, 70), (7, 3), (30, 20)])
def test_max_angle_shortens_what_is_longer(shape, dtype):
    chart, free = MatrixExp(*shape, max_angle=1.0), MatrixExp(*shape)
    V = torch.randn(*shape, dtype=dtype)
    for size in (3.0, 1e3, 1e8):
        Z = (size * V).requires_grad_()
        X = chart(Z)
        assert orthonormality_residual(X).max() <= tolerance(dtype, *shape)
        (g,) = torch.autograd.grad(X, Z, torch.randn_like(X))
        assert g.isfinite().all()
        if shape == (6, 6):  # a point of the same geodesic
            angle = torch.linspace(0, 4, 4001, dtype=torch.float64)
            A = skew_from_coordinates(V.to(torch.complex128 if dtype.is_complex else torch.float64))
            A = A / torch.linalg.matrix_norm(A, 2)
            distances = [(oracle(t * A) - X).abs().max() for t in angle[1000::10]]
            assert min(distances) <= 2e-2
    inside = 0.2 * V / torch.linalg.matrix_norm(V, 2)
    assert (chart(inside) - free(inside)).abs().max() <= 2 * tolerance(dtype, *shape)


@pytest.mark.parametrize("max_angle", [math.pi, 2 * math.pi])
@pytest.mark.parametrize("shape", [(6, 6), (70, 70), (7, 3), (30, 20)])
def test_max_angle_reads_nothing_back(shape, max_angle):
    def reads(chart):
        chart.set_base(haar(*shape))
        V = torch.randn(shape, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            chart(V).square().sum().backward()
        names = [event.key for event in profile.key_averages()]
        assert "aten::mm" in names or "aten::addmm" in names
        return {"aten::item", "aten::_local_scalar_dense", "aten::linalg_svd"} & set(names)

    assert reads(MatrixExp(*shape, max_angle=max_angle)) == set()
    assert reads(MatrixExp(*shape)) != set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_bounds_keep_tall_weights_orthonormal(dtype):
    for bound in (2 * math.pi, 1e3, 1e5, 1e8):
        chart = MatrixExp(30, 20, max_angle=bound)
        for size in (1e-3, 1.0, 1e3):
            X = chart(bound * size * torch.randn(30, 20, dtype=dtype))
            assert orthonormality_residual(X) <= tolerance(dtype, 30, 20)


@pytest.mark.parametrize("max_angle", [None, 1.0])
@pytest.mark.parametrize("shape", [(6, 6), (70, 70), (1, 1), (7, 3)])
@pytest.mark.parametrize("dtype", [*DOUBLE, torch.float32, torch.complex64])
def test_every_finite_coordinate_gives_a_point(shape, dtype, max_angle, one_thread):
    chart, limits = MatrixExp(*shape, max_angle=max_angle), torch.finfo(dtype)
    tiny = limits.smallest_normal
    sizes = [tiny / 1e5, tiny / 64, tiny, math.sqrt(tiny) / 8, 1e-20]
    sizes += [1e18, 1e20, 1e30, math.sqrt(limits.max), limits.max]
    for size in sizes:
        V = torch.randn(*shape, dtype=dtype)
        parts = torch.view_as_real(V) if dtype.is_complex else V
        parts.div_(parts.abs().amax()).mul_(size)
        V.requires_grad_()
        X = chart(V)
        assert orthonormality_residual(X) <= tolerance(dtype, *shape), size
        if size < 1e-19:
            assert torch.allclose(X, torch.eye(*shape, dtype=dtype), rtol=0, atol=1e-6)
        (g,) = torch.autograd.grad(X, V, torch.randn_like(X))
        assert g.isfinite().all(), size
    V = torch.randn(*shape, dtype=dtype)
    V[0, -1] = math.inf if not dtype.is_complex else complex(0, math.inf)
    assert (shape == (1, 1) and not dtype.is_complex) or chart(V).isnan().any()


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("shape", [(6, 6), (7, 3)])
@pytest.mark.parametrize("rate", [1e20, 1e300])
def test_a_monstrous_rate_leaves_the_base_a_point(rate, shape, dtype, one_thread):
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    layer = stiefel.orthogonal(layer, via="matrix_exp", rebase_every=1, init="haar")
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    stiefel.attach(layer, optimizer)
    T, chart = haar(*shape, dtype=dtype), layer.parametrizations.weight[0]
    for _ in range(3):
        optimizer.zero_grad()
        (layer.weight - T).abs().square().sum().backward()
        optimizer.step()
        assert orthonormality_residual(chart.base) <= tolerance(dtype, *shape)
        assert orthonormality_residual(layer.weight) <= tolerance(dtype, *shape)


def test_tall_weights_train_in_memory_of_their_size():
    code = """
import resource, torch, stiefel
layer = stiefel.orthogonal(torch.nn.Linear(50, 30000, bias=False), via="matrix_exp", rebase_every=2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
stiefel.attach(layer, optimizer)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
C = torch.linspace(0, 1, 30000)[:, None]
losses = []
for _ in range(6):
    optimizer.zero_grad()
    loss = (C * layer.weight.square()).sum()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
assert losses[-1] < losses[0], losses
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(result.stdout) <= 150  # MiB; the weight has 6, an n x n matrix would have 3433


# ------------------------------------------------------------- bases: EXPRNN, DTRIV, steps


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (5, 1)])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_base_at_the_identity_is_exprnn(shape, dtype):
    current, identity = MatrixExp(*shape), MatrixExp(*shape, base="identity")
    V = torch.randn(*shape, dtype=dtype)
    assert torch.allclose(current(V), identity(V), atol=1e-13)
    if shape[0] == shape[1] and not dtype.is_complex:
        A = V.triu(1) - V.triu(1).mT
        assert (identity(V) - oracle(A)).abs().max() <= 1e-13
        identity.set_determinant(torch.tensor(-1))
        assert (identity(V)[:-1] - oracle(A)[:-1]).abs().max() <= 1e-13
        assert (identity(V)[-1] + oracle(A)[-1]).abs().max() <= 1e-13


def test_gradient_of_a_skew_entry_against_finite_differences():
    chart, V, h = MatrixExp(6, base="identity"), torch.randn(6, 6, dtype=torch.float64), 1e-6
    G = torch.randn_like(V)
    V.requires_grad_()
    (g,) = torch.autograd.grad(chart(V), V, G)
    step = torch.zeros_like(V)
    step[1, 4] = h
    with torch.no_grad():
        slope = ((chart(V + step) - chart(V - step)) * G).sum() / (2 * h)
    assert (slope - g[1, 4]).abs() <= 1e-7
    assert g.tril().abs().max() == 0


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("shape", [(6, 6), (7, 3), (5, 1), (1, 1)])
def test_sgd_rebased_every_step_is_riemannian_gradient_descent(shape, dtype):
    n, p = shape
    X, T = haar(n, p, dtype=dtype), haar(n, p, dtype=dtype)
    D = torch.linspace(0.5, 2, n, dtype=torch.float64)[:, None]
    layers = []
    for options in (
        {"via": "matrix_exp", "rebase_every": 1},
        {"via": "riemannian", "inner": "canonical", "retraction": "exp"},
    ):
        layer = nn.Linear(p, n, bias=False, dtype=dtype)
        layer.weight.data.copy_(X)
        layers.append(stiefel.orthogonal(layer, init="keep", **options))
    ours, theirs = layers
    sgd = torch.optim.SGD(ours.parameters(), lr=0.2)
    stiefel.attach(ours, sgd)
    rgd = stiefel.optim.RGD(theirs.parameters(), lr=0.2)
    for _ in range(10):
        for layer, optimizer in ((ours, sgd), (theirs, rgd)):
            optimizer.zero_grad()
            (D * (layer.weight - T).abs().square()).sum().backward()
            optimizer.step()
        assert (ours.weight - theirs.weight).abs().max() <= 1e-12
    assert (ours.weight - X).abs().max() > 1e-3 or (n == 1 and not dtype.is_complex)


@pytest.mark.parametrize("shape", [(6, 6), (8, 3)])
def test_a_thousand_rebases_leave_no_drift(shape, one_thread):
    chart = MatrixExp(*shape, project_every=100)
    for _ in range(1000):
        V = torch.randn(*shape, dtype=torch.float64)
        before = chart(V)
        ((zero,), _) = chart.rebase((V,))
        assert (chart(zero) - before).abs().max() <= 1e-12
    assert int(chart.rebases) == 1000
    assert orthonormality_residual(chart.base).max() <= 1e-10


def layer_with(rebase_every=None, **options):
    layer = nn.Linear(5, 5, bias=False, dtype=torch.float64)
    return stiefel.orthogonal(
        layer, via="matrix_exp", init="haar", rebase_every=rebase_every, **options
    )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_without_a_gradient_after_a_rebase_moves_nothing(kind):
    layer = layer_with(rebase_every=3)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(layer.parameters(), lr=0.1, **options)
    stiefel.attach(layer, optimizer)
    T = haar(5, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        (layer.weight - T).square().sum().backward()
        optimizer.step()
    before = layer.weight.detach().clone()
    assert layer.parametrizations.weight.original.abs().max() == 0
    layer.parametrizations.weight.original.grad.zero_()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_resuming_copies_and_precision_keep_the_base():
    def train(layer, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (layer.weight - T).square().sum().backward()
            optimizer.step()

    T = haar(5, dtype=torch.float64)
    one = layer_with(rebase_every=2, project_every=3)
    train(one, stiefel.optim.build(one, lr=0.1, lr_orthogonal=0.1), 8)
    chart = one.parametrizations.weight[0]
    assert int(chart.rebases) == 4
    two = layer_with(rebase_every=2, project_every=3)
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(two.weight, one.weight)
    assert int(two.parametrizations.weight[0].rebases) == 4
    three = copy.deepcopy(one)
    for layer in (one, two, three):
        train(layer, stiefel.optim.build(layer, lr=0.1, lr_orthogonal=0.1), 5)
    half = copy.deepcopy(one).to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(one.weight, two.weight)
        assert torch.equal(one.weight, three.weight)
        assert half.parametrizations.weight[0].base.dtype == torch.float32
        assert half.weight.dtype == torch.bfloat16
        assert (half.weight - one.weight).abs().max() <= 2e-2


def test_assigning_moves_the_base_and_around_the_identity_the_coordinates():
    X = haar(6, dtype=torch.float64, determinant=-1)
    for via in ("exprnn", "dtriv", "dtriv-inf"):
        layer = stiefel.orthogonal(nn.Linear(6, 6, bias=False, dtype=torch.float64), via=via)
        layer.weight = X
        assert (layer.weight - X).abs().max() <= 1e-12
        zero = bool((layer.parametrizations.weight.original == 0).all())
        assert zero == (via != "exprnn")


def test_determinant_of_a_base_follows_its_last_row():
    chart = MatrixExp(4, batch=(2,))
    chart.set_base(haar(4, 4, (2,), dtype=torch.float64, determinant=1))
    base = chart.base.clone()
    chart.set_determinant(torch.tensor([1, -1]))
    assert torch.equal(chart.base[0], base[0])
    assert torch.equal(chart.base[1, :-1], base[1, :-1])
    assert torch.equal(chart.base[1, -1], -base[1, -1])
    with pytest.raises(RepresentationError, match="determinant"):
        chart.right_inverse(base)


@pytest.mark.parametrize("shape", [(9, 9), (9, 4)])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_start_around_the_identity_is_within_reach(shape, dtype):
    chart = MatrixExp(*shape, base="identity")
    for seed in range(5):
        X = chart.start(dtype, generator=torch.Generator().manual_seed(seed))
        V = chart.right_inverse(X)
        A = skew_from_coordinates(V) if shape[0] == shape[1] else V
        assert 0.05 < float(torch.linalg.matrix_norm(A, 2)) <= math.pi
        assert (chart(V) - X).abs().max() <= 1e-12


def test_start_around_the_identity_stays_within_the_bound():
    chart = MatrixExp(8, base="identity", max_angle=0.5)
    X = chart.start(torch.float64)
    assert torch.linalg.eigvals(X).angle().abs().max() <= 0.5
    assert (chart(chart.right_inverse(X)) - X).abs().max() <= 1e-12


@pytest.mark.parametrize("base", ["identity", "current"])
@pytest.mark.parametrize("shape", [(4, 4), (70, 70), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_values_beyond_max_angle_are_refused(shape, base, dtype):
    chart = MatrixExp(*shape, base=base, max_angle=1.0)
    remedy = "assign the weight" if base == "current" else "base='current'"
    far = torch.eye(*shape, dtype=dtype)
    far[:2, :2] = -far[:2, :2]
    for X, taken in ((far, False), (MatrixExp(*shape, max_angle=0.9)(1e3 * far.roll(1, 1)), True)):
        if taken:
            assert chart.obstacle(X) is None
            V = chart.right_inverse(X)
            assert (chart(V) - X).abs().max() <= 4 * tolerance(dtype, *shape)
            continue
        with pytest.raises(RepresentationError, match=f"larger max_angle=.*{remedy}"):
            chart.right_inverse(X)
        assert "max_angle=1" in chart.obstacle(X)


def test_init_and_convert_refuse_what_max_angle_shortens():
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data.copy_(-torch.eye(4))
    options = {"via": "matrix_exp", "base": "identity", "max_angle": 1.0}
    with pytest.raises(RepresentationError, match="larger max_angle="):
        stiefel.orthogonal(layer, init="keep", **options)
    free = stiefel.orthogonal(layer, via="exprnn", init="keep")
    with pytest.raises(RepresentationError, match="larger max_angle="):
        stiefel.convert(free, "exprnn", max_angle=1.0)
    assert (free.weight + torch.eye(4)).abs().max() <= 1e-6


def test_checkpoints_record_max_angle():
    def layer(**options):
        layer = nn.Linear(4, 4)
        return stiefel.orthogonal(layer, via="exprnn", init="chart", **options)

    saved = layer(max_angle=3.0).state_dict()
    layer(max_angle=3.0).load_state_dict(saved)
    for options in ({}, {"max_angle": 1.0}):
        with pytest.raises(RuntimeError, match="max_angle"):
            layer(**options).load_state_dict(saved)


def test_rebases_are_counted_only_where_the_count_matters():
    assert "rebases" not in MatrixExp(4, rebase_every=2).state_dict()
    assert "rebases" in MatrixExp(4, rebase_every=2, project_every=3).state_dict()
    assert "base" not in MatrixExp(4, base="identity").state_dict()


def test_options_that_do_not_go_together():
    with pytest.raises(ConfigurationError, match="never moves"):
        MatrixExp(4, base="identity", rebase_every=2)
    with pytest.raises(ConfigurationError, match="never moves"):
        MatrixExp(4, base="identity", project_every=2)
    with pytest.raises(UnknownNameError, match=r"unknown base 'haar'.*current, identity"):
        MatrixExp(4, base="haar")
    for option in ("rebase_every", "project_every"):
        for wrong in (0, 2.0, True):
            with pytest.raises(ConfigurationError, match=f"{option}= to be a whole number >= 1"):
                MatrixExp(4, **{option: wrong})
    with pytest.raises(ConfigurationError, match="max_angle > 0"):
        MatrixExp(4, max_angle=-1.0)
    with pytest.raises(ConfigurationError, match="via='matrix_exp'"):
        stiefel.orthogonal(nn.Linear(4, 4), via="dtriv", rebase_every=3)
