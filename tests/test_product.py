"""The full-precision product: values, derivatives of every order, and torch's transformations."""

from __future__ import annotations

import pytest
import torch

from stiefel.geometry import product

SHAPES = [((3, 4), (4, 2)), ((2, 3, 4), (4, 2)), ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2))]


def pair(shapes, dtype):
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_is_the_product_with_all_its_derivatives(shapes, dtype):
    A, B = pair(shapes, dtype)
    torch.testing.assert_close(product(A, B), A @ B)
    torch.testing.assert_close(product(B.mH, A.mH), (A @ B).mH)
    assert torch.autograd.gradcheck(product, (A, B))
    assert torch.autograd.gradgradcheck(product, (A, B))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (-1, 1)])
def test_vmap_adds_a_batch_dimension(in_dims):
    A, B = torch.randn(3, 3, 3, 3), torch.randn(3, 3, 3)
    A, B = (A if in_dims[0] is not None else A[0]), B
    expected = torch.vmap(torch.matmul, in_dims)(A, B)
    torch.testing.assert_close(torch.vmap(product, in_dims)(A, B), expected)


def test_reduced_precision_reaches_neither_value_nor_gradients():
    A, B = pair(((64, 64), (64, 64)), torch.float32)
    G = torch.randn(64, 64)
    exact = torch.autograd.grad(product(A, B), (A, B), G)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            C = product(A, B)
            gradients = torch.autograd.grad(C, (A, B), G)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert C.dtype == torch.float32
    assert torch.equal(C, A @ B)
    assert all(torch.equal(g, h) for g, h in zip(exact, gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_to_one_graph():
    A, B = pair(((3, 4), (4, 2)), torch.float64)
    compiled = torch.compile(lambda A, B: 2 * product(A, B), fullgraph=True, backend="aot_eager")
    C = compiled(A, B)
    torch.testing.assert_close(C, 2 * A @ B)
    G = torch.randn_like(C)
    ours = torch.autograd.grad(C, (A, B), G)
    torch.testing.assert_close(ours, torch.autograd.grad(2 * A @ B, (A, B), G))
