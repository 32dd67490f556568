"""What does adapting a linear layer by a few reflections cost?

Forward and backward of 512 tokens through a linear layer 1024 x 1024 (float32): the layer alone,
its weight trained and frozen, the layer behind r = 32 reflections as `HouseholderAdapter` applies
them, one by one under autograd, and with the rotation formed and multiplied into the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Goal, Section, Settings, Study, measure, require
from stiefel.models import HouseholderAdapter

__all__ = ["sections"]

_PLAIN = "torch linear, weight trained"
_OURS = "stiefel HouseholderAdapter"
#: Largest distance between two ways of computing the same output, relative to its size.
_BOUND = 1e-5


def _one_by_one(adapter: HouseholderAdapter) -> Callable[[Tensor], Tensor]:
    """The layer after ``x <- x - 2 (x v) v^T / |v|^2``, from the last reflection to the first."""

    def apply(x: Tensor) -> Tensor:
        V = next(adapter.rotation.parameters())
        for v in reversed(V.unbind(-1)):
            x = x - torch.outer(x @ v, v) * (2 / (v @ v))
        return adapter.linear(x)

    return apply


def _formed(adapter: HouseholderAdapter) -> Callable[[Tensor], Tensor]:
    """The layer with the weight W Q, formed for this pass."""

    def apply(x: Tensor) -> Tensor:
        W = adapter.linear.weight @ adapter.rotation.weight
        return nn.functional.linear(x, W, adapter.linear.bias)

    return apply


def _case(
    name: str,
    apply: Callable[[Tensor], Tensor],
    leaves: list[nn.Parameter],
    x: Tensor,
    exact: Callable[[Tensor], Tensor],
) -> Case:
    """Forward, and backward to the input and to `leaves`."""
    out = apply(x.detach()).shape
    probe = torch.randn(out, device=x.device)

    def refresh() -> None:
        x.grad = None
        with torch.no_grad():
            x.normal_()
            for leaf in leaves:
                leaf.grad = None
                leaf.add_(1e-3 * torch.randn_like(leaf) * leaf.std())

    def run() -> None:
        apply(x).backward(probe)

    def check() -> float:
        refresh()
        with torch.no_grad():
            expected = exact(x)
            error = float((apply(x) - expected).abs().max() / expected.abs().max())
        require("distance to the float64 product", error, _BOUND)
        run()
        found = [x.grad, *(leaf.grad for leaf in leaves)]
        require("gradients that are missing", float(sum(g is None for g in found)), 0.5)
        return error

    return Case(name, run, refresh, check)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its table.

    Args:
        settings: Device, repeats, sizes.
    """
    d, r, tokens = (32, 4, 8) if settings.quick else (1024, 32, 512)
    device = settings.device

    def linear(trained: bool) -> nn.Linear:
        return nn.Linear(d, d, device=device).requires_grad_(trained)

    def exact_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.linear(
            x.double(), layer.weight.double(), layer.bias.double()
        )

    def exact_adapter(adapter: HouseholderAdapter) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            x = x.double()
            for v in reversed(next(adapter.rotation.parameters()).double().unbind(-1)):
                x = x - torch.outer(x @ v, v) * (2 / (v @ v))
            return exact_linear(adapter.linear)(x)

        return apply

    plain, frozen = linear(True), linear(False)
    inputs = [torch.randn(tokens, d, device=device, requires_grad=True) for _ in range(5)]
    cases = [
        _case(_PLAIN, plain, list(plain.parameters()), inputs[0], exact_linear(plain)),
        _case("torch linear, frozen", frozen, [], inputs[1], exact_linear(frozen)),
    ]
    forms: list[tuple[str, Callable[[HouseholderAdapter], Callable[[Tensor], Tensor]]]] = [
        (_OURS, lambda adapter: adapter),
        ("reflections one by one, autograd", _one_by_one),
        ("rotation formed, times the weight", _formed),
    ]
    for (name, form), x in zip(forms, inputs[2:], strict=True):
        adapter = HouseholderAdapter(linear(False), r)
        with torch.no_grad():
            for leaf in adapter.rotation.parameters():
                leaf.normal_()
        leaves = list(adapter.rotation.parameters())
        cases.append(_case(name, form(adapter), leaves, x, exact_adapter(adapter)))
    goals = [Goal("the adapter at most 1.3 of the plain layer's time", _OURS, _PLAIN, at_most=1.3)]
    title = f"forward + backward, {tokens} tokens, {d} x {d}, {r} reflections, float32"
    yield measure(Study(title, cases, _PLAIN, goals), settings)
