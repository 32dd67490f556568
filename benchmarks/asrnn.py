"""What does the saturation of an asRNN cost, and what does its Elman form save?

`stiefel.models.ASRNN` beside `OrthogonalRNN` with tanh, both with weights of one chart and a head,
on sequences of pixels (one feature), forward and backward: with logits of the last step, as for
pixel MNIST, and of every step. The reference is `OrthogonalRNN`. The recurrence as published,
three products a step under plain autograd, has the same weights; so has `NNRNN` its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Goal, Section, Settings, Study, measure, require
from benchmarks.weights import perturb
from stiefel.models import ASRNN, NNRNN, OrthogonalRNN, SequenceModel

__all__ = ["ThreeProducts", "sections"]

_VIA, _CLASSES = "cwy", 10
_OURS, _REFERENCE = "stiefel ASRNN", "stiefel OrthogonalRNN, tanh"


class ThreeProducts(nn.Module):
    """h_t = W_f^-1 tanh(W_f (W_xh x_t + W_hh h_{t-1} + b)) of an `ASRNN`, a step at a time."""

    def __init__(self, rnn: ASRNN) -> None:
        super().__init__()
        self.rnn, self.hidden_size = rnn, rnn.hidden_size

    def forward(self, x: Tensor, h0: None = None) -> tuple[Tensor, Tensor]:
        """States `(T, B, H)` and the last one, `(1, B, H)`."""
        layer: Any = self.rnn.layers[0]
        U, W, d = layer.mixing.weight, layer.recurrent.weight, layer.s.abs() + layer.eps
        encoder, decoder = (U * d).mT, U / d
        h, states = x.new_zeros(x.shape[1], self.hidden_size), []
        for z in layer.input(x).unbind(0):
            h = torch.tanh((z + h @ W.mT) @ encoder) @ decoder
            states.append(h)
        return torch.stack(states), h.unsqueeze(0)


def _case(name: str, rnn: nn.Module, x: Tensor, readout: str, check: Any = lambda: None) -> Case:
    model = SequenceModel(rnn, _CLASSES, readout=readout).to(x.device)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    logits = model(x)
    assert isinstance(logits, Tensor)
    cotangent = torch.randn_like(logits)

    def refresh() -> None:
        with torch.no_grad():
            for leaf in leaves:
                leaf.grad = None
                leaf.add_(perturb(leaf) * 1e-3)

    def run() -> None:
        made = model(x)
        assert isinstance(made, Tensor)
        made.backward(cotangent)

    return Case(name, run, refresh, check)


def _section(
    steps: int, batch: int, hidden: int, readout: str, bound: float, settings: Settings
) -> Section:
    """Times the models on sequences of one size."""
    device = settings.device
    x = torch.rand(steps, batch, 1, device=device)
    ours = ASRNN(1, hidden, via=_VIA, device=device)

    def check() -> None:
        twin = ASRNN(1, hidden, via=_VIA, a=0.5, b=1.5, device=device)
        wanted, _ = ThreeProducts(twin)(x[:50])
        distance = (twin(x[:50])[0] - wanted).norm() / wanted.norm()
        require("distance of the Elman form", distance.item(), 1e-4)

    reference = OrthogonalRNN(1, hidden, nonlinearity="tanh", via=_VIA, device=device)
    published = ThreeProducts(ASRNN(1, hidden, via=_VIA, device=device))
    cases = [
        _case(_OURS, ours, x, readout, check),
        _case(_REFERENCE, reference, x, readout),
        _case("three products a step, autograd", published, x, readout),
        _case("stiefel NNRNN", NNRNN(1, hidden, via=_VIA, device=device), x, readout),
    ]
    title = f"forward + backward, T = {steps}, B = {batch}, N = {hidden}, logits of {readout}"
    text = f"logits of {readout}, N = {hidden}: at most {bound} of the time of {_REFERENCE}"
    goal = Goal(text, _OURS, _REFERENCE, at_most=bound)
    return measure(Study(title, cases, _REFERENCE, [goal]), settings)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    if settings.quick:
        yield _section(20, 3, 8, "last", 10, settings)
        return
    for readout in ("last", "all"):
        yield _section(784, 128, 122, readout, 1.25, settings)
