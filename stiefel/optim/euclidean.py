"""Ordinary parameters: torch's own arithmetic, and a guard that leaves some of them untouched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from stiefel.errors import ConfigurationError
from stiefel.numerics import real_dtype

__all__ = ["EUCLIDEAN_STEPS", "fit_state", "untouched_where_non_finite"]

State = MutableMapping[Tensor, dict[str, Any]]


def _gradients(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _sgd_step(group: dict[str, Any], leaves: list[Tensor], state: State) -> None:
    """The step of `torch.optim.SGD`, by torch's own function.

    A group of an optimizer without momentum of its own has none, unless it is given in the group.
    """
    momentum = group.get("momentum", 0)
    buffers: list[Tensor | None] = [
        state[leaf].get("momentum_buffer") if momentum != 0 else None for leaf in leaves
    ]
    sgd(
        leaves,
        _gradients(leaves),
        buffers,
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=group["lr"],
        dampening=group.get("dampening", 0),
        nesterov=group.get("nesterov", False),
        maximize=group["maximize"],
    )
    if momentum != 0:
        for leaf, buffer in zip(leaves, buffers, strict=True):
            state[leaf]["momentum_buffer"] = buffer


def _adam_step(group: dict[str, Any], leaves: list[Tensor], state: State) -> None:
    """The step of `torch.optim.Adam`, by torch's own function."""
    amsgrad = group["amsgrad"]
    for leaf in leaves:
        if not state[leaf]:
            double = torch.get_default_dtype() == torch.float64
            dtype = torch.float64 if double else torch.float32
            state[leaf]["step"] = torch.tensor(0.0, dtype=dtype, device="cpu")
            state[leaf]["exp_avg"] = torch.zeros_like(leaf)
            state[leaf]["exp_avg_sq"] = torch.zeros_like(leaf)
            if amsgrad:
                state[leaf]["max_exp_avg_sq"] = torch.zeros_like(leaf)
    beta1, beta2 = group["betas"]
    adam(
        leaves,
        _gradients(leaves),
        [state[leaf]["exp_avg"] for leaf in leaves],
        [state[leaf]["exp_avg_sq"] for leaf in leaves],
        [state[leaf]["max_exp_avg_sq"] for leaf in leaves] if amsgrad else [],
        [state[leaf]["step"] for leaf in leaves],
        has_complex=any(leaf.is_complex() for leaf in leaves),
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


#: What ``euclidean=`` may be. Each takes a parameter group, leaves with gradients, and the state.
EUCLIDEAN_STEPS: dict[str, Callable[[dict[str, Any], list[Tensor], State], None]] = {
    "sgd": _sgd_step,
    "adam": _adam_step,
}


def fit_state(
    leaf: Tensor,
    state: MutableMapping[str, Any],
    group: Mapping[str, Any],
    *,
    counted_by_torch: bool = True,
) -> None:
    """Gives the state of a parameter its dtype and device, by torch's rule for loading.

    For a parameter whose precision or device has changed since its last step: most of torch's
    optimizers fail in the middle of a step then. The states of a complex parameter are complex
    or real, and stay so; those of a real one are real.

    Args:
        leaf: The parameter as it is now.
        state: Its state; tensors in it are replaced.
        group: Its parameter group.
        counted_by_torch: Whether the count ``step`` keeps its dtype, and its device too unless the
            group says ``capturable`` or ``fused``. If not it is a number like any other.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if name == "step" and counted_by_torch:
            if group.get("capturable", False) or group.get("fused", False):
                state[name] = value.to(leaf.device)
        elif value.is_floating_point() or value.is_complex():
            dtype = leaf.dtype if value.is_complex() else real_dtype(leaf.dtype)
            state[name] = value.to(leaf.device, dtype)
        else:
            state[name] = value.to(leaf.device)


@contextlib.contextmanager
def untouched_where_non_finite(leaves: Sequence[Tensor], state: State) -> Iterator[None]:
    """Lets any optimizer step, then undoes it for leaves whose gradient is not finite.

    Nothing is read by the host: old and new values are chosen by `torch.where`. It costs a copy
    of the leaves and of their states. A state made by this very step is set to zero; a counter
    that lives on another device than its parameter counts the step all the same.

    Args:
        leaves: Parameters, all with gradients.
        state: The optimizer's state.

    Yields:
        Nothing: step the optimizer inside the ``with`` block.

    Raises:
        ConfigurationError: If a gradient is sparse.
    """
    saved = []
    for leaf in leaves:
        grad = leaf.grad
        if grad is None or grad.layout != torch.strided:
            raise ConfigurationError(
                f"skip_nonfinite=True needs dense gradients, got a sparse one for a parameter of "
                f"shape {tuple(leaf.shape)}: use sparse=False in the layer, or skip_nonfinite=False"
            )
        good = torch.isfinite(grad).all()
        before = {k: v.clone() for k, v in state.get(leaf, {}).items() if isinstance(v, Tensor)}
        saved.append((leaf, grad, good, leaf.detach().clone(), before))
        leaf.grad = torch.where(good, grad, torch.zeros_like(grad))
    try:
        yield
    finally:
        with torch.no_grad():
            for leaf, grad, good, value, before in saved:
                leaf.grad = grad
                leaf.copy_(torch.where(good, leaf, value))
                for name, new in state.get(leaf, {}).items():
                    if isinstance(new, Tensor) and new.device == good.device:
                        old = before.get(name)
                        new.copy_(
                            torch.where(good, new, torch.zeros_like(new) if old is None else old)
                        )
