"""What the optimizers share that keep points near the manifold instead of on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.geometry import orthonormality_residual
from stiefel.geometry.gram import gram
from stiefel.geometry.linear import plus_product
from stiefel.manifolds import Manifold
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.checks import check_stiefel
from stiefel.optim.groups import manifold_of

__all__ = [
    "NearManifold",
    "largest_part",
    "residual_of_gram",
    "tangent_field",
    "tangent_part",
    "twice_skew",
]


def residual_of_gram(S: Tensor) -> tuple[Tensor, Tensor]:
    """``E = S - I`` in the place of S, and ``|E|_F`` of each matrix, shape ``(..., 1, 1)``."""
    S.diagonal(dim1=-2, dim2=-1).sub_(1)
    return S, torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)


def largest_part(Z: Tensor) -> Tensor:
    """The largest entry of each matrix in modulus, of a complex one the largest part.

    Args:
        Z: Shape ``(..., n, p)``.

    Returns:
        Shape ``(..., 1, 1)``, real, never zero.
    """
    parts = torch.view_as_real(Z.resolve_conj()) if Z.is_complex() else Z
    flat = parts.flatten(Z.ndim - 2)
    most = torch.maximum(flat.amax(-1), -flat.amin(-1))  # aminmax takes twenty times as long
    return most[..., None, None].clamp_min(torch.finfo(most.dtype).tiny)


def twice_skew(W: Tensor) -> tuple[Tensor, Tensor]:
    """``W - W^H`` in the place of W, and memory of its size for something else.

    A copied transpose is read faster than a strided one.
    """
    T = torch.empty_like(W).copy_(W.mH)
    return W.sub_(T), T


def tangent_field(X: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    r"""The relative gradient ``skew(G X^H) X`` by products of O(n p^2).

    ``(G X^H X - X G^H X)/2``: it is tangent to the level set of ``X^H X`` at any X of full rank,
    ``X^H Phi + Phi^H X = 0`` exactly, on the manifold and off it, and on it half the gradient in
    the canonical metric. Square matrices take two products, ``skew(G X^H)`` and that times X.
    Source: Ablin and Peyre, Fast and accurate optimization on the orthogonal manifold without
    retraction, AISTATS 2022; Ablin, Vary, Gao and Absil, JMLR 25 (2024), for n > p.

    Args:
        X: Matrices of full rank, shape ``(..., n, p)``.
        G: Ambient gradients, same shape.

    Returns:
        Phi, same shape, and a tensor ``(..., p, p)`` of nothing, memory to use again.
    """
    if X.shape[-2] == X.shape[-1]:
        W, spare = twice_skew(G @ X.mH)
        return torch.matmul(W, X, out=spare).div_(2), W
    P, S = X.mH @ G, gram(X)
    return plus_product(G @ S, X, P.mH, alpha=-1).div_(2), S


def tangent_part(X: Tensor, G: Tensor) -> Tensor:
    """``G - X sym(X^H G)``, for X near the manifold: what a gradient says of tangent directions.

    Averages of gradients are made of these. The rest of G is normal at its own X but not at later
    points; in an average it would push along the path or against it, by as much as the loss falls
    or rises off the manifold, which must not matter.
    """
    P = X.mH @ G
    return plus_product(G, X, P.add_(P.mH.clone()), alpha=-0.5)


class NearManifold(RiemannianOptimizer):
    """Base of the optimizers whose points are near the manifold: they report how near."""

    ambient_state = True  # averages are not transported: `tangent_field` takes their part at X

    def _reach(self, group: Mapping[str, Any]) -> float:
        """What the largest entry of ``|X^H X - I|`` is at most, while a group is stepped."""
        raise NotImplementedError

    def bound(self) -> list[float]:
        """What `feasibility` stays below, for each parameter group.

        It is that of exact arithmetic: `stiefel.tolerance` comes on top where it is smaller.
        """
        return [self._reach(group) for group in self.param_groups]

    def feasibility(self) -> list[float]:
        """How far the points are from their manifold now.

        Returns:
            For each parameter group, the largest entry of ``|X^H X - I|`` over its manifold
            parameters, 0 for a group without any. The host reads it from the device.
        """
        return [
            max((_worst(x) for x in group["params"] if manifold_of(x) is not None), default=0.0)
            for group in self.param_groups
        ]

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        name, reach = type(self).__name__, self._reach(group)
        stiefel = check_stiefel(name, leaf, manifold, self.describe)
        bound = stiefel.tolerance_for(leaf.dtype, *leaf.shape[-2:])
        enough = f"{min(1.05 * reach, 0.99):.2g}"
        if bound < reach < float("inf"):
            raise ConfigurationError(
                f"{name} keeps points near the manifold, not on it: expected a parameter on "
                f"stiefel.Stiefel(tolerance={enough}) or more, got {self.describe(leaf)} on "
                f"{manifold}, which allows {bound:.1e}. Make the weight with "
                f"stiefel.orthogonal(module, via='riemannian', tolerance={enough}), or use RGD"
            )


def _worst(X: Tensor) -> float:
    residual = orthonormality_residual(X)
    return float(residual.max()) if residual.numel() else 0.0
