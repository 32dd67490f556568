"""Averages of a model's weights, EMA and SWA, that stay on the manifold."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from stiefel.errors import ConfigurationError, NonFiniteError, RepresentationError
from stiefel.geometry import polar_factor
from stiefel.manifolds import is_stiefel
from stiefel.numerics import compute_dtype, full_precision, tolerance
from stiefel.parameter import Constraint, constraints

__all__ = ["AveragedModel"]

_Average = Callable[[Tensor, Tensor, "Tensor | int"], Tensor]
_Tensors = tuple[Tensor, ...] | list[Tensor]
_MultiAverage = Callable[[_Tensors, _Tensors, "Tensor | int"], None]


class AveragedModel(swa_utils.AveragedModel):
    r"""A running average of a model, EMA or SWA, whose constrained weights stay on the manifold.

    As `torch.optim.swa_utils.AveragedModel`, whose averages of constrained weights are off the
    manifold (of points) or another point than one would think (of coordinates). Here a
    constrained weight is averaged as a point, however it is trained: the running mean
    :math:`M = \sum_t w_t X_t` is kept beside the model, exactly, in float32 or better, and the
    weight is the point nearest to it, its polar factor, which is the chordal mean

    .. math:: \arg\min_{X \in \mathrm{St}(n, p)} \sum_t w_t \|X - X_t\|_F^2.

    Chart coordinates are then set to that point. Points on geoopt's other manifolds are projected
    by ``projx``. Everything else is torch's: ordinary parameters, buffers, ``n_averaged``, the
    first update, which copies.

    There is no nearest point to a mean that has lost a rank (X and -X), and some charts cannot
    hold every point (few reflections, a fixed determinant). The averaged weight then stays what
    it was, with a warning; the mean goes on, so that later updates may succeed.

    Args:
        model: The model; a copy of it is kept as ``module``.
        device: Where the copy lives; where the model does by default.
        avg_fn: As for torch, ``avg_fn(average, current, n_averaged)``; it must be affine.
        multi_avg_fn: As for torch, over lists, in place.
        use_buffers: Whether to average the buffers too, instead of copying them. Buffers that
            belong to a chart (its base, its signs) follow its weight.
        decay: d between 0 and 1 for an exponential moving average,
            ``M <- d M + (1 - d) X``; by default all updates have equal weights.

    Raises:
        ConfigurationError: If more than one of `avg_fn`, `multi_avg_fn` and `decay` is given, or
            `decay` is not between 0 and 1.

    Example:
        >>> import torch, stiefel
        >>> model = stiefel.orthogonal(torch.nn.Linear(8, 8), via="cwy")
        >>> average = stiefel.optim.AveragedModel(model, decay=0.9)
        >>> for _ in range(3):
        ...     _ = stiefel.orthogonal(model, init="haar")  # stands for training
        ...     average.update_parameters(model)
        >>> W = average.module.weight
        >>> bool((W.mT @ W - torch.eye(8)).abs().max() < stiefel.tolerance(W.dtype, 8, 8))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: _Average | None = None,
        multi_avg_fn: _MultiAverage | None = None,
        use_buffers: bool = False,
        *,
        decay: float | None = None,
    ) -> None:
        if sum(given is not None for given in (avg_fn, multi_avg_fn, decay)) > 1:
            raise ConfigurationError(
                "expected one way to average, got several of avg_fn, multi_avg_fn and decay: "
                "decay=d is short for multi_avg_fn=get_ema_multi_avg_fn(d)"
            )
        if decay is not None:
            if not 0 <= decay <= 1:
                raise ConfigurationError(f"expected decay between 0 and 1, got {decay}")
            multi_avg_fn = swa_utils.get_ema_multi_avg_fn(decay)
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        for index, point in enumerate(map(_exact_point, constraints(self.module))):
            self.register_buffer(f"mean{index}", point.clone())

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes the weights of `model` into the average.

        Args:
            model: The model that was given at the start, trained further. Its weights are stored
                as they were then.

        Raises:
            ConfigurationError: If its constrained weights are others, or of other charts.
        """
        ours, theirs = list(constraints(self.module)), list(constraints(model))
        _check_alike(ours, theirs)
        first = bool(self.n_averaged == 0)
        means = [self.get_buffer(f"mean{index}") for index in range(len(ours))]
        points = [
            _exact_point(constraint).to(mean.device, mean.dtype)
            for constraint, mean in zip(theirs, means, strict=True)
        ]
        count = self.n_averaged.clone()
        kept = [] if first else [[tensor.clone() for tensor in _stored(x)] for x in ours]
        super().update_parameters(model)
        if first:
            for mean, point in zip(means, points, strict=True):
                mean.copy_(point)
            return
        for constraint, values in zip(ours, kept, strict=True):
            for tensor, value in zip(_stored(constraint), values, strict=True):
                tensor.copy_(value)  # torch has averaged coordinates, or copied a base
        self._average(means, points, count)
        for constraint, mean in zip(ours, means, strict=True):
            _move_to_mean(constraint, mean)

    def _average(self, means: list[Tensor], points: list[Tensor], count: Tensor) -> None:
        """What torch does to parameters, to the means."""
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, mean in enumerate(means):
            alike[mean.device, mean.dtype].append(index)
        for (device, _), indices in alike.items():
            some, new = [means[i] for i in indices], [points[i] for i in indices]
            if self.multi_avg_fn is not None:
                self.multi_avg_fn(some, new, count.to(device))
                continue
            average = self.avg_fn or swa_utils.get_swa_avg_fn()
            for mean, point in zip(some, new, strict=True):
                mean.copy_(average(mean, point, count.to(device)))


def _exact_point(constraint: Constraint) -> Tensor:
    """The point in float32 or better, detached."""
    storage = constraint.storage
    point = constraint.point if storage is None else storage.exact_point()
    return point.to(compute_dtype(point.dtype))


def _stored(constraint: Constraint) -> list[Tensor]:
    """The coordinates of a weight and the buffers of its chart, detached."""
    storage = constraint.storage
    buffers = [] if storage is None else list(storage.chart.buffers())
    return [tensor.detach() for tensor in (*constraint.leaves, *buffers)]


def _check_alike(ours: list[Constraint], theirs: list[Constraint]) -> None:
    described = [[(c.path, c.via, tuple(c.point.shape)) for c in some] for some in (ours, theirs)]
    for constraint in theirs:
        constraint.check()
    if described[0] != described[1]:
        differing = [x for x in described[1] if x not in described[0]] or described[0]
        raise ConfigurationError(
            f"expected the model that is averaged, with {len(ours)} constrained weights, got one "
            f"with {len(theirs)}; the first that differs is {differing[0]}: was it converted or "
            "released since? Make the AveragedModel afterwards"
        )


def _move_to_mean(constraint: Constraint, mean: Tensor) -> None:
    """Sets a weight to the point nearest to a mean, or warns and leaves it."""
    name = constraint.path or constraint.name
    point, good = _nearest_point(constraint, mean)
    if not bool(good.all()):
        _warn(name, "the mean has (nearly) lost a rank, so that no point is the nearest to it")
        if not bool(good.any()):
            return
        point = torch.where(good, point, _exact_point(constraint).to(point.dtype))
    try:
        constraint.assign(point)
    except (RepresentationError, NonFiniteError) as error:
        _warn(
            name,
            f"{error} (or average a model whose weight is stored as a point: stiefel."
            "convert(model, 'riemannian'))",
        )


def _nearest_point(constraint: Constraint, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest point W, and where it is one, a mask that broadcasts against it.

    With M = W H, H positive semidefinite, the smallest singular value of M is the smallest
    eigenvalue of H. It counts as zero up to t = `stiefel.tolerance`, by a Cholesky factorisation
    of H - t I: rounding errors of M turn W by about their size divided by it.
    """
    manifold = constraint.manifold
    if not is_stiefel(manifold):
        point = manifold.projx(mean)
        return point, torch.isfinite(point).all()
    W = polar_factor(mean)
    with full_precision():
        H = W.mH @ mean
    t = tolerance(mean.dtype, *mean.shape[-2:])
    H = (H + H.mH) / 2
    H.diagonal(dim1=-2, dim2=-1).sub_(t)
    positive = torch.linalg.cholesky_ex(H).info == 0
    return W, positive[..., None, None] & torch.isfinite(W).all((-2, -1), keepdim=True)


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"the averaged weight {name} stays what it was before this update: {reason}",
        UserWarning,
        stacklevel=4,
    )
