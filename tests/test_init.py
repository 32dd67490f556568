"""Initialisers: orthonormal, distributed as named, reproducible, in the component asked for."""

from __future__ import annotations

import math

import pytest
import torch

from stiefel.errors import ConfigurationError, DtypeError, NonFiniteError, ShapeError
from stiefel.geometry import orthonormality_residual, polar_factor
from stiefel.init import (
    INITIALIZERS,
    cayley_,
    haar_,
    henaff_,
    identity_,
    orthogonalize_,
    permutation_,
    torus_,
)
from stiefel.numerics import tolerance
from stiefel.parametrizations import CWY

ALL = list(INITIALIZERS.values())
RANDOM = [initialise for initialise in ALL if initialise is not orthogonalize_]
SHAPES = [(6, 6), (7, 7), (7, 3), (3, 7), (1, 1), (5, 1), (2, 3, 5, 5), (2, 6, 3), (2, 3, 6)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16]


@pytest.mark.parametrize("initialise", ALL)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_orthonormal_in_place(initialise, shape, dtype, device):
    W = (9 * torch.randn(shape, dtype=torch.float64, device=device)).to(dtype)
    assert initialise(W) is W
    tall = W if shape[-2] >= shape[-1] else W.mT
    assert orthonormality_residual(tall).max() <= tolerance(dtype, *tall.shape[-2:])


@pytest.mark.parametrize("initialise", ALL)
@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("sign", [1, -1])
def test_determinant(initialise, n, sign):
    if initialise is permutation_ and n == 1 and sign == -1:
        return  # there is none
    for _ in range(5):
        W = initialise(torch.randn(3, n, n, dtype=torch.float64), determinant=sign)
        torch.testing.assert_close(torch.linalg.det(W), torch.full((3,), float(sign)).double())


@pytest.mark.parametrize("initialise", ALL)
def test_determinant_of_each_matrix(initialise):
    signs = torch.tensor([1, -1, -1])
    W = initialise(torch.randn(3, 4, 4, dtype=torch.float64), determinant=signs)
    torch.testing.assert_close(torch.linalg.det(W), signs.double())


@pytest.mark.parametrize("initialise", ALL)
def test_bad_requests(initialise):
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        initialise(torch.empty(5))
    with pytest.raises(DtypeError, match="int64"):
        initialise(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match="square"):
        initialise(torch.empty(5, 3), determinant=1)
    with pytest.raises(DtypeError, match="real"):
        initialise(torch.empty(3, 3, dtype=torch.complex64), determinant=1)
    with pytest.raises(ConfigurationError, match=r"\+1 or -1"):
        initialise(torch.empty(3, 3), determinant=2)


@pytest.mark.parametrize("initialise", RANDOM)
def test_generator_decides(initialise, device):
    def draw(seed):
        generator = torch.Generator(device=device).manual_seed(seed)
        return initialise(torch.empty(8, 8, device=device), generator=generator)

    torch.rand(3, device=device)
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("initialise", ALL)
def test_parameters_can_be_filled(initialise):
    W = torch.nn.Parameter(2 * torch.ones(4, 4))
    initialise(W)
    assert W.requires_grad
    assert W.grad_fn is None
    assert orthonormality_residual(W.detach()).max() < 1e-5


@pytest.mark.parametrize("initialise", ALL)
def test_empty_batches(initialise):
    assert initialise(torch.empty(0, 4, 3)).shape == (0, 4, 3)
    assert initialise(torch.empty(0, 4, 4), determinant=-1).shape == (0, 4, 4)


def test_haar_has_the_moments_of_the_haar_measure():
    W = haar_(torch.empty(20_000, 3, 3, dtype=torch.float64))
    # E W = 0, E W_ij^2 = 1/n, E (tr W)^2 = 1, E (tr W)^4 = 3 for O(n), n >= 2.
    assert W.mean(0).abs().max() < 0.02
    assert (W.square().mean(0) - 1 / 3).abs().max() < 0.02
    trace = W.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.square().mean() - 1) < 0.05
    assert abs(trace.pow(4).mean() - 3) < 0.25


def _angles(W):
    """Angles of the blocks [[cos a, sin a], [-sin a, cos a]] of each matrix."""
    even = torch.arange(0, W.shape[-1] - 1, 2)
    return torch.atan2(W[..., even, even + 1], W[..., even, even])


@pytest.mark.parametrize("initialise", [henaff_, cayley_])
@pytest.mark.parametrize("n", [6, 7])
def test_block_rotations_are_exponentials_of_block_skew_matrices(initialise, n):
    W = initialise(torch.empty(n, n, dtype=torch.float64))
    A = torch.zeros_like(W)
    for i, a in enumerate(_angles(W)):
        A[2 * i, 2 * i + 1], A[2 * i + 1, 2 * i] = a, -a
    torch.testing.assert_close(W, torch.linalg.matrix_exp(A))


def test_henaff_angles_are_uniform_on_the_circle():
    a = _angles(henaff_(torch.empty(4000, 8, 8, dtype=torch.float64))).flatten()
    counts = torch.histc(a, bins=8, min=-math.pi, max=math.pi) / a.numel()
    assert (counts - 1 / 8).abs().max() < 0.012


def test_cayley_angles_are_minus_tan_of_half_theta():
    a = _angles(cayley_(torch.empty(4000, 8, 8, dtype=torch.float64))).flatten()
    assert a.max() <= 0
    assert a.min() > -1
    theta = 2 * torch.atan(-a)  # uniform on (0, pi / 2)
    counts = torch.histc(theta, bins=8, min=0, max=math.pi / 2) / a.numel()
    assert (counts - 1 / 8).abs().max() < 0.012


@pytest.mark.parametrize("initialise", [henaff_, cayley_, torus_, permutation_])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_tall_and_wide_take_columns_of_the_square_matrix(initialise, dtype):
    def draw(*shape):
        generator = torch.Generator().manual_seed(4)
        return initialise(torch.empty(shape, dtype=dtype), generator=generator)

    assert torch.equal(draw(7, 4), draw(7, 7)[:, :4])
    assert torch.equal(draw(4, 7), draw(7, 4).mT)


# ------------------------------------------------------------------------ near the identity


def jacobian_rank(chart, X):
    """Rank of the derivative of the weight at the coordinates that the chart gives to X."""
    originals = chart.right_inverse(X)
    originals = originals if isinstance(originals, tuple) else (originals,)
    parts = [torch.view_as_real(o).clone() if o.is_complex() else o for o in originals]

    def weight(*parts):
        first = torch.view_as_complex(parts[0]) if X.is_complex() else parts[0]
        W = chart(first, *parts[1:])
        return (torch.view_as_real(W) if W.is_complex() else W).flatten()

    blocks = torch.autograd.functional.jacobian(weight, tuple(parts))
    return torch.linalg.matrix_rank(torch.cat([b.flatten(1) for b in blocks], dim=1), rtol=1e-9)


@pytest.mark.parametrize(
    ("n", "p", "dtype", "dimension"),
    [
        (12, 12, torch.float64, 66),
        (9, 4, torch.float64, 26),
        (5, 5, torch.complex128, 25),
        (9, 4, torch.complex128, 56),
    ],
    ids=str,
)
def test_reflections_can_leave_the_identity_start_in_every_direction(n, p, dtype, dimension):
    chart = CWY(n, p)
    for _ in range(3):
        assert jacobian_rank(chart, identity_(torch.empty(n, p, dtype=dtype))) == dimension
    assert jacobian_rank(chart, torch.eye(n, p, dtype=dtype)) < dimension


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("noise", [1e-3, 1e-2, 0.1])
def test_identity_is_as_near_as_the_noise_and_has_no_eigenvalue_one(dtype, noise):
    n = 40
    W = identity_(torch.empty(20, n, n, dtype=dtype), noise=noise)
    distance = torch.linalg.matrix_norm(W - torch.eye(n)) / (noise * math.sqrt(n))
    distance = distance if dtype.is_complex else distance / 2
    assert distance.min() > 0.6
    assert distance.max() < 1.5
    assert (torch.linalg.eigvals(W) - 1).abs().min() > 1e-6 * noise
    odd = identity_(torch.empty(7, 7, dtype=dtype), noise=noise)
    assert ((torch.linalg.eigvals(odd) - 1).abs() < 1e-12).sum() == (not dtype.is_complex)


def test_identity_refuses_to_be_exact():
    for noise in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="positive noise"):
            identity_(torch.empty(3, 3), noise=noise)


# ----------------------------------------------------------------------------- permutations


def test_permutations_are_uniform():
    W = permutation_(torch.empty(24_000, 4, 4))
    assert ((W == 0) | (W == 1)).all()
    codes = W.argmax(-1) @ torch.tensor([64, 16, 4, 1])
    counts = codes.bincount()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert (counts - 1000).abs().max() < 160  # five standard deviations
    even = permutation_(torch.empty(12_000, 4, 4), determinant=1)
    counts = (even.argmax(-1) @ torch.tensor([64, 16, 4, 1])).bincount()
    assert (counts > 0).sum() == 12
    assert ((counts == 0) | ((counts - 1000).abs() < 160)).all()


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_cycles_go_through_everything(n):
    W = permutation_(torch.empty(30, n, n, dtype=torch.float64), cyclic=True)
    power = torch.eye(n, dtype=torch.float64).expand_as(W)
    for _ in range(n - 1):
        power = power @ W
        assert (power.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert torch.equal(power @ W, torch.eye(n, dtype=torch.float64).expand_as(W))
    sign = (-1) ** (n - 1)
    permutation_(torch.empty(n, n), cyclic=True, determinant=sign)
    with pytest.raises(ConfigurationError, match=rf"determinant \{sign:+d}"):
        permutation_(torch.empty(n, n), cyclic=True, determinant=-sign)


def test_one_coordinate_has_one_permutation():
    with pytest.raises(ConfigurationError, match="determinant"):
        permutation_(torch.empty(1, 1), determinant=-1)


# ------------------------------------------------------------------------------------ torus


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_torus_spreads_the_eigenvalues_evenly(n, dtype):
    W = torus_(torch.empty(n, n, dtype=dtype))
    found = torch.linalg.eigvals(W).angle().sort().values
    count = n if dtype.is_complex else 2 * (n // 2)
    expected = -math.pi + 2 * math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if not dtype.is_complex and n % 2:
        expected = torch.cat([expected, torch.zeros(1, dtype=torch.float64)]).sort().values
    torch.testing.assert_close(found, expected)


def test_torus_takes_angles():
    a = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64)
    W = torus_(torch.empty(2, 7, 7, dtype=torch.float64), angles=a)
    assert (_angles(W) - a).abs().max() < 1e-14
    each = torch.stack([a, 2 * a / 3])
    W = torus_(torch.empty(2, 6, 6, dtype=torch.float64), angles=each)
    assert (_angles(W) - each).abs().max() < 1e-14
    D = torus_(torch.empty(3, 3, dtype=torch.complex128), angles=a)
    assert (D - torch.diag(torch.exp(1j * a))).abs().max() < 1e-15
    for wrong in (torch.ones(2), torch.tensor(1.0), torch.ones(1, 1, 3)):
        with pytest.raises(ShapeError, match=r"angles of shape \(3,\)"):
            torus_(torch.empty(6, 6), angles=wrong)


# ------------------------------------------------------------------------------ the nearest


@pytest.mark.parametrize("shape", [(6, 6), (2, 7, 3), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_orthogonalize_is_the_polar_factor(shape, dtype):
    Z = torch.randn(shape, dtype=dtype)
    expected = polar_factor(Z) if shape[-2] >= shape[-1] else polar_factor(Z.mT).mT
    W = orthogonalize_(Z)
    torch.testing.assert_close(W, expected)
    torch.testing.assert_close(orthogonalize_(W.clone()), W)


@pytest.mark.parametrize("sign", [1, -1])
def test_orthogonalize_is_the_nearest_of_that_determinant(sign):
    Z = torch.randn(4, 4, dtype=torch.float64)
    W = orthogonalize_(Z.clone(), determinant=sign)
    assert abs(torch.linalg.det(W) - sign) < 1e-12
    ours = torch.linalg.matrix_norm(W - Z)
    others = haar_(torch.empty(20_000, 4, 4, dtype=torch.float64), determinant=sign)
    assert (torch.linalg.matrix_norm(others - Z) > ours).all()
    # nothing near it is nearer: a minimum along every small rotation
    A = 0.05 * torch.randn(2000, 4, 4, dtype=torch.float64)
    near = W @ torch.linalg.matrix_exp(A - A.mT)
    assert (torch.linalg.matrix_norm(near - Z) > ours).all()


def test_orthogonalize_takes_any_rank_and_refuses_nan():
    assert orthonormality_residual(orthogonalize_(torch.zeros(5, 3))).max() < 1e-6
    with pytest.raises(NonFiniteError, match="fill the tensor first"):
        orthogonalize_(torch.full((3, 3), math.nan))
