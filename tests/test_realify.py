"""The real twin of a complex matrix, and of a unitary recurrent network."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import DtypeError, ShapeError
from stiefel.geometry import haar, orthonormality_residual, realify, realify_vector

COMPLEX = torch.complex128


def gaussian(*shape):
    return torch.randn(shape, dtype=COMPLEX)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_products_sums_and_conjugate_transposes_are_respected(batch):
    A, B, C, x = (gaussian(*batch, *size) for size in [(4, 3), (3, 5), (4, 3), (3,)])
    assert realify(A).shape == (*batch, 8, 6)
    assert (realify(A @ B) - realify(A) @ realify(B)).abs().max() < 1e-13
    assert torch.equal(realify(A + C), realify(A) + realify(C))
    assert torch.equal(realify(A.mH), realify(A).mT)
    image = (A @ x.unsqueeze(-1)).squeeze(-1)
    twin = (realify(A) @ realify_vector(x).unsqueeze(-1)).squeeze(-1)
    assert (realify_vector(image) - twin).abs().max() < 1e-13
    h = gaussian(*batch, 2, 3)
    assert (realify_vector(h @ A.mT) - realify_vector(h) @ realify(A).mT).abs().max() < 1e-13


@pytest.mark.parametrize(("n", "p"), [(5, 5), (5, 2), (1, 1)])
def test_unitary_becomes_special_orthogonal(n, p):
    R = realify(haar(n, p, (3,), dtype=COMPLEX))
    assert R.dtype == torch.float64
    assert orthonormality_residual(R).max() < 1e-13
    if n == p:
        assert (torch.linalg.det(R) - 1).abs().max() < 1e-13


def test_gradients_are_those_of_the_complex_matrix():
    W, G = gaussian(3, 3).requires_grad_(), torch.randn(6, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(realify, W)
    (g,) = torch.autograd.grad((G * realify(W)).sum(), W)
    expected = torch.complex(G[:3, :3] + G[3:, 3:], G[3:, :3] - G[:3, 3:])
    assert (g - expected).abs().max() < 1e-14


def test_unitary_network_and_its_real_twin_agree_step_by_step():
    """h_t = modReLU(h_(t-1) W^T + x_t V^T), the modulus of a twin that of its pairs."""
    n, steps = 6, 200
    W, V, b = haar(n, dtype=COMPLEX), gaussian(n, 2), 0.1 * torch.randn(n, dtype=torch.float64)

    def mod_relu(z, modulus):
        return z * (modulus + b).clamp_min(0) / (modulus + 1e-5)

    h = gaussian(4, n)
    r = realify_vector(h)
    for _ in range(steps):
        x = 0.1 * gaussian(4, 2)
        z = h @ W.mT + x @ V.mT
        h = mod_relu(z, z.abs())
        y = r @ realify(W).mT + realify_vector(x) @ realify(V).mT
        re, im = y.chunk(2, dim=-1)
        modulus = torch.hypot(re, im)
        r = torch.cat([mod_relu(re, modulus), mod_relu(im, modulus)], dim=-1)
        assert (r - realify_vector(h)).abs().max() < 1e-11
    assert h.abs().max() > 0.1


def test_real_tensors_are_refused():
    with pytest.raises(DtypeError, match="complex"):
        realify(torch.eye(3))
    with pytest.raises(DtypeError, match="complex"):
        realify_vector(torch.ones(3))
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        realify(gaussian(3))
