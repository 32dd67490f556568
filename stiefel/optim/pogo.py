"""POGO: a tangent step of any base direction, then one normal correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.geometry.gram import gram
from stiefel.geometry.linear import plus_product
from stiefel.manifolds import Manifold
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.moments import (
    above_rounding,
    bias_correction,
    check_betas,
    check_eps,
    check_momentum,
    heavy_ball,
    saturated_average,
)
from stiefel.optim.near import NearManifold, largest_part, tangent_field, tangent_part

__all__ = ["POGO", "correction_bound", "normal_correction", "spectral_norm_bound"]

_BASES = ("sgd", "adam")
#: Up to so many columns the norm of a tangent vector is bounded, above it is estimated.
_MOST_SCHATTEN = 256
#: Products with Phi^H Phi in the estimate, and what it is multiplied by.
_POWERS, _MARGIN = 4, 1.15


def normal_correction(M: Tensor, corrections: int = 1, spare: Tensor | None = None) -> Tensor:
    r"""``M <- M - M (M^H M - I)/2``, the step in the normal direction towards the manifold.

    With ``E = M^H M - I`` before, it is ``-3/4 E^2 + E^3/4`` after: the singular values are below
    1 then, whichever side they came from.

    Args:
        M: Matrices, shape ``(..., n, p)``, with ``|E|_2`` below 1.
        corrections: How many steps.
        spare: Memory for Gram matrices, shape ``(..., p, p)``; new by default.

    Returns:
        Same shape.
    """
    E = spare
    for _ in range(corrections):
        E = gram(M, out=E)
        E.diagonal(dim1=-2, dim2=-1).sub_(1)
        M = plus_product(M, M, E, alpha=-0.5)
    return M


def correction_bound(step: float, corrections: int = 1) -> float:
    """How far from the manifold points are kept by tangent steps of spectral norm at most `step`.

    ``|E|_2 = step^2`` before the first correction, ``3/4 |E|^2 - |E|^3/4`` after it (3/4 step^4 to
    leading order), ``3/4 |E|^2 + |E|^3/4`` after each further one. Errors do not add up from step
    to step: a correction leaves ``E <= 0``, the next tangent step adds to it a positive
    semidefinite matrix of norm ``step^2`` at most.

    Args:
        step: Bound on ``|eta Phi|_2``, at most 1.
        corrections: How many corrections follow a tangent step, at least 1.

    Returns:
        Bound on ``|X^H X - I|_2``, and so on its largest entry.
    """
    e = step**2
    e = 0.75 * e**2 - e**3 / 4
    for _ in range(corrections - 1):
        e = 0.75 * e**2 + e**3 / 4
    return e


def spectral_norm_bound(Phi: Tensor) -> Tensor:
    """What the spectral norm of each matrix is at most, by products, without a decomposition.

    Up to 256 columns it is the Schatten norm ``(sum sigma^16)^(1/16)`` from ``K = Phi^H Phi`` and
    K^4: never too small, and at most p^(1/16) times too large. For more columns it is an estimate
    by power iteration, from below, raised by 15 percent; of Gaussian matrices it misses 10.

    Args:
        Phi: Matrices, shape ``(..., n, p)``.

    Returns:
        Shape ``(..., 1, 1)``, real; infinite where Phi is not finite.
    """
    unit = largest_part(Phi)
    if Phi.shape[-1] > _MOST_SCHATTEN:
        return unit * _power_iteration(Phi, unit)
    K = gram(Phi / unit)
    trace = K.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None].clamp_min(0.5)
    K = K / trace
    K = K @ K
    K = K @ K
    size = torch.linalg.vector_norm(K, dim=(-2, -1), keepdim=True)
    return unit * (trace * size**0.25).sqrt()


def _power_iteration(Phi: Tensor, unit: Tensor) -> Tensor:
    """The spectral norm of Phi / unit, about."""
    p, tiny = Phi.shape[-1], torch.finfo(unit.dtype).tiny
    k = torch.arange(1, p + 1, device=Phi.device, dtype=unit.dtype)
    x = (k * k * 0.618034).cos().to(Phi.dtype).unsqueeze(-1).expand(*Phi.shape[:-2], p, 1)
    size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    for _ in range(_POWERS):
        y = Phi @ (x / size) / unit
        y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp_min(tiny)
        x = Phi.mH @ y / unit
        size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return _MARGIN * size


def scalar_adam(
    G: Tensor, batch: Batch, betas: tuple[float, float], eps: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Adam's direction with one second moment for each matrix, ``E |G|_F^2``, and its new state.

    The direction does not depend on the scale of G and turns with it: with the count k,
    ``m <- b1 m + (1 - b1) G``, ``v <- b2 v + (1 - b2) |G|_F^2``, and it is
    ``m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)``. Lengths have the floor of `above_rounding`.
    """
    b1, b2 = betas
    state = batch.state or {
        "exp_avg": batch.zeros("point"),
        "exp_avg_sq": batch.zeros("matrix"),
        "step": batch.zeros("leaf"),
    }
    square = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True).square()
    square = above_rounding(square, batch.gradients)
    m, k = torch.lerp(state["exp_avg"], G, 1 - b1), state["step"] + 1
    v = saturated_average(state["exp_avg_sq"], square, b2, batch.leaves[0].dtype)
    root = (v / bias_correction(b2, k)).sqrt() + eps
    direction = m / (bias_correction(b1, k) * root).to(v.dtype)
    return direction, {"exp_avg": m, "exp_avg_sq": v, "step": k}


class POGO(NearManifold):
    r"""POGO: a tangent step in any base direction, then one correction in the normal direction.

    A base optimizer makes a direction B: ``base="sgd"``, the gradient, or with momentum as torch's
    SGD; ``base="adam"``, Adam with one second moment for each matrix. (Their averages are of the
    tangent parts of the gradients, which costs two more products.) Its relative gradient
    ``Phi = skew(B X^H) X`` gives ``M = X - eta Phi``, for which ``M^H M = X^H X +
    eta^2 Phi^H Phi`` exactly, and ``X <- M - M (M^H M - I)/2`` takes that back to second order: X
    is within ``3/4 |eta Phi|_2^4`` of orthonormal after each step, however many there are. `bound`
    tells what that is for the largest step, and `feasibility` where the points are. One step takes
    four products of 2 n p^2 operations and two Gram matrices, or three and one for square
    matrices; the bound on its length takes one more Gram matrix and two products of 2 p^3 (above
    256 columns eight products with vectors, 16 n p), and the check of the new point, which every
    step makes, another. A Gram matrix is a product of 2 n p^2, from 512 columns on three quarters
    of one or less. Source: Javaloy and Vergari, An embarrassingly simple way to optimize
    orthogonal matrices at scale, 2026 (proximal one-step geometric orthoptimizer), with
    lambda = 1/2.

    The correction needs ``|eta Phi|_2`` well below sqrt(2). ``eta = min(lr, max_step / |Phi|_2)``
    sees to it for each matrix on its device, the norm by products (`spectral_norm_bound`):
    with the default a step turns no direction by more than half a radian.

    Rates transfer as those of `Landing` do: twice the rate of `RGD` with ``inner="canonical"``,
    and for square matrices that of ``inner="euclidean"``. With ``base="adam"`` the rate is about
    the Frobenius norm of the step. Metric and retraction of the manifold are not used.

    Parameters are on ``stiefel.Stiefel(tolerance=t)`` with t at least the bound, 0.043 by default.
    With ``corrections=3, max_step=0.1`` the bound is below rounding, and any `stiefel.Stiefel`
    will do.

    Args:
        params: Manifold parameters, or groups of them. Ordinary parameters need `euclidean`.
        lr: Learning rate, a number or a tensor with one entry.
        base: ``"sgd"`` or ``"adam"``.
        momentum: Momentum factor of ``base="sgd"``; 0 for none.
        dampening: Dampening of momentum.
        nesterov: Whether to use Nesterov's momentum.
        betas: For ``base="adam"`` and ``euclidean="adam"``.
        eps: Likewise.
        corrections: Normal corrections after each tangent step, at least 1.
        max_step: Largest ``|eta Phi|_2``, at most 1; None for no bound, then diverging is possible.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options do not go together, a manifold allows less than the bound,
            or an ordinary parameter comes without `euclidean`.
        UnknownNameError: If `base` or `euclidean` is none of the names above.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> near = stiefel.Stiefel(tolerance=0.1)
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2), near)
        >>> optimizer = stiefel.optim.POGO([X], lr=0.2)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (X.mT @ C @ X).trace().backward()
        ...     optimizer.step()
        >>> round((X.mT @ C @ X).trace().item(), 3)  # the two smallest eigenvalues, 1 + 2
        3.0
        >>> optimizer.feasibility()[0] < 1e-5
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        base: str = "sgd",
        momentum: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        corrections: int = 1,
        max_step: float | None = 0.5,
        *,
        maximize: bool = False,
        euclidean: str | None = None,
        weight_decay: float = 0,
        skip_nonfinite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "base": base,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "corrections": corrections,
            "max_step": max_step,
            "maximize": maximize,
            "weight_decay": weight_decay,
        }
        self._points_have_betas = base == "adam"
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["base"] not in _BASES:
            raise unknown("base direction", group["base"], _BASES)
        check_momentum(group)
        check_betas(group["betas"])
        if group["base"] == "adam" and group["momentum"] != 0:
            raise ConfigurationError(
                f"base='adam' has betas=(b1, b2) for momentum: expected momentum=0, got "
                f"{group['momentum']}"
            )
        if group["corrections"] < 1:
            raise ConfigurationError(f"expected corrections >= 1, got {group['corrections']}")
        if group["max_step"] is not None and not 0 < group["max_step"] <= 1:
            raise ConfigurationError(
                f"expected max_step between 0 and 1, or None, got {group['max_step']}: a "
                "correction makes matrices singular from sqrt(2) on"
            )
        super()._check_group(group)

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        if group["base"] == "adam":
            check_eps(group["eps"], " with base='adam'")

    def _reach(self, group: Mapping[str, Any]) -> float:
        if group["max_step"] is None:
            return float("inf")
        return correction_bound(group["max_step"], group["corrections"])

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        if group["base"] == "adam":
            return {"exp_avg": "point", "exp_avg_sq": "matrix", "step": "leaf"}
        return {"momentum_buffer": "point"} if group["momentum"] != 0 else {}

    def _direction(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        G, group = batch.gradients, batch.group
        if group["base"] == "sgd" and group["momentum"] == 0:
            return G, {}
        G = tangent_part(batch.points, G)
        if group["base"] == "adam":
            return scalar_adam(G, batch, group["betas"], group["eps"])
        direction, buffer = heavy_ball(G, batch.state.get("momentum_buffer"), group)
        return direction, {"momentum_buffer": buffer}

    def _propose(self, batch: Batch) -> Proposal:
        X, group = batch.points, batch.group
        direction, state = self._direction(batch)
        Phi, spare = tangent_field(X, direction)
        rate = batch.rate
        if group["max_step"] is not None:
            eta = torch.clamp_max(group["max_step"] / spectral_norm_bound(Phi), abs(rate))
            rate = eta if group["maximize"] else -eta
        M = Phi.mul_(rate).add_(X)
        return Proposal(normal_correction(M, group["corrections"], spare), state)
