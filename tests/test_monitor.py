"""What a monitor survives: exceptions, accumulation, scalers, copies, processes, changed models."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import stiefel
from stiefel.diagnostics import DictLogger, SideConditions, StationarityMonitor
from stiefel.diagnostics import monitor as monitor_module
from stiefel.errors import ConfigurationError
from tests.monitored_runs import compare, layers, loss_of, none_left_watched, oracle, sgd, step


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """After every test no watcher of points and no hook of optimizers is left."""
    with none_left_watched():
        yield
    assert not _global_optimizer_post_hooks


def test_only_the_first_and_every_kth_step_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    real = monitor_module.point_gradients
    monkeypatch.setattr(
        monitor_module, "point_gradients", lambda model: entered.append(1) or real(model)
    )
    model = layers()
    logger, optimizer = DictLogger(), sgd(model)
    monitor = StationarityMonitor(model, 7, loggers=[logger])
    for seed in range(22):
        with monitor as inside:
            assert inside is monitor
            step(model, optimizer, seed)
    assert [row["step"] for row in monitor.records] == [1, 7, 14, 21]
    assert len(entered) == 4
    assert monitor.step == 22
    assert list(logger.series["model/canonical_norm"]) == [1, 7, 14, 21]
    assert "0.weight/drift_per_step" not in monitor.records[0]
    first, second = monitor.records[:2]
    drift = (second["0.weight/max_residual"] - first["0.weight/max_residual"]) / 6
    assert second["0.weight/drift_per_step"] == drift


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_an_exception_leaves_nothing_and_does_not_count(where: str) -> None:
    model = layers()
    optimizer = sgd(model)
    monitor = StationarityMonitor(model, 1)
    before = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]

    def fail() -> None:
        with monitor:
            if where == "before":
                raise KeyError("mine")
            loss = loss_of(model)
            if where == "between":
                raise KeyError("mine")
            loss.backward()
            optimizer.step()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == before
    assert hooks == []
    assert monitor.records == []
    assert monitor.step == 0
    expected = oracle(model, loss_of)
    with monitor:
        step(model, optimizer)
    assert monitor.step == 1
    compare(monitor.records[0], expected)


def test_several_backward_passes_add_up() -> None:
    model = layers()
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1)
    expected = oracle(model, lambda model: sum(loss_of(model, seed) for seed in range(3)) / 3)
    with monitor:
        for seed in range(3):
            (loss_of(model, seed) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    compare(monitor.records[0], expected)


def test_what_was_accumulated_before_is_not_of_this_step() -> None:
    model = layers()
    expected = oracle(model, loss_of)
    loss_of(model, 9).backward()
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1)
    with monitor:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    compare(monitor.records[0], expected)


def test_a_frozen_weight_and_one_without_a_loss_are_said() -> None:
    model = layers()
    stiefel.orthogonal(unused := nn.Linear(4, 4), via="rgd-c-c")
    model.append(nn.Identity())
    model[-1].unused = unused
    for leaf in model[0].parametrizations.weight.parameters():
        leaf.requires_grad_(False)
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1)
    with monitor:
        step(model, optimizer)
    (row,) = monitor.records
    assert "frozen" in row["0.weight/missing"] or "requires_grad" in row["0.weight/missing"]
    assert "not read" in row["6.unused.weight/missing"]
    assert "0.weight/canonical_norm" not in row
    assert row["0.weight/max_residual"] < 1e-12
    assert row["model/euclidean_norm"] == row["3.weight/euclidean_norm"] > 0
    assert "0.weight" in row["model/missing"]
    printed = str(monitor.report())
    assert "skipped: 0.weight/missing: " in printed
    assert "feasible: yes" in printed


def test_weights_may_come_and_go() -> None:
    model = layers()
    monitor = StationarityMonitor(model, 1)

    def run() -> dict[str, Any]:
        expected = oracle(model, loss_of)
        with monitor:
            step(model, stiefel.optim.build(model, lr=1e-2, optimizer="sgd"))
        compare(monitor.records[-1], expected)
        return monitor.records[-1]

    run()
    stiefel.convert(model[0], "cayley")
    assert "0.weight/drift_per_step" in run()
    stiefel.convert(model[3], "rgd-e-qr")
    assert "3.weight/coordinate_norm_squared" not in run()
    stiefel.orthogonal(model[2], via="polar")  # (3, 6): a wide one
    assert "2.weight/canonical_norm" in run()
    stiefel.release(model[0])
    assert "0.weight/canonical_norm" not in run()
    stiefel.release(model)
    with monitor:
        step(model, sgd(model))
    assert monitor.records[-1].keys() == {"step", "model/missing", "model/total_norm"}
    assert "no constrained weight" in monitor.records[-1]["model/missing"]
    assert monitor.step == 6


def test_converting_inside_the_block_is_survived() -> None:
    model = layers()
    monitor = StationarityMonitor(model, 1, side_conditions=SideConditions())
    expected = oracle(model, loss_of)
    with monitor:
        loss_of(model).backward()
        stiefel.convert(model[0], "cayley")
    compare(monitor.records[0], expected)


def test_the_scale_of_a_scaler_is_taken_off() -> None:
    model = layers()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    monitor = StationarityMonitor(model, 1, scale=scaler)
    for seed in range(3):  # the scale doubles inside of every block
        expected = oracle(model, lambda model, seed=seed: loss_of(model, seed))
        with monitor:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed)).backward()
            scaler.step(optimizer)
            scaler.update()
        compare(monitor.records[-1], expected)
    assert scaler.get_scale() == 2.0**13


def test_copies_and_checkpoints() -> None:
    model = layers()
    optimizer, monitor = sgd(model), StationarityMonitor(model, 5, loggers=[DictLogger()])
    for seed in range(7):
        with monitor:
            step(model, optimizer, seed)

    twin, other = copy.deepcopy((model, monitor))
    assert other.model is twin
    assert copy.deepcopy(monitor).model is not model

    pickled = pickle.loads(pickle.dumps(monitor))
    assert pickled.records == monitor.records
    pickled.step = 9
    with pytest.raises(ConfigurationError, match="without its model"), pickled:
        pass

    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    resumed = StationarityMonitor(twin, 5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for each, net in ((monitor, model), (other, twin)):
        optimizer = sgd(net)
        for seed in range(7, 11):
            if each is other:  # both watch the same run
                resumed.__enter__()
            with each:
                step(net, optimizer, seed)
            if each is other:
                resumed.__exit__(None, None, None)
    assert monitor.records == other.records == resumed.records
    assert [row["step"] for row in monitor.records] == [1, 5, 10]
    assert "0.weight/drift_per_step" in resumed.records[-1]


def test_a_copy_made_inside_a_block_watches_nothing() -> None:
    model = layers()
    monitor = StationarityMonitor(model, 1)
    with monitor:
        twin = copy.deepcopy(monitor)
        step(model, sgd(model))
    assert len(monitor.records) == 1
    assert twin.records == []
    with twin:
        step(twin.model, sgd(twin.model))
    assert len(twin.records) == 1


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no constrained weight"):
        StationarityMonitor(nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="unconstrained=True"):
        StationarityMonitor(nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="no constrained weight"):
        StationarityMonitor(nn.Linear(3, 3).requires_grad_(False), unconstrained=True)
    with pytest.raises(ConfigurationError, match="every >= 1"):
        StationarityMonitor(layers(), 0)
    monitor = StationarityMonitor(layers(), 1)
    with pytest.raises(ConfigurationError, match="one block a step"), monitor, monitor:
        pass
    assert monitor.step == 0


@pytest.mark.parametrize("kind", ["stiefel", "geoopt"])
def test_bare_points_of_both_libraries_and_batches_and_tied_weights(kind: str) -> None:
    import geoopt

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            X = torch.linalg.qr(torch.randn(2, 6, 3, dtype=torch.float64))[0]
            self.point = (
                stiefel.ManifoldParameter(X)
                if kind == "stiefel"
                else geoopt.ManifoldParameter(X, geoopt.EuclideanStiefel())
            )
            self.first = nn.Linear(6, 6, dtype=torch.float64)
            stiefel.orthogonal(self.first, via="cwy", init="haar")
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(torch.tanh(self.first(x)))
            return (x @ self.point).sum((0, -1)).unsqueeze(-1)

    model = Mine()
    expected = oracle(model, loss_of)
    monitor = StationarityMonitor(model, 1, differential_every=1)
    with monitor:
        step(model, stiefel.optim.build(model, lr=1e-3, optimizer="sgd"))
    compare(monitor.records[0], expected)
    assert "point/canonical_norm" in expected
    assert monitor.records[0]["first.weight/differential_rank"] == 15


def train_together(rank: int, folder: str, queue: Any) -> None:
    """Three steps on data that differ between two processes; what rank 0 and 1 recorded."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = layers()
    logger, conditions = DictLogger(), SideConditions()
    wrapped = nn.parallel.DistributedDataParallel(model)
    monitor = StationarityMonitor(wrapped, 1, loggers=[logger], side_conditions=conditions)
    optimizer = sgd(model)
    for k in range(1, 4):
        optimizer.param_groups[0]["lr"] = k**-0.5
        expected = oracle(model, lambda model, k=k: loss_of(model, 10 * k + rank))
        with monitor:
            loss_of(wrapped, 10 * k + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare(monitor.records[-1], expected)
    norms = [row["model/euclidean_norm"] for row in monitor.records]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, (norms, len(logger.series), conditions.report().ok))
    if rank == 0:
        queue.put(gathered)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_processes_record_their_own_gradients_and_one_logs(tmp_path: Path) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train_together, (str(tmp_path), queue), nprocs=2)
    (first, logged, kept), (second, silent, also) = queue.get()
    assert len(set(first + second)) == 6
    assert logged > 0
    assert silent == 0
    assert kept  # the step was made from the averaged gradient
    assert also


def test_a_process_group_of_one_is_rank_zero(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/it", rank=0, world_size=1)
    try:
        model, logger = layers(), DictLogger()
        monitor = StationarityMonitor(
            nn.parallel.DistributedDataParallel(model), 1, loggers=[logger]
        )
        with monitor:
            step(model, sgd(model))
        assert "0.weight/canonical_norm" in logger.series
    finally:
        dist.destroy_process_group()
