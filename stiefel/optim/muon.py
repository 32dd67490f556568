"""Muon on the Stiefel manifold: steepest descent in the spectral norm, and a true retraction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.geometry import projection_transport
from stiefel.manifolds import Manifold
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.checks import check_stiefel
from stiefel.optim.moments import check_momentum, heavy_ball
from stiefel.optim.steepest import (
    projected_direction,
    steepest_direction,
    tangent_part_above_rounding,
)

__all__ = ["StiefelMuon"]

_DIRECTIONS = ("steepest", "projected")


class StiefelMuon(RiemannianOptimizer):
    r"""Steepest descent in the spectral norm on the Stiefel manifold, ``X <- R_X(lr A)``.

    A is the tangent direction along which the loss falls fastest among those of spectral norm 1
    (Bernstein, Modular manifolds, 2025): all singular directions of a step have the same length.
    For square matrices it is known, ``A = -X msign(skew(X^H G))``; for n > p it is the limit of a
    dual ascent, `iterations` of them, each an eigenvalue problem of size p in float64, whose every
    iterate is tangent and has spectral norm 1. ``direction="projected"`` is the one-shot form, the
    tangent projection of msign of the gradient, which costs one msign and is no steepest
    direction for n > p.

    ``msign(U S V^H) = U sign(S) V^H`` comes from convergent iterations, zero singular values stay
    zero (a real skew matrix of odd order has one), and R is the retraction of each parameter's
    manifold: points stay on it.

    The length of a step is `lr`, whatever the size of the gradient: near a minimum the rate has
    to fall, by any learning rate scheduler. A zero gradient moves nothing. Rates do not depend on
    the metric, and a step turns no direction by more than about `lr` radians; with Nesterov's or
    plain momentum too.

    Momentum is taken of the tangent part of the gradient and carried to each new point by
    projection, so that it is tangent there; A is computed from it.

    Args:
        params: Manifold parameters, or groups of them. Ordinary parameters need `euclidean`.
        lr: Learning rate, the spectral norm of a step; a number or a tensor with one entry.
        momentum: Momentum factor; 0 for none.
        dampening: Dampening of momentum.
        nesterov: Whether to use Nesterov's momentum.
        direction: ``"steepest"`` or ``"projected"``, see above.
        iterations: Iterations of the dual ascent, at least 1.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        betas: For ``euclidean="adam"``.
        eps: For ``euclidean="adam"``.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options do not go together, a parameter is on another manifold than
            `stiefel.Stiefel`, or an ordinary parameter comes without `euclidean`.
        UnknownNameError: If `direction` or `euclidean` is none of the names above.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2))
        >>> optimizer = stiefel.optim.StiefelMuon([X], lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (X.mT @ C @ X).trace().backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> round((X.mT @ C @ X).trace().item(), 3)  # the two smallest eigenvalues, 1 + 2
        3.0
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        direction: str = "steepest",
        iterations: int = 8,
        *,
        maximize: bool = False,
        euclidean: str | None = None,
        weight_decay: float = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        skip_nonfinite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "direction": direction,
            "iterations": iterations,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_momentum(group)
        if group["direction"] not in _DIRECTIONS:
            raise unknown("direction", group["direction"], _DIRECTIONS)
        if group["iterations"] < 1:
            raise ConfigurationError(
                f"expected iterations >= 1, got {group['iterations']}: use direction='projected' "
                "for the form without a dual ascent"
            )
        super()._check_group(group)

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        check_stiefel("StiefelMuon", leaf, manifold, self.describe)

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        return {"momentum_buffer": "point"} if group["momentum"] != 0 else {}

    def _propose(self, batch: Batch) -> Proposal:
        X, group, manifold = batch.points, batch.group, batch.manifold
        u = buffer = tangent_part_above_rounding(X, batch.gradients)
        if group["momentum"] != 0:
            u, buffer = heavy_ball(u, batch.state.get("momentum_buffer"), group)
        if group["direction"] == "projected":
            A = projected_direction(X, u)
        else:
            A = steepest_direction(X, u, group["iterations"])
        Y = manifold.retr(X, -batch.rate * A)  # A descends along u, the rate is negative then
        if group["momentum"] == 0:
            return Proposal(Y, {})
        return Proposal(Y, {"momentum_buffer": projection_transport(Y, buffer)})
