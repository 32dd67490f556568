"""Slow, obvious forms of the charts, in float64: what a weight and its gradient must be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import require
from stiefel.geometry import canonical_exponential
from stiefel.parameter import constraints

__all__ = ["against", "cayley", "exponential", "polar"]

#: ``reference(original, buffers)``: the weight from coordinates, differentiable, in float64.
Reference = Callable[[Tensor, dict[str, Tensor]], Tensor]


def skew(original: Tensor) -> Tensor:
    """A = triu(X, 1) - triu(X, 1)^T."""
    upper = original.triu(1)
    return upper - upper.mT


def exponential(original: Tensor, buffers: dict[str, Tensor]) -> Tensor:
    """B exp(A) by torch; for tall coordinates Z the geodesic from B along their tangent part."""
    n, p = original.shape[-2:]
    base = buffers.get("base", torch.eye(n, p, dtype=original.dtype))
    if n == p:
        return base @ torch.linalg.matrix_exp(skew(original))
    inner = base.mT @ original
    u = original - base @ inner + base @ (inner - inner.mT) / 2**0.5
    return canonical_exponential(base, u)


def cayley(original: Tensor, buffers: dict[str, Tensor]) -> Tensor:
    """(I + A)^-1 (I - A), the last row flipped where the chart's buffer says so."""
    A = skew(original)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Q = torch.linalg.solve(eye + A, eye - A)
    flip = buffers.get("flip")
    return Q if flip is None else torch.cat((Q[:-1], Q[-1:] * flip))


def polar(original: Tensor, buffers: dict[str, Tensor]) -> Tensor:
    """U V^T of the singular value decomposition."""
    U, _, Vh = torch.linalg.svd(original, full_matrices=False)
    return U @ Vh


def against(
    reference: Reference, value: float = 2e-5, slope: float = 1e-3
) -> Callable[[nn.Module], None]:
    """Returns a check that a layer's weight and gradient are those of a reference.

    Args:
        reference: The slow form.
        value: Bound on the largest difference of an entry of the weight.
        slope: Bound on the relative distance of the gradients.
    """

    def check(layer: nn.Module) -> None:
        (constraint,) = constraints(layer)
        (leaf,) = constraint.leaves
        storage = constraint.storage
        assert storage is not None
        buffers = {name: buffer.double() for name, buffer in storage.chart.named_buffers()}
        original = leaf.detach().double().requires_grad_()
        expected = reference(original, buffers)
        cotangent = torch.randn_like(expected)
        (gradient,) = torch.autograd.grad(expected, original, cotangent)
        leaf.grad = None
        weight = layer.weight
        assert isinstance(weight, Tensor)
        weight.backward(cotangent.to(weight.dtype))
        assert leaf.grad is not None
        error = (weight.detach().double() - expected).abs().max().item()
        require("distance to the slow form in float64", error, value)
        distance = (leaf.grad.double() - gradient).norm() / gradient.norm()
        require("relative distance of the gradients", distance.item(), slope)
        leaf.grad = None

    return check
