"""What the adaptive optimizers share: decay rates of moments, and the correction of their bias."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.numerics import real_dtype

__all__ = ["bias_correction", "check_betas", "saturated_average"]


def check_betas(betas: Any) -> None:
    """Raises `ConfigurationError` unless `betas` is a pair of numbers in [0, 1)."""
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        first = second = math.nan
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ConfigurationError(f"expected betas, two numbers in [0, 1), got {betas!r}")


def bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """``1 - beta^step``, without the cancellation that float32 has for a beta close to 1."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else 1.0


def saturated_average(v: Tensor, square: Tensor, beta: float, dtype: torch.dtype) -> Tensor:
    """``beta v + (1 - beta) square``, at most the largest number that a leaf of `dtype` can keep.

    An infinite second moment would stop its parameter for ever: the square of a finite gradient
    may be beyond the range of the dtype.
    """
    return (beta * v + (1 - beta) * square).clamp(max=torch.finfo(real_dtype(dtype)).max)
