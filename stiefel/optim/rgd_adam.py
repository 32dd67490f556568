"""Cayley Adam: one second moment a matrix, and steps along a bounded Cayley transform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.geometry.skew_step import bounded_cayley_step, bounded_sweep_step
from stiefel.manifolds import Manifold, Stiefel
from stiefel.optim.base import RiemannianOptimizer
from stiefel.optim.batches import Batch, Proposal, StateKind
from stiefel.optim.moments import bias_correction, check_betas, check_eps, saturated_average

__all__ = ["RGDAdam"]


class RGDAdam(RiemannianOptimizer):
    r"""Cayley Adam of Li, Fuxin and Todorovic (ICLR 2020), for `stiefel.Stiefel`.

    With the gradient G, the ambient momentum M, one number v for each matrix and the count k:
    ``M <- b1 M + (1 - b1) G``, ``v <- b2 v + (1 - b2) |G|_F^2``,
    ``r = (1 - b1^k) sqrt(v / (1 - b2^k) + eps)``, and the skew matrix
    ``W = (N X^H - X N^H) / r`` with ``N = M - X X^H M / 2``. Then ``M <- r W X``, the tangent part
    of M at the point that is left: the next step projects it at the point that is reached, which
    transports it. The step along -W is ``alpha = min(lr, 2q / (|W| + eps))``.

    W has rank 2p and is never formed: the step costs O(n p^2), square matrices included. For |W|
    the Frobenius norm is taken, which p x p matrices give. It bounds the spectral norm, as the
    1-norm of the paper's code does, and that is what the bound is for: ``alpha |W|_2 / 2 <= q``
    makes the fixed-point iteration a contraction. Steps that neither norm bounds are the same.

    By default the point moves by the exact Cayley transform,
    ``X <- (I + alpha W/2)^-1 (I - alpha W/2) X``, computed with p x p matrices, so that it stays
    on the manifold at any step. ``iterations=s`` takes the paper's s fixed-point sweeps
    ``Y_i = X - alpha/2 W (X + Y_(i-1))`` from ``Y_0 = X - alpha W X`` instead (the paper: 2, its
    code: 5). With ``c = alpha |W|_2 / 2 <= q`` their result is within ``2 c^(s+2)`` of the exact
    step, and so off the manifold: by up to ``4 c^(s+2)`` in a step, and it adds up. A point that
    is further off than its manifold allows is computed again in double precision and projected;
    ``Stiefel(..., tolerance=1e-2)`` leaves the paper's iterates as they are.

    In the canonical metric the canonical gradient takes the place of the projected G; v stays.

    Args:
        params: Parameters on `stiefel.Stiefel` with the Cayley retraction, or groups of them.
            Ordinary parameters need `euclidean`.
        lr: Learning rate, a number or a tensor with one entry: about the distance, in the
            Frobenius norm, that one step moves a matrix.
        betas: Decay of the first and the second moment.
        eps: Added under the root, and to |W|.
        q: Bound on ``alpha |W|_2 / 2``, between 0 and 1.
        iterations: None for the exact Cayley step, or a number of sweeps.
        amsgrad: Whether v is replaced by its maximum so far.
        maximize: Whether to ascend.
        euclidean: None, ``"sgd"`` or ``"adam"``, for ordinary ones: see `RiemannianOptimizer`.
        weight_decay: For ordinary parameters; must be 0 in a group with manifold parameters.
        skip_nonfinite: Whether a parameter with a non-finite gradient stays where it is, instead
            of an error: see `RiemannianOptimizer`.

    Raises:
        ConfigurationError: If options are out of range or do not go together, or a parameter is on
            another manifold or has another retraction.
        UnknownNameError: If `euclidean` is none of the names above.

    Example:
        >>> import torch, stiefel
        >>> C = torch.diag(torch.arange(1.0, 7.0))
        >>> X = stiefel.ManifoldParameter(stiefel.geometry.haar(6, 2))
        >>> optimizer = stiefel.optim.RGDAdam([X], lr=0.1)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (X.mT @ C @ X).trace().backward()
        ...     optimizer.step()
        >>> round((X.mT @ C @ X).trace().item(), 3)  # the two smallest eigenvalues, 1 + 2
        3.0
    """

    _points_have_betas = True
    ambient_state = True  # M is projected at the point that is reached

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        q: float = 0.5,
        iterations: int | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        euclidean: str | None = None,
        weight_decay: float = 0,
        skip_nonfinite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "q": q,
            "iterations": iterations,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, euclidean=euclidean, skip_nonfinite=skip_nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        if not 0 < group["q"] < 1:
            raise ConfigurationError(
                f"expected q between 0 and 1, got {group['q']}: it bounds the contraction factor "
                "alpha |W| / 2 of the step"
            )
        sweeps = group["iterations"]
        if sweeps is not None and (isinstance(sweeps, bool) or sweeps != int(sweeps) or sweeps < 0):
            raise ConfigurationError(
                f"expected iterations=None (the exact Cayley step) or a count >= 0, got {sweeps!r}"
            )
        super()._check_group(group)

    def _check_manifold_leaf(self, leaf: Tensor, manifold: Manifold, group: dict[str, Any]) -> None:
        super()._check_manifold_leaf(leaf, manifold, group)
        check_eps(group["eps"], "")
        if not (isinstance(manifold, Stiefel) and manifold.retraction == "cayley"):
            raise ConfigurationError(
                "RGDAdam steps along a Cayley transform: expected a parameter on "
                f"stiefel.Stiefel(retraction='cayley'), got {self.describe(leaf)} on {manifold}. "
                "Use stiefel.optim.RiemannianAdam, which takes every manifold and retraction"
            )

    def _state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        kinds: dict[str, StateKind] = {"exp_avg": "point", "exp_avg_sq": "matrix", "step": "leaf"}
        return {**kinds, "max_exp_avg_sq": "matrix"} if group["amsgrad"] else kinds

    def _propose(self, batch: Batch) -> Proposal:
        X, G, group = batch.points, batch.gradients, batch.group
        kinds = self._state_kinds(group)
        state = batch.state or {name: batch.zeros(kind) for name, kind in kinds.items()}
        assert isinstance(batch.manifold, Stiefel)
        b1, b2 = group["betas"]
        eps, sign = group["eps"], 1 if group["maximize"] else -1
        M, v, k = state["exp_avg"], state["exp_avg_sq"], state["step"]
        M, k = torch.lerp(M, G, 1 - b1), k + 1
        v = saturated_average(v, _square(G), b2, batch.leaves[0].dtype)
        new = {"exp_avg_sq": v, "step": k}
        if group["amsgrad"]:
            v = torch.maximum(v, state["max_exp_avg_sq"])
            new["max_exp_avg_sq"] = v
        r = bias_correction(b1, k) * torch.sqrt(v / bias_correction(b2, k) + eps)
        canonical = batch.manifold.metric == "canonical"
        T = (1 - b1) * (X.mH @ G) if canonical else None  # G - X G^H X = proj G + X skew(X^H G)
        alpha = abs(batch.rate)
        if group["iterations"] is None:
            Y, M = bounded_cayley_step(X, M, T, r, alpha, sign, group["q"], eps)
        else:
            sweeps = int(group["iterations"])
            Y, M = bounded_sweep_step(X, M, T, r, alpha, sign, group["q"], eps, sweeps)
        return Proposal(Y, {"exp_avg": M, **new})


def _square(G: Tensor) -> Tensor:
    """Squared Frobenius norms, shape ``(..., 1, 1)``."""
    return torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True).square()
