"""How long does an orthogonal RNN take to walk a sequence, forward and backward?

`stiefel.models.OrthogonalRNN` (tanh, 10 input features) beside `torch.nn.RNN` with the same
weights, `nn.LSTM` and `nn.GRU` of the same hidden size, and the *bare products*: what any
implementation must do at least. The recurrent weight of the first case is a plain one, so that the
rollout alone is timed; another case builds it by CWY too. The loss is the inner product of the
whole output with a fixed random tensor; the input needs no gradient.

Bare products for T steps, batch B, N hidden units and F features, back to back, each into memory
that was allocated before:

- forward, T products (B, N) x (N, N), from one row of the hidden sequence (T + 1, B, N) into the
  next, and the input products (C B, F) x (F, N) of every chunk of C = 8 steps;
- backward, T products (B, N) x (N, N), from one row of a chunk's deltas into the previous one, and
  for every chunk the two weight gradients (N, C B) x (C B, N) and (N, C B) x (C B, F), added up.

Nothing else is done: no addition of the input, no nonlinearity, no derivative of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Goal, Section, Settings, Study, measure, require
from benchmarks.ours import rnn_like
from benchmarks.weights import perturb

__all__ = ["bare_products", "sections", "sequence_case"]

_FEATURES = 10
_CHUNK = 8
_OURS = "stiefel OrthogonalRNN, plain weight"
_BARE = "bare products"
_RNN = "torch nn.RNN"


def bare_products(steps: int, batch: int, hidden: int, features: int, device: str) -> Case:
    """Makes the case of the bare products, as the module's docstring defines them.

    Args:
        steps: T.
        batch: B.
        hidden: N.
        features: F.
        device: Where.
    """
    weight = torch.linalg.qr(torch.randn(hidden, hidden)).Q.contiguous().to(device)
    entry = torch.randn(hidden, features, device=device)
    x = torch.randn(steps * batch, features, device=device)
    h = torch.randn(steps + 1, batch, hidden, device=device)
    deltas = torch.randn(_CHUNK + 1, batch, hidden, device=device)
    lifted = torch.empty(_CHUNK * batch, hidden, device=device)
    weight_gradient, entry_gradient = torch.empty_like(weight), torch.empty_like(entry)
    rows, delta_rows = h.unbind(), deltas.unbind()
    starts = range(0, steps, _CHUNK)

    def run() -> None:
        weight_gradient.zero_()
        entry_gradient.zero_()
        for start in starts:
            stop = min(start + _CHUNK, steps)
            size = (stop - start) * batch
            chunk = x[start * batch : stop * batch]
            torch.mm(chunk, entry.mT, out=lifted[:size])
            for t in range(start, stop):
                torch.mm(rows[t], weight.mT, out=rows[t + 1])
        for start in reversed(starts):
            length = min(_CHUNK, steps - start)
            for t in range(length, 0, -1):
                torch.mm(delta_rows[t], weight, out=delta_rows[t - 1])
            flat = deltas[1 : length + 1].view(length * batch, hidden)
            before = h[start : start + length].view(length * batch, hidden)
            weight_gradient.addmm_(flat.mT, before)
            entry_gradient.addmm_(flat.mT, x[start * batch : (start + length) * batch])

    def refresh() -> None:
        h[0].normal_()
        deltas.normal_()

    return Case(_BARE, run, refresh)


def sequence_case(
    name: str,
    module: nn.Module,
    x: Tensor,
    cotangent: Tensor,
    check: Callable[[], None] = lambda: None,
) -> Case:
    """Makes the case of a sequence model: forward, and backward to its parameters.

    Args:
        name: Of the case.
        module: A model whose first output is ``(T, B, N)``.
        x: Input ``(T, B, F)``.
        cotangent: Gradient of the output ``(T, B, N)``.
        check: Called before timing.
    """
    leaves = [leaf for leaf in module.parameters() if leaf.requires_grad]

    def refresh() -> None:
        with torch.no_grad():
            for leaf in leaves:
                leaf.grad = None
                leaf.add_(perturb(leaf) * 1e-2)

    def run() -> None:
        module(x)[0].backward(cotangent)

    return Case(name, run, refresh, check)


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / (b.norm() + 1e-30)).item()


def _same_as_rnn(x: Tensor, hidden: int) -> Callable[[], None]:
    """Returns a check that output and gradients equal those of `nn.RNN` with the same weights."""

    def check() -> None:
        rnn = nn.RNN(x.shape[-1], hidden).to(x.device)
        twin, pairs = rnn_like(rnn)
        cotangent = torch.randn(x.shape[0], x.shape[1], hidden, device=x.device)
        expected, output = rnn(x)[0], twin(x)[0]
        require("distance of the outputs", _distance(output, expected), 1e-4)
        expected.backward(cotangent)
        output.backward(cotangent)
        for mine, theirs in pairs:
            assert mine.grad is not None
            slope = sum(leaf.grad for leaf in theirs if leaf.grad is not None) / len(theirs)
            assert isinstance(slope, Tensor)
            require("relative distance of the gradients", _distance(mine.grad, slope), 1e-3)

    return check


def _section(steps: int, batch: int, hidden: int, goals: list[Goal], settings: Settings) -> Section:
    """Times all models on sequences of one size."""
    device = settings.device
    x = torch.randn(steps, batch, _FEATURES, device=device)
    cotangent = torch.randn(steps, batch, hidden, device=device)
    rnn = nn.RNN(_FEATURES, hidden).to(device)
    plain, _ = rnn_like(rnn)
    built, _ = rnn_like(rnn, via="cwy")
    gated = {f"torch nn.{kind.__name__}": kind(_FEATURES, hidden) for kind in (nn.LSTM, nn.GRU)}
    cases = [
        sequence_case(_OURS, plain, x, cotangent, _same_as_rnn(x[:60], hidden)),
        sequence_case("stiefel OrthogonalRNN, cwy", built, x, cotangent),
        bare_products(steps, batch, hidden, _FEATURES, device),
        sequence_case(_RNN, rnn, x, cotangent),
        *(sequence_case(name, net.to(device), x, cotangent) for name, net in gated.items()),
    ]
    title = f"forward + backward, T = {steps}, B = {batch}, N = {hidden}, tanh, float32"
    return measure(Study(title, cases, _RNN, goals), settings)


def _at_most(bound: float, reference: str, batch: int, hidden: int) -> Goal:
    text = f"B = {batch}, N = {hidden}: at most {bound} of the time of {reference}"
    return Goal(text, _OURS, reference, at_most=bound)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    if settings.quick:
        yield _section(20, 3, 8, [_at_most(1, _RNN, 3, 8)], settings)
        return
    shares = {(128, 128): 0.7, (128, 190): 0.7, (128, 512): 0.85, (1, 128): 0.65, (8, 128): 0.65}
    for (batch, hidden), share in shares.items():
        goals = [_at_most(share, _RNN, batch, hidden)]
        if hidden in (190, 512):
            goals.append(_at_most(1.6, _BARE, batch, hidden))
        yield _section(1000, batch, hidden, goals, settings)
