"""Cases that build a weight: read ``module.weight`` and, if asked, go backward through it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, IncorrectError, require
from stiefel.geometry import orthonormality_residual
from stiefel.numerics import tolerance

__all__ = ["perturb", "perturb_below_diagonal", "weight_case"]

#: Peers are asked for an orthonormal weight to three digits; how far they are off is in the table.
PEER_BOUND = 1e-3


def perturb(leaf: Tensor) -> Tensor:
    """Returns noise of one hundredth of a leaf's size, of its shape."""
    return torch.randn_like(leaf) * (leaf.std() * 1e-2 + 1e-6)


def perturb_below_diagonal(leaf: Tensor) -> Tensor:
    """Returns such noise for torch's Householder map, which keeps its signs on the diagonal."""
    return perturb(leaf).tril(-1)


def _has_gradient(leaf: Tensor) -> bool:
    """Whether a leaf has a gradient that is finite and not zero."""
    return leaf.grad is not None and 0 < leaf.grad.norm().item() < float("inf")


def weight_case(
    name: str,
    module: nn.Module,
    *,
    ours: bool = False,
    backward: bool = True,
    noise: Callable[[Tensor], Tensor] = perturb,
    oracle: Callable[[nn.Module], None] | None = None,
) -> Case:
    """Makes the case that builds ``module.weight`` once.

    Args:
        name: Of the case.
        module: Its `weight` ``(n, p)`` is made by a parametrization.
        ours: Whether the residual must lie within `stiefel.tolerance`; a peer's may be 1e-3.
        backward: Whether to go backward too, from a fixed random cotangent.
        noise: Perturbation of a leaf before each repeat.
        oracle: Further check of the module.

    Returns:
        The case.
    """
    leaves = list(module.parameters())

    def weight() -> Tensor:
        built = module.weight
        assert isinstance(built, Tensor)
        return built

    start = weight()
    *_, n, p = start.shape
    cotangent = torch.randn_like(start.detach())

    def refresh() -> None:
        with torch.no_grad():
            for leaf in leaves:
                leaf.grad = None
                leaf.add_(noise(leaf))

    def run() -> None:
        built = weight()
        if backward:
            built.backward(cotangent)

    def check() -> float:
        run()
        if backward and not all(_has_gradient(leaf) for leaf in leaves):
            raise IncorrectError("expected a finite gradient other than zero for every leaf")
        built = weight().detach()
        residual = float(orthonormality_residual(built).max())
        bound = tolerance(built.dtype, n, p) if ours else PEER_BOUND
        require("orthonormality residual", residual, bound)
        if oracle is not None:
            oracle(module)
        return residual

    return Case(name, run, refresh, check)
