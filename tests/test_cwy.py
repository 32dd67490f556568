"""CWY and T-CWY against explicit products of reflections, and at the edges."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    RepresentationError,
    ShapeError,
)
from stiefel.geometry import haar, orthonormality_residual
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.determinant import determinant_sign
from stiefel.geometry.reflections import householder_vectors
from stiefel.geometry.wy_factors import (
    check_reflection_vectors,
    compact_wy_factors,
    smallest_norm,
    unit_columns,
)
from stiefel.numerics import tolerance
from stiefel.operators import CompactWY, Dense
from stiefel.parametrizations import CWY, TCWY

REAL, COMPLEX = torch.float64, torch.complex128
SIZES = [(12, 5), (40, 40), (100, 30)]


def vectors(n, L, dtype, *batch):
    """Gaussian reflection vectors and, for complex ones, phases."""
    V = torch.randn(*batch, n, L, dtype=dtype)
    return (V, 6 * torch.rand(*batch, L).double()) if dtype.is_complex else (V, None)


def explicit_product(V, phases=None, columns=None):
    """H_1 H_2 ... H_L, one after the other: the oracle."""
    n, L = V.shape[-2:]
    Q = torch.eye(n, dtype=V.dtype)
    for k in range(L):
        v = V[..., :, k : k + 1]
        tau = 2 if phases is None else (1 - torch.exp(1j * phases[..., k]))[..., None, None]
        Q = Q @ (torch.eye(n, dtype=V.dtype) - tau * (v @ v.mH) / (v.mH @ v))
    return Q[..., :columns]


def rebuilt(X, reflections=None, **options):
    V, phases = householder_vectors(X, reflections, **options)
    assert torch.allclose(torch.linalg.vector_norm(V, dim=-2), torch.ones(1).to(V.real))
    return compact_wy(V, phases, columns=X.shape[-1])


# ------------------------------------------------------------------------------ the map


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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "L"), [(6, 6), (6, 2)])
def test_operators_are_registered_properly(n, L, transposed):
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
        Q, U, Y = ops.compact_wy_square.default(V, phases, flip)
        args = (G, Q, U, Y, V, phases, flip)
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


# --------------------------------------------------------------------- zero vectors, sizes


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


@pytest.mark.parametrize("n", [1, 2, 5, 190])
def test_signs_of_determinants(n):
    """For batches too: n = 190 is where batched LU goes wrong after torch.set_num_threads."""
    torch.set_num_threads(torch.get_num_threads())
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=REAL)
    X = haar(n, batch=(2, 2), dtype=REAL)
    one_by_one = torch.stack([torch.linalg.det(x) for x in X.flatten(0, 1)]).view(2, 2)
    X[..., -1, :] *= (one_by_one.sign() * signs)[..., None]
    assert torch.equal(determinant_sign(X), signs)
    assert torch.equal(determinant_sign(3 * X.float()), signs.float())
    assert determinant_sign(torch.eye(n)) == 1
    assert determinant_sign(torch.zeros(n, n)) == 0


# ------------------------------------------------------------------------- factorisation


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("n", [1, 2, 33, 190])
def test_factorisation_rebuilds(n, dtype):
    X = haar(n, dtype=dtype, determinant=None if dtype.is_complex else (-1) ** n)
    assert (rebuilt(X) - X).abs().max() < 1e-12
    for p in {1, (n + 1) // 2, n - 1} - {0, n} if n < 190 else {95}:
        X = haar(n, p, dtype=dtype)
        assert (rebuilt(X) - X).abs().max() < 1e-12
        assert (rebuilt(X, n) - X).abs().max() < 1e-12
    if n < 190:
        sign = None if dtype.is_complex else (-1) ** n
        X = haar(n, batch=(2, 2), dtype=dtype, determinant=sign)
        assert (rebuilt(X) - X).abs().max() < 1e-12


def test_factorisation_of_an_exponential():
    A = torch.randn(190, 190, dtype=REAL)
    X = torch.linalg.matrix_exp((A - A.mT) / 10)
    assert (rebuilt(X) - X).abs().max() < 1e-12
    V, _ = householder_vectors(X)
    assert (torch.tril(V) - V).abs().max() == 0  # column k is zero above row k


@pytest.mark.parametrize("gap", [0.0, 1e-300, 1e-17, 1e-12, 1e-8, 1e-3])
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
def test_factorisation_is_stable_near_the_identity(gap, dtype):
    A = torch.randn(20, 20, dtype=dtype)
    X = torch.linalg.matrix_exp(gap * (A - A.mH))
    assert (rebuilt(X) - X).abs().max() < 1e-14
    assert (rebuilt(X[:, :7].clone()) - X[:, :7]).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("p", [1, 3, 5, 6, 7])
def test_signed_permutations(p, dtype):
    for _ in range(10):
        E = torch.eye(7, dtype=dtype)[:, torch.randperm(7)] * torch.sign(torch.randn(7)).to(dtype)
        if p == 7 and not dtype.is_complex:
            E[:, 0] *= -torch.linalg.det(E)
        assert (rebuilt(E[:, :p].clone()) - E[:, :p]).abs().max() < 1e-14


def test_complex_unit_vectors_with_any_phase():
    angles = torch.linspace(0, 6.28, 9, dtype=REAL)
    X = torch.polar(torch.ones_like(angles), angles)[:, None, None]
    assert (rebuilt(X) - X).abs().max() < 1e-14
    X = torch.nn.functional.pad(X, (0, 0, 0, 3))
    assert (rebuilt(X) - X).abs().max() < 1e-14


def test_wrong_parity_is_refused():
    with pytest.raises(RepresentationError, match=r"\(-1\)\^5.*-1.*determinant \+1.*last row"):
        householder_vectors(haar(5, dtype=REAL, determinant=1))
    signs = torch.tensor([1, -1, 1])
    X = haar(6, batch=(3,), dtype=REAL, determinant=1)
    X[:, -1] *= signs[:, None]
    with pytest.raises(RepresentationError, match=r"matrices \[1\] of the batch"):
        householder_vectors(X)
    with pytest.raises(ShapeError, match="n >= p"):
        householder_vectors(torch.randn(3, 5))
    with pytest.raises(ShapeError, match="reflections"):
        householder_vectors(haar(5), 6)


@pytest.mark.parametrize("dtype", [REAL, COMPLEX, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "L"), [(12, 5), (60, 20), (60, 45), (9, 1)])
def test_few_reflections_are_found_again(n, L, dtype):
    V, phases = vectors(n, L, dtype, 2)
    Q = compact_wy(V, None if phases is None else phases)
    bound = 2 * tolerance(dtype, n, n)
    assert (rebuilt(Q, L) - Q).abs().max() < bound
    assert (rebuilt(Q, L + 2) - Q).abs().max() < bound  # spare ones multiply to the identity
    X = Q[..., : L + 1].clone()
    assert (rebuilt(X, L) - X).abs().max() < bound  # L reflections for L + 1 columns
    angles = None if phases is None else torch.tensor([1.0, 2.0]).double()
    more = Q @ compact_wy(torch.randn(n, 2, dtype=dtype), angles)
    with pytest.raises(RepresentationError, match=rf"rank\(X - I\) is {L + 2}"):
        householder_vectors(more, L)
    if not dtype.is_complex:
        with pytest.raises(RepresentationError, match=r"determinant \(-1\)"):
            householder_vectors(Q, L + 1)


def test_small_rotations_of_low_rank_are_found():
    """Reflections that nearly cancel: rank is counted although X - I is small."""
    v = torch.randn(30, 2, dtype=REAL)
    V = torch.stack([v[:, 0], v[:, 0] + 1e-6 * v[:, 1]], dim=1)
    Q = compact_wy(torch.cat([V, torch.randn(30, 1, dtype=REAL)], dim=1))
    assert (rebuilt(Q, 3) - Q).abs().max() < 1e-12


def test_spare_reflections_leave_many_directions_open():
    """At the identity n pairs of one vector would leave 11 of 66 directions (n = 12)."""
    chart = CWY(12)
    V = chart.right_inverse(torch.eye(12, dtype=REAL))
    J = torch.autograd.functional.jacobian(chart, V).reshape(144, 144)
    assert torch.linalg.matrix_rank(J, rtol=1e-9) > 45


# ------------------------------------------------------------------------------- charts


def test_charts_choose_sizes_and_refuse_the_impossible():
    assert CWY(7).reflections == 7
    assert CWY(7, 3).reflections == 3
    assert TCWY(7, 3).reflections == 3
    with pytest.raises(ConfigurationError, match=r"reflections <= n = 7, got 8"):
        CWY(7, reflections=8)
    with pytest.raises(ConfigurationError, match="got 0"):
        CWY(7, reflections=0)
    with pytest.raises(ConfigurationError, match="via='cwy'"):
        TCWY(7, 7)
    with pytest.raises(ConfigurationError, match="via='cwy'"):
        TCWY(7)
    with pytest.raises(ShapeError, match="wide"):
        CWY(3, 7)


def test_operator_is_compact_where_that_is_cheaper():
    for chart, kind in [
        (CWY(9), Dense),
        (CWY(9, reflections=4), CompactWY),
        (CWY(8, reflections=4), Dense),
        (TCWY(9, 4), CompactWY),
        (TCWY(9, 5), Dense),
    ]:
        V = chart.empty_originals(torch.float32).normal_()
        assert isinstance(chart.operator(V), kind)
        assert isinstance(chart.operator(V).mT, Dense) == (kind is Dense)


def test_thin_orbit_covers_tall_matrices():
    """T-CWY is onto St(n, p), p < n, with the extreme points too."""
    for n, p in [(2, 1), (3, 2), (8, 7), (8, 3)]:
        chart = TCWY(n, p)
        E = torch.eye(n, p, dtype=REAL)
        for X in (E, -E, haar(n, p, dtype=REAL), E.flip(0), E.flip(0).flip(1)):
            assert (chart(chart.right_inverse(X)) - X).abs().max() < 1e-12


def test_more_reflections_than_columns():
    chart = CWY(8, 3, reflections=6)
    X = haar(8, 3, dtype=REAL)
    V = chart.right_inverse(X)
    assert V.shape == (8, 6)
    assert (chart(V) - X).abs().max() < 1e-12


def test_complex_weights_need_no_determinant():
    chart = CWY(5)
    chart.set_determinant(torch.tensor(1))
    X = haar(5, dtype=COMPLEX)
    assert chart.obstacle(X) is None
    assert (chart(*chart.right_inverse(X)) - X).abs().max() < 1e-12


def test_flip_is_saved_and_survives_conversion():
    chart = CWY(5, batch=(2,))
    chart.set_determinant(torch.tensor([1, -1]))
    other = CWY(5, batch=(2,))
    other.load_state_dict(chart.state_dict())
    assert torch.equal(other.flip, torch.tensor([-1, 1], dtype=torch.int8))
    assert other.to(torch.float64).to(torch.bfloat16).flip.dtype == torch.int8


def test_start_repeats_with_its_generator():
    for dtype in (torch.float32, COMPLEX):
        one, two = (
            CWY(6).start(dtype, generator=torch.Generator().manual_seed(3)) for _ in range(2)
        )
        assert torch.equal(one, two)
        assert one.dtype == dtype


def test_changing_a_vector_in_place_changes_the_weight():
    chart = CWY(4)
    V = torch.randn(4, 4)
    X = chart(V)
    with torch.no_grad():
        V[:, 0] += 1
    assert not torch.allclose(chart(V), X)


def test_rebase_moves_every_known_moment_and_resets_the_rest():
    chart = CWY(5)
    V = 3 * torch.randn(5, 5)
    V[:, 2] = 0
    (new,), move = chart.rebase([V])
    norms = torch.linalg.vector_norm(V, dim=0)
    norms[2] = 1
    assert torch.allclose(new, V / norms)
    moment = torch.rand(5, 5)
    for key in ("exp_avg", "momentum_buffer", "grad_avg"):
        assert torch.allclose(move(0, key, moment), moment * norms)
    for key in ("exp_avg_sq", "square_avg", "max_exp_avg_sq", "sum"):
        assert torch.allclose(move(0, key, moment), moment * norms**2)
    assert move(0, "unheard_of", moment) is None
    assert move(0, "step", torch.tensor(3.0)) == 3
    phases = torch.rand(5)
    assert torch.equal(move(1, "exp_avg", phases), phases)


def test_gradient_descent_lengthens_the_vectors():
    """Scale invariance: steps are orthogonal to v, so |v| never shrinks under plain SGD."""
    V = torch.randn(6, 6, dtype=REAL, requires_grad=True)
    target = haar(6, dtype=REAL, determinant=1)
    norms = torch.linalg.vector_norm(V.detach(), dim=0)
    for _ in range(50):
        loss = (compact_wy(V) - target).square().sum()
        (g,) = torch.autograd.grad(loss, V)
        with torch.no_grad():
            V -= 0.1 * g
        longer = torch.linalg.vector_norm(V.detach(), dim=0)
        assert (longer >= norms * (1 - 1e-12)).all()
        norms = longer
    assert (compact_wy(V) - target).square().sum() < 1
