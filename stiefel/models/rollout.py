"""The recurrence h_t = sigma(h_{t-1} Q^T + x_t V^T + b) over a whole sequence, as one function.

The kernels are custom operators without autograd, so that `torch.compile`, `torch.export`,
`torch.func` and `vmap` see one opaque node however long the sequence is; the derivative is an
autograd function around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    ShapeError,
    unknown,
)
from stiefel.geometry.kernel import apply_reverse, first_derivative, kernel_op
from stiefel.models._twin import Factors, from_twin, real_twin
from stiefel.models._walk import Problem, walk_backward, walk_forward
from stiefel.models.activations import MODULUS, NONLINEARITIES, check_complex, empty_kept
from stiefel.models.masks import checked_lengths
from stiefel.numerics import compute_dtype, real_dtype
from stiefel.operators import CompactWY, Operator

__all__ = ["as_factors", "as_lengths", "rollout"]


_PROBLEM = (
    "Tensor x, Tensor kernel, Tensor? bias, Tensor left, Tensor? right, Tensor? sign, "
    "Tensor? beta, Tensor? h0, Tensor? lengths, str nonlinearity, bool reverse"
)
#: Places of the first 9 arguments, all tensors or None, that have a gradient.
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 6, 7)


def _forward_fake(x: Tensor, kernel: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], kernel.shape[0])
    states = x.new_empty(shape)
    return states, x.new_empty(shape[1:]), empty_kept(rest[-2], states)


@kernel_op("rollout_forward", f"({_PROBLEM}) -> (Tensor, Tensor, Tensor)", fake=_forward_fake)
def _forward_op(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The states, the last state, and what the nonlinearity keeps aside (`empty_kept`)."""
    return walk_forward(Problem(x.contiguous(), *rest))


def _backward_fake(
    grad_states: Any, grad_last: Any, states: Any, kept: Any, needs: list[bool], *problem: Any
) -> list[Tensor]:
    def like(at: int, need: bool) -> Tensor:
        tensor = problem[at]
        return states.new_empty(tensor.shape if need and tensor is not None else (0,))

    grads = [like(at, need) for at, need in zip(_DIFFERENTIABLE, needs, strict=True)]
    grads[-1] = states.new_empty(states.shape[1:])
    return grads


@kernel_op(
    "rollout_backward",
    "(Tensor? grad_states, Tensor? grad_last, Tensor states, Tensor kept, bool[] needs, "
    f"{_PROBLEM}) -> Tensor[]",
    fake=_backward_fake,
)
def _backward_op(
    grad_states: Tensor | None,
    grad_last: Tensor | None,
    states: Tensor,
    kept: Tensor,
    needs: list[bool],
    x: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Gradients of x, V, b, Q or (U, Y), beta and h0; empty where not needed."""
    problem = Problem(x.contiguous(), *rest)
    return walk_backward(
        problem, states.contiguous(), kept.contiguous(), grad_states, grad_last, needs
    )


def _loop_vmap(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[int | None], args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call for each element of the mapped dimension, the outputs stacked along dim 0."""
    results = [
        function.apply(
            *(
                arg.select(dim, i) if isinstance(dim, int) else arg
                for arg, dim in zip(args, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


#: What to do for the derivatives that the rollout does not have.
_STEP = (
    "step the recurrence under plain autograd, h = activate(nonlinearity, h @ weight.mT + "
    "x[t] @ kernel.mT), with a Riemannian weight, for instance on a shorter sequence"
)


class _Rollout(torch.autograd.Function):
    """states, last, kept = rollout(x, V, b, Q or (U, Y, sign), beta, h0, lengths).

    Two differentiable results, a mask of the needed gradients, and a map over the batch that is
    not the leading dimension: more than `stiefel.geometry.kernel.differentiable` joins.
    """

    @staticmethod
    def forward(
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        left: Tensor,
        right: Tensor | None,
        sign: Tensor | None,
        beta: Tensor | None,
        h0: Tensor | None,
        lengths: Tensor | None,
        nonlinearity: str,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # all named: without a gradient, Dynamo counts the parameters to see if one is a context
        return _forward_op(
            x, kernel, bias, left, right, sign, beta, h0, lengths, nonlinearity, reverse
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.nonlinearity, ctx.reverse = inputs
        states, _, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, kept, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * 11
        if grads[0] is None and grads[1] is None:
            return tuple(found)
        states, kept, *tensors = ctx.saved_tensors
        needs = [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]
        needs[3] = needs[4] = needs[3] or needs[4]  # U and Y come together
        args = (*grads[:2], states, kept, needs, *tensors, ctx.nonlinearity, ctx.reverse)
        # compiled graphs refuse a double backward themselves
        compiling = torch.compiler.is_compiling()
        results = _backward_op(*args) if compiling else _applied(_RolloutBackward, *args)
        for at, result in zip(_DIFFERENTIABLE, results, strict=True):
            if ctx.needs_input_grad[at]:
                found[at] = result
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        if all(dim is None for dim in (*in_dims[1:7], in_dims[8])):
            return _batched(info.batch_size, in_dims, args)
        return _loop_vmap(_Rollout, info.batch_size, in_dims, args)


def _batched(size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    """The map over inputs and first states alone: their dimension joins the batch."""

    def join(tensor: Tensor | None, dim: int | None, at: int) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.unsqueeze(at) if dim is None else tensor.movedim(dim, at)
        tensor = tensor.expand(*tensor.shape[:at], size, *tensor.shape[at + 1 :])
        return tensor.flatten(at, at + 1)

    x, *rest = args
    rest[6] = join(rest[6], in_dims[7], 0)
    if rest[7] is not None:
        rest[7] = rest[7].repeat(size)
    states, last, kept = _Rollout.apply(join(x, in_dims[0], 1), *rest)
    states, last = states.unflatten(1, (size, -1)), last.unflatten(0, (size, -1))
    if kept.dim() == 1:
        return (states, last, kept), (1, 0, None)
    return (states, last, kept.unflatten(1, (size, -1))), (1, 0, 1)


#: The gradients of `_Rollout`, of which no further derivative is written.
_RolloutBackward = first_derivative(
    _backward_op,
    "the rollout of a recurrence has a first derivative only: a second one was asked, by "
    f"create_graph=True, a gradient penalty or a nested torch.func.grad. Instead, {_STEP}",
    _loop_vmap,
)


def _applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    return apply_reverse(function, *args, name="the rollout of a recurrence", remedy=_STEP)


def _check(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor | Operator,
    vectors: dict[str, Tensor | None],
    nonlinearity: str,
) -> None:
    """Checks the nonlinearity, and shapes, dtypes and devices against the input and its kernel."""
    if nonlinearity not in NONLINEARITIES:
        raise unknown("nonlinearity", nonlinearity, NONLINEARITIES)
    if nonlinearity != "modrelu" and vectors["beta"] is not None:
        raise ConfigurationError(f"beta is the bias of modrelu, {nonlinearity} takes none")
    check_complex(nonlinearity, kernel.dtype)
    hidden, features = kernel.shape
    if x.ndim != 3 or x.shape[2] != features:
        raise ShapeError(
            f"expected an input of shape (T, B, {features}), got {tuple(x.shape)}: sequences come "
            "first, then the batch, then the features that the input kernel takes"
        )
    if x.shape[0] == 0:
        raise ShapeError(
            f"expected a sequence of at least one step, got an input of shape {tuple(x.shape)} "
            "with T = 0: skip empty sequences, the state after them is h0"
        )
    if tuple(recurrent.shape) != (hidden, hidden):
        raise ShapeError(
            f"expected a recurrent weight of shape {(hidden, hidden)}, for the input kernel has "
            f"{hidden} rows, got {tuple(recurrent.shape)}"
        )
    batch = x.shape[1]
    wanted = {"bias": (hidden,), "beta": (hidden,), "h0": (batch, hidden)}
    for name, tensor in vectors.items():
        if tensor is not None and tensor.shape != wanted[name]:
            raise ShapeError(f"expected {name} of shape {wanted[name]}, got {tuple(tensor.shape)}")
    if not (x.dtype.is_floating_point or (x.is_complex() and kernel.is_complex())):
        raise DtypeError(f"expected a real floating point input, got {x.dtype}: use x.float()")
    dtypes = {"kernel": x.dtype, "bias": x.dtype, "beta": x.dtype, "h0": x.dtype}
    if kernel.is_complex():
        of_complex = kernel.dtype
        real = real_dtype(of_complex)
        dtypes = dict.fromkeys(dtypes, of_complex) | {"beta": real}
        if x.dtype not in (of_complex, real):
            raise DtypeError(
                f"expected an input of {real} or {of_complex} for weights of {of_complex}, got "
                f"{x.dtype}"
            )
    for name, tensor in {"kernel": kernel, **vectors}.items():
        if tensor is not None and (tensor.dtype != dtypes[name] or tensor.device != x.device):
            raise DtypeError(
                f"expected an input and weights of one dtype on one device, got an input of "
                f"{x.dtype} on {x.device} and {name} of {tensor.dtype} on {tensor.device}: "
                "convert with .to(dtype=..., device=...)"
            )
    if recurrent.dtype not in (kernel.dtype, compute_dtype(kernel.dtype)):
        raise DtypeError(
            f"expected a recurrent weight of {kernel.dtype}, as the input kernel, got "
            f"{recurrent.dtype}: convert one of them with .to(dtype=...)"
        )


def as_lengths(lengths: Tensor | Sequence[int], x: Tensor) -> Tensor:
    """Lengths as an int64 tensor `(B,)` on the device of x; values are checked on the CPU."""
    return checked_lengths(lengths, *x.shape[:2]).to(x.device)


def as_factors(recurrent: Tensor | Operator, dtype: torch.dtype) -> Factors:
    """The matrix, or (U, F Y, diagonal of F) of a compact form that has few columns."""
    if isinstance(recurrent, Tensor):
        return recurrent.to(dtype), None, None
    if not isinstance(recurrent, CompactWY) or 2 * recurrent.U.shape[-1] >= len(recurrent.U):
        return recurrent.to_dense().to(dtype), None, None
    U, Y, flip = recurrent.U.to(dtype), recurrent.Y.to(dtype), recurrent.flip
    if flip is None:
        return U, Y, None
    sign = torch.cat([U.new_ones(len(U) - 1), flip.reshape(1).to(dtype)])
    return U, Y * sign.unsqueeze(-1), sign


def _reversal(lengths: Tensor, length: int) -> Tensor:
    """`(T, B, 1)`: the step that takes the place of step t when each sequence is turned round."""
    steps = torch.arange(length, device=lengths.device)[:, None]
    return torch.where(steps < lengths, lengths - 1 - steps, steps).unsqueeze(-1)


def rollout(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor | Operator,
    *,
    nonlinearity: str = "modrelu",
    bias: Tensor | None = None,
    beta: Tensor | None = None,
    h0: Tensor | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over a whole sequence: h_t = sigma(h_{t-1} Q^T + x_t V^T + b).

    With complex weights the states are complex, and sigma is modReLU on the modulus or the
    identity; it is computed as the real twin of twice the size (`stiefel.geometry.realify`).

    One differentiable function, walked in chunks of 8 to 32 steps that stay in cache. It keeps
    for its backward pass the hidden sequence, the signs of ``abs`` (a byte an entry) and the
    moduli of complex modReLU. All is computed in full precision: autocast and reduced matmul
    precision do not reach the recurrence, whose norms would drift; 16-bit tensors are lifted to
    float32 and the results cast back. A compact WY operator with fewer than H/2 columns is applied
    as two thin products a step and never formed; any other is formed once.

    Args:
        x: Inputs `(T, B, K)`, T >= 1; B may be 0. Real or complex where the weights are complex.
        kernel: V `(H, K)`.
        recurrent: Q `(H, H)`, a tensor or an operator.
        nonlinearity: ``"modrelu"``, ``"abs"``, ``"relu"``, ``"leaky_relu"`` (slope 0.1),
            ``"tanh"`` or ``"identity"``.
        bias: b `(H,)` or None.
        beta: Bias of modReLU `(H,)`, real; zero when None. Only modReLU takes one.
        h0: First state `(B, H)`; zero when None.
        lengths: Steps of each sequence `(B,)`, from 1 to T; all have T when None. What lies past
            the end of a sequence is never read.
        reverse: Whether to walk from the last step of each sequence to the first.

    Returns:
        The states `(T, B, H)`, zero past the end of a sequence, and the state `(B, H)` after each
        sequence's own last step of the walk.

    Raises:
        ShapeError: If shapes disagree, T = 0, or a length is out of range.
        DtypeError: If dtypes or devices disagree.
        UnknownNameError: If `nonlinearity` is unknown.
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.models import rollout
        >>> rollout(torch.randn(7, 2, 3), torch.randn(4, 3), torch.eye(4))[0].shape
        torch.Size([7, 2, 4])
    """
    _check(x, kernel, recurrent, {"bias": bias, "beta": beta, "h0": h0}, nonlinearity)
    if nonlinearity == "modrelu" and beta is None:
        nonlinearity = "identity"  # what modReLU with a zero bias is
    given, working = kernel.dtype, compute_dtype(kernel.dtype)
    factors = as_factors(recurrent, working)
    bias, h0 = (None if each is None else each.to(working) for each in (bias, h0))
    kernel = kernel.to(working)
    x = x.to(working if x.is_complex() else real_dtype(working))
    beta = None if beta is None else beta.to(real_dtype(working))
    if given.is_complex:
        x, kernel, bias, h0, factors = real_twin(x, kernel, bias, h0, factors)
        nonlinearity = MODULUS if nonlinearity == "modrelu" else nonlinearity
    states, last = _walked(x, kernel, factors, bias, beta, h0, lengths, nonlinearity, reverse)
    if given.is_complex:
        return from_twin(states).to(given), from_twin(last).to(given)
    return states.to(given), last.to(given)


def _walked(
    x: Tensor,
    kernel: Tensor,
    factors: Factors,
    bias: Tensor | None,
    beta: Tensor | None,
    h0: Tensor | None,
    lengths: Tensor | Sequence[int] | None,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The walk over real tensors of one dtype, each sequence within its own length."""
    turn = None
    if lengths is not None:
        lengths = as_lengths(lengths, x)
        if reverse:  # turn each sequence round within its own length
            turn, reverse = _reversal(lengths, len(x)), False
            x = x.gather(0, turn.expand_as(x))
    states, last, _ = _applied(
        _Rollout, x, kernel, bias, *factors, beta, h0, lengths, nonlinearity, reverse
    )
    if turn is not None:
        states = states.gather(0, turn.expand_as(states))
    return states, last
