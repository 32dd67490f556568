"""What does it cost to watch a training run?

A training step (zero_grad, forward, backward, step of the optimizer) without a monitor, and the
same step as a `StationarityMonitor` that records every step takes it; the rounds of both are
interleaved. At the default interval one step in 50 is such a step, and the other 49 enter and
leave the monitor, which is timed by itself, 10,000 times. The overhead is

    (monitored - plain) / (interval plain) + (enter and leave) / plain.

Checked before: the Riemannian gradient norm of a record is that of autograd on a released weight.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import stiefel
from benchmarks.harness import Case, Row, Section, Settings, Study, judge, measure, require
from stiefel.diagnostics import StationarityMonitor, stationarity_at
from stiefel.models import OrthogonalRNN, SequenceModel, VideoPredictor

__all__ = ["sections"]

#: Steps between two records that a monitor takes by default.
INTERVAL: int = inspect.signature(StationarityMonitor).parameters["every"].default

_PLAIN, _WATCHED = "step", "monitored step"
_EMPTY = "enter and leave, 10,000 times"
_ENTRIES = 10_000

Loss = Callable[[nn.Module, Tensor], Tensor]


def _recurrent(steps: int, batch: int, hidden: int, device: str, **options) -> tuple:
    """A network that reads pixels one by one, its loss, and what draws its input."""
    rnn = OrthogonalRNN(1, hidden, **options)
    model = SequenceModel(rnn, 10, readout="last").to(device)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), torch.arange(batch, device=device) % 10)

    return model, loss, lambda: torch.rand(steps, batch, 1, device=device)


def _video(steps: int, batch: int, size: int, device: str, **options) -> tuple:
    """A predictor of frames, its loss, and what draws its input."""
    model = VideoPredictor(1, kernel_size=3, **options).to(device)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:-1]) - x[1:]).square().mean()

    return model, loss, lambda: torch.rand(steps + 1, batch, 1, size, size, device=device)


def _true(model: nn.Module, loss: Loss, x: Tensor) -> Callable[[], float]:
    """A check that a record holds the gradient that autograd finds on released weights."""

    def check() -> float:
        watched, released = copy.deepcopy(model), copy.deepcopy(model)
        monitor = StationarityMonitor(watched, 1)
        with monitor:
            loss(watched, x).backward()
        points = [(c.path, c.point, c.storage) for c in stiefel.constraints(released)]
        stiefel.release(released)
        loss(released, x).backward()
        for path, X, storage in points:
            assert storage is not None
            X.requires_grad_()
            (G,) = torch.autograd.grad(storage.view(X), X, released.get_parameter(path).grad)
            expected = stationarity_at(X, G).euclidean_norm
            found = monitor.records[0][f"{path}/euclidean_norm"]
            require(f"gradient norm of {path}", abs(found - expected) / expected, 1e-3)
        return monitor.records[0]["model/max_residual"]

    return check


def _sections(title: str, made: tuple, settings: Settings) -> Iterator[Section]:
    """The times of the steps, and the overhead that follows."""
    model, loss, draw = made
    x = draw()
    cases = []
    for name in (_PLAIN, _WATCHED):
        own = copy.deepcopy(model)
        optimizer = stiefel.optim.build(own, lr=1e-4)
        monitor = StationarityMonitor(own, 1)

        def step(own=own, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            loss(own, x).backward()
            optimizer.step()

        def watched(step=step, monitor=monitor) -> None:
            with monitor:
                step()

        cases.append(
            Case(name, step, lambda: x.copy_(draw()), lambda: None)
            if name == _PLAIN
            else Case(name, watched, lambda: x.copy_(draw()), _true(model, loss, x))
        )
    idle = StationarityMonitor(copy.deepcopy(model), 10**12)
    idle.step = 1

    def enter() -> None:
        for _ in range(_ENTRIES):
            with idle:
                pass

    cases.append(Case(_EMPTY, enter))
    section = measure(Study(title, cases, _PLAIN), settings)
    yield section
    share = {row.name: row.values["x reference"] for row in section.rows}
    monitored, entries = share[_WATCHED], share[_EMPTY]
    assert isinstance(monitored, float)
    assert isinstance(entries, float)
    record, idle_share = 100 * (monitored - 1) / INTERVAL, 100 * entries / _ENTRIES
    values: dict[str, float | str | None] = {
        "a record, %": record,
        "enter and leave, %": idle_share,
        "overhead, %": record + idle_share,
    }
    text = f"{title}: overhead at the default interval of {INTERVAL} steps below 3 %"
    overhead = record + idle_share
    verdict = judge(text, overhead, 3.0, overhead < 3.0, settings)
    yield Section(f"{title}: overhead, interval {INTERVAL}", [Row("default", values)], [verdict])


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    device = settings.device
    if settings.quick:
        yield from _sections("tiny network", _recurrent(9, 3, 8, device), settings)
        made = _video(3, 2, 8, device, widths=(4, 4), via="tcwy")
        yield from _sections("tiny video", made, settings)
        return
    title = "OrthogonalRNN, T = 784, B = 128, N = 170, cwy"
    yield from _sections(title, _recurrent(784, 128, 170, device), settings)
    made = _recurrent(784, 128, 170, device, via="cwy", reflections=16, init="chart")
    yield from _sections(f"{title} of 16 reflections, matrix-free", made, settings)
    title = "OrthogonalRNN, T = 120, B = 128, N = 190, cwy"
    yield from _sections(title, _recurrent(120, 128, 190, device), settings)
    made = _video(8, 4, 32, device, widths=(8, 16, 16), via="tcwy")
    title = "VideoPredictor, ConvNERU of 8, 16, 16 channels, T = 8, B = 4, 32 x 32, tcwy"
    yield from _sections(title, made, settings)
