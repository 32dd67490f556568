"""Orthonormal matrices factored into reflections, and the signs of their determinants."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import RepresentationError, ShapeError
from stiefel.geometry import haar
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.determinant import determinant_sign
from stiefel.geometry.reflections import householder_vectors
from stiefel.numerics import tolerance
from tests.reflection_vectors import COMPLEX, REAL, vectors


def rebuilt(X, reflections=None, **options):
    V, phases = householder_vectors(X, reflections, **options)
    assert torch.allclose(torch.linalg.vector_norm(V, dim=-2), torch.ones(1).to(V.real))
    return compact_wy(V, phases, columns=X.shape[-1])


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
