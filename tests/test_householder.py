"""Reflections one after another: equal to compact WY, in value and derivative, at the edges too."""

from __future__ import annotations

import pytest
import torch

import stiefel
from stiefel.errors import DtypeError, ShapeError
from stiefel.geometry import haar, orthonormality_residual
from stiefel.geometry import householder as kernel
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.householder import householder_product
from stiefel.geometry.wy_factors import smallest_norm
from stiefel.numerics import tolerance
from stiefel.operators import Dense
from stiefel.parametrizations import CWY, HouseholderProduct
from tests.reflection_vectors import COMPLEX, REAL, vectors

#: (batch, n, L, p): square, few reflections, tall on both sides of 2p = n, batches.
SIZES = [
    ((), 40, 40, 40),
    ((), 12, 5, 12),
    ((), 12, 12, 5),
    ((), 100, 30, 50),
    ((), 100, 30, 30),
    ((3,), 7, 7, 7),
    ((20,), 7, 7, 7),
    ((5, 4), 9, 4, 3),
    ((2, 0), 5, 5, 5),
    ((512,), 4, 4, 4),
    ((512,), 5, 3, 2),
]


def leaves(V, phases):
    return [t.requires_grad_() for t in (V, phases) if t is not None]


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize(("batch", "n", "L", "p"), SIZES)
def test_equals_compact_wy_in_value_and_gradient(batch, n, L, p, dtype):
    args = leaves(*vectors(n, L, dtype, *batch))
    flip = None
    if n == p and dtype == REAL:
        flip = (2 * torch.randint(0, 2, batch) - 1).to(torch.int8)
    X = householder_product(*args, columns=p, flip=flip)
    Y = compact_wy(*args, columns=p, flip=flip)
    assert torch.allclose(X, Y, rtol=0, atol=1e-12)
    G = torch.randn_like(X)
    ours, theirs = (torch.autograd.grad(Z, args, G) for Z in (X, Y))
    for g, h in zip(ours, theirs, strict=True):
        assert torch.allclose(g, h, rtol=0, atol=1e-10)


def test_equals_one_reflection_after_another_on_a_vector():
    V, phases = vectors(9, 6, COMPLEX)
    Q, h = householder_product(V, phases), torch.randn(9, dtype=COMPLEX)
    forward, backward = h.clone(), h.clone()
    for k in range(6):
        u = V[:, k] / torch.linalg.vector_norm(V[:, k])
        backward -= (1 - torch.exp(-1j * phases[k])) * u * (u.conj() @ backward)
    for k in reversed(range(6)):
        u = V[:, k] / torch.linalg.vector_norm(V[:, k])
        forward -= (1 - torch.exp(1j * phases[k])) * u * (u.conj() @ forward)
    assert (Q @ h - forward).abs().max() < 1e-12
    assert (Q.mH @ h - backward).abs().max() < 1e-12  # first to last undoes the product


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
def test_parts_of_a_batch_change_nothing(dtype, monkeypatch):
    """A batch at once, also in blocks, in parts that fit a cache, or matrix by matrix."""
    args = leaves(*vectors(6, 6, dtype, 40))
    G = torch.randn(40, 6, 6, dtype=dtype)
    results = []
    for cached, few, width in [(2**30, 1, 128), (2**30, 1, 2), (36 * 17, 4, 128), (36, 16, 128)]:
        monkeypatch.setattr(kernel, "_CACHED", cached)
        monkeypatch.setattr(kernel, "_FEW", few)
        monkeypatch.setattr(kernel, "_WIDTH", width)
        X = householder_product(*args)
        results.append((X, *torch.autograd.grad(X, args, G)))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("p", [8, 3])
def test_zero_vectors_act_as_the_identity(dtype, p):
    V, phases = vectors(8, 5, dtype)
    with torch.no_grad():
        V[:, 1], V[:, 3] = 0, smallest_norm(dtype) / 8
    kept = [0, 2, 4]
    others = (V[:, kept], None if phases is None else phases[kept])
    args = leaves(V, phases)
    X = householder_product(*args, columns=p)
    assert (X - householder_product(*others, columns=p)).abs().max() < 1e-13
    gradients = torch.autograd.grad(X, args, torch.randn_like(X))
    for g in gradients:
        assert torch.equal(g[..., [1, 3]], torch.zeros_like(g[..., [1, 3]]))
        assert g[..., kept].abs().min() > 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_lengths_do_not_matter(scale):
    V, _ = vectors(8, 8, REAL)
    V = V.float()
    X = householder_product(scale * V)
    assert (X - householder_product(V)).abs().max() < 1e-6
    assert orthonormality_residual(X).max() < tolerance(torch.float32, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_repeated_vectors_stay_orthonormal_in_single_precision(dtype):
    """The norm of a rounded u differs from one, and here by the same amount again and again."""
    V = torch.randn(300, 32, 1).expand(300, 32, 32).to(dtype)
    phases = torch.full((300, 32), torch.pi) if dtype.is_complex else None
    X = householder_product(V, phases)
    assert orthonormality_residual(X).max() < tolerance(dtype, 32, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(
    ("batch", "n", "columns"), [((), 200, 200), ((), 200, 40), ((2,), 100, 100)]
)
def test_many_equal_steps_do_not_drift(batch, n, columns, dtype):
    """Every step rounds alike."""
    V = torch.ones(*batch, n, n, dtype=dtype, requires_grad=True)
    phases = torch.full((*batch, n), torch.pi) if dtype.is_complex else None
    X = householder_product(V, phases, columns=columns)
    assert orthonormality_residual(X).max() < tolerance(dtype, n, columns)
    G = torch.randn_like(X)
    double = V.detach().to(COMPLEX if dtype.is_complex else REAL).requires_grad_()
    exact = householder_product(
        double, None if phases is None else phases.double(), columns=columns
    )
    (g,), (slope,) = torch.autograd.grad(X, V, G), torch.autograd.grad(exact, double, G.to(exact))
    assert (X - exact).abs().max() < 1e-4
    assert (g - slope).norm() < 1e-3 * slope.norm()


def test_memory_is_that_of_the_frame():
    """The result and two numbers a reflection are kept: no n x n matrix, no graph of L nodes."""
    V = torch.randn(2000, 3, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        X = householder_product(V, columns=3)
    assert sum(kept) <= 2 * 2000 * 3 + 2 * 3  # with the reflections themselves
    X.sum().backward()
    assert V.grad.shape == V.shape


def test_chart_shares_everything_with_cwy():
    one, two = HouseholderProduct(7, reflections=3), CWY(7, reflections=3)
    one.set_determinant(torch.tensor(1))
    two.load_state_dict(one.state_dict())
    V = torch.randn(7, 3, dtype=REAL)
    assert (one(V) - two(V)).abs().max() < 1e-12
    assert isinstance(one.operator(V), Dense)
    X = haar(7, dtype=REAL, determinant=-1)
    square = HouseholderProduct(7)
    assert torch.equal(square.right_inverse(X), CWY(7).right_inverse(X))


def test_short_form():
    layer = stiefel.orthogonal(torch.nn.Linear(5, 5), via="hr", reflections=2, init="chart")
    (constraint,) = stiefel.constraints(layer)
    assert constraint.via == "householder"
    assert constraint.leaves[0].shape == (5, 2)


def test_bad_arguments_are_refused():
    V, phases = vectors(5, 3, COMPLEX)
    with pytest.raises(ShapeError, match="L <= n"):
        householder_product(V.mT, phases)
    with pytest.raises(DtypeError, match="phases"):
        householder_product(V)
    with pytest.raises(ShapeError, match="columns"):
        householder_product(V, phases, columns=6)
