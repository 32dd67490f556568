"""Points as a user hands them over: how many there are, and on which manifolds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.manifolds import GeooptManifoldParameter, ManifoldParameter, Stiefel
from stiefel.optim.solvers.components import Component, component_of
from stiefel.optim.solvers.problem import Point

__all__ = ["components_of", "unpack"]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def unpack(
    X0: Tensor | Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], Callable[[Point], Any]]:
    """The starts as a tuple, and the function that gives points the type of X0.

    Args:
        X0: A tensor, a manifold parameter, or a list or tuple of them.

    Raises:
        ConfigurationError: If it is anything else, or empty.
        DtypeError: If a start is not of 32 or 64 bit precision.
    """
    several = isinstance(X0, (list, tuple))
    starts: tuple[Any, ...] = tuple(X0) if several else (X0,)
    if not starts:
        raise ConfigurationError("expected at least one start, got an empty sequence")
    for start in starts:
        if not isinstance(start, Tensor):
            raise ConfigurationError(
                f"expected a tensor, a ManifoldParameter or a list or tuple of them, got "
                f"{type(start).__name__}"
            )
        if start.dtype not in _DTYPES:
            raise DtypeError(
                f"expected float32, float64 or a complex start, got {start.dtype}: convert it, for "
                "instance with .to(torch.float64)"
            )

    def wrap(X: Point) -> Any:
        points = [_like(start, part) for start, part in zip(starts, X, strict=True)]
        if not several:
            return points[0]
        return points if isinstance(X0, list) else tuple(points)

    return starts, wrap


def _like(start: Tensor, X: Tensor) -> Tensor:
    if isinstance(start, GeooptManifoldParameter):
        return ManifoldParameter(X, start.manifold, start.requires_grad, check=False)
    return X


def components_of(starts: tuple[Tensor, ...], manifold: Any) -> tuple[Component, ...]:
    """One component for each start.

    Args:
        starts: Tensors; manifold parameters have their own manifold.
        manifold: As for `stiefel.optim.minimize`.

    Raises:
        ConfigurationError: If starts and manifolds do not go together.
        ShapeError: If a start without a manifold is no matrix.
    """
    given = list(manifold) if isinstance(manifold, (list, tuple)) else [manifold] * len(starts)
    if len(given) != len(starts):
        raise ConfigurationError(
            f"expected one manifold for each of the {len(starts)} starts, got {len(given)}"
        )
    components = []
    for start, choice in zip(starts, given, strict=True):
        own = getattr(start, "manifold", None)
        if own is not None and choice is not None and own != choice:
            raise ConfigurationError(
                f"a start lies on {own} and manifold={choice!r} was given: leave manifold= out, or "
                "hand over start.detach().as_subclass(torch.Tensor)"
            )
        choice = own if choice is None else choice
        if choice is None:
            if start.ndim < 2:
                raise ShapeError(
                    f"expected a matrix (..., n, p), got a tensor of shape {tuple(start.shape)}: "
                    "name its manifold, for instance manifold='euclidean' for a free tensor"
                )
            choice = Stiefel("euclidean", "cholesky_qr")
        components.append(component_of(choice))
    return tuple(components)
