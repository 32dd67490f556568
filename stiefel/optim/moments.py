"""Averages of gradients: momentum as in torch's SGD, and the moments of the adaptive optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.numerics import real_dtype

__all__ = [
    "above_rounding",
    "bias_correction",
    "check_betas",
    "check_eps",
    "check_momentum",
    "heavy_ball",
    "saturated_average",
]


def check_momentum(group: Mapping[str, Any]) -> None:
    """Raises if momentum, dampening and nesterov do not go together."""
    if group["momentum"] < 0:
        raise ConfigurationError(f"expected momentum >= 0, got {group['momentum']}")
    if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
        raise ConfigurationError(
            "nesterov=True needs momentum > 0 and dampening = 0, got momentum = "
            f"{group['momentum']} and dampening = {group['dampening']}"
        )


def heavy_ball(G: Tensor, buffer: Tensor | None, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Direction and buffer of torch's SGD, with the momentum m and the dampening d of a group.

    ``b <- m b + (1 - d) G`` (``b = G`` at first); the direction is b, or ``G + m b`` with
    Nesterov's momentum.

    Args:
        G: Gradients.
        buffer: b so far; None at first.
        group: Has ``momentum``, ``dampening`` and ``nesterov``.

    Returns:
        The direction, and the new b.
    """
    m, d = group["momentum"], group["dampening"]
    b = G if buffer is None else (m * buffer).add_(G, alpha=1 - d)
    return (torch.add(G, b, alpha=m) if group["nesterov"] else b), b


def check_betas(betas: Any) -> None:
    """Raises `ConfigurationError` unless `betas` is a pair of numbers in [0, 1)."""
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        first = second = math.nan
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ConfigurationError(f"expected betas, two numbers in [0, 1), got {betas!r}")


def check_eps(eps: float, where: str) -> None:
    """Raises `ConfigurationError` unless `eps` is positive, as steps of points need it.

    Args:
        eps: What is added to the root of a second moment.
        where: When that is needed, such as ``" with base='adam'"``; empty for always.
    """
    if not eps > 0:
        raise ConfigurationError(
            f"expected eps > 0{where}, got {eps}: a zero gradient would be divided by zero"
        )


def bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """``1 - beta^step``, without the cancellation that float32 has for a beta close to 1."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else 1.0


def above_rounding(square: Tensor, G: Tensor) -> Tensor:
    """``|g|^2 + (256 eps |G|)^2``: the squared length of the tangent part g of G, with a floor.

    Where G is normal to the manifold, as at a critical point, g is rounding of the size eps |G|. A
    step that divides g by its own length would walk about at full rate there.

    Args:
        square: ``|g|^2`` in whatever metric, one number a point, shape ``(..., 1, 1)``.
        G: Ambient gradients, shape ``(..., n, p)``.
    """
    sizes = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    return square + (256 * torch.finfo(G.dtype).eps * sizes).square()


def saturated_average(v: Tensor, square: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """``beta v + (1 - beta) square``, at most the largest number that a leaf of `dtype` can keep.

    An infinite second moment would stop its parameter for ever: the square of a finite gradient
    may be beyond the range of the dtype.
    """
    return (beta * v + (1 - beta) * square).clamp(max=torch.finfo(real_dtype(dtype)).max)
