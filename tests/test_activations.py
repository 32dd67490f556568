"""The nonlinearities of the recurrences, modReLU above all."""

from __future__ import annotations

import pytest
import torch

from stiefel import errors
from stiefel.models import NONLINEARITIES, ModReLU, activate, modrelu, rollout
from tests.recurrences import sigma


def test_modrelu_is_exactly_zero_at_zero() -> None:
    beta = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    x = torch.zeros(3, 1, 2, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(2, dtype=torch.float64)
    states, _ = rollout(x, eye, eye, nonlinearity="modrelu", beta=beta)
    assert torch.equal(states, torch.zeros_like(states))
    for slope in torch.autograd.grad(states.sum(), (x, beta)):
        assert torch.equal(slope, torch.zeros_like(slope))
    z = torch.tensor([[0.0, 0.0], [0.3, 0.3], [-2.0, -2.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.0], [0.8, 0.0], [-2.5, -1.5]], dtype=torch.float64)
    assert torch.allclose(modrelu(z, beta), expected)
    assert torch.equal(activate("modrelu", z, beta), modrelu(z, beta))


def test_modrelu_module_and_activate() -> None:
    module = ModReLU(1000, generator=torch.Generator().manual_seed(0))
    assert module.beta.abs().max() <= 0.01
    assert module.beta.std() > 0.005
    z = torch.randn(5, 1000)
    assert torch.equal(module(z), modrelu(z, module.beta))
    beta = torch.randn(1000)
    for name in NONLINEARITIES:
        assert torch.allclose(activate(name, z, beta), sigma(name, z, beta))
    with pytest.raises(errors.UnknownNameError, match="modrelu"):
        activate("softplus", z)
