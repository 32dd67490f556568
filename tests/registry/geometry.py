"""Sizes, dtypes, metrics, retractions, transports and manifolds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel import geometry
from stiefel.manifolds import Stiefel

#: (batch, n, p): square, tall, p = 1, n = 1, batched.
SHAPES: list[tuple[tuple[int, ...], int, int]] = [
    ((), 6, 6),
    ((), 7, 3),
    ((), 5, 1),
    ((), 1, 1),
    ((2, 3), 6, 2),
    ((2,), 4, 4),
]
DTYPES = [torch.float32, torch.float64, torch.complex128]
DOUBLE = [torch.float64, torch.complex128]

METRICS = {
    "canonical": (geometry.canonical_inner, geometry.canonical_gradient),
    "euclidean": (geometry.euclidean_inner, geometry.euclidean_gradient),
}


@dataclass(frozen=True)
class RetractionCase:
    """A retraction and the order of its distance to each metric's exponential.

    ``special_order`` holds where the two metrics share their geodesics: square matrices, and real
    unit vectors (a complex one turns in its own phase, which the metrics weigh differently);
    ``orders[metric]`` elsewhere.
    """

    name: str
    orders: dict[str, int]
    special_order: int


RETRACTIONS = [
    RetractionCase("cayley", {"canonical": 3, "euclidean": 2}, 3),
    RetractionCase("polar", {"canonical": 2, "euclidean": 3}, 3),
    RetractionCase("qr", {"canonical": 2, "euclidean": 2}, 2),
    RetractionCase("cholesky_qr", {"canonical": 2, "euclidean": 2}, 2),
]

#: ``transport(X, u, z)``: z carried to the point that the named retraction takes u to.
TRANSPORTS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    **{
        f"projection-{name}": (
            name,
            lambda X, u, z, R=retraction: geometry.projection_transport(R(X, u), z),
        )
        for name, retraction in geometry.RETRACTIONS.items()
    },
    "cayley": ("cayley", geometry.cayley_transport),
}

MANIFOLDS = [
    Stiefel(inner, retraction) for inner in METRICS for retraction in [*geometry.RETRACTIONS, "exp"]
]
