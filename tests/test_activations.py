"""The nonlinearities of the recurrences, modReLU above all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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


def _through_rollout(z: Tensor, beta: Tensor) -> Tensor:
    """modReLU of `z` `(B, H)` by the kernel of the rollout: one step with V = I."""
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    return rollout(z.unsqueeze(0), eye, eye, nonlinearity="modrelu", beta=beta)[0][0]


def _value_and_slopes(
    function: Callable[[Tensor, Tensor], Tensor], z: Tensor, beta: Tensor, cotangent: Tensor
) -> list[Tensor]:
    z, beta = z.clone().requires_grad_(), beta.clone().requires_grad_()
    h = function(z, beta)
    return [h.detach(), *torch.autograd.grad(h, (z, beta), cotangent)]


@pytest.mark.parametrize("function", [_through_rollout, modrelu])
@pytest.mark.parametrize("complex_states", [False, True])
@pytest.mark.parametrize("bias", [0.5, 1e-3, -0.5, 0.0])
def test_modrelu_is_exact_to_rounding_for_every_modulus(
    function: Callable[[Tensor, Tensor], Tensor], complex_states: bool, bias: float
) -> None:
    """Values and slopes of float32 are those of float64, unit by unit, to a few roundings.

    Where the bias drowns the modulus the slope across z is beta / r, up to 1e37 here.
    """
    eps = 8 * torch.finfo(torch.float32).eps
    angle = torch.linspace(0, 6, 16).repeat(2, 1)
    turn = torch.tensor([[0.7], [-2.0]])  # of dh against z
    for ratio in (1e37, 1e6, 4, 1e-1, 1e-3, 1e-6, 1e-9, 1e-15, 1e-24, 1e-30):
        modulus = torch.full_like(angle, ratio * (abs(bias) or 1.0))
        z, cotangent = modulus * (3 - angle).sign(), turn.expand_as(angle)
        if complex_states:
            z, cotangent = torch.polar(modulus, angle), torch.polar(turn.abs(), angle + turn)
        case = (z, torch.full((16,), bias), cotangent)
        *found, slope = _value_and_slopes(function, *case)
        exact = torch.complex128 if complex_states else torch.float64
        wide = (z.to(exact), case[1].double(), cotangent.to(exact))
        *right, bias_slope = _value_and_slopes(modrelu, *wide)
        for a, b in zip(found, right, strict=True):
            assert ((a.to(exact) - b).abs() <= eps * b.abs()).all(), ratio
        # a sum over the two rows
        assert ((slope.double() - bias_slope).abs() <= eps * turn.abs().sum()).all(), ratio


@pytest.mark.parametrize("function", [_through_rollout, modrelu])
@pytest.mark.parametrize("bias", [0.5, -0.5, 0.0])
def test_a_complex_modulus_below_the_normal_numbers_counts_as_zero(
    function: Callable[[Tensor, Tensor], Tensor], bias: float
) -> None:
    """Where z / |z| is not a number in torch, or |z| is zero."""
    z = torch.tensor([[0, 1e-40, -1e-44j, 7e-39 + 7e-39j]], dtype=torch.complex64)
    for part in _value_and_slopes(function, z, torch.full((4,), bias), torch.ones_like(z)):
        assert torch.equal(part, torch.zeros_like(part))


def test_a_slope_beyond_the_largest_number_is_no_nan() -> None:
    z = torch.tensor([[2e-38, 2e-38j]], dtype=torch.complex64)
    cotangent = torch.full_like(z, 1 + 1j)
    beta = torch.full((2,), 1e4)
    _, slope, bias_slope = _value_and_slopes(_through_rollout, z, beta, cotangent)
    assert not slope.isnan().any()
    assert torch.equal(bias_slope, torch.ones(2))
