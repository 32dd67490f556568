"""The constrained weights of a model as they are now, without the rest of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.numerics import compute_dtype, full_precision
from stiefel.parameter import Constraint, constraints
from stiefel.parameter.storage import install

__all__ = ["coordinate_gradients", "skeleton"]


def skeleton(model: nn.Module) -> nn.Module:
    """Copies the constrained weights of a model: leaves, charts and bases, under the same paths.

    What is measured on the copy is measured at the moment of the copy, however far the model has
    been trained, rebased or converted since.

    Args:
        model: Any model.

    Returns:
        A module in evaluation mode whose `stiefel.constraints` have the paths, charts and values
        of the model's.
    """
    root = nn.Module()
    for constraint in constraints(model):
        *parts, name = constraint.path.split(".")
        module = root
        for part in parts:
            # not by add_module, which refuses names such as "type" that a model may well have
            module = module._modules.setdefault(part, nn.Module())
            assert module is not None
        if constraint.storage is None:
            module._parameters[name] = copy.deepcopy(constraint.leaves[0])  # pyright: ignore[reportArgumentType]
            continue
        module._parameters[name] = nn.Parameter(torch.empty(0), requires_grad=False)
        install(module, name, copy.deepcopy(constraint.storage))
    return root.eval()


def coordinate_gradients(constraint: Constraint, G: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient with respect to the coordinates of a chart, from that of the point.

    With the chart ``X = phi(v)`` and ``G = dL/dX`` this is the adjoint of the differential of phi
    at today's v, applied to G: what the backward pass of L would leave in ``v.grad``.

    Args:
        constraint: A weight that is stored in a chart, of a `skeleton`: how it emits its weight is
            changed.
        G: Gradient of the point ``(*batch, n, p)``.

    Returns:
        A gradient for each leaf, None where the chart does not use it.

    Raises:
        ConfigurationError: If the weight is its own leaf.
    """
    storage = constraint.storage
    if storage is None or constraint.is_riemannian:
        raise ConfigurationError(f"{constraint.path}: a point has no coordinates")
    chart: Any = storage.chart
    chart.weight_dtype = compute_dtype(storage.dtype)
    with torch.enable_grad(), full_precision():
        v = [leaf.detach().requires_grad_() for leaf in storage.originals]
        X = chart(*v)
        return torch.autograd.grad(X, v, G.to(X), allow_unused=True)
