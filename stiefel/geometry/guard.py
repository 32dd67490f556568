"""The common entrance of all geometric maps: shapes, dtypes and precision are settled here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from stiefel.errors import DtypeError, ShapeError
from stiefel.numerics import compute_dtype, full_precision

__all__ = ["check_point_shape", "guarded"]

_F = TypeVar("_F", bound=Callable[..., Tensor])


def check_point_shape(X: Tensor, what: str = "a point") -> None:
    """Checks that `X` is a batch of matrices with at least as many rows as columns.

    Args:
        X: Tensor of any shape; ``(..., n, p)`` with ``n >= p`` is expected.
        what: How the error calls the tensor.

    Raises:
        ShapeError: If `X` has fewer than two dimensions or fewer rows than columns.

    Example:
        >>> import torch
        >>> from stiefel.geometry import check_point_shape
        >>> check_point_shape(torch.ones(5, 2))
        >>> check_point_shape(torch.ones(5))
        Traceback (most recent call last):
        stiefel.errors.ShapeError: expected a point of shape (..., n, p), got (5,): add the missing
        dimensions
    """
    if X.ndim < 2:
        raise ShapeError(
            f"expected {what} of shape (..., n, p), got {tuple(X.shape)}: add the missing "
            "dimensions"
        )
    n, p = X.shape[-2:]
    if n < p:
        raise ShapeError(
            f"expected {what} of shape (..., n, p) with n >= p, got {tuple(X.shape)}: orthonormal "
            "columns need at least as many rows as columns. Pass the transpose (X.mT), or use "
            "stiefel.orthogonal, which transposes wide weights itself"
        )


def _check_same_kind(X: Tensor, other: Tensor) -> None:
    if other.dtype != X.dtype or other.device != X.device:
        raise DtypeError(
            f"expected tensors of one dtype and device, got {X.dtype} on {X.device} and "
            f"{other.dtype} on {other.device}: convert with .to(dtype=..., device=...)"
        )


def _check_same_sizes(X: Tensor, other: Tensor) -> None:
    if other.ndim < 2 or other.shape[-2:] != X.shape[-2:]:
        raise ShapeError(
            f"expected a matrix of the point's size {tuple(X.shape[-2:])}, got a tensor of shape "
            f"{tuple(other.shape)} for a point of shape {tuple(X.shape)}"
        )


def guarded(function: _F) -> _F:
    """Decorates a map ``f(X, *tensors, **options)`` on points ``(..., n, p)``.

    Checks shape, dtype and device, lifts 16-bit tensors to float32 and casts the result back,
    and runs the body in full precision (`stiefel.numerics.full_precision`).
    """

    @functools.wraps(function)
    def wrapper(X: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        check_point_shape(X)
        for other in (*args, *kwargs.values()):
            if isinstance(other, Tensor):
                _check_same_kind(X, other)
                _check_same_sizes(X, other)
        given, working = X.dtype, compute_dtype(X.dtype)
        with full_precision():
            if given == working:
                return function(X, *args, **kwargs)
            lifted = [a.to(working) if isinstance(a, Tensor) else a for a in args]
            named = {k: v.to(working) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return function(X.to(working), *lifted, **named).to(given)

    return cast(_F, wrapper)
