"""What is said where something between two points fails because one of them is no point."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from stiefel.errors import RepresentationError, ShapeError

__all__ = ["two_points"]


@contextlib.contextmanager
def two_points(manifold: Any, x: Tensor, y: Tensor) -> Iterator[None]:
    """Checks the sizes of two points; where the body fails, whether they are points.

    Args:
        manifold: A `stiefel.Stiefel`.
        x: A point, shape ``(..., n, p)``.
        y: Another, of leading dimensions that broadcast.

    Raises:
        ShapeError: If the matrices differ in size, or are wide.
        OffManifoldError: If the body fails and one of them is not on the manifold.
    """
    for point in (x, y):
        manifold.assert_check_point(point)
    if x.shape[-2:] != y.shape[-2:]:
        raise ShapeError(
            f"expected two points of one size, got {tuple(x.shape)} and {tuple(y.shape)}: leading "
            "dimensions may broadcast, matrices may not"
        )
    try:
        yield
    except (RepresentationError, RuntimeError):  # of torch.linalg, for NaN
        for point in (x, y):
            manifold.assert_check_point_on_manifold(point)
        raise
