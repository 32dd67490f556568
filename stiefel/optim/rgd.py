"""Riemannian gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from stiefel.geometry import DESCENTS
from stiefel.manifolds import Manifold, Stiefel
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.carrying import check_transport, check_transport_on, move_and_carry
from stiefel.optim.moments import check_momentum, heavy_ball

__all__ = ["RGD"]


class RGD(RiemannianOptimizer):
    r"""Riemannian gradient descent, ``X <- R_X(-lr grad f(X))``.

    The gradient and the retraction are those of each parameter's manifold, so the four methods
    RGD-C-C, RGD-E-C, RGD-C-QR and RGD-E-QR of Likhosherstov et al. (AISTATS 2021) are
    ``stiefel.Stiefel(inner, retraction)`` with the canonical or the Euclidean inner product and
    the Cayley or the QR retraction. geoopt's manifolds work as well, by their own methods.

    With momentum m and dampening d: ``b <- m b + (1 - d) grad`` (``b = grad`` at first), the
    direction is b, or ``grad + m b`` with ``nesterov``, and b is carried to the new point, so
    that it is tangent there.

    Args:
        params: Manifold parameters, or groups of them. Ordinary parameters need `euclidean`.
        lr: Learning rate, a number or a tensor with one entry.
        momentum: Momentum factor; 0 for none.
        dampening: Dampening of momentum.
        nesterov: Whether to use Nesterov's momentum.
        transport: How momentum is carried: ``"projection"`` onto the new tangent space (on
            manifolds of other libraries, their own ``retr_transp``), or ``"cayley"``, isometric,
            for `stiefel.Stiefel` with the Cayley retraction.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        betas: For ``euclidean="adam"``.
        eps: For ``euclidean="adam"``.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options do not go together, or an ordinary parameter comes without
            `euclidean`.
        UnknownNameError: If `transport` or `euclidean` is none of the names above.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2))
        >>> optimizer = stiefel.optim.RGD([X], lr=0.1)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (X.mT @ C @ X).trace().backward()
        ...     optimizer.step()
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
        transport: str = "projection",
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
            "transport": transport,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_momentum(group)
        check_transport(group)
        super()._check_group(group)

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        check_transport_on(manifold, group, self.describe(leaf))

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        return {"momentum_buffer": "point"} if group["momentum"] != 0 else {}

    def _propose(self, batch: Batch) -> Proposal:
        manifold, X, group = batch.manifold, batch.points, batch.group
        rate, momentum = batch.rate, group["momentum"]
        if momentum == 0 and type(manifold) is Stiefel and manifold.retraction in DESCENTS:
            descent = DESCENTS[manifold.retraction]
            return Proposal(descent(X, batch.gradients, rate, manifold.metric), {})
        gradient = manifold.egrad2rgrad(X, batch.gradients)
        if momentum == 0:
            return Proposal(manifold.retr(X, rate * gradient), {})
        direction, buffer = heavy_ball(gradient, batch.state.get("momentum_buffer"), group)
        Y, carried = move_and_carry(manifold, X, rate * direction, buffer, group["transport"])
        return Proposal(Y, {"momentum_buffer": carried})
