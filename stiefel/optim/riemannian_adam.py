"""Adam on any manifold: one second moment a point, momentum carried along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.manifolds import Manifold, Stiefel
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.carrying import check_transport, check_transport_on, move_and_carry
from stiefel.optim.moments import (
    above_rounding,
    bias_correction,
    check_betas,
    check_eps,
    saturated_average,
)

__all__ = ["RiemannianAdam"]


class RiemannianAdam(RiemannianOptimizer):
    r"""Adam on any manifold of ours or geoopt's (Becigneul and Ganea, ICLR 2019).

    With the Riemannian gradient g of each manifold's metric, the momentum m, one number v for
    each point and the count k: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) <g, g>_X``,
    ``u = m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)``, ``X <- R_X(-lr u)``, and m is carried
    to the new point, so that it is tangent there after every step.

    A point is a matrix of a batch; its entries share one v, for the coordinates of a tangent
    space have no meaning of their own. On `stiefel.Stiefel` the squared length counts as at least
    ``(256 eps |G|_F)^2``, below which g is rounding of the gradient G. Where a manifold is a
    product (geoopt's `ProductManifold`, and its `Euclidean`, a product of lines) each factor has
    its own v, by ``component_inner``.

    Args:
        params: Manifold parameters, or groups of them. Ordinary parameters need `euclidean`.
        lr: Learning rate, a number or a tensor with one entry: about the distance that one step
            moves a point, in its metric.
        betas: Decay of the first and the second moment.
        eps: Added to the root of v.
        amsgrad: Whether v is replaced by its maximum so far.
        transport: How m is carried: ``"projection"`` onto the new tangent space (on manifolds of
            other libraries, their own ``retr_transp``), or ``"cayley"``, isometric, for
            `stiefel.Stiefel` with the Cayley retraction.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options are out of range or do not go together.
        UnknownNameError: If `transport` or `euclidean` is none of the names above.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> manifold = stiefel.Stiefel("euclidean", "cholesky_qr")
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2), manifold)
        >>> optimizer = stiefel.optim.RiemannianAdam([X], lr=0.4)
        >>> decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (X.mT @ C @ X).trace().backward()
        ...     optimizer.step()
        ...     decay.step()
        >>> round((X.mT @ C @ X).trace().item(), 3)  # the two smallest eigenvalues, 1 + 2
        3.0
    """

    _points_have_betas = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        transport: str = "projection",
        *,
        maximize: bool = False,
        euclidean: str | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "transport": transport,
            "maximize": maximize,
        }
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        if not group["eps"] >= 0:
            raise ConfigurationError(f"expected eps >= 0, got {group['eps']}")
        check_transport(group)
        super()._check_group(group)

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        check_eps(group["eps"], " for a parameter on a manifold")
        check_transport_on(manifold, group, self.describe(leaf))

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        kinds: dict[str, StateKind] = {"exp_avg": "point", "exp_avg_sq": "matrix", "step": "leaf"}
        return {**kinds, "max_exp_avg_sq": "matrix"} if group["amsgrad"] else kinds

    def _kinds_on(self, manifold: Manifold, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        kinds = self._state_kinds(group)
        if _is_product(manifold):  # a number for each factor, at all of its entries
            return {name: "point" if kind == "matrix" else kind for name, kind in kinds.items()}
        return kinds

    def _propose(self, batch: Batch) -> Proposal:
        manifold, X, group = batch.manifold, batch.points, batch.group
        kinds = self._kinds_on(manifold, group)
        state = batch.state or {name: batch.zeros(kind) for name, kind in kinds.items()}
        b1, b2 = group["betas"]
        m, v, k = state["exp_avg"], state["exp_avg_sq"], state["step"]
        G = batch.gradients
        g = manifold.egrad2rgrad(X, G)
        m, k = torch.lerp(m, g, 1 - b1), k + 1
        square = _squared_length(manifold, X, g).clamp(min=0)  # Lorentz: rounding below 0
        if isinstance(manifold, Stiefel):
            square = above_rounding(square, G)
        v = saturated_average(v, square, b2, batch.leaves[0].dtype)
        new = {"exp_avg_sq": v, "step": k}
        if group["amsgrad"]:
            v = torch.maximum(v, state["max_exp_avg_sq"])
            new["max_exp_avg_sq"] = v
        root = torch.sqrt(v / bias_correction(b2, k)) + group["eps"]
        u = m * (batch.rate / (bias_correction(b1, k) * root))
        Y, m = move_and_carry(manifold, X, u, m, group["transport"])
        return Proposal(Y, {"exp_avg": m, **new})


def _is_product(manifold: Manifold) -> bool:
    """Whether a manifold knows inner products of its factors."""
    return type(manifold).component_inner is not Manifold.component_inner


def _squared_length(manifold: Manifold, X: Tensor, g: Tensor) -> Tensor:
    """``<g, g>_X``, one real number a point, or for each factor of a product, broadcasting."""
    if _is_product(manifold):
        square = manifold.component_inner(X, g)
    else:
        leading = X.shape[: X.ndim - int(manifold.ndim)]
        square = manifold.inner(X, g, keepdim=True).reshape(*leading, *(1,) * int(manifold.ndim))
    return square.real if square.is_complex() else square
