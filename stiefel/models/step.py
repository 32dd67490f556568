"""One step of a recurrence at a time, for networks whose next input depends on their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, ShapeError
from stiefel.geometry import product
from stiefel.models.activations import activate, drop_units
from stiefel.models.rollout import as_factors
from stiefel.numerics import compute_dtype, real_dtype
from stiefel.operators import Operator

if TYPE_CHECKING:
    from stiefel.models.base import RecurrentNetwork

__all__ = ["LayerStep", "Parts", "Stepper", "elman_step", "exact"]

#: The parts of the state of one layer, each `(B, H)`, or None for zero; the first is the output.
Parts = tuple[Tensor | None, ...]
#: One step of one layer: the input `(B, features)` and the parts before it to those after it.
LayerStep = Callable[[Tensor, Parts], tuple[Tensor, ...]]


def exact(A: Tensor, B: Tensor) -> Tensor:
    """The product A B in full precision, whatever the settings; plain where they ask for it.

    `stiefel.geometry.product` costs several times a small product of torch.

    Args:
        A: `(n, k)`.
        B: `(k, p)`.

    Returns:
        The product `(n, p)`.
    """
    if torch.is_autocast_enabled(A.device.type):
        return product(A, B)
    if A.dtype in (torch.float64, torch.complex128) or torch.compiler.is_compiling():
        return A @ B
    try:
        full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's newer settings are in use, one for each backend
        full = False
    return A @ B if full else product(A, B)


def elman_step(
    kernel: Tensor,
    recurrent: Tensor | Operator,
    *,
    nonlinearity: str,
    bias: Tensor | None = None,
    beta: Tensor | None = None,
) -> LayerStep:
    """The step h_t = sigma(h_{t-1} Q^T + x_t V^T + b) of `rollout`, under plain autograd.

    Computed in full precision and float32 or float64, as the rollout is; a compact WY operator
    with few columns stays two thin products.

    Args:
        kernel: V `(H, K)`.
        recurrent: Q `(H, H)`, a tensor or an operator.
        nonlinearity: One of `NONLINEARITIES`.
        bias: b `(H,)` or None.
        beta: Bias of modReLU `(H,)` or None.

    Returns:
        The step, which holds these tensors.
    """
    working = compute_dtype(kernel.dtype)
    left, right, sign = as_factors(recurrent, working)
    V = kernel.to(working)
    bias = None if bias is None else bias.to(working)
    beta = None if beta is None else beta.to(real_dtype(working))

    def turned(h: Tensor) -> Tensor:
        if right is None:
            return exact(h, left.mT)
        kept = h if sign is None else h * sign
        return kept - exact(exact(h, left.conj()), right.mT)

    def step(x: Tensor, parts: Parts) -> tuple[Tensor, ...]:
        (h,) = parts
        z = exact(x.to(working), V.mT)
        z = z if bias is None else z + bias
        z = z if h is None else z + turned(h.to(working))
        return (activate(nonlinearity, z, beta).to(kernel.dtype),)

    return step


class Stepper:
    """A `RecurrentNetwork` as a function of one step, made by `RecurrentNetwork.stepper`.

    All weights and operators are read when it is made, and only then: it is for one sequence, or
    one pass of a decoder, and a step of an optimizer makes it stale. Steps are differentiable, to
    any order, and equal `RecurrentNetwork.forward` over the sequence to rounding. What they keep
    for the backward pass is what plain autograd keeps, a few tensors `(B, H)` a step and layer.

    Args:
        rnn: The network; it runs forwards only.
        watch: Called with the number of the layer and the parts of its state after each step;
            gives the parts to go on with.
    """

    def __init__(
        self,
        rnn: RecurrentNetwork,
        watch: Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None,
    ) -> None:
        if rnn.bidirectional:
            raise ConfigurationError(
                "expected a network that runs forwards only, got bidirectional=True: its second "
                "direction starts at the last step, which single steps do not know. Call the "
                "network on the whole sequence"
            )
        self.rnn, self.watch = rnn, watch
        self.steps = [rnn.layer_step(index) for index in range(rnn.num_layers)]

    def __call__(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Runs one step of all layers.

        Args:
            x: The input of this step, `(B, K)`.
            state: The state before it, `(layers, B, H)`, a pair where the state is one; None for
                the first states that the network learned, or zero.

        Returns:
            The output of the last layer `(B, H)` and the state after the step, to be passed on.

        Raises:
            ShapeError: If a shape is wrong.
            DtypeError: If dtype or device is not that of the parameters.
        """
        rnn = self.rnn
        if x.ndim != 2 or x.shape[1] != rnn.input_size:
            raise ShapeError(
                f"expected the input of one step, of shape (B, K) with K = {rnn.input_size}, got "
                f"{tuple(x.shape)}: a whole sequence goes to the network itself"
            )
        x = rnn._to_dtype(x, "input")
        given = rnn._first_states(state, len(x), True)
        before = [[None] * len(self.steps) if h is None else h.unbind(0) for h in given]
        after: list[tuple[Tensor, ...]] = []
        for index, step in enumerate(self.steps):
            parts = step(x, tuple(part[index] for part in before))
            after.append(parts if self.watch is None else self.watch(index, parts))
            x = after[-1][0]
            if rnn.dropout and index < len(self.steps) - 1:
                x = drop_units(x, rnn.dropout, rnn.training)
        return x, rnn._state([torch.stack(part) for part in zip(*after, strict=True)])
