"""The kernels of the exponential: the polynomial, and slow oracles in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import torch

from stiefel.geometry import (
    canonical_exponential,
    exponential_of_coordinates,
    exponential_products,
    frame_exponential,
    haar,
    orthonormality_residual,
    scaling_squaring,
    skew,
    skew_exponential,
)
from stiefel.geometry.exponential_polynomial import ECONOMISED_DOUBLE, ECONOMISED_SINGLE, TAYLOR
from stiefel.geometry.spectral import gram_norm, skew_norm
from stiefel.numerics import tolerance
from tests.oracles import skew_exponential_oracle as oracle
from tests.registry import DOUBLE

SIZES = [1, 2, 5, 16, 70]


def skew_of_norm(n, norm, dtype=torch.float64, batch=()):
    """Random skew matrices with that spectral norm."""
    A = skew(torch.randn(*batch, n, n, dtype=dtype))
    largest = torch.linalg.matrix_norm(A, 2)
    return A * (norm / torch.where(largest > 0, largest, 1))[..., None, None]


def tangent_of(Z, B):
    """The tangent vector of tall coordinates, as the docstring states it."""
    a = B.mH @ Z
    return Z - B @ a + B @ (a - a.mH) / math.sqrt(2)


# ---------------------------------------------------------------------------- the polynomial


def expanded(rows):
    """Coefficients of T = B1 + (B2 + A6) A6, A6 = B3 + B4^2, lowest first."""
    P = np.polynomial.polynomial
    B1, B2, B3, B4 = (np.array(row) for row in rows)
    A6 = P.polyadd(B3, P.polymul(B4, B4))
    return P.polyadd(B1, P.polymul(P.polyadd(B2, A6), A6))


def chebyshev_coefficients(reach):
    """The series of exp on [-i reach, i reach], cut after degree 12, in powers."""
    orders = np.arange(13)
    series = 2 * 1j**orders * scipy.special.jv(orders, reach)
    series[0] /= 2
    powers = np.polynomial.chebyshev.cheb2poly(series)
    return (powers / (1j * reach) ** orders).real


@pytest.mark.parametrize(
    ("polynomial", "error"),
    [(ECONOMISED_SINGLE, 3e-7), (ECONOMISED_DOUBLE, 2e-15), (TAYLOR, 2e-15)],
)
def test_sixteen_numbers_expand_to_the_stated_polynomial(polynomial, error):
    ours, reach = expanded(polynomial.rows), polynomial.reach
    wanted = 1 / scipy.special.factorial(np.arange(13))
    if polynomial is not TAYLOR:
        wanted = chebyshev_coefficients(reach)
    assert ours.shape == (13,)
    powers = reach ** np.arange(13)
    np.testing.assert_allclose(ours * powers, wanted * powers, rtol=1e-11, atol=1e-15)
    y = 1j * np.linspace(-reach, reach, 1001)
    assert np.abs(np.polyval(ours[::-1], y) - np.exp(y)).max() <= error
    # the terms are as small as they can be: rounding errors are not amplified
    assert expanded(np.abs(polynomial.rows)) @ powers <= 1.01 * math.exp(reach)


# ------------------------------------------------------------------------- square matrices


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        (torch.float32, 1e-6),
        (torch.complex64, 1e-6),
        (torch.float64, 1e-14),
        (torch.complex128, 1e-14),
    ],
)
def test_exponential_is_that_of_the_eigenvalues(n, dtype, error):
    for norm in (0.0, 1e-8, 0.3, 1.0, 3.0, math.pi, 3 * math.pi):
        A = skew_of_norm(n, norm, dtype)
        assert (skew_exponential(A) - oracle(A)).abs().max() <= error


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_huge_arguments_keep_the_columns_orthonormal(n, dtype):
    # torch.linalg.matrix_exp is off by 1e-2 at entries of 1e3 in float32
    for size in (1e3, 1e6, 1e12):
        A = skew(size * torch.randn(n, n, dtype=dtype))
        X = skew_exponential(A, haar(n, dtype=dtype))
        assert orthonormality_residual(X).max() <= tolerance(dtype, n, n)
        if n > 1:
            Z = size * torch.randn(n, n - 1, dtype=dtype, requires_grad=True)
            X = frame_exponential(Z, haar(n, n - 1, dtype=dtype))
            assert orthonormality_residual(X).max() <= tolerance(dtype, n, n - 1)
            (g,) = torch.autograd.grad(X, Z, torch.randn_like(X))
            assert g.isfinite().all()


@pytest.mark.parametrize("dtype", DOUBLE)
def test_derivative_is_exact_in_batches_of_mixed_sizes(dtype):
    A = torch.stack([skew_of_norm(6, norm, dtype) for norm in (0.0, 1e-3, 1.0, 3.0, 9.0, 40.0)])
    A = A.reshape(2, 3, 6, 6).requires_grad_()
    B = haar(6, 6, (2, 3), dtype=dtype)
    G = torch.randn_like(B)
    (ours,) = torch.autograd.grad(skew_exponential(A, B), A, G)
    (theirs,) = torch.autograd.grad(B @ torch.linalg.matrix_exp(skew(A)), A, G)
    assert (ours - theirs).abs().max() <= 1e-12
    assert (ours + ours.mH).abs().max() == 0


@pytest.mark.parametrize("n", [3, 64, 65, 200])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_norm_estimate(n, dtype):
    spectra = {
        "semicircle": skew_of_norm(n, 2.0, dtype),
        "flat": torch.zeros(n, n, dtype=dtype),
        "single": torch.zeros(n, n, dtype=dtype),
    }
    k = torch.arange(n - 1)
    spectra["flat"][k[::2], k[::2] + 1] = 2.0
    spectra["single"][0, 1] = 2.0
    for name, A in spectra.items():
        A = A if name == "semicircle" else A - A.mH
        ratio = float(skew_norm(A)) / 2
        power = 4 if n <= 16 else 8
        most = 1.09 if n > 64 else (n if dtype.is_complex else n / 2) ** (1 / power)
        assert 0.95 <= ratio <= most + 1e-6
    assert skew_norm(torch.zeros(n, n)) == 0
    N = torch.randn(n, 5, dtype=dtype)
    largest = float(torch.linalg.matrix_norm(N, 2))
    assert largest * (1 - 1e-12) <= float(gram_norm(N.mH @ N)) <= 5**0.125 * largest


def test_groups_of_exponentials():
    A = skew_of_norm(7, 2.5)
    identity = torch.eye(7, dtype=torch.float64)
    assert (skew_exponential(A) @ skew_exponential(-A) - identity).abs().max() <= 1e-14
    assert (skew_exponential(0 * A) - identity).abs().max() <= 1e-15
    assert torch.linalg.det(skew_exponential(A)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_large_batches_are_computed_in_pieces(dtype, monkeypatch):
    """Pieces of at most eight matrices, of a hundred, give what the whole batch gives."""
    calls = {"_forward_body": [], "_backward_body": []}

    def counting(name):
        body = getattr(exponential_products, name)

        def counted(first, *rest):
            calls[name].append(first.shape[0])
            return body(first, *rest)

        return counted

    for name in calls:
        monkeypatch.setattr(exponential_products, name, counting(name))
    V = (2 * torch.randn(5, 20, 4, 4, dtype=dtype)).requires_grad_()
    base = haar(4, 4, (5, 20), dtype=dtype)
    G = torch.randn_like(V)
    whole = exponential_of_coordinates(V, base)
    (g,) = torch.autograd.grad(whole, V, G)
    assert calls == {"_forward_body": [100], "_backward_body": [100]}
    monkeypatch.setattr(scaling_squaring, "_PIECE", 16 * 8)
    pieces = exponential_of_coordinates(V, base)
    (h,) = torch.autograd.grad(pieces, V, G)
    for sizes in calls.values():
        assert sizes[1:] == [8] * 12 + [4]
    assert (whole - pieces).abs().max() <= tolerance(dtype, 4, 4)
    assert (g - h).abs().max() <= 20 * tolerance(dtype, 4, 4)


# --------------------------------------------------------------------------- tall matrices


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize(("n", "p"), [(2, 1), (6, 5), (7, 3), (40, 4)])
def test_tall_exponential_is_the_geodesic(n, p, dtype):
    for size in (0.0, 1e-9, 0.3, 2.0):
        B, Z = haar(n, p, dtype=dtype), size * torch.randn(n, p, dtype=dtype)
        Z.requires_grad_()
        ours, theirs = frame_exponential(Z, B), canonical_exponential(B, tangent_of(Z, B))
        assert (ours - theirs).abs().max() <= 1e-12
        G = torch.randn_like(B)
        g, h = torch.autograd.grad(ours, Z, G)[0], torch.autograd.grad(theirs, Z, G)[0]
        assert (g - h).abs().max() <= 1e-11
