"""Logarithms of unitary matrices and of frames: exponentials undone, and what cannot be."""

from __future__ import annotations

import math

import pytest
import torch

from stiefel.errors import RepresentationError, ShapeError
from stiefel.geometry import (
    canonical_exponential,
    canonical_logarithm,
    haar,
    random_tangent,
    tangency_residual,
    unitary_logarithm,
)
from tests.registry import DOUBLE


def haar_with_logarithm(n, dtype, batch=()):
    return haar(n, n, batch, dtype=dtype, determinant=None if dtype.is_complex else 1)


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("n", [1, 2, 5, 6, 60])
def test_exponential_of_the_logarithm(n, dtype):
    Q = haar_with_logarithm(n, dtype, (2, 2))
    A = unitary_logarithm(Q)
    assert A.shape == Q.shape
    assert A.dtype == Q.dtype
    assert (A + A.mH).abs().max() == 0
    assert (torch.linalg.matrix_exp(A) - Q).abs().max() <= 1e-13
    assert torch.linalg.matrix_norm(A, 2).max() <= math.pi + 1e-12


@pytest.mark.parametrize("dtype", DOUBLE)
def test_logarithm_of_the_exponential(dtype):
    W = haar_with_logarithm(6, dtype)
    for largest in (1e-6, 1.0, 3.0, 3.14):
        angles = torch.linspace(0.1, 1, 3, dtype=torch.float64) * largest
        J = torch.zeros(6, 6, dtype=torch.float64)
        k = torch.arange(0, 6, 2)
        J[k, k + 1], J[k + 1, k] = angles, -angles
        A = W @ J.to(dtype) @ W.mH
        assert (unitary_logarithm(torch.linalg.matrix_exp(A)) - A).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", DOUBLE)
def test_pairs_of_eigenvalues_minus_one(dtype):
    W = haar_with_logarithm(7, dtype)
    for count in (2, 4, 6):
        D = torch.ones(7, dtype=torch.float64)
        D[:count] = -1
        Q = (W * D) @ W.mH
        A = unitary_logarithm(Q)
        assert (torch.linalg.matrix_exp(A) - Q).abs().max() <= 1e-13
        assert torch.linalg.matrix_norm(A, 2) <= math.pi + 1e-12


def test_real_matrices_of_the_other_component_have_none():
    with pytest.raises(RepresentationError, match="determinant -1"):
        unitary_logarithm(haar(5, dtype=torch.float64, determinant=-1))
    with pytest.raises(ShapeError, match="square"):
        unitary_logarithm(haar(5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_computed_in_float64(dtype):
    Q = haar(6, dtype=torch.float32, determinant=1).to(dtype)
    A = unitary_logarithm(Q)
    assert A.dtype == torch.float32
    error = (torch.linalg.matrix_exp(A.double()) - Q.double()).abs().max()
    assert error <= (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize(("n", "p"), [(2, 1), (6, 5), (7, 3), (6, 1), (5, 5), (300, 10)])
def test_canonical_logarithm_undoes_the_geodesic(n, p, dtype):
    for length in (0.0, 1e-3, 0.5, 1.2):
        B = haar(n, p, (2,), dtype=dtype)
        u = random_tangent(B)
        u = length * u / torch.linalg.matrix_norm(u, 2).clamp_min(1e-9)[..., None, None]
        if n == p == 1:
            continue
        X = canonical_exponential(B, u)
        v = canonical_logarithm(B, X)
        assert (v - u).abs().max() <= 1e-11
        assert tangency_residual(B, v).max() <= 1e-12


@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize(("n", "p"), [(6, 1), (7, 3), (6, 5)])
def test_canonical_logarithm_of_far_points_still_leads_there(n, p, dtype):
    B, X = haar(n, p, (10,), dtype=dtype), haar(n, p, (10,), dtype=dtype)
    assert (canonical_exponential(B, canonical_logarithm(B, X)) - X).abs().max() <= 1e-8


def test_frames_beyond_reach_are_refused_with_the_residual(monkeypatch):
    monkeypatch.setattr("stiefel.geometry.logarithms._ITERATIONS", 2)
    with pytest.raises(RepresentationError, match=r"did not converge \(residual .*base"):
        canonical_logarithm(haar(9, 4, dtype=torch.float64), haar(9, 4, dtype=torch.float64))
    with pytest.raises(ShapeError, match="one shape"):
        canonical_logarithm(haar(9, 4), haar(9, 3))
