"""How far a model is from a stationary point, weight by weight, measured where the loss sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stiefel.diagnostics.columns import MODEL
from stiefel.diagnostics.point_gradients import PointGradient
from stiefel.errors import ShapeError
from stiefel.geometry import (
    canonical_gradient,
    canonical_inner,
    euclidean_gradient,
    skew,
)
from stiefel.manifolds import Manifold, is_stiefel
from stiefel.numerics import full_precision, in_double
from stiefel.parameter import Constraint, constraints

__all__ = ["Stationarity", "stationarity", "stationarity_at", "total_stationarity"]


@dataclass(frozen=True)
class Stationarity:
    """How far one weight is from a stationary point of the loss.

    With X the point and G = dL/dRe X + i dL/dIm X. All figures but the coordinate norms are
    properties of the loss at the point, whatever the chart. The two norms and `kkt_residual` are
    zero together, exactly at a stationary point; `symmetry_residual` alone says nothing of the
    directions out of the span of X. A batch of weights is one point of a product of manifolds:
    figures are the roots of sums of squares over it.

    Attributes:
        path: Name of the weight in the model; ``"model"`` for a `total_stationarity`.
        via: Its chart, or ``"riemannian"``.
        euclidean_norm: |G - X sym(X^H G)|_F, the norm of the gradient in the Euclidean metric.
        canonical_norm: Norm of G - X G^H X in <u, v> = Re tr u^H (I - X X^H / 2) v, the norm of the
            gradient in the canonical metric.
        kkt_residual: |G - X L|_F with L = G^H X, the multiplier of X^H X = I.
        symmetry_residual: |skew(X^H G)|_F: a multiplier is Hermitian.
        gradient_norm: |G|_F.
        relative: ``euclidean_norm / gradient_norm``, from 0 to 1: which share of the gradient the
            constraint leaves to move along. NaN where G = 0.
        coordinate_norm_squared: Sum of the squares of all entries of the leaves' ``.grad``; None
            for points that are their own coordinates, and where no leaf has a gradient. It depends
            on the chart: it is small where v is large or the chart is singular, too.
        scale_free_coordinate_norm_squared: Sum over reflections of |v_l|^2 |grad_{v_l}|^2, and of
            the squared gradients of the phases of complex ones: the same for coordinates scaled to
            |v_l| = 1. For ``cwy``, ``tcwy`` and ``householder``; None otherwise.
        missing: Why the figures of the point are NaN: what `PointGradient.missing` says; for a
            `total_stationarity`, which weights are not in it. None where nothing is missing.

    Manifolds of geoopt other than Stiefel have one metric of their own: both norms are its
    gradient's, and `kkt_residual`, `symmetry_residual` and `relative` are NaN.
    """

    path: str
    via: str
    euclidean_norm: float
    canonical_norm: float
    kkt_residual: float
    symmetry_residual: float
    gradient_norm: float
    relative: float
    coordinate_norm_squared: float | None = None
    scale_free_coordinate_norm_squared: float | None = None
    missing: str | None = None


_NAN = math.nan
_UNKNOWN = Stationarity("", "", _NAN, _NAN, _NAN, _NAN, _NAN, _NAN)


@torch.no_grad()
@full_precision()
def stationarity_at(X: Tensor, G: Tensor) -> Stationarity:
    """Measures how far X is from stationary, from the gradient there.

    Everything is computed in float64 (complex128) with autocast off.

    Args:
        X: Points, shape ``(..., n, p)`` with n >= p; a batch is measured as one point.
        G: The gradient dL/dX, as torch gives it, same shape.

    Returns:
        The figures, with an empty path.

    Raises:
        ShapeError: If the shapes differ, or n < p.

    Example:
        >>> import torch
        >>> from stiefel.diagnostics import stationarity_at
        >>> A = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> X = torch.eye(3, 2)  # two eigenvectors of A: stationary for tr(X^T A X)
        >>> found = stationarity_at(X, 2 * A @ X)
        >>> found.euclidean_norm, round(found.gradient_norm, 3)
        (0.0, 7.211)
    """
    if X.shape != G.shape:
        raise ShapeError(
            f"expected a gradient of the point's shape {tuple(X.shape)}, got {tuple(G.shape)}"
        )
    X, (G, unit) = in_double(X), _in_units(in_double(G))
    D = canonical_gradient(X, G)
    euclidean, size = _norm(euclidean_gradient(X, G)), _norm(G)
    return Stationarity(
        path="",
        via="",
        euclidean_norm=unit * euclidean,
        canonical_norm=unit * math.sqrt(max(float(canonical_inner(X, D, D).sum()), 0.0)),
        kkt_residual=unit * _norm(D),
        symmetry_residual=unit * _norm(skew(X.mH @ G)),
        gradient_norm=unit * size,
        relative=euclidean / size if size else math.nan,
    )


def stationarity(
    model: nn.Module, gradients: Mapping[str, PointGradient]
) -> dict[str, Stationarity]:
    """Measures how far every constrained weight is from stationary.

    Call it after the backward passes and before the optimizer's step or ``zero_grad``: the
    coordinate norms are read from the leaves' ``.grad``.

    Args:
        model: The model.
        gradients: What `point_gradients` recorded.

    Returns:
        The figures by `Constraint.path`; NaN with the reason where there is no gradient.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import point_gradients, stationarity
        >>> layer = stiefel.orthogonal(torch.nn.Linear(6, 6))
        >>> with point_gradients(layer) as gradients:
        ...     layer(torch.randn(9, 6)).square()[:, 0].sum().backward()
        >>> found = stationarity(layer, gradients)["weight"]
        >>> found.missing is None, 0 < found.relative <= 1
        (True, True)
        >>> abs(found.canonical_norm / found.euclidean_norm - 2**0.5) < 1e-6  # a square weight
        True
    """
    return {each.path: _of(each, gradients[each.path]) for each in constraints(model)}


def total_stationarity(figures: Mapping[str, Stationarity]) -> Stationarity:
    """Measures a model as one point: roots of the sums of squares over its weights.

    Args:
        figures: What `stationarity` gave.

    Returns:
        Figures with the path ``"model"``. Weights without a gradient are not in the sums; `missing`
        names them, and all is NaN where none is left. A weight whose manifold has no residual is
        not in the residuals. The coordinate norm is a sum over the charts, None without any; the
        scale-free one is None unless every chart has it.
    """
    seen = [each for each in figures.values() if each.missing is None]
    absent = [each.path for each in figures.values() if each.missing is not None]
    size = _root_of_squares(each.gradient_norm for each in seen)
    euclidean = _root_of_squares(each.euclidean_norm for each in seen)
    own = [each for each in seen if not math.isnan(each.kkt_residual)]
    scale_free = [
        each.scale_free_coordinate_norm_squared
        for each in figures.values()
        if each.coordinate_norm_squared is not None
    ]
    missing = None if figures else "the model has no constrained weight"
    if absent:
        missing = "without " + "; ".join(f"{path} ({figures[path].missing})" for path in absent)
    return Stationarity(
        path=MODEL,
        via=", ".join(dict.fromkeys(each.via for each in figures.values())),
        euclidean_norm=euclidean,
        canonical_norm=_root_of_squares(each.canonical_norm for each in seen),
        kkt_residual=_root_of_squares(each.kkt_residual for each in own),
        symmetry_residual=_root_of_squares(each.symmetry_residual for each in own),
        gradient_norm=size,
        relative=euclidean / size if size and len(own) == len(seen) else math.nan,
        coordinate_norm_squared=_sum(each.coordinate_norm_squared for each in figures.values()),
        scale_free_coordinate_norm_squared=_sum(scale_free) if None not in scale_free else None,
        missing=missing,
    )


def _of(constraint: Constraint, found: PointGradient) -> Stationarity:
    """The figures of one weight."""
    coordinates, scale_free = _coordinate_norms(constraint)
    figures = _UNKNOWN
    if found.gradient is not None:
        manifold = constraint.manifold
        if is_stiefel(manifold):
            figures = stationarity_at(found.point, found.gradient)
        else:
            norm, size = _norms_elsewhere(manifold, found.point, found.gradient)
            figures = replace(
                _UNKNOWN, euclidean_norm=norm, canonical_norm=norm, gradient_norm=size
            )
    return replace(
        figures,
        path=constraint.path,
        via=constraint.via,
        coordinate_norm_squared=coordinates,
        scale_free_coordinate_norm_squared=scale_free,
        missing=found.missing,
    )


@torch.no_grad()
@full_precision()
def _norms_elsewhere(manifold: Manifold, X: Tensor, G: Tensor) -> tuple[float, float]:
    """Norms of the gradient in a manifold's own metric, and of G."""
    X, (G, unit) = in_double(X), _in_units(in_double(G))
    u = manifold.egrad2rgrad(X, G)
    square = manifold.inner(X, u, keepdim=True).sum()
    square = square.real if square.is_complex() else square
    return unit * math.sqrt(max(float(square), 0.0)), unit * _norm(G)


@torch.no_grad()
def _coordinate_norms(constraint: Constraint) -> tuple[float | None, float | None]:
    """sum |grad|^2 over the leaves, and the same for columns v_l of the first scaled to one."""
    leaves = constraint.leaves
    squares = [None if leaf.grad is None else _squares(leaf.grad) for leaf in leaves]
    if constraint.is_riemannian or all(square is None for square in squares):
        return None, None
    coordinates = math.fsum(float(square.sum()) for square in squares if square is not None)
    if not is_of_reflections(constraint):
        return coordinates, None
    scaled = [square for square in squares[1:] if square is not None]
    if squares[0] is not None:  # sum_l |v_l|^2 |grad_{v_l}|^2
        scaled.append(_squares(leaves[0]).sum(-2) * squares[0].sum(-2))
    return coordinates, math.fsum(float(square.sum()) for square in scaled)


def is_of_reflections(constraint: Constraint) -> bool:
    """Whether the columns of a weight's first leaf are reflection vectors v_l."""
    return constraint.storage is not None and constraint.storage.chart.reflects


def _in_units(G: Tensor) -> tuple[Tensor, float]:
    """G over its largest entry, and that: squares of very small or large ones are lost."""
    unit = float(G.abs().max()) if G.numel() else 0.0
    if not 0 < unit < math.inf or 1e-100 < unit < 1e100:
        return G, 1.0
    return G / unit, unit


def _norm(A: Tensor) -> float:
    """Frobenius norm of all of A, a batch included."""
    return float(torch.linalg.vector_norm(A))


def _squares(A: Tensor) -> Tensor:
    """|a|^2 of every entry, in float64."""
    return in_double(A).abs().square()


def _root_of_squares(values: Iterable[float]) -> float:
    """The root of the sum of squares; NaN for no values at all."""
    known = list(values)
    return math.hypot(*known) if known else math.nan


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of what is there; None for nothing."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
