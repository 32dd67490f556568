"""The chart urnn: its formula, its operator, and how it refuses what it cannot hold."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import ConfigurationError, DtypeError, RepresentationError
from stiefel.geometry import haar, orthonormality_residual
from stiefel.operators import Dense, FourierReflections
from stiefel.parametrizations import URNN

COMPLEX = torch.complex128


def layer(n, dtype=torch.complex64):
    return nn.Linear(n, n, bias=False, dtype=dtype)


@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_equals_the_product_of_its_factors(n):
    chart = URNN(n)
    V, theta = chart.starting_originals(COMPLEX)
    k = torch.arange(n, dtype=torch.float64)
    F = torch.polar(torch.ones(n, n, dtype=torch.float64), -2 * math.pi / n * torch.outer(k, k))
    F /= math.sqrt(n)
    Pi = torch.eye(n, dtype=COMPLEX)[chart.permutation]
    D1, D2, D3 = (torch.diag(torch.exp(1j * theta[:, i])) for i in range(3))
    eye = torch.eye(n, dtype=COMPLEX)
    R1, R2 = (
        eye - 2 * torch.outer(v, v.conj()) / torch.linalg.vector_norm(v) ** 2 for v in V.unbind(1)
    )
    assert (F @ F.mH - eye).abs().max() < 1e-13
    W = D3 @ R2 @ F.mH @ D2 @ Pi @ R1 @ F @ D1
    assert (chart(V, theta) - W).abs().max() < 1e-13
    op = chart.operator(V, theta)
    assert isinstance(op, FourierReflections)
    assert (op.mT.to_dense() - W.mT).abs().max() < 1e-13
    h = torch.randn(3, n, dtype=COMPLEX)
    assert (h @ op.mT - h @ W.mT).abs().max() < 1e-12
    assert (h @ op - h @ W).abs().max() < 1e-12


def test_norms_are_kept_for_a_thousand_steps():
    chart = URNN(16)
    op = chart.operator(*chart.starting_originals(COMPLEX))
    h = torch.randn(5, 16, dtype=COMPLEX)
    before = torch.linalg.vector_norm(h, dim=-1)
    for _ in range(1000):
        h = h @ op.mT
    assert (torch.linalg.vector_norm(h, dim=-1) - before).abs().max() < 1e-12


def test_has_seven_n_parameters_and_as_many_dimensions_as_they_allow():
    """7n less the length and phase of each v, two of three common phases of D_i, and one more."""
    n = 12
    chart = URNN(n)
    V, theta = chart.starting_originals(COMPLEX)
    assert 2 * V.numel() + theta.numel() == 7 * n

    def weight(real, imag, theta):
        return torch.view_as_real(chart(torch.complex(real, imag), theta)).flatten()

    J = torch.autograd.functional.jacobian(weight, (V.real.clone(), V.imag.clone(), theta))
    J = torch.cat([block.flatten(1) for block in J], dim=1)
    assert torch.linalg.matrix_rank(J, rtol=1e-9) == 7 * n - 7


def test_zero_vectors_are_the_identity_and_lengths_do_not_matter():
    chart = URNN(6)
    V, theta = chart.starting_originals(COMPLEX)
    assert (chart(1e12 * V, theta) - chart(V, theta)).abs().max() < 1e-13
    V[:, 0] = 0
    V.requires_grad_()
    W = chart(V, theta)
    assert orthonormality_residual(W).max() < 1e-13
    (g,) = torch.autograd.grad(W.real.sum(), V)
    assert torch.equal(g[:, 0], torch.zeros(6, dtype=COMPLEX))
    assert g[:, 1].abs().max() > 0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_gradients_of_vectors_of_any_size(scale):
    """They go as the inverse of the size."""
    chart, gradients = URNN(8), []
    V, theta = chart.starting_originals(torch.complex64)
    G = torch.randn(8, 8, dtype=torch.complex64)
    for vectors in (V, scale * V):
        (g,) = torch.autograd.grad(chart(vectors.requires_grad_(), theta), vectors, G)
        gradients.append(g)
    assert (scale * gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_second_derivatives_are_right():
    chart = URNN(4)
    originals = tuple(o.requires_grad_() for o in chart.starting_originals(COMPLEX))
    assert torch.autograd.gradgradcheck(chart, originals)


def test_permutation_depends_on_the_seed_and_is_saved():
    assert torch.equal(URNN(20).permutation, URNN(20).permutation)
    other = URNN(20, seed=1)
    assert not torch.equal(URNN(20).permutation, other.permutation)
    assert other.permutation.sort().values.equal(torch.arange(20))
    chart = URNN(20)
    chart.load_state_dict(other.state_dict())
    originals = chart.starting_originals(COMPLEX)
    assert torch.equal(chart(*originals), other(*originals))
    assert chart.to(torch.float64).permutation.dtype == torch.int64


def test_start_is_distributed_as_published_and_repeats_with_its_generator():
    n = 2000
    chart = URNN(n)
    V, theta = chart.starting_originals(COMPLEX)
    bound = math.sqrt(6 / (2 + 2 * n))
    parts = torch.view_as_real(V)
    assert 0.98 * bound < parts.abs().max() <= bound
    assert abs(parts.square().mean() / (bound**2 / 3) - 1) < 0.06
    assert 0.98 * math.pi < theta.abs().max() <= math.pi
    small = URNN(5)
    one, two = (small.start(COMPLEX, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(one, two)


def test_door_takes_its_own_start_with_a_warning():
    with pytest.warns(UserWarning, match="init='chart'"):
        module = stiefel.orthogonal(layer(6), via="urnn")
    (constraint,) = stiefel.constraints(module)
    assert constraint.via == "urnn"
    assert module.weight.dtype == torch.complex64
    assert orthonormality_residual(module.weight).max() < stiefel.tolerance(torch.complex64, 6, 6)
    assert sum(p.numel() * (2 if p.is_complex() else 1) for p in module.parameters()) == 42
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stiefel.orthogonal(layer(6), via="urnn", init="chart", seed=4)
    with pytest.raises(RepresentationError, match="via='cwy'"):
        stiefel.orthogonal(layer(6), via="urnn", init="keep")
    with pytest.raises(RepresentationError, match="own start"):
        constraint.assign(haar(6, dtype=torch.complex64))


def test_it_trains_and_converts_away():
    torch.manual_seed(0)
    module = stiefel.orthogonal(layer(5, COMPLEX), via="urnn", init="chart")
    x, y = (torch.randn(40, 5, dtype=COMPLEX) for _ in "ab")
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (module(x) - y).abs().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    W = module.weight.detach().clone()
    stiefel.convert(module, "cwy")
    assert (module.weight - W).abs().max() < 1e-12
    with pytest.raises(RepresentationError, match="urnn"):
        stiefel.convert(module, "urnn")


@pytest.mark.parametrize("init", [None, "keep", "chart", "haar"])
def test_real_weights_are_refused_with_the_remedy(init):
    with pytest.raises(DtypeError, match=r"complex64.*via='givens'"):
        stiefel.orthogonal(layer(4, torch.float32), via="urnn", init=init)


def test_only_single_square_matrices():
    with pytest.raises(ConfigurationError, match="square"):
        URNN(5, 3)
    with pytest.raises(ConfigurationError, match="batch"):
        URNN(5, batch=(2,))


def test_operator_is_dense_where_the_weight_is_cast():
    chart = URNN(5)
    originals = chart.starting_originals(torch.complex64)
    chart.weight_dtype = COMPLEX
    op = chart.operator(*originals)
    assert isinstance(op, Dense)
    assert op.dtype == chart(*originals).dtype == COMPLEX
