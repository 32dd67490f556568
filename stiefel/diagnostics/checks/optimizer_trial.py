"""Small problems on which an optimizer is tried, and the steps that it takes there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.sample_points import random_point
from stiefel.geometry import orthonormality_residual
from stiefel.manifolds import (
    GeooptManifoldParameter,
    Manifold,
    ManifoldParameter,
    is_stiefel,
    tolerance_on,
)
from stiefel.numerics import in_double, plain

__all__ = ["Trial", "states_of"]

#: Parts of the names under which optimizers keep squares of gradients.
_SQUARES = ("sq", "second", "var")


class Trial:
    """An optimizer with options, a manifold, and random points and gradients there.

    Args:
        kind: Makes an optimizer: ``kind(parameters, lr=..., **options)``.
        options: Its options.
        manifold: The manifold.
        shape: Shape of the point.
        generator: Source of randomness.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        options: Mapping[str, Any],
        manifold: Manifold,
        shape: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        self.kind, self.options, self.manifold = kind, dict(options), manifold
        self.generator = generator
        self.X = random_point(manifold, shape, torch.float64, generator)
        self.G = self.noise(torch.float64)

    @property
    def name(self) -> str:
        """The optimizer in words, with its options."""
        name = getattr(self.kind, "__name__", type(self.kind).__name__)
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"

    @property
    def is_fixed(self) -> bool:
        """Whether the gradient has no tangent part: of a single real number, +1 or -1."""
        gradient = plain(self.manifold.egrad2rgrad(self.X, self.G.clone()))
        return float(gradient.norm()) <= 1e-12 * float(self.G.norm())

    def noise(self, dtype: torch.dtype) -> Tensor:
        """A gradient with entries N(0, 1)."""
        return torch.randn(self.X.shape, dtype=torch.float64, generator=self.generator).to(dtype)

    def leaf(self, dtype: torch.dtype = torch.float64) -> ManifoldParameter:
        """The point as a fresh parameter."""
        return ManifoldParameter(self.X.to(dtype, copy=True), self.manifold, check=False)

    def make(self, params: Sequence[Any], lr: float, **more: Any) -> Any:
        """A fresh optimizer."""
        return self.kind(params, lr=lr, **{**self.options, **more})

    def velocity(self, scale: float = 1.0, h: float = 1e-5, **more: Any) -> Tensor:
        """The derivative of the first step in its rate, at rate zero; to O(h^2).

        Args:
            scale: Multiplies the gradient.
            h: A small rate.
            **more: Further options of the optimizer.
        """
        far, near = (self.first_step(rate, scale, **more) / rate for rate in (h, h / 2))
        return 2 * near - far

    def first_step(self, rate: float, scale: float = 1.0, **more: Any) -> Tensor:
        """How far the first step goes."""
        leaf = self.leaf()
        optimizer = self.make([leaf], rate, **more)
        leaf.grad = scale * self.G
        optimizer.step()
        return plain(leaf) - self.X

    def off(self, leaf: Tensor) -> float:
        """How far a leaf is from its manifold; infinite if it has lost it, or is not finite."""
        kept = isinstance(leaf, GeooptManifoldParameter) and leaf.manifold == self.manifold
        x = in_double(leaf)
        if not kept or not bool(x.isfinite().all()):
            return math.inf
        if is_stiefel(self.manifold):
            return float(orthonormality_residual(x).max())
        return float((self.manifold.projx(x) - x).abs().max())

    def allowed(self, dtype: torch.dtype) -> float:
        """How far a point may be from the manifold."""
        n, p = self.X.shape[-2:] if self.X.ndim > 1 else (self.X.shape[-1], 1)
        return tolerance_on(self.manifold, dtype, n, p)


def states_of(optimizer: Any, leaf: Tensor) -> dict[str, Tensor]:
    """The states of a leaf that are vectors at its point, by name: averages of gradients."""
    state = optimizer.state.get(leaf, {})
    shaped = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == leaf.shape and value.ndim > 0
    }
    kinds = getattr(optimizer, "_state_kinds", None)
    if kinds is not None:
        known = kinds(optimizer.param_groups[0])
        return {name: value for name, value in shaped.items() if known.get(name) == "point"}
    return {
        name: value for name, value in shaped.items() if not any(word in name for word in _SQUARES)
    }
