"""A tensor as something to measure: without its class, without its graph, in double precision."""

from __future__ import annotations

import pytest
import torch

import stiefel
from stiefel.geometry.linear import readable
from stiefel.numerics import double_dtype, in_double, in_transform, plain

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_double_has_the_numbers_and_nothing_else(dtype):
    numbers = torch.eye(4, 2).to(dtype)
    for X in (numbers, stiefel.ManifoldParameter(numbers), torch.nn.Parameter(numbers) * 1):
        found = in_double(X)
        assert type(found) is torch.Tensor
        assert (found.dtype, found.requires_grad) == (double_dtype(dtype), False)
        assert torch.equal(found, torch.eye(4, 2, dtype=found.dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_in_double_carries_a_conjugate_out(dtype):
    X = torch.randn(3, 2, dtype=dtype)
    found = in_double(X.mH)
    assert not found.is_conj()
    assert torch.equal(torch.view_as_real(found)[..., 1], -X.mT.imag.double())


def test_plain_shares_the_numbers():
    X = stiefel.ManifoldParameter(torch.eye(4, 2))
    assert type(plain(X)) is torch.Tensor
    assert plain(X).data_ptr() == X.data_ptr()


def asked(answers):
    """A sum that notes whether its argument is in a transform, and readable."""

    def f(X):
        answers.append((in_transform(X), readable(X)))
        return X.square().sum()

    return f


def transformed(f, name, X):
    if name == "vmap":
        return torch.func.vmap(f)(X)
    if name == "jvp":
        return torch.func.jvp(f, (X,), (X,))
    if name == "nested":
        return torch.func.vmap(torch.func.grad(f))(X)
    return getattr(torch.func, name)(f)(X)


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "jacrev", "jacfwd", "hessian", "nested"])
def test_a_transform_is_noticed(name):
    answers = []
    transformed(asked(answers), name, torch.randn(3, 2))
    assert answers
    assert set(answers) == {(True, False)}


@pytest.mark.parametrize("grad", [False, True])
def test_outside_of_transforms_nothing_is_noticed(grad):
    X = torch.randn(3, 2, requires_grad=grad)
    assert (in_transform(X), readable(X * 1)) == (False, True)
    assert not in_transform(stiefel.ManifoldParameter(torch.eye(3, 2)))
