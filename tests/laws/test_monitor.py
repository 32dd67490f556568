"""The monitor on real training runs: its figures are true, and it does not disturb the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import StationarityMonitor
from stiefel.operators import Dense
from tests.monitored_runs import CHANNELS, HIDDEN, Loss, compare, copying, frames, oracle, video
from tests.registry.charts import CHARTS, ChartCase

RIEMANNIAN = ["rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr", "rgd-adam", "landing", "pogo"]
STEPS = 20

Make = Callable[[], tuple[nn.Module, Loss]]


def _square() -> dict[str, Make]:
    """Runs of the copying task, in every chart that takes square weights."""
    made: dict[str, Make] = {}
    for case in CHARTS:
        if any(n == p and not batch for batch, n, p in case.shapes):
            real = torch.float64 in case.dtypes
            if real:
                made[str(case)] = lambda case=case: copying(case.make(((), HIDDEN, HIDDEN)))
            if case.name in ("urnn", "cwy", "givens", "matrix_exp"):
                made[f"{case}-complex"] = lambda case=case: copying(
                    case.make(((), HIDDEN, HIDDEN)), torch.complex128
                )
    return made | {via: lambda via=via: copying(via) for via in RIEMANNIAN}


def _tall(case: ChartCase) -> bool:
    return any(n > p and not batch for batch, n, p in case.shapes)


def _frames() -> dict[str, Make]:
    """Runs of ConvNERU, in every chart that takes tall weights."""
    n, p = 9 * CHANNELS, CHANNELS
    start = {"own-centerTrue": {"init": None}}
    made: dict[str, Make] = {
        str(case): lambda case=case: frames(case.make(((), n, p)), **start.get(str(case), {}))
        for case in CHARTS
        if _tall(case)
    }
    return made | {via: lambda via=via: frames(via) for via in RIEMANNIAN}


RUNS: dict[str, Make] = {
    **{f"copying-{name}": make for name, make in _square().items()},
    **{f"convneru-{name}": make for name, make in _frames().items()},
    **{f"video-{via}": lambda via=via: video(via) for via in ("tcwy", "rgd-e-qr")},
}


def _train(model: nn.Module, loss: Loss, steps: int, around: Any = None) -> None:
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2, optimizer="sgd")
    for step in range(steps):
        with around or torch.enable_grad():
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()


@pytest.mark.parametrize("name", RUNS)
def test_figures_are_those_of_autograd_on_released_weights(name: str) -> None:
    model, loss = RUNS[name]()
    monitor = StationarityMonitor(model, every=4)
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2, optimizer="sgd")
    expected = {}
    for step in range(STEPS):
        if step in (0, 3, 7, 11, 15, 19):
            expected[step + 1] = oracle(model, lambda model, step=step: loss(model, step))
        with monitor:
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [row["step"] for row in monitor.records] == [1, 4, 8, 12, 16, 20] == list(expected)
    for row in monitor.records:
        compare(row, expected[row["step"]])
    paths = [c.path for c in stiefel.constraints(model)]
    assert all(f"{path}/canonical_norm" in expected[1] for path in paths)
    norms = [row["model/canonical_norm"] for row in monitor.records]
    assert len(set(norms)) == len(norms)


def _forms(model: nn.Module) -> bool:
    return all(isinstance(c.operator(), Dense) for c in stiefel.constraints(model))


@pytest.mark.parametrize("name", RUNS)
def test_training_is_not_disturbed(name: str) -> None:
    model, loss = RUNS[name]()
    plain = copy.deepcopy(model)
    _train(plain, loss, 12)
    _train(model, loss, 12, StationarityMonitor(model, every=2, differential_every=3))
    exact = _forms(model)
    for (key, watched), free in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        if exact:
            assert torch.equal(watched, free), key
        else:  # the weight is multiplied as a matrix on monitored steps
            assert torch.allclose(watched, free, rtol=1e-9, atol=1e-11), key
    dense = [run for run in RUNS if run.startswith("convneru") or "rgd" in run]
    assert exact or name not in dense


def test_runs_cover_every_chart_and_both_ways_to_multiply() -> None:
    for case in CHARTS:
        assert any(str(case) in name for name in RUNS), case
    forming = {name: _forms(make()[0]) for name, make in RUNS.items()}
    assert not forming["copying-cwy-reflections2"]
    assert forming["copying-cwy"]
