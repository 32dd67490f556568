"""Initialisers: orthonormal, distributed as named, reproducible, in the component asked for."""

from __future__ import annotations

import math

import pytest
import torch

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.geometry import orthonormality_residual
from stiefel.init import cayley_, haar_, henaff_
from stiefel.numerics import tolerance

ALL = [haar_, henaff_, cayley_]
SHAPES = [(6, 6), (7, 7), (7, 3), (3, 7), (1, 1), (5, 1), (2, 3, 5, 5), (2, 6, 3), (2, 3, 6)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16]


@pytest.mark.parametrize("initialise", ALL)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_orthonormal_in_place(initialise, shape, dtype, device):
    W = torch.full(shape, 9.0, dtype=dtype, device=device)
    assert initialise(W) is W
    tall = W if shape[-2] >= shape[-1] else W.mT
    assert orthonormality_residual(tall).max() <= tolerance(dtype, *tall.shape[-2:])


@pytest.mark.parametrize("initialise", ALL)
@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("sign", [1, -1])
def test_determinant(initialise, n, sign):
    for _ in range(5):
        W = initialise(torch.empty(3, n, n, dtype=torch.float64), determinant=sign)
        torch.testing.assert_close(torch.linalg.det(W), torch.full((3,), float(sign)).double())


@pytest.mark.parametrize("initialise", ALL)
def test_determinant_of_each_matrix(initialise):
    signs = torch.tensor([1, -1, -1])
    W = initialise(torch.empty(3, 4, 4, dtype=torch.float64), determinant=signs)
    torch.testing.assert_close(torch.linalg.det(W), signs.double())


@pytest.mark.parametrize("initialise", ALL)
def test_bad_requests(initialise):
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        initialise(torch.empty(5))
    with pytest.raises(ConfigurationError, match="square"):
        initialise(torch.empty(5, 3), determinant=1)
    with pytest.raises(DtypeError, match="real"):
        initialise(torch.empty(3, 3, dtype=torch.complex64), determinant=1)
    with pytest.raises(ConfigurationError, match=r"\+1 or -1"):
        initialise(torch.empty(3, 3), determinant=2)


@pytest.mark.parametrize("initialise", ALL)
def test_generator_decides(initialise, device):
    def draw(seed):
        generator = torch.Generator(device=device).manual_seed(seed)
        return initialise(torch.empty(8, 8, device=device), generator=generator)

    torch.rand(3, device=device)
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("initialise", ALL)
def test_parameters_can_be_filled(initialise):
    W = torch.nn.Parameter(torch.zeros(4, 4))
    initialise(W)
    assert W.requires_grad
    assert W.grad_fn is None
    assert W.abs().sum() > 0


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


@pytest.mark.parametrize("initialise", [henaff_, cayley_])
def test_tall_and_wide_take_columns_of_the_square_matrix(initialise):
    def draw(*shape):
        generator = torch.Generator().manual_seed(4)
        return initialise(torch.empty(shape, dtype=torch.float64), generator=generator)

    assert torch.equal(draw(7, 4), draw(7, 7)[:, :4])
    assert torch.equal(draw(4, 7), draw(7, 4).mT)
