"""Points and their coordinates: projecting, choosing a component, making parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stiefel import geometry
from stiefel.errors import NonFiniteError, RepresentationError
from stiefel.geometry.determinant import determinant_sign
from stiefel.manifolds import ManifoldParameter
from stiefel.numerics import double_dtype, tolerance
from stiefel.parameter.riemannian import Riemannian
from stiefel.parametrizations import Parametrization

__all__ = ["coordinates_of", "make_leaves", "nearest", "sign_of_determinant"]


@torch.no_grad()
def nearest(X: Tensor, bound: float | None = None) -> tuple[Tensor, float]:
    """The nearest matrices with orthonormal columns, and how far they are.

    A matrix that is on the manifold within the bound is returned as it is.

    Args:
        X: Matrices, shape ``(..., n, p)``.
        bound: The largest entry of |X^H X - I| on the manifold; `stiefel.tolerance` by default.

    Returns:
        The points, and the Frobenius norm of the whole move.

    Raises:
        NonFiniteError: If `X` has a NaN or an infinity.
    """
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError(
            "expected finite entries, got NaN or infinity in the weight: give it finite numbers "
            "first (a run that diverged leaves NaN)"
        )
    residual = geometry.orthonormality_residual(X)
    bound = tolerance(X.dtype, *X.shape[-2:]) if bound is None else bound
    if residual.numel() == 0 or float(residual.max()) <= bound:
        return X, 0.0
    point = geometry.polar_factor(X)
    double = double_dtype(X.dtype)
    return point, float(torch.linalg.vector_norm(point.to(double) - X.to(double)))


def sign_of_determinant(X: Tensor) -> Tensor | None:
    """Signs of the determinants of real square matrices, shape ``(...)``; None for others."""
    if X.is_complex() or X.shape[-1] != X.shape[-2]:
        return None
    if X.shape[-1] == 0:
        return X.new_ones(X.shape[:-2])
    sign = determinant_sign(X)
    return torch.where(sign < 0, -torch.ones_like(sign), torch.ones_like(sign))


def coordinates_of(
    chart: Parametrization, point: Tensor, determinant: int | None = None
) -> tuple[Tensor, ...]:
    """The coordinates of a point; the chart's component and base are set to the point's.

    Args:
        chart: The chart; its component and base are as before if an error is raised.
        point: A point ``(*batch, n, p)``.
        determinant: +1 or -1 if the user fixed it.

    Returns:
        The originals.

    Raises:
        RepresentationError: If the chart cannot represent the point.
    """
    sign = sign_of_determinant(point)
    if determinant is not None and sign is not None and bool((sign != determinant).any()):
        raise RepresentationError(
            f"the value has determinant {-determinant:+d} and determinant={determinant:+d} is "
            "asked for: negate one of its rows, or leave determinant= out"
        )
    buffers = {k: None if b is None else b.clone() for k, b in chart._buffers.items()}
    try:
        if sign is not None:
            chart.set_determinant(sign)
        chart.set_base(point)
        coordinates = chart.right_inverse(point)
    except Exception:
        chart._buffers.update(buffers)
        raise
    return (coordinates,) if isinstance(coordinates, Tensor) else tuple(coordinates)


def make_leaves(
    chart: Parametrization, coordinates: tuple[Tensor, ...], like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Wraps coordinates as what `like` is: trainable or frozen parameters, or buffers.

    Args:
        chart: The chart.
        coordinates: The values; real ones of a complex point are stored in its real dtype.
        like: A parameter or a plain tensor.
        dtype: Dtype of the point, as it was stored.
    """
    leaves = []
    for tensor in coordinates:
        kind = dtype if tensor.is_complex() else dtype.to_real()
        tensor = tensor.detach().to(kind).clone(memory_format=torch.contiguous_format)
        if isinstance(like, nn.Parameter):
            if isinstance(chart, Riemannian):
                tensor = ManifoldParameter(tensor, chart.manifold, like.requires_grad, check=False)
            else:
                tensor = nn.Parameter(tensor, like.requires_grad)
        leaves.append(tensor)
    return tuple(leaves)
