"""What do the nonlinearities of an orthogonal RNN cost, and what does its walk keep in memory?

`stiefel.models.OrthogonalRNN` with 10 input features, forward and backward over T = 1000 steps of
128 sequences, with tanh, abs and modReLU, beside `nn.RNN` and `nn.LSTM` of the same hidden size;
with CWY of L = n / 8 reflections, applied without being formed and formed once; and the bytes that
are alive after the forward pass, counted over the storages that autograd keeps and the output,
beside a plain loop of steps. The weights of the first table are plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Goal, Row, Section, Settings, Study, judge, measure, require
from benchmarks.rollout import sequence_case
from stiefel.models import OrthogonalRNN, RecurrentLayer, activate, rollout
from stiefel.parameter import operator

__all__ = ["kept_bytes", "sections"]

_FEATURES = 10
_NONLINEARITIES = ("tanh", "abs", "modrelu")
_RNN, _LSTM = "torch nn.RNN", "torch nn.LSTM"
_FREE, _DENSE = "applied, not formed", "formed once"


def _network(hidden: int, nonlinearity: str, device: str, via: str | None = None, **options):
    return OrthogonalRNN(
        _FEATURES, hidden, nonlinearity=nonlinearity, via=via, device=device, **options
    )


def _loop(rnn: OrthogonalRNN, x: Tensor) -> Tensor:
    """The states of a one-layer network by a plain loop under autograd."""
    layer = rnn.layers[0]
    assert isinstance(layer, RecurrentLayer)
    h, states = x.new_zeros(x.shape[1], rnn.hidden_size), []
    weight: Tensor = layer.recurrent.weight
    for z in layer.input(x).unbind(0):
        h = activate(layer.nonlinearity, z + h @ weight.mT, layer.beta)
        states.append(h)
    return torch.stack(states)


def kept_bytes(run: Callable[[], Tensor], inputs: list[Tensor]) -> int:
    """Bytes of all storages that autograd keeps for the backward pass, and of the output.

    Args:
        run: Makes the output.
        inputs: Tensors that are there anyway, which do not count.
    """
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    pack(output.detach())
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _times(steps: int, batch: int, hidden: int, settings: Settings) -> Section:
    device = settings.device
    x = torch.randn(steps, batch, _FEATURES, device=device)
    cotangent = torch.randn(steps, batch, hidden, device=device)
    goals, cases = [], []
    for nonlinearity in _NONLINEARITIES:
        name = f"stiefel OrthogonalRNN, {nonlinearity}"
        rnn = _network(hidden, nonlinearity, device)

        def check(rnn: OrthogonalRNN = rnn) -> None:
            with torch.no_grad():
                short = x[:50]
                error = float((rnn(short)[0] - _loop(rnn, short)).abs().max())
            require("distance to a plain loop", error, 1e-4)

        cases.append(sequence_case(name, rnn, x, cotangent, check))
        share = 0.7 if hidden < 512 else 0.85
        for reference, bound in ((_RNN, share), (_LSTM, 0.3)):
            text = f"N = {hidden}, {nonlinearity}: at most {bound} of the time of {reference}"
            goals.append(Goal(text, name, reference, at_most=bound))
    for name, kind in ((_RNN, nn.RNN), (_LSTM, nn.LSTM)):
        cases.append(sequence_case(name, kind(_FEATURES, hidden).to(device), x, cotangent))
    title = f"forward + backward, T = {steps}, B = {batch}, N = {hidden}, float32"
    return measure(Study(title, cases, _RNN, goals), settings)


def _matrix_free(steps: int, batch: int, hidden: int, count: int, settings: Settings) -> Section:
    device = settings.device
    x = torch.randn(steps, batch, _FEATURES, device=device)
    cotangent = torch.randn(steps, batch, hidden, device=device)

    def case(name: str, formed: bool) -> Case:
        rnn = _network(hidden, "tanh", device, "cwy", reflections=count, init="chart")
        layer = rnn.layers[0]
        assert isinstance(layer, RecurrentLayer)
        leaves = list(rnn.parameters())

        def run() -> None:
            weight: Tensor = layer.recurrent.weight
            Q = weight if formed else operator(layer.recurrent)
            made = rollout(x, layer.input.weight, Q, nonlinearity="tanh", bias=layer.input.bias)
            made[0].backward(cotangent)

        def refresh() -> None:
            for leaf in leaves:
                leaf.grad = None
                with torch.no_grad():
                    leaf.add_(1e-3 * torch.randn_like(leaf) * (leaf.std() + 1e-6))

        def check() -> None:
            with torch.no_grad():
                error = float((rnn(x[:50])[0] - _loop(rnn, x[:50])).abs().max())
            require("distance to a plain loop", error, 1e-4)

        return Case(name, run, refresh, check)

    cases = [case(_FREE, False), case(_DENSE, True)]
    goals = [Goal("matrix-free at most 0.7 of the dense rollout", _FREE, _DENSE, at_most=0.7)]
    title = f"CWY, T = {steps}, B = {batch}, N = {hidden}, L = {count}, float32"
    return measure(Study(title, cases, _DENSE, goals), settings)


def _memory(steps: int, batch: int, hidden: int, settings: Settings) -> Section:
    device = settings.device
    x = torch.randn(steps, batch, _FEATURES, device=device)
    rows, verdicts = [], []
    for nonlinearity, bound in (("tanh", 0.6), ("modrelu", 0.4), ("abs", None)):
        rnn = _network(hidden, nonlinearity, device)
        here = [x, *rnn.parameters()]
        ours = kept_bytes(lambda rnn=rnn: rnn(x)[0], here)
        loop = kept_bytes(lambda rnn=rnn: _loop(rnn, x), here)
        values: dict[str, float | str | None] = {
            "ours, MB": ours / 1e6,
            "plain loop, MB": loop / 1e6,
            "share": ours / loop,
        }
        rows.append(Row(nonlinearity, values))
        if bound is not None:
            text = f"{nonlinearity}: at most {bound} of what a plain loop keeps"
            verdicts.append(judge(text, ours / loop, bound, ours / loop <= bound, settings))
    title = f"kept after the forward pass, T = {steps}, B = {batch}, N = {hidden}, float32"
    return Section(title, rows, verdicts)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    if settings.quick:
        yield _times(20, 3, 8, settings)
        yield _matrix_free(20, 3, 16, 2, settings)
        yield _memory(20, 3, 8, settings)
        return
    for hidden in (190, 512):
        yield _times(1000, 128, hidden, settings)
    yield _matrix_free(1000, 128, 512, 64, settings)
    yield _memory(1000, 128, 190, settings)
