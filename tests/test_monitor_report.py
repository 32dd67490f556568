"""What the records of a monitor say: verdicts, warnings, noise, side conditions, feasibility."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import stiefel
from stiefel.diagnostics import DictLogger, SideConditions, StationarityMonitor, Verdict
from stiefel.diagnostics.monitor_report import judge_records, write_report
from stiefel.errors import ConfigurationError
from tests.monitored_runs import copying, layers, loss_of, none_left_watched, sgd, step


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """After every test no watcher of points and no hook of optimizers is left."""
    with none_left_watched():
        yield
    assert not _global_optimizer_post_hooks


def test_nothing_but_frozen_weights_is_no_divergence() -> None:
    model = layers().requires_grad_(False)
    model[2].requires_grad_(True)
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1)
    for seed in range(3):
        with monitor:
            step(model, optimizer, seed)
    assert "model/canonical_norm" not in monitor.records[-1]
    report = monitor.report()
    assert report.judgement is None
    assert "stationary: not measured" in str(report)
    with pytest.raises(ConfigurationError, match="model/max_residual"):
        monitor.judge()


def test_a_step_that_the_scaler_skips_is_no_divergence_but_an_end_in_nan_is() -> None:
    model = layers()
    optimizer = sgd(model, 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    monitor = StationarityMonitor(model, 1, scale=scaler)

    def run(factor: float, seed: int) -> None:
        with monitor:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed) * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    for seed in range(40):
        run(math.inf if seed == 35 else 1.0, seed)
    assert math.isnan(monitor.records[35]["model/euclidean_norm"])
    judged = monitor.judge()
    assert judged.verdict is not Verdict.DIVERGING
    assert judged.fit is not None
    run(math.inf, 40)
    assert monitor.judge().verdict is Verdict.DIVERGING


def test_nan_is_recorded_as_nan_and_means_divergence() -> None:
    model = layers()
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1, differential_every=1)
    for seed in range(12):
        with monitor:
            optimizer.zero_grad()
            (loss_of(model, seed) * (math.nan if seed == 10 else 1.0)).backward()
            optimizer.step()  # from here on the weights are NaN too
    assert math.isnan(monitor.records[10]["model/canonical_norm"])
    assert math.isnan(monitor.records[11]["0.weight/max_residual"])
    assert monitor.judge().verdict is Verdict.DIVERGING
    report = monitor.report()
    assert not report.ok
    assert "feasible: no, see 0.weight, 3.weight" in str(report)
    assert "stationary: no" in str(report)


def test_the_generator_of_training_is_left_alone() -> None:
    layer = stiefel.orthogonal(nn.Linear(40, 40, dtype=torch.float64), via="cwy")
    monitor = StationarityMonitor(layer, 1, differential_every=1)  # 780 dimensions: estimated
    before = torch.get_rng_state()
    with monitor:
        layer(torch.eye(40, dtype=torch.float64)).square()[:3].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert monitor.records[0]["weight/differential_largest"] > 0
    assert "weight/differential_rank" not in monitor.records[0]


def _train(conditions: SideConditions, make: Callable[..., Any], clip: float | None = None) -> Any:
    model = layers()
    reflections = [c.leaves[0] for c in stiefel.constraints(model)]
    optimizer = make(reflections)
    monitor = StationarityMonitor(model, 2, side_conditions=conditions)
    for k in range(1, 9):
        for group in optimizer.param_groups:
            group["lr"] = k**-0.5 if group["lr"] != 0.05 else 0.05
        with monitor:
            loss_of(model, k).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(reflections, clip)
            optimizer.step()
            model.zero_grad()
    assert conditions.steps == 5
    report = monitor.report()
    return [
        f.name
        for f in report.failures
        if f.name in {"step identity", "orthogonal steps", "non-decreasing norms"}
    ]


def test_side_conditions_are_noted() -> None:
    SGD = torch.optim.SGD
    identity, orthogonal, norms = "step identity", "orthogonal steps", "non-decreasing norms"
    assert _train(SideConditions(), lambda p: SGD(p, lr=1.0)) == []
    assert _train(SideConditions(), lambda p: SGD(p, lr=0.05)) == [identity]
    assert _train(SideConditions(), lambda p: SGD(p, lr=1.0), clip=1e-3) == [identity]
    momentum = _train(SideConditions(), lambda p: SGD(p, lr=1.0, momentum=0.5))
    assert momentum == [identity, orthogonal]
    decay = _train(SideConditions(), lambda p: SGD(p, lr=1.0, weight_decay=0.3))
    assert decay == [identity, orthogonal, norms]


def test_side_conditions_take_reflections_only() -> None:
    model = layers("matrix_exp")
    conditions = SideConditions()
    monitor = StationarityMonitor(model, 1, side_conditions=conditions)
    with monitor:
        step(model, sgd(model))
    assert conditions.steps == 0
    assert "no step was noted" in str(monitor.report())


def test_a_small_coordinate_gradient_of_a_singular_chart_is_warned_of() -> None:
    """Equal pairs of reflections: the chart cannot leave I in most directions."""
    n = 6
    layer = stiefel.orthogonal(nn.Linear(n, n, bias=False, dtype=torch.float64), via="cwy")
    (V,) = next(stiefel.constraints(layer)).leaves
    with torch.no_grad():
        V.zero_()[0] = 1.0  # all reflections are the same
    A = torch.zeros(n, n, dtype=torch.float64)
    A[3, 4], A[4, 3] = 1.0, -1.0  # a rotation that no reflection along e_1 makes
    monitor = StationarityMonitor(layer, 1, differential_every=1)
    with monitor:
        (layer.weight * A).sum().backward()
    (row,) = monitor.records
    assert row["weight/coordinate_norm_squared"] < 1e-20
    assert row["weight/euclidean_norm"] == pytest.approx(2**0.5)
    assert row["weight/differential_rank"] == n - 1 < row["weight/differential_dimension"]
    assert "proves nothing here" in row["weight/warning"]
    assert "step 1, weight/warning: the coordinate gradient" in str(monitor.report())


def test_a_regular_chart_is_not_warned_of() -> None:
    model, loss = copying("cwy")
    monitor = StationarityMonitor(model, 1, differential_every=2)
    for k in range(4):
        with monitor:
            loss(model, k).backward()
    paths = {key for row in monitor.records for key in row}
    assert not any(key.endswith("/warning") for key in paths)
    ranked = [row["step"] for row in monitor.records if any("rank" in key for key in row)]
    assert ranked == [1, 3]


def test_a_weight_that_cannot_move_is_no_singular_chart() -> None:
    """O(1) is two points."""
    layer = stiefel.orthogonal(nn.Linear(1, 1, bias=False, dtype=torch.float64), via="cwy")
    monitor = StationarityMonitor(layer, 1, differential_every=1)
    for _ in range(10):
        with monitor:
            layer.weight.sum().backward()
    assert not any(key.endswith("/warning") for row in monitor.records for key in row)
    assert monitor.records[-1]["weight/differential_dimension"] == 0
    assert "or they cannot move" in str(monitor.report())


def test_what_was_not_measured_is_not_called_feasible() -> None:
    model = layers()
    monitor = StationarityMonitor(model, 1)
    assert "feasible: not measured" in str(monitor.report())
    with monitor:
        step(model, sgd(model))
    printed = " ".join(str(monitor.report()).split())
    assert "feasible: yes" in printed
    assert (
        "too early to say: expected at least 8 finite positive values from step 0.5 on" in printed
    )
    stiefel.release(model)
    with monitor:
        step(model, sgd(model))
    assert "feasible: not measured" in str(monitor.report())


@pytest.mark.parametrize(("low", "answer"), [(0.5, "no, without the noise"), (0.0, "as far as")])
def test_a_gradient_above_its_noise_is_not_called_stationary(low: float, answer: str) -> None:
    rows: list[dict[str, Any]] = [
        {"step": k, "model/euclidean_norm": 1 + 0.01 * (k % 3)} for k in range(1, 41)
    ]
    estimate = {"squared_gradient": 0.6, "squared_gradient_high": 0.7, "noise_floor": 1.0}
    rows[-1] |= {f"model/{name}": value for name, value in estimate.items()}
    rows[-1]["model/squared_gradient_low"] = low
    found = judge_records(rows, "model/euclidean_norm_squared", noise_floor=1.0)
    assert found.verdict is Verdict.NOISE_FLOOR
    report = write_report(rows, 40, {}, found, "model/euclidean_norm_squared", None)
    assert f"stationary: {answer}" in str(report)


def test_noise_is_measured_recorded_and_judged() -> None:
    model = layers()
    logger, optimizer = DictLogger(), sgd(model)
    monitor = StationarityMonitor(model, 1, loggers=[logger])
    for seed in range(40):
        with monitor:
            step(model, optimizer, seed)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    found = monitor.measure_noise([lambda s=s: loss_of(model, s) for s in range(100, 108)])
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True))
    row = monitor.records[-1]
    assert row["step"] == 40
    assert row["model/squared_gradient"] == found["model"].value
    assert row["3.weight/noise_floor"] == found["3.weight"].noise_floor
    assert logger.series["model/noise_floor"] == {40: found["model"].noise_floor}
    assert "noise floors" in monitor.judge().explanation
    assert "noise floors" not in monitor.judge("model/canonical_norm_squared").explanation
    assert "without the noise, at step 40" in str(monitor.report())


def test_the_floor_is_that_of_a_batch_of_training() -> None:
    model = layers()
    monitor = StationarityMonitor(model)
    losses = [lambda s=s: loss_of(model, s) for s in range(8)]

    def floor(**options: Any) -> float:
        found = monitor.measure_noise(losses, **options)
        assert monitor.records[-1]["model/squared_gradient"] == found["model"].value
        return monitor.records[-1]["model/noise_floor"]

    whole = floor()
    assert floor(per_batch=8) == pytest.approx(whole)
    assert floor(per_batch=2) == pytest.approx(4 * whole)
    drawn = {"population": 128, "batch_size": 8}
    assert floor(**drawn) == pytest.approx(whole / 2)
    assert floor(per_batch=8, **drawn) == pytest.approx(whole / 2)
    assert floor(per_batch=2, **drawn) == pytest.approx(4 * whole * 7 / 8)
    with pytest.raises(ConfigurationError, match="per_batch"):
        monitor.measure_noise(losses, per_batch=0)


def test_judging_takes_squares_and_any_figure() -> None:
    monitor = StationarityMonitor(layers(), 10)
    monitor.records = [
        {"step": k, "model/euclidean_norm": 3 * k**-0.5, "model/gradient_norm": 1.0, "a/b": k**-0.2}
        for k in range(10, 2000, 10)
    ]
    judged = monitor.judge()
    assert judged.verdict is Verdict.DECREASING
    assert judged.fit.slope == pytest.approx(-1.0)
    assert monitor.judge("model/euclidean_norm").fit.slope == pytest.approx(-0.5)
    assert monitor.judge("a/b_squared").fit.slope == pytest.approx(-0.4)
    assert monitor.judge("a/b", required=-0.1).verdict is Verdict.DECREASING
    with pytest.raises(ConfigurationError, match="no record has the figure 'a/c'"):
        monitor.judge("a/c")
    printed = str(monitor.report())
    assert "stationary: not known to be yet, the gradient still falls" in printed


def test_a_wrong_optimizer_is_found_infeasible() -> None:
    model = layers("rgd-c-c")
    monitor = StationarityMonitor(model, 1)
    optimizer = sgd(model, 0.5)  # moves points off the manifold
    for seed in range(3):
        with monitor:
            step(model, optimizer, seed)
    report = monitor.report()
    assert not report.ok
    assert [f.name for f in report.failures] == [
        "largest residual of 0.weight (riemannian)",
        "largest residual of 3.weight (riemannian)",
    ]
    assert "stiefel.optim.build" in str(report)
