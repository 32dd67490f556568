"""The landing algorithm: descent and attraction to the manifold in one field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.geometry.gram import gram
from stiefel.geometry.linear import plus_product
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.moments import check_momentum, heavy_ball
from stiefel.optim.near import NearManifold, residual_of_gram, tangent_part, twice_skew

__all__ = ["Landing", "landing_field", "safe_rate"]

#: Steps stay within this much of the radius, so that rounding does not leave it.
_INSIDE = 1 - 1e-4


def landing_field(
    X: Tensor, G: Tensor, attraction: float, radius: float, sign: int = 1
) -> tuple[Tensor, Tensor]:
    r"""The landing field ``F = skew(G X^H) X + lambda X (X^H X - I)``, and ``|X^H X - I|_F``.

    In products of O(n p^2), with ``S = X^H X``, ``E = S - I``, ``P = X^H G``:
    ``F = G S / 2 + X (lambda E - P^H / 2)``; four of them, and three for square matrices,
    ``F = (skew(G X^H) + lambda (X X^H - I)) X``. A matrix outside of the radius gets the second
    term of F alone. Source: Ablin and Peyre, AISTATS 2022; Ablin, Vary, Gao and Absil, Infeasible
    deterministic, stochastic, and variance-reduction algorithms for optimization under
    orthogonality constraints, JMLR 25 (2024).

    Args:
        X: Matrices, shape ``(..., n, p)``.
        G: Ambient gradients, same shape.
        attraction: lambda.
        radius: Distance d from which on only lambda acts.
        sign: -1 to ascend.

    Returns:
        F, shape ``(..., n, p)``, and d, shape ``(..., 1, 1)``.
    """
    if X.shape[-2] == X.shape[-1]:
        E, d = residual_of_gram(gram(X.mH))  # X (X^H X - I) = (X X^H - I) X
        half = ((d <= radius) * (sign / 2)).to(X.dtype)
        W, spare = twice_skew(G @ X.mH)
        return torch.matmul(E.mul_(attraction).addcmul_(half, W), X, out=spare), d
    P = X.mH @ G
    S = gram(X)
    E, d = residual_of_gram(S.clone())
    half = ((d <= radius) * (sign / 2)).to(X.dtype)
    GS = G @ S.mul_(half)
    return plus_product(GS, X, E.mul_(attraction).addcmul_(half, P.mH, value=-1)), d


def safe_rate(d: Tensor, g: Tensor, attraction: float, radius: float) -> Tensor:
    r"""The largest step that is known to stay within the radius.

    With ``d = |X^H X - I|_F <= e`` and ``g = |F|_F``, ``X - eta F`` is within e of the manifold,
    in the same norm, for every
    ``eta <= min((lambda d (1 - d) + sqrt(lambda^2 d^2 (1 - d)^2 + g^2 (e - d))) / g^2,
    1 / (2 lambda))``. Source: Ablin and Peyre 2022, Ablin, Vary, Gao and Absil 2024. For a matrix
    outside of the radius, where F is the attraction alone, it is ``1 / (2 lambda max(1, d))``,
    which takes every singular value towards 1.

    Args:
        d: Distances, shape ``(..., 1, 1)``.
        g: Norms of the field, same shape.
        attraction: lambda.
        radius: e, below 1.

    Returns:
        Rates, same shape.
    """
    g = g.clamp_min(torch.finfo(g.dtype).tiny)
    pull = attraction * d * (1 - d) / g
    most = 1 / (2 * attraction)
    inside = ((pull + (pull.square() + (radius - d).clamp_min(0)).sqrt()) / g).clamp_max(most)
    return torch.where(d <= radius, inside, most / d.clamp_min(1))


class Landing(NearManifold):
    r"""The landing algorithm, ``X <- X - eta F``, product by product and without a retraction.

    ``F = skew(G X^H) X + lambda X (X^H X - I)``: the first term, the relative gradient, descends
    along the level set of ``X^H X``, the second, orthogonal to it, attracts X to the manifold.
    Points are near the manifold while the optimizer runs and reach it as the gradient vanishes or
    the rate goes to zero. The step is ``eta = min(lr, safe)``, where `safe` is computed for each
    matrix on its device so that ``|X^H X - I|_F`` never exceeds `radius` (see `safe_rate`), for
    any gradient; `feasibility` tells where the points are. One step takes four products of
    2 n p^2 operations, three for square matrices, and the check of the new point, which every step
    makes, one more; of these, two are Gram matrices, from 512 columns on three quarters of a
    product or less.

    On the manifold the relative gradient is half the gradient of the canonical metric, so the
    rate of Landing is twice that of `RGD` with ``inner="canonical"``; for square matrices it is
    the gradient of the Euclidean metric, at the same rate as ``inner="euclidean"``. The metric
    and the retraction of the manifold are not used.

    Momentum is that of torch's SGD, of the tangent parts of the gradients (two more products);
    the relative gradient of the buffer is taken at each point, so that the bound of the safe step
    holds with momentum too.

    Parameters are on ``stiefel.Stiefel(tolerance=t)`` with t at least `radius`.

    Args:
        params: Manifold parameters, or groups of them. Ordinary parameters need `euclidean`.
        lr: Learning rate, a number or a tensor with one entry.
        attraction: lambda, how strongly points are attracted. A step shrinks a small distance to
            the manifold by the factor ``1 - 2 eta lambda``.
        momentum: Momentum factor; 0 for none.
        dampening: Dampening of momentum.
        nesterov: Whether to use Nesterov's momentum.
        radius: Bound on ``|X^H X - I|_F``, between 0 and 1.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        betas: For ``euclidean="adam"``.
        eps: For ``euclidean="adam"``.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options do not go together, a manifold allows less than `radius`,
            or an ordinary parameter comes without `euclidean`.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> near = stiefel.Stiefel(tolerance=0.5)
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2), near)
        >>> optimizer = stiefel.optim.Landing([X], lr=0.2)
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
        attraction: float = 1.0,
        momentum: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        radius: float = 0.5,
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
            "attraction": attraction,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "radius": radius,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_momentum(group)
        if not group["attraction"] > 0:
            raise ConfigurationError(f"expected attraction > 0, got {group['attraction']}")
        if not 0 < group["radius"] < 1:
            raise ConfigurationError(
                f"expected a radius between 0 and 1, got {group['radius']}: the safe step is "
                "known for |X^H X - I|_F below 1 only"
            )
        super()._check_group(group)

    def _reach(self, group: Mapping[str, Any]) -> float:
        return group["radius"]

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        return {"momentum_buffer": "point"} if group["momentum"] != 0 else {}

    def _propose(self, batch: Batch) -> Proposal:
        X, group, state = batch.points, batch.group, {}
        G = batch.gradients
        if group["momentum"] != 0:
            buffer = batch.state.get("momentum_buffer")
            G, state["momentum_buffer"] = heavy_ball(tangent_part(X, G), buffer, group)
        attraction, radius = group["attraction"], group["radius"] * _INSIDE
        F, d = landing_field(X, G, attraction, radius, -1 if group["maximize"] else 1)
        g = torch.linalg.vector_norm(F, dim=(-2, -1), keepdim=True)
        safe = safe_rate(d, g, attraction, radius)
        eta = torch.clamp_max(safe, abs(batch.rate))
        return Proposal(F.mul_(-eta).add_(X), state)
