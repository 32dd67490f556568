"""How many numbers a weight has, by formula."""

from __future__ import annotations

from torch import Tensor, nn

from stiefel.geometry import manifold_dimension
from stiefel.parameter import Constraint, constraints

__all__ = ["linear_parameters", "weight_parameters"]


def weight_parameters(module: nn.Module, name: str = "weight", *, effective: bool = False) -> int:
    """Real numbers that a weight is trained by; a complex number is two.

    Args:
        module: The module that holds the weight, constrained or plain.
        name: Its name.
        effective: Whether a constrained weight counts by the dimension of its manifold instead of
            by the coordinates that its chart declares. A chart with fewer coordinates than that
            (few reflections or rotations) counts by those.

    Returns:
        The count.
    """
    for constraint in constraints(module):
        if constraint.module is not module or constraint.name != name:
            continue
        n, p = constraint.point.shape[-2:]
        matrices = constraint.point.numel() // (n * p)
        count = _numbers(_declared(constraint))
        if not effective:
            return count
        return min(count, matrices * manifold_dimension(n, p, constraint.point.is_complex()))
    return _numbers([getattr(module, name)])


def linear_parameters(inputs: int, outputs: int, bias: bool = True) -> int:
    """Numbers of a linear map: `inputs` `outputs`, and `outputs` of its bias."""
    return inputs * outputs + outputs * bias


def _declared(constraint: Constraint) -> list[Tensor]:
    """Empty originals of the size that the chart says, or the point itself."""
    if constraint.storage is None:
        return constraint.leaves
    empty = constraint.storage.chart.empty_originals(constraint.point.dtype, "meta")
    return [empty] if isinstance(empty, Tensor) else list(empty)


def _numbers(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors)
