"""The Cayley chart: its map, its domain, determinants, and what rebasing at every step equals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import ConfigurationError, RepresentationError, ShapeError
from stiefel.geometry import cayley_coordinates, cayley_map, haar, orthonormality_residual
from stiefel.geometry.skew_coordinates import skew_from_coordinates
from stiefel.numerics import tolerance
from stiefel.parametrizations import Cayley

REAL, COMPLEX = torch.float64, torch.complex128
DOUBLE = pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)


def skew(X):
    """A, entry by entry."""
    A = torch.zeros_like(X)
    n = X.shape[-1]
    for i in range(n):
        for j in range(i + 1, n):
            A[..., i, j], A[..., j, i] = X[..., i, j], -X[..., i, j].conj()
        if X.is_complex():
            A[..., i, i] = 1j * 2**0.5 * X[..., i, i].imag
    return A


def oracle(X, negative=0, flip=1):
    """F (I + A)^-1 (I - A) D by a solve."""
    n = X.shape[-1]
    A, eye = skew(X), torch.eye(n, dtype=X.dtype)
    D, F = torch.ones(n, dtype=X.dtype), torch.ones(n, dtype=X.dtype)
    D[n - negative :], F[-1] = -1, flip
    return F[:, None] * torch.linalg.solve(eye + A, eye - A) * D


# ---------------------------------------------------------------------------------- the map


@DOUBLE
@pytest.mark.parametrize("negative", [0, 2, 5])
@pytest.mark.parametrize("flip", [1, -1])
def test_is_the_scaled_cayley_transform(dtype, negative, flip):
    X = torch.randn(5, 5, dtype=dtype)
    Q = cayley_map(X, negative=negative, flip=torch.tensor(flip, dtype=torch.int8))
    torch.testing.assert_close(Q, oracle(X, negative, flip), rtol=0, atol=1e-13)
    assert orthonormality_residual(Q) < 1e-14


@DOUBLE
def test_gradient_is_that_of_finite_differences(dtype):
    """dF/dA of F(Q) = Re tr(G^H Q), along every coordinate that counts."""
    X, G = torch.randn(2, 4, 4, dtype=dtype)
    X.requires_grad_()
    loss = lambda X: (G.conj() * cayley_map(X, negative=2)).real.sum()  # noqa: E731
    (gradient,) = torch.autograd.grad(loss(X), X)
    slopes, h = torch.zeros_like(X), 1e-6
    for i in range(4):
        for j in range(4):
            for unit in [1, 1j] if dtype == COMPLEX else [1]:
                E = torch.zeros_like(X)
                E[i, j] = unit
                slope = (loss(X + h * E) - loss(X - h * E)) / (2 * h)
                slopes[i, j] += unit * slope.item()
    torch.testing.assert_close(gradient, slopes, rtol=0, atol=1e-7)
    assert bool((gradient.tril(-1) == 0).all())
    assert bool((gradient.diagonal().real == 0).all())
    assert (gradient.triu(1) != 0).sum() == 6


@DOUBLE
def test_coordinates_are_orthonormal_in_the_canonical_metric(dtype):
    basis = []
    for i in range(3):
        for j in range(i, 3):
            for unit in [1, 1j] if dtype == COMPLEX else [1]:
                E = torch.zeros(3, 3, dtype=dtype)
                E[i, j] = unit
                A = skew_from_coordinates(E)
                torch.testing.assert_close(A, skew(E))
                if A.abs().max() > 0:
                    basis.append(A.flatten())
    B = torch.stack(basis)
    assert len(basis) == (9 if dtype == COMPLEX else 3)
    gram = (B.conj() @ B.mT).real / 2
    torch.testing.assert_close(gram, torch.eye(len(basis), dtype=REAL))


@pytest.mark.parametrize("n", [2, 65, 130, 200])
def test_large_matrices_are_inverted_by_halves(n):
    """Blocks above 64 rows, batched and not, in both precisions."""
    for dtype in (torch.float32, REAL, torch.complex64, COMPLEX):
        X = torch.randn(2, n, n, dtype=dtype) / n**0.5
        Q = cayley_map(X)
        wide = X.to(COMPLEX if X.is_complex() else REAL)
        exact = torch.stack([oracle_fast(x) for x in wide])
        bound = tolerance(dtype, n, n)
        assert (Q - exact).abs().max() <= bound
        assert orthonormality_residual(Q).max() <= bound
        assert torch.allclose(cayley_map(X[0]), Q[0], rtol=0, atol=bound)


def oracle_fast(X):
    A, eye = skew_from_coordinates(X), torch.eye(X.shape[-1], dtype=X.dtype)
    return torch.linalg.solve(eye + A, eye - A)


@pytest.mark.parametrize("dtype", [torch.float32, REAL, torch.complex64, COMPLEX], ids=str)
@pytest.mark.parametrize("size", [30.0, 1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("n", [1, 6, 7, 64, 131])
def test_any_finite_coordinates_give_an_orthogonal_matrix(dtype, size, n):
    """Odd n has an eigenvalue 0 of A beside the huge ones: plain LU in float32 is O(1) wrong."""
    dense, few = torch.randn(2, n, n, dtype=dtype)
    few[2:] = 0
    for X in (size * dense, size * few, size * torch.ones(n, n, dtype=dtype)):
        X.requires_grad_()
        Q = cayley_map(X)
        assert orthonormality_residual(Q) <= tolerance(dtype, n, n)
        (gradient,) = torch.autograd.grad(Q.real.sum(), X)
        assert bool(gradient.isfinite().all())
        if size <= 1e3:
            exact = oracle_fast(X.detach().to(COMPLEX if X.is_complex() else REAL))
            assert (Q - exact).abs().max() <= 4 * tolerance(dtype, n, n)


def test_infinite_coordinates_are_not_hidden():
    for value in (float("inf"), float("nan")):
        X = torch.zeros(3, 3)
        X[0, 1] = value
        assert bool(cayley_map(X).isnan().any())


def test_an_identity_d_leaves_no_eigenvalue_minus_one():
    """(1 - i a) / (1 + i a) is never -1; with a D of det -1 there is always one."""
    Q = cayley_map(3 * torch.randn(100, 6, 6, dtype=REAL))
    eye = torch.eye(6, dtype=REAL)
    assert torch.linalg.svdvals(Q + eye).amin() > 1e-3
    R = cayley_map(3 * torch.randn(100, 6, 6, dtype=REAL), negative=1)
    assert torch.linalg.svdvals(R + eye).amin(-1).amax() < 1e-12


@pytest.mark.parametrize("negative", range(6))
def test_determinant_is_that_of_d(negative):
    chart = Cayley(5, negative=negative)
    determinants = torch.linalg.det(
        cayley_map(torch.randn(20, 5, 5, dtype=REAL), negative=negative)
    )
    torch.testing.assert_close(determinants, torch.full((20,), (-1.0) ** negative, dtype=REAL))
    assert chart.fixed_determinant == (-1) ** negative
    chart.set_determinant(torch.tensor(-chart.fixed_determinant))
    X = chart(torch.randn(5, 5, dtype=REAL))
    assert torch.linalg.det(X).sign() == chart.fixed_determinant


@DOUBLE
def test_coordinates_are_recovered(dtype):
    X = torch.randn(3, 6, 6, dtype=dtype)
    back = cayley_coordinates(cayley_map(X))
    torch.testing.assert_close(skew(back), skew(X))
    assert bool((back.tril(-1) == 0).all())
    assert bool((back.diagonal(dim1=-2, dim2=-1).real == 0).all())


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match="square"):
        cayley_map(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="flip of shape"):
        cayley_map(torch.zeros(3, 3), flip=torch.ones(2))
    with pytest.raises(ShapeError, match="negative <= n"):
        cayley_map(torch.zeros(3, 3), negative=4)


# -------------------------------------------------------------------------------- the chart


def test_options_are_checked():
    for wrong in (-1, 5, 1.0, True):
        with pytest.raises(ConfigurationError, match="negative= to be a whole number from 0 to 4"):
            Cayley(4, negative=wrong)
    for wrong in (0, -3, 2.0, True):
        with pytest.raises(ConfigurationError, match="rebase_every= to be a whole number >= 1"):
            Cayley(4, rebase_every=wrong)
    with pytest.raises(ConfigurationError, match="square matrices only"):
        Cayley(4, 2)
    assert "negative=3, rebase_every=7" in repr(Cayley(4, negative=3, rebase_every=7))


def test_eigenvalues_at_minus_one_are_refused_with_a_remedy_that_works():
    B, S = haar(6, dtype=REAL), torch.ones(6, dtype=REAL)
    S[:2] = -1  # a turn by pi in some plane
    R = B * S @ B.mT
    with pytest.raises(RepresentationError, match=r"smallest singular.*rebase_every=.*negative="):
        Cayley(6).right_inverse(R)
    other = Cayley(6, negative=2)
    assert (other(other.right_inverse(R)) - R).abs().max() < 1e-12
    moving = Cayley(6, rebase_every=3)  # its base is the identity
    assert moving.obstacle(R) is not None
    moving.set_base(R)
    assert torch.equal(moving.right_inverse(R), torch.zeros(6, 6, dtype=REAL))


def test_a_round_trip_that_would_miss_is_refused():
    """An angle pi - t has coordinates 2/t, whose rounding moves every other entry."""
    B = haar(6, dtype=REAL, determinant=1)
    for t, fine in [(1.0, True), (1e-2, True), (1e-6, False)]:
        c, s = torch.cos(torch.tensor(torch.pi - t)), torch.sin(torch.tensor(torch.pi - t))
        R = torch.eye(6, dtype=REAL)
        R[:2, :2] = torch.tensor([[c, s], [-s, c]])
        R = stiefel.geometry.polar_factor(B @ R @ B.mT).float()
        chart = Cayley(6)
        assert (chart.obstacle(R) is None) == fine
        if fine:
            assert (chart(chart.right_inverse(R)) - R).abs().max() <= tolerance(R.dtype, 6, 6)


def test_start_turns_by_less_than_a_quarter():
    for n, negative in [(6, 0), (7, 3), (1, 1)]:
        chart = Cayley(n, negative=negative)
        Q = chart.start(REAL)
        D = torch.ones(n, dtype=REAL)
        D[n - negative :] = -1
        angles = torch.linalg.eigvals(Q * D).angle().abs()
        assert angles.max() < torch.pi / 2
        assert (angles > 1e-3).sum() == 2 * (n // 2)
    flipped = Cayley(6, batch=(2,))
    flipped.set_determinant(torch.tensor([1, -1]))
    torch.testing.assert_close(
        torch.linalg.det(flipped.start(REAL)), torch.tensor([1, -1], dtype=REAL)
    )


# ----------------------------------------------------------------------------- through the door


def square(X):
    layer = nn.Linear(X.shape[-1], X.shape[-1], bias=False, dtype=X.dtype)
    with torch.no_grad():
        layer.weight.copy_(X)
    return layer


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("options", [{}, {"rebase_every": 4}], ids=str)
def test_both_determinants_are_kept(sign, options):
    Q = haar(6, dtype=REAL, determinant=sign)
    layer = stiefel.orthogonal(square(Q), via="cayley", init="keep", **options)
    assert (layer.weight - Q).abs().max() < 1e-12
    moved = stiefel.orthogonal(
        square(Q), via="cayley", init="haar", determinant=-sign, **options
    ).weight
    assert torch.linalg.det(moved).sign() == -sign


def test_a_number_of_negatives_and_a_determinant_may_not_disagree():
    Q = haar(6, dtype=REAL, determinant=1)
    for negative, sign in [(3, 1), (2, -1)]:
        with pytest.raises(ConfigurationError, match="disagrees"):
            stiefel.orthogonal(square(Q), via="cayley", negative=negative, determinant=sign)
    with pytest.raises(RepresentationError, match=r"negative=3 fixes it.*negative=4"):
        stiefel.orthogonal(square(Q), via="cayley", negative=3, init="keep")
    with pytest.warns(UserWarning, match="negative=3 fixes it"):
        layer = stiefel.orthogonal(square(Q), via="cayley", negative=3)
    assert torch.linalg.det(layer.weight) < 0
    layer = stiefel.orthogonal(square(Q), via="cayley", negative=4, determinant=1, init="keep")
    assert (layer.weight - Q).abs().max() < 1e-12


def test_scornn_has_half_of_d_negative():
    for n, negative in ((1, 0), (4, 2), (6, 2), (7, 3), (9, 5)):
        Q = haar(n, dtype=REAL, determinant=(-1) ** negative)
        layer = stiefel.orthogonal(square(Q), via="scornn", init="keep")
        assert layer.parametrizations.weight[0].negative == negative
        assert (layer.weight - Q).abs().max() < 1e-12
    with pytest.raises(ConfigurationError, match=r"'scornn' already says.*via='cayley'"):
        stiefel.orthogonal(square(Q), via="scornn", negative=1)


@pytest.mark.parametrize("init", ["henaff", "cayley", "torus"])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 10, 17, 18])
def test_scornn_splits_no_plane_of_a_rotation(init, n):
    layer = stiefel.orthogonal(square(torch.eye(n, dtype=REAL)), via="scornn", init=init)
    assert orthonormality_residual(layer.weight) < 1e-13
    assert torch.linalg.det(layer.weight) * (-1) ** n > 0


# ------------------------------------------------------------------------------ a moving base


@DOUBLE
def test_rebased_at_every_step_it_is_rgd_at_four_times_the_rate(dtype):
    """SGD(lr) on coordinates from zero = RGD(4 lr), canonical metric, Cayley retraction."""
    start, target = haar(5, dtype=dtype), torch.randn(5, 5, dtype=dtype)

    def loss(X):
        return (X - target).abs().square().sum() + X.real.pow(3).sum()

    chart, point = square(start), square(start)
    stiefel.orthogonal(chart, via="cayley", rebase_every=1)
    stiefel.orthogonal(point, via="rgd-c-c")
    lr = 0.01
    ours = torch.optim.SGD(chart.parameters(), lr=lr)
    stiefel.attach(chart, ours)
    theirs = stiefel.optim.RGD(point.parameters(), lr=4 * lr)
    for _ in range(20):
        for layer, optimizer in ((chart, ours), (point, theirs)):
            optimizer.zero_grad()
            loss(layer.weight).backward()
            optimizer.step()
        torch.testing.assert_close(chart.weight, point.weight, rtol=0, atol=1e-12)
        assert bool((chart.parametrizations.weight.original == 0).all())
    assert (chart.weight - start).abs().max() > 0.1


def test_many_rebases_do_not_drift():
    chart = Cayley(16, rebase_every=1)
    for _ in range(300):
        chart.rebase((0.1 * torch.randn(16, 16),))
    assert orthonormality_residual(chart.base) <= tolerance(torch.float32, 16, 16)


def test_base_is_saved_and_begins_as_d():
    chart = Cayley(4, negative=3, rebase_every=2)
    D = torch.diag(torch.tensor([1.0, -1.0, -1.0, -1.0]))
    assert torch.equal(chart(torch.zeros(4, 4)), D)
    new, move = chart.rebase((torch.randn(4, 4),))
    assert torch.equal(new[0], torch.zeros(4, 4))
    assert move(0, "exp_avg", torch.ones(4, 4)) is None
    other = Cayley(4, negative=3, rebase_every=2)
    other.load_state_dict(chart.state_dict())
    assert torch.equal(other.base, chart.base)
    assert not torch.equal(other.base, D)
