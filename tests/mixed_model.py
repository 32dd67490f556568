"""A model with everything that an optimizer may meet, for the tests of `stiefel.optim.build`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stiefel
from stiefel import geometry


class Model(nn.Module):
    """A chart, two points of one size, a batched bare point and ordinary parameters."""

    layers: Any

    def __init__(self, device="cpu", via=("cwy", "rgd-c-c", "rgd-e-qr")):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, device=device) for _ in via])
        for layer, name in zip(self.layers, via, strict=True):
            stiefel.orthogonal(layer, via=name)
        self.bare = stiefel.ManifoldParameter(geometry.haar(6, 2, (3,), device=device))
        self.head = nn.Linear(6, 2, device=device)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + (x @ self.bare).sum(0)


def train(model, optimizer, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator).to(model.head.weight.device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def residuals(model):
    return max(
        float(geometry.orthonormality_residual(c.point).max()) for c in stiefel.constraints(model)
    )


def equal(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def group(optimizer, role):
    return next(g for g in optimizer.param_groups if g["role"] == role)
