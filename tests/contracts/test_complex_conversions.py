"""Complex weights whose coordinates are partly real, in every conversion of a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import DtypeError

VIAS = ["cwy", "householder", "givens", "urnn", "matrix_exp", "cayley", "own", "rgd-c-c"]


def layer(via):
    torch.manual_seed(0)
    linear = nn.Linear(5, 5, dtype=torch.complex64)
    return stiefel.orthogonal(linear, via=via, init="chart" if via == "urnn" else None)


def assert_unitary(weight, dtype):
    bound = stiefel.tolerance(dtype, 5, 5)
    assert stiefel.geometry.orthonormality_residual(weight) < bound


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("name", ["half", "bfloat16", "float", "double"])
def test_methods_that_convert_real_tensors_only(via, name):
    module = layer(via)
    before = module.weight.detach().clone()
    getattr(module, name)()
    weight = module.weight
    assert weight.is_complex()
    assert_unitary(weight, torch.complex64)
    atol = 1e-5 if name in ("float", "double") else 0.1
    assert torch.allclose(weight.to(before.dtype), before, atol=atol)
    weight.abs().square().sum().backward()


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("via", VIAS)
def test_to_another_complex_dtype(via):
    module = layer(via)
    before = module.weight.detach().clone()
    module.to(torch.complex128)
    assert module.weight.dtype == torch.complex128
    assert_unitary(module.weight, before.dtype)
    assert torch.allclose(module.weight.to(before.dtype), before, atol=1e-5)
    module.weight.abs().square().sum().backward()
    module.to(torch.complex64)
    assert module.weight.dtype == torch.complex64
    for leaf in next(iter(stiefel.constraints(module))).leaves:
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("via", [via for via in VIAS if via != "givens"])  # all of it is real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_complex_weight_does_not_become_real(via, dtype):
    module = layer(via)
    with pytest.raises(DtypeError, match="complex dtype for a complex weight"):
        module.to(dtype)
    assert_unitary(module.weight, torch.complex64)
