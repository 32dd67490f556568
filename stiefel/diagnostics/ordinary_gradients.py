"""The gradient of the ordinary parameters, those of no constrained weight, over a training step."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from stiefel.numerics import double_dtype
from stiefel.parameter import constraints

__all__ = ["OrdinaryGradients"]


class OrdinaryGradients:
    """Adds up what backward passes inside a block send to the ordinary parameters of a model.

    What was in ``.grad`` before, and what is done to it afterwards (clipping, averages over
    processes), has no part in it. On leaving the block the hooks are gone.

    A parameter of a lazy layer that has no shape yet when the block begins takes no hook.

    Args:
        model: Any module.
    """

    def __init__(self, model: nn.Module) -> None:
        constrained = {id(leaf) for each in constraints(model) for leaf in each.leaves}
        trained = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in constrained
        ]
        self._parameters = [p for p in trained if not isinstance(p, UninitializedParameter)]
        self._unseen = len(self._parameters) < len(trained)
        self._sums: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for place, parameter in enumerate(self._parameters):

            def add(gradient: Tensor, place: int = place) -> None:
                found = gradient.detach()
                before = self._sums.get(place)
                self._sums[place] = found.clone() if before is None else _sum(before, found)

            self._handles.append(parameter.register_hook(add))
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def norm(self, scale: float = 1.0) -> float | None:
        """The Frobenius norm over all of them, in float64.

        Args:
            scale: What the loss was multiplied by.

        Returns:
            The norm; None where no gradient has reached any, NaN where some could not be seen.
        """
        if self._unseen:
            return math.nan
        if not self._sums:
            return None
        return math.hypot(*map(_norm, self._sums.values())) / scale


def _sum(before: Tensor, found: Tensor) -> Tensor:
    """Their sum; torch adds a sparse tensor to a dense one, not a dense one to a sparse."""
    return found + before if before.is_sparse else before + found


@torch.no_grad()
def _norm(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values.to(double_dtype(values.dtype))))
