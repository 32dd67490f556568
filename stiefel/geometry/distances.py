"""Distances along the geodesics of each metric: the length of the logarithm, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.geometry.guard import guarded
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.logarithms import canonical_logarithm
from stiefel.geometry.metrics import canonical_inner, euclidean_inner
from stiefel.geometry.shooting import euclidean_logarithm
from stiefel.numerics import double_dtype, real_dtype, tolerance

__all__ = ["LOGARITHMS", "canonical_distance", "euclidean_distance"]

#: The logarithm of each metric.
LOGARITHMS = {"canonical": canonical_logarithm, "euclidean": euclidean_logarithm}


def _end_velocity(X: Tensor, Y: Tensor, u: Tensor, metric: str) -> Tensor:
    """The velocity at Y = exp_X(u) of the geodesic that left X with velocity u.

    Canonical: ``exp_X(t u) = e^(t W) X`` with ``W = P u X^H - X u^H P, P = I - X X^H / 2``, so
    ``W Y``. Euclidean: ``e^(t W) X e^(-t A)``, ``W = u X^H - X u^H, A = X^H u``, so ``W Y - Y A``.
    """
    if metric == "canonical":
        Pu = u - X @ (X.mH @ u) / 2
        return Pu @ (X.mH @ Y) - X @ (Pu.mH @ Y)
    return u @ (X.mH @ Y) - X @ (u.mH @ Y) - Y @ (X.mH @ u)


def _ambient(X: Tensor, v: Tensor, metric: str) -> Tensor:
    """The ambient gradient G with ``Re tr(G^H z) = <v, z>_X`` for all tangent z."""
    return v - X @ (X.mH @ v) / 2 if metric == "canonical" else v


@kernel_op(
    "geodesic_distance",
    "(Tensor X, Tensor Y, str metric) -> (Tensor, Tensor, Tensor)",
    fake=lambda X, Y, metric: (
        X.new_empty(X.shape[:-2], dtype=real_dtype(X.dtype)),
        X.new_empty(X.shape),
        X.new_empty(X.shape),
    ),
)
def _distance(X: Tensor, Y: Tensor, metric: str) -> tuple[Tensor, Tensor, Tensor]:
    """d(X, Y), then its gradients in X and Y: the unit velocities, pointing apart."""
    given = X.dtype
    X, Y = X.to(double_dtype(given)), Y.to(double_dtype(given))
    u = LOGARITHMS[metric](X, Y)
    inner = canonical_inner if metric == "canonical" else euclidean_inner
    d = inner(X, u, u).clamp_min(0).sqrt()
    d = torch.where(d <= tolerance(torch.float64, *X.shape[-2:]), 0.0, d)
    unit = u / torch.where(d == 0, torch.inf, d)[..., None, None]
    left = -_ambient(X, unit, metric)
    right = _ambient(Y, _end_velocity(X, Y, unit, metric), metric)
    return d.to(real_dtype(given)), left.to(given), right.to(given)


@kernel_op(
    "geodesic_distance_backward",
    "(Tensor grad, Tensor left, Tensor right, Tensor X, Tensor Y, str metric) -> Tensor[]",
    fake=lambda grad, left, right, X, Y, metric: [X.new_empty(X.shape), Y.new_empty(Y.shape)],
)
def _distance_backward(
    grad: Tensor, left: Tensor, right: Tensor, X: Tensor, Y: Tensor, metric: str
) -> list[Tensor]:
    return [grad[..., None, None] * left, grad[..., None, None] * right]


_geodesic_distance = differentiable(_distance, _distance_backward, name="the geodesic distance")


def _between(X: Tensor, Y: Tensor, metric: str) -> Tensor:
    try:
        X, Y = torch.broadcast_tensors(X, Y)
    except RuntimeError:
        raise ShapeError(
            f"expected points of one shape or batches that broadcast, got {tuple(X.shape)} and "
            f"{tuple(Y.shape)}"
        ) from None
    return _geodesic_distance(X, Y, metric)


@guarded
def canonical_distance(X: Tensor, Y: Tensor) -> Tensor:
    """The length of the geodesic of the canonical metric from X to Y, by `canonical_logarithm`.

    It is the distance where that geodesic is the shortest, certainly below ``sqrt(4/5) pi =
    0.894 pi`` (Rentmeesters' bound, see Stoye and Zimmermann, arXiv:2403.03782); for points farther
    apart it is the length of the geodesic that was found. The gradient is the unit velocity at
    each end, zero where X = Y (distances within `stiefel.tolerance` in float64 are zero). There is
    no second derivative.

    Args:
        X: Points, shape ``(..., n, p)``.
        Y: Points; batch dimensions broadcast.

    Returns:
        Real tensor of shape ``(...)``, computed in float64.

    Raises:
        ShapeError: If n < p, or the shapes do not broadcast.
        RepresentationError: If the logarithm does not converge, or real square matrices have
            determinants of different signs.
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_distance
        >>> X = torch.eye(5, 2, dtype=torch.float64)
        >>> Y = X[[0, 4, 2, 3, 1]]  # the second column turned by a right angle
        >>> round(float(canonical_distance(X, Y)), 6)
        1.570796
    """
    return _between(X, Y, "canonical")


@guarded
def euclidean_distance(X: Tensor, Y: Tensor) -> Tensor:
    """The length of the geodesic of the Euclidean metric from X to Y, by `euclidean_logarithm`.

    It is the distance where that geodesic is the shortest, certainly below pi (the injectivity
    radius: Zimmermann and Stoye, arXiv:2405.02268); for points farther apart it is the length of
    the geodesic that was found. Gradient and zero as in `canonical_distance`. It is not the chord
    ``|X - Y|``, which is shorter.

    Args:
        X: Points, shape ``(..., n, p)``.
        Y: Points; batch dimensions broadcast.

    Returns:
        Real tensor of shape ``(...)``, computed in float64.

    Raises:
        ShapeError: If n < p, or the shapes do not broadcast.
        RepresentationError: If the logarithm does not converge, or real square matrices have
            determinants of different signs.
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_distance
        >>> X = torch.eye(5, 2, dtype=torch.float64)
        >>> round(float(euclidean_distance(X, X[[0, 4, 2, 3, 1]])), 6)
        1.570796
    """
    return _between(X, Y, "euclidean")
