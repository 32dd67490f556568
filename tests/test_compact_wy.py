"""Compact WY products against explicit products of reflections, and at the edges."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import DtypeError, RepresentationError, ShapeError
from stiefel.geometry import orthonormality_residual
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.wy_factors import (
    check_reflection_vectors,
    compact_wy_factors,
    smallest_norm,
    unit_columns,
)
from stiefel.numerics import tolerance
from tests.reflection_vectors import COMPLEX, REAL, vectors

SIZES = [(12, 5), (40, 40), (100, 30)]


def explicit_product(V, phases=None, columns=None):
    """H_1 H_2 ... H_L, one after the other: the oracle."""
    n, L = V.shape[-2:]
    Q = torch.eye(n, dtype=V.dtype)
    for k in range(L):
        v = V[..., :, k : k + 1]
        tau = 2 if phases is None else (1 - torch.exp(1j * phases[..., k]))[..., None, None]
        Q = Q @ (torch.eye(n, dtype=V.dtype) - tau * (v @ v.mH) / (v.mH @ v))
    return Q[..., :columns]


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize(("n", "L"), SIZES)
def test_equals_the_ordered_product(n, L, dtype):
    V, phases = vectors(n, L, dtype)
    Q = compact_wy(V, phases)
    explicit = explicit_product(V, phases)
    assert (Q - explicit).abs().max() < 1e-12
    for p in {1, L, n // 2}:
        assert (compact_wy(V, phases, columns=p) - explicit[:, :p]).abs().max() < 1e-12
    U, Y = compact_wy_factors(V, phases)
    assert (torch.eye(n, dtype=dtype) - Y @ U.mH - explicit).abs().max() < 1e-12
    assert not torch.allclose(Q, Q.mT)  # so that the order was seen


@pytest.mark.parametrize(("n", "L"), SIZES)
def test_determinant_rank_and_the_identity_of_s(n, L):
    V, _ = vectors(n, L, REAL)
    Q = compact_wy(V)
    assert abs(torch.linalg.det(Q) - (-1) ** L) < 1e-12
    assert torch.linalg.matrix_rank(Q - torch.eye(n, dtype=REAL)) <= L
    U = unit_columns(V)
    S = torch.triu(U.mT @ U, 1) + torch.eye(L, dtype=REAL) / 2
    assert (S + S.mT - U.mT @ U).abs().max() < 1e-12
    assert (Q - (torch.eye(n, dtype=REAL) - U @ torch.linalg.inv(S) @ U.mT)).abs().max() < 1e-12


def test_complex_determinant_is_the_sum_of_the_phases():
    V, phases = vectors(9, 9, COMPLEX)
    det = torch.linalg.det(compact_wy(V, phases))
    assert (det - torch.exp(1j * phases.sum())).abs() < 1e-12
    V, phases = vectors(9, 4, COMPLEX)
    Q = compact_wy(V, torch.full_like(phases, torch.pi))
    v = V / torch.linalg.vector_norm(V, dim=0)
    H = [torch.eye(9) - 2 * v[:, k : k + 1] @ v[:, k : k + 1].mH for k in range(4)]
    assert (Q - H[0] @ H[1] @ H[2] @ H[3]).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize(("n", "L", "p"), [(8, 8, 8), (8, 3, 8), (8, 3, 3), (600, 520, 600)])
def test_scale_does_not_matter_and_gradients_know_it(n, L, p, dtype):
    V, phases = vectors(n, L, dtype)
    V.requires_grad_()
    X = compact_wy(V, phases, columns=p)
    scales = 10.0 ** torch.randint(-8, 9, (L,)).double()
    assert (compact_wy(V * scales, phases, columns=p) - X).abs().max() < 1e-12
    (g,) = torch.autograd.grad(X, V, torch.randn_like(X))
    inner = (V.conj() * g).sum(-2).abs()
    sizes = torch.linalg.vector_norm(V, dim=-2) * torch.linalg.vector_norm(g, dim=-2)
    assert (inner <= 1e-10 * sizes).all()
    half = (V * 0.5).detach().requires_grad_()
    Y = compact_wy(half, phases, columns=p)
    G = torch.randn_like(X)
    (g,), (h,) = (
        torch.autograd.grad(compact_wy(V, phases, columns=p), V, G),
        torch.autograd.grad(Y, half, G),
    )
    assert (h - 2 * g).abs().max() <= 1e-10 * g.abs().max()


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize(
    ("n", "L", "p"), [(12, 5, 12), (12, 8, 12), (40, 40, 40), (40, 7, 7), (12, 7, 3), (1, 1, 1)]
)
@pytest.mark.parametrize("batch", [(), (2,), (2, 2)], ids=str)
def test_gradient_is_that_of_the_sequential_product(n, L, p, batch, dtype):
    V, phases = vectors(n, L, dtype, *batch)
    leaves = [t.requires_grad_() for t in (V, phases) if t is not None]
    X, explicit = compact_wy(*leaves, columns=p), explicit_product(*leaves, columns=p)
    G = torch.randn_like(X)
    ours, theirs = torch.autograd.grad(X, leaves, G), torch.autograd.grad(explicit, leaves, G)
    for g, h in zip(ours, theirs, strict=True):
        assert (g - h).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("L", [520, 601])
def test_block_columns_give_the_same_as_autograd(L, batch, dtype):
    """Above 512 columns the triangular products go by blocks: the oracle is plain autograd."""
    n = 601
    V, phases = vectors(n, L, dtype, *batch)
    leaves = [t.requires_grad_() for t in (V, phases) if t is not None]
    X = compact_wy(*leaves)
    U, Y = compact_wy_factors(*leaves)
    reference = torch.eye(n, dtype=dtype) - Y @ U.mH
    assert (X - reference).abs().max() < 1e-12
    G = torch.randn_like(X)
    ours, theirs = torch.autograd.grad(X, leaves, G), torch.autograd.grad(reference, leaves, G)
    for g, h in zip(ours, theirs, strict=True):
        assert (g - h).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(("n", "L"), [(64, 64), (256, 256), (256, 40), (512, 512)])
def test_single_precision_stays_on_the_manifold(n, L, dtype):
    V = torch.randn(n, L, dtype=dtype)
    phases = 6 * torch.rand(L) if dtype.is_complex else None
    assert orthonormality_residual(compact_wy(V, phases)) < tolerance(dtype, n, n)
    assert orthonormality_residual(compact_wy(V, phases, columns=L)) < tolerance(dtype, n, L)


def test_one_column_is_a_reflected_unit_vector():
    V, _ = vectors(7, 1, REAL)
    v = V[:, 0]
    e = torch.eye(7, dtype=REAL)[0]
    X = compact_wy(V, columns=1)[:, 0]
    assert (X - (e - 2 * v * v[0] / (v @ v))).abs().max() < 1e-14


def test_flip_negates_the_last_row_of_each_matrix():
    V, _ = vectors(6, 6, REAL, 2, 2)
    flip = torch.tensor([[1, -1], [-1, 1]], dtype=torch.int8)
    X, Y = compact_wy(V, flip=flip), compact_wy(V)
    assert torch.equal(X[..., :-1, :], Y[..., :-1, :])
    assert torch.equal(X[..., -1, :], Y[..., -1, :] * flip[..., None])


@pytest.mark.parametrize("shape", [(7, 7, REAL), (7, 5, REAL), (7, 7, COMPLEX), (7, 5, COMPLEX)])
def test_a_triangular_factor_divides_in_blocks_too(shape, monkeypatch):
    n, L, dtype = shape
    V, phases = vectors(n, L, dtype)
    G = torch.randn(n, n, dtype=dtype)
    results = []
    for blocked in (100, 1):
        monkeypatch.setattr("stiefel.geometry.linear._BLOCKED", blocked)
        monkeypatch.setattr("stiefel.geometry.linear._WIDTH", 3)
        leaves = [x.clone().requires_grad_() for x in (V, phases) if x is not None]
        Q = compact_wy(*leaves)
        results.append([Q.detach(), *torch.autograd.grad(Q, leaves, G)])
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocked", [1, 100])
@pytest.mark.parametrize(("n", "L"), [(6, 6), (6, 2)])
def test_operators_are_registered_properly(n, L, blocked, transposed, monkeypatch):
    monkeypatch.setattr("stiefel.geometry.linear._BLOCKED", blocked)
    ops = torch.ops.stiefel
    for dtype in (REAL, COMPLEX):
        V, phases = vectors(L, n, dtype, 2) if transposed else vectors(n, L, dtype, 2)
        if transposed:
            V = V.mT
            phases = None if phases is None else phases[..., :L].contiguous()
        flip = None if dtype.is_complex else torch.tensor([1, -1], dtype=torch.int8)
        V.requires_grad_()
        G = torch.randn(2, n, n, dtype=dtype)
        tests = ("test_schema", "test_faketensor")
        square = ops.compact_wy_square.default, (V, phases, flip)
        torch.library.opcheck(*square, test_utils=tests)
        saved = ops.compact_wy_square.default(V, phases, flip)
        args = (G, *saved, V, phases, flip)
        torch.library.opcheck(ops.compact_wy_square_backward.default, args, test_utils=tests)
        thin = (V, phases, flip, n)
        torch.library.opcheck(ops.compact_wy_thin.default, thin, test_utils=tests)
        _, *saved = ops.compact_wy_thin.default(*thin)
        args = (G, *saved, *thin)
        torch.library.opcheck(ops.compact_wy_thin_backward.default, args, test_utils=tests)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("n", "L", "p"), [(8, 8, 8), (8, 2, 8), (8, 2, 2)])
def test_compiles_with_the_default_backend(n, L, p):
    V = torch.randn(n, L, requires_grad=True)
    compiled = torch.compile(lambda V: compact_wy(V * 1.5, columns=p).sin(), fullgraph=True)
    X = compiled(V)
    Y = compact_wy(V * 1.5, columns=p).sin()
    torch.testing.assert_close(X, Y)
    G = torch.randn_like(Y)
    torch.testing.assert_close(torch.autograd.grad(X, V, G), torch.autograd.grad(Y, V, G))


# ---------------------------------------------------------------------- zero vectors, bad arguments


@pytest.mark.parametrize("dtype", [REAL, COMPLEX, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "L", "p"), [(6, 5, 6), (9, 3, 9), (9, 3, 3)])
@pytest.mark.parametrize("size", [0.0, 1e-30, 0.3], ids=["zero", "tiny", "below"])
def test_zero_vector_acts_as_the_identity(n, L, p, dtype, size):
    V, phases = vectors(n, L, dtype)
    phases = None if phases is None else phases.to(V.real.dtype)
    small = V[:, 1] / torch.linalg.vector_norm(V[:, 1])
    V[:, 1] = small * (smallest_norm(dtype) * size if size == 0.3 else size * 1e-300 ** (size > 0))
    V.requires_grad_()
    X = compact_wy(V, phases, columns=p)
    rest = [0, *range(2, L)]
    others = compact_wy(V[:, rest], None if phases is None else phases[rest], columns=p)
    assert (X - others).abs().max() < tolerance(dtype, n, p)
    assert orthonormality_residual(X) < tolerance(dtype, n, p)
    (g,) = torch.autograd.grad(X, V, torch.randn_like(X))
    assert g.isfinite().all()
    assert (g[:, 1] == 0).all()
    U, Y = compact_wy_factors(V, phases)
    (h,) = torch.autograd.grad((Y @ U.mH).abs().square().sum() + Y.real.sum(), V)
    assert h.isfinite().all()
    assert (h[:, 1] == 0).all()


def test_all_vectors_zero_give_the_identity():
    V = torch.zeros(4, 4, requires_grad=True)
    X = compact_wy(V)
    assert torch.equal(X, torch.eye(4))
    X.pow(3).sum().backward()
    assert torch.equal(V.grad, torch.zeros(4, 4))


def test_zero_vectors_are_found():
    V = torch.randn(2, 5, 3)
    check_reflection_vectors(V)
    V[1, :, 2] = 0
    with pytest.raises(RepresentationError, match=r"1 reflection vector.*\(1, 2\).*direction"):
        check_reflection_vectors(V)
    V[1, 0, 2] = float("nan")
    with pytest.raises(RepresentationError, match="not finite"):
        check_reflection_vectors(V)
    with pytest.raises(RepresentationError, match=r"\[0\]"):
        check_reflection_vectors(torch.zeros(5, 1))


def test_bad_arguments_of_the_map():
    with pytest.raises(ShapeError, match=r"L <= n.*\(3, 4\)"):
        compact_wy(torch.randn(3, 4))
    with pytest.raises(ShapeError, match="columns"):
        compact_wy(torch.randn(4, 2), columns=5)
    with pytest.raises(DtypeError, match="phases"):
        compact_wy(torch.randn(4, 2, dtype=COMPLEX))
    with pytest.raises(DtypeError, match="phases"):
        compact_wy(torch.randn(4, 2), torch.randn(2))
    with pytest.raises(ShapeError, match="phases of shape"):
        compact_wy(torch.randn(4, 2, dtype=COMPLEX), torch.randn(3).double())
    with pytest.raises(ShapeError, match="flip"):
        compact_wy(torch.randn(4, 2), columns=2, flip=torch.ones(()))
