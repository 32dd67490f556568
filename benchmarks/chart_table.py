"""Which chart costs what, covers what, and is for whom?

Writes the tables of ``docs/charts.md`` (``--write docs/charts.md``). `products` is the time of a
forward and a backward pass through one n x n weight, in products of two n x n matrices measured in
the same rounds; `saved` what the forward pass keeps for the backward pass, in sizes of the weight.
For frames, `ms` is a forward and a backward pass through the weight (charts) or the gradient with
respect to the weight and one optimizer step (Riemannian). The formulae are those of
`benchmarks.costs`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.costs import FRAMES, SQUARE, ChartCost
from benchmarks.harness import Case, Row, Section, Settings, Study, measure
from benchmarks.ours import constrained
from benchmarks.weights import weight_case
from stiefel.geometry import haar
from stiefel.optim import build

__all__ = ["saved_weights", "sections"]

_PRODUCT = "one product"


def saved_weights(module: nn.Module) -> float:
    """What building ``module.weight`` keeps for its backward pass, in sizes of the weight.

    Storage that several saved tensors share, and that of parameters, is counted once.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weight = module.weight
    assert isinstance(weight, Tensor)
    return sum(kept.values()) / (weight.numel() * weight.itemsize)


def _product_case(n: int, device: str) -> Case:
    A, B = (torch.randn(n, n, device=device) for _ in range(2))
    C = torch.empty_like(A)
    return Case(_PRODUCT, lambda: torch.mm(A, B, out=C))


def _layer(cost: ChartCost, n: int, device: str) -> nn.Module | None:
    """A layer with the chart's weight; None for weights without a map."""
    if cost.via == "riemannian":
        return None
    if cost.via == "urnn":
        return constrained((n, n), "urnn", device, dtype=torch.complex64)
    layer = constrained((n, n), cost.via, device)
    if cost.via == "matrix_exp":  # angles of order one, as in training
        with torch.no_grad():
            for leaf in layer.parameters():
                leaf.normal_().div_(n**0.5)
    return layer


def _square(n: int, settings: Settings) -> Iterator[Section]:
    layers = {cost.via: _layer(cost, n, settings.device) for cost in SQUARE}
    present = {via: layer for via, layer in layers.items() if layer is not None}
    cases = [weight_case(via, layer, ours=True) for via, layer in present.items()]
    study = Study("", [_product_case(n, settings.device), *cases], _PRODUCT)
    times = {row.name: row.values["x reference"] for row in measure(study, settings).rows}
    saved = {via: saved_weights(layer) for via, layer in present.items()}
    rows = [
        Row(
            cost.via,
            {
                "paper": cost.paper,
                "serial": cost.serial,
                "parallel": cost.parallel,
                "flops of a build": cost.flops,
                "products": times.get(cost.via),
                "saved": saved.get(cost.via),
            },
        )
        for cost in SQUARE
    ]
    yield Section(f"cost of a square weight; measured: n = {n}, L = n, float32", rows)
    rows = [
        Row(cost.via, {"covers": cost.covers, "determinant": cost.determinant, "when": cost.when})
        for cost in SQUARE
    ]
    yield Section("what a chart covers, and when to choose it", rows)


def _frame_case(name: str, via: str, n: int, p: int, device: str) -> Case:
    """A pass through a chart, or a step of a Riemannian weight with its gradient given."""
    module = constrained((n, p), via, device)
    if not via.startswith("rgd"):
        return weight_case(name, module, ours=True)
    optimizer = build(module, lr=1e-3)
    (leaf,) = module.parameters()

    def refresh() -> None:
        leaf.grad = torch.randn_like(leaf)

    def run() -> None:
        optimizer.step()

    with torch.no_grad():
        leaf.copy_(haar(n, p, device=device))
    return Case(name, run, refresh)


def _frames(n: int, p: int, settings: Settings) -> Section:
    cases = [_frame_case(c.name, c.via, n, p, settings.device) for c in FRAMES]
    measured = measure(Study("", cases, FRAMES[0].name), settings)
    times = {row.name: row.values["median ms"] for row in measured.rows}
    rows = [
        Row(
            cost.name,
            {
                "via": cost.via,
                "parallel": cost.parallel,
                "inverted or factorised": cost.matrix,
                "flops": cost.flops,
                "ms": times[cost.name],
            },
        )
        for cost in FRAMES
    ]
    return Section(f"one gradient step of a frame; measured: {n} x {p}, float32", rows)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    n, frame = (16, (32, 4)) if settings.quick else (1024, (1024, 128))
    yield from _square(n, settings)
    yield _frames(*frame, settings)
