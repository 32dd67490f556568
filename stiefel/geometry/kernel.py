"""Hand-written first derivatives that survive everything torch does to a function.

A kernel is a pair of `torch.library.custom_op` without autograd (forward and backward, each with
a fake implementation), called inside an `torch.autograd.Function` with ``setup_context`` and a
``vmap`` rule; its backward calls a second Function whose own backward raises. Kernels built this
way pass gradcheck, `torch.func.grad`, `torch.vmap`, `torch.compile` with ``fullgraph=True`` and
`torch.export`, and a second derivative is a clear error, as is one in forward mode
(`apply_reverse`). Two decorators and one call make one:

    @kernel_op("my_map", "(Tensor x) -> (Tensor, Tensor)", fake=...)
    def _forward(x): ...                       # returns the result, then what backward needs

    @kernel_op("my_map_backward", "(Tensor grad, Tensor saved, Tensor x) -> Tensor[]", fake=...)
    def _backward(grad, saved, x): ...         # gradients of the first inputs, in order

    my_map = differentiable(_forward, _backward, name="my_map")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import DoubleBackwardError, ForwardModeError
from stiefel.numerics import full_precision

__all__ = ["apply_reverse", "differentiable", "first_derivative", "kernel_op"]


def _refusal_of_torch() -> str:
    """What torch says where an autograd function has no derivative in forward mode."""
    try:
        torch.autograd.Function.jvp(None)
    except NotImplementedError as error:
        return str(error)
    return ""


_NO_FORWARD_MODE = _refusal_of_torch()


def apply_reverse(
    function: type[torch.autograd.Function],
    *args: Any,
    name: str,
    remedy: str = "use a Riemannian weight (via='riemannian'), whose point is itself the leaf",
) -> Any:
    """Applies an autograd function that has a derivative in reverse mode only.

    A `jvp` that raises would say it too, but `torch.compile` takes no function that has one.

    Args:
        function: The function.
        *args: Its arguments.
        name: How the error calls it.
        remedy: What to do for forward mode.

    Returns:
        What ``function.apply(*args)`` returns.

    Raises:
        ForwardModeError: In forward mode.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)
    try:
        return function.apply(*args)
    except NotImplementedError as error:
        if str(error) != _NO_FORWARD_MODE:
            raise
        raise ForwardModeError(
            f"{name}: expected a derivative in reverse mode, the only one that it has, got forward "
            "mode (torch.func.jvp, jacfwd or hessian, or torch.autograd.forward_ad). Take vjp, "
            f"grad or jacrev of torch.func; where it has to be forward mode, {remedy}"
        ) from error


def kernel_op(
    name: str, schema: str, *, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function on tensors as the operator ``stiefel::name``, without autograd.

    The body runs in full precision: autocast off and float32 products in float32, whatever the
    caller's settings, compiled or not. It returns a tuple, or a list where the schema says
    ``Tensor[]``, of new tensors (no inputs, no views of them), which are made contiguous as the
    fake implementation promises.

    The body must not do elementwise arithmetic on a lazily conjugated tensor (``A.mH``,
    ``A.conj()``): called from a compiled graph, torch ignores the conjugation there. Products
    (``A.mH @ B``) are fine; elsewhere use ``A.mH.resolve_conj()`` or ``A.conj_physical()``.

    Args:
        name: Name of the operator in the namespace ``stiefel``.
        schema: Its schema, such as ``"(Tensor x, Tensor? y) -> (Tensor, Tensor)"``.
        fake: The same function on shapes alone: returns empty tensors like the results.

    Returns:
        A decorator that returns the registered operator.
    """

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            resolved = [
                a.resolve_conj().resolve_neg() if isinstance(a, Tensor) else a for a in args
            ]
            with full_precision():
                results = body(*resolved)
            contiguous = [result.resolve_conj().contiguous() for result in results]
            return contiguous if isinstance(results, list) else tuple(contiguous)

        op = torch.library.custom_op(f"stiefel::{name}", run, mutates_args=(), schema=schema)
        op.register_fake(fake)
        return op._opoverload  # the bare operator: nothing for the tracers to look into

    return register


def _leading_vmap(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call, the mapped dimension of every tensor in front, where batches lead anyway."""
    moved = [
        arg
        if not isinstance(arg, Tensor)
        else arg.expand(size, *arg.shape)
        if dim is None
        else arg.movedim(dim, 0)
        for arg, dim in zip(args, in_dims, strict=True)
    ]
    results: Any = function.apply(*moved)
    return results, (0,) * len(results)


def first_derivative(
    backward_op: Callable[..., Any],
    refusal: str,
    vmap_rule: Callable[..., tuple[Any, Any]] = _leading_vmap,
) -> type[torch.autograd.Function]:
    """Makes a backward operator a function whose own derivative is an error.

    Args:
        backward_op: Returns the gradients, as a list.
        refusal: What the `DoubleBackwardError` says.
        vmap_rule: ``vmap_rule(function, size, in_dims, args)`` returns the results of `torch.vmap`
            and their mapped dimensions; by default batches are in front of every tensor.

    Returns:
        The function; ``apply`` it to the arguments of `backward_op`.
    """

    class Backward(torch.autograd.Function):
        """The first derivative; its own derivative is an error."""

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return tuple(backward_op(*args))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise DoubleBackwardError(refusal)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return vmap_rule(Backward, info.batch_size, in_dims, args)

    return Backward


def differentiable(
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Any],
    *,
    name: str,
    keep_result: bool = False,
) -> Callable[..., Tensor]:
    """Joins a forward and a backward operator into one differentiable function.

    Every tensor has its batch dimensions in front, so `torch.vmap` is one more of them.

    Args:
        forward_op: ``forward_op(*args)`` returns ``(result, *saved)``.
        backward_op: ``backward_op(grad, [result,] *saved, *args)`` returns the gradients of the
            first arguments, as a list; the rest have none.
        name: How error messages call the function.
        keep_result: Whether backward_op also takes the result.

    Returns:
        ``function(*args) -> result``.
    """
    derivative = first_derivative(
        backward_op,
        f"{name} has a hand-written first derivative only. For second derivatives "
        "(Hessian products, gradient penalties) use a Riemannian weight "
        "(via='riemannian'), whose point is itself the leaf",
    )

    def derive(*args: Any) -> Any:
        return apply_reverse(derivative, *args, name=f"the derivative of {name}")

    Forward = _forward_function(forward_op, backward_op, derive, 0 if keep_result else 1)

    def function(*args: Any) -> Tensor:
        return apply_reverse(Forward, *args, name=name)[0]

    function.__name__ = name
    return function


def _forward_function(
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Any],
    derivative: Callable[..., Any],
    first: int,
) -> type[torch.autograd.Function]:
    """The function of `differentiable`; outputs from number `first` on are kept for backward."""

    class Forward(torch.autograd.Function):
        """The map itself; what backward needs are further, non-differentiable outputs."""

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return tuple(forward_op(*args))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[1:])
            ctx.plain = [None if isinstance(arg, Tensor) else arg for arg in inputs]
            ctx.is_tensor = [isinstance(arg, Tensor) for arg in inputs]
            ctx.saved_outputs = len(output) - first
            ctx.save_for_backward(*output[first:], *(a for a in inputs if isinstance(a, Tensor)))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            count = len(ctx.plain)
            if grads[0] is None:
                return (None,) * count
            saved = ctx.saved_tensors
            tensors = list(saved[ctx.saved_outputs :])
            args = []
            for is_tensor, plain in zip(ctx.is_tensor, ctx.plain, strict=True):
                args.append(tensors.pop(0) if is_tensor else plain)
            outputs = saved[: ctx.saved_outputs]
            # compiled graphs refuse a double backward themselves
            backward = backward_op if torch.compiler.is_compiling() else derivative
            results = list(backward(grads[0], *outputs, *args))
            return tuple(results + [None] * (count - len(results)))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return _leading_vmap(Forward, info.batch_size, in_dims, args)

    # Without a gradient, Dynamo compares the number of parameters to see if forward takes ctx.
    Forward.forward.__signature__ = inspect.Signature(
        [
            inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_ONLY)
            for argument in forward_op._schema.arguments  # pyright: ignore[reportFunctionMemberAccess]
        ]
    )
    return Forward
