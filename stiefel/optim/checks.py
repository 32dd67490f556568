"""What is checked before a step changes anything, and how the errors read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, LostManifoldError, NonFiniteError
from stiefel.manifolds import Manifold, Stiefel
from stiefel.numerics import compute_dtype

__all__ = [
    "all_finite",
    "check_kind",
    "check_stiefel",
    "lost_manifold_error",
    "non_finite_error",
    "off_manifold",
    "place_in_groups",
]

_SHOWN = 5
#: Matrices of so many columns are checked without the half of X^H X that symmetry makes twice.
_QUARTERS_FROM = 512


def _entries(tensor: Tensor) -> Tensor:
    """The stored entries of a dense or sparse tensor."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is a NaN or an infinity; reads one flag from each device.

    A finite sum implies finite entries, so one sum a tensor settles the usual case. Only when
    some sum is not finite (it may have overflowed) are the entries looked at one by one.

    Args:
        tensors: Dense or sparse tensors.
    """
    kept = [_entries(tensor) for tensor in tensors]
    sums: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in kept:
        sums[tensor.device, tensor.dtype].append(tensor.sum())
    flags: dict[torch.device, list[Tensor]] = defaultdict(list)
    for (device, _), parts in sums.items():
        flags[device].append(torch.isfinite(torch.stack(parts)).all())
    if all(bool(torch.stack(some).all()) for some in flags.values()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in kept)


def place_in_groups(leaf: Tensor, groups: Iterable[Mapping[str, Any]]) -> str:
    """How errors call a parameter: its name or number, and the number of its group."""
    for number, group in enumerate(groups):
        for index, other in enumerate(group["params"]):
            if other is leaf:
                name = group["param_names"][index] if "param_names" in group else ""
                return f"parameter {name or index} of group {number}"
    return "a parameter"


def lost_manifold_error(what: str) -> LostManifoldError:
    """Builds the error for `what`, a point that has become an ordinary parameter."""
    return LostManifoldError(
        f"{what} was on a manifold when it was given to the optimizer and is an ordinary "
        "parameter now: .to('meta'), load_state_dict(assign=True) or one of torch's conversion "
        "flags replaced it. Weights made by stiefel.orthogonal survive all of these; for a bare "
        "ManifoldParameter, wrap the new value in one and make the optimizer again"
    )


def check_kind(leaf: Tensor, before: torch.dtype, describe: Callable[[Tensor], str]) -> None:
    """Raises if a parameter with a state has become complex, or real, since its last step.

    Args:
        leaf: The parameter.
        before: Its dtype at that step.
        describe: How to call it.

    Raises:
        ConfigurationError: If so.
    """
    if leaf.dtype.is_complex != before.is_complex:
        kind = "complex" if leaf.dtype.is_complex else "real"
        raise ConfigurationError(
            f"expected a parameter of dtype {before}, as at its last step, got {describe(leaf)} of "
            f"dtype {leaf.dtype}: the optimizer's averages of its gradients cannot be made {kind}. "
            "Nothing was changed. Make the optimizer again"
        )


def check_stiefel(
    optimizer: str, leaf: Tensor, manifold: Manifold, describe: Callable[[Tensor], str]
) -> Stiefel:
    """The manifold of a leaf, for optimizers that know `stiefel.Stiefel` only.

    Args:
        optimizer: Name of the optimizer.
        leaf: The parameter.
        manifold: Its manifold.
        describe: How to call it.

    Raises:
        ConfigurationError: If it is another one.
    """
    if not isinstance(manifold, Stiefel):
        raise ConfigurationError(
            f"{optimizer} moves parameters on stiefel.Stiefel, got {describe(leaf)} on {manifold}"
        )
    return manifold


def non_finite_error(leaves: Sequence[Tensor], describe: Callable[[Tensor], str]) -> NonFiniteError:
    """Builds the error that says which gradients are not finite.

    Args:
        leaves: Parameters with gradients, some of them not finite.
        describe: How to call a parameter, such as ``"parameter 2 of group 0"``.

    Returns:
        The error; it names at most five parameters.
    """
    lines = []
    for leaf in leaves:
        assert leaf.grad is not None
        grad = _entries(leaf.grad)
        finite = torch.isfinite(grad)
        if bool(finite.all()):
            continue
        nan, bad = int(torch.isnan(grad).sum()), int((~finite).sum())
        lines.append(
            f"{describe(leaf)}, shape {tuple(leaf.shape)}, {leaf.dtype}: {bad} of {grad.numel()} "
            f"entries ({nan} NaN, {bad - nan} infinite)"
        )
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return NonFiniteError(
        f"expected finite gradients, got non-finite ones in {len(lines)} of {len(leaves)} "
        f"parameters: {'; '.join(lines[:_SHOWN])}{more}. No parameter and no optimizer state was "
        "changed. Lower the learning rate, clip the gradients, or look for the operation with "
        "torch.autograd.detect_anomaly(); skip_nonfinite=True leaves such parameters where they "
        "are and steps the others"
    )


def off_manifold(manifold: Manifold, points: Tensor, slack: float = 1) -> Tensor | None:
    """Which points are off a `stiefel.Stiefel`, by the product X^H X in their own precision.

    Its rounding is taken off the bound, so that the others are within the tolerance to whoever
    measures them in float64.

    Args:
        manifold: The manifold.
        points: Points, shape ``(..., n, p)``.
        slack: How many times its tolerance is still on it.

    Returns:
        A mask over the leading dimensions; None where that is not known, off a
        `stiefel.Stiefel` and without points.
    """
    if not isinstance(manifold, Stiefel) or points.numel() == 0:
        return None
    bound = slack * manifold.tolerance_for(points.dtype, *points.shape[-2:])
    rounding = 4 * torch.finfo(compute_dtype(points.dtype)).eps
    return ~(_residual(points) <= bound - rounding)


def _residual(X: Tensor) -> Tensor:
    """The largest entry of ``|X^H X - I|``, shape ``(...)``; of large matrices by quarters."""
    p = X.shape[-1]
    if p < _QUARTERS_FROM:
        gram = X.mH @ X
        gram.diagonal(dim1=-2, dim2=-1).sub_(1)
        return _largest(gram)
    left, right = X[..., : p // 2], X[..., p // 2 :]
    outer = torch.maximum(_residual(left), _residual(right))
    return torch.maximum(outer, _largest(left.mH @ right))


def _largest(A: Tensor) -> Tensor:
    return (A.abs() if A.is_complex() else A.abs_()).amax((-2, -1))
