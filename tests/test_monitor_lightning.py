"""The monitor as a Lightning callback: rows, accumulation, checkpoints, exceptions, precision."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stiefel
from stiefel.diagnostics import DictLogger, LightningCallback, SideConditions
from stiefel.errors import ConfigurationError
from tests.monitored_runs import compare, none_left_watched, oracle

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.filterwarnings("ignore")


class Regression(LightningModule):
    """A tall weight and a head; keeps what each optimizer step should have recorded."""

    def __init__(self, accumulate: int = 1, fail_at: int | None = None, check: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 1)
        stiefel.orthogonal(self.body, via="cwy", init="haar", generator=generator)
        for parameter in (self.body.bias, *self.head.parameters()):
            nn.init.normal_(parameter, generator=generator)
        self.double()
        self.accumulate, self.fail_at, self.check = accumulate, fail_at, check
        self.expected: list[dict[str, float]] = []
        self._batches: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.fail_at:
            raise KeyError("mine")
        self._batches.append(batch)
        if self.check and len(self._batches) == self.accumulate:
            batches, self._batches = self._batches, []
            model = nn.ModuleDict({"body": self.body, "head": self.head})

            def loss(model: Any) -> Any:
                out = [model["head"](torch.tanh(model["body"](x))) - y for x, y in batches]
                return sum(each.square().mean() for each in out) / self.accumulate

            self.expected.append(oracle(model, loss))
        x, y = batch
        return (self(x) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return stiefel.optim.build(self, lr=1e-2, lr_orthogonal=1e-2, optimizer="sgd")


def data(dtype: torch.dtype = torch.float64, rows: int = 48) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 5, dtype=dtype, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1, keepdim=True)), batch_size=8)


def trainer(folder: Path, *callbacks: Any, logger: Any = False, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"enable_checkpointing": False, **quiet, **options}
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), logger=logger, **options)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    with none_left_watched():
        yield


@pytest.mark.parametrize("accumulate", [1, 4])
def test_rows_are_those_of_the_optimizer_steps(tmp_path: Path, accumulate: int) -> None:
    module, logger = Regression(accumulate), DictLogger()
    conditions = SideConditions(lambda k: 1e-2)
    callback = LightningCallback(2, loggers=[logger], side_conditions=conditions)
    with pytest.raises(ConfigurationError, match="made when the fit starts"):
        _ = callback.monitor
    run = trainer(
        tmp_path, callback, accumulate_grad_batches=accumulate, max_epochs=4, limit_train_batches=4
    )
    run.fit(module, data(), data())
    monitor = callback.monitor
    steps = 16 // accumulate
    assert monitor.step == run.global_step == steps
    assert [row["step"] for row in monitor.records] == [1, *range(2, steps + 1, 2)]
    for row in monitor.records:
        compare(row, module.expected[row["step"] - 1])
    assert list(logger.series["model/canonical_norm"]) == [r["step"] for r in monitor.records]
    assert monitor.report().ok
    assert conditions.steps == len(monitor.records)


def test_rows_go_to_the_loggers_of_the_trainer(tmp_path: Path) -> None:
    logger = LightningCSVLogger(tmp_path, name="", version="")
    run = trainer(tmp_path, LightningCallback(3), logger=logger, max_epochs=1, log_every_n_steps=1)
    run.fit(Regression(check=False), data())
    written = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "body.weight/canonical_norm" in written[0]
    assert len(written) == 1 + 3


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    whole = LightningCallback(4)
    trainer(tmp_path, whole, max_steps=12).fit(Regression(check=False), data())
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=6, filename="at-{step}")
    first, second = LightningCallback(4), LightningCallback(4)
    options = {"enable_checkpointing": True}
    trainer(tmp_path, first, saver, max_steps=6, **options).fit(Regression(check=False), data())
    path = str(tmp_path / "at-step=6.ckpt")
    assert torch.load(path, weights_only=True)["callbacks"]
    trainer(tmp_path, second, max_steps=12).fit(Regression(check=False), data(), ckpt_path=path)
    assert second.monitor.records == whole.monitor.records
    assert [row["step"] for row in second.monitor.records] == [1, 4, 8, 12]


def test_a_callback_that_joins_late_counts_from_the_run(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=6, filename="at-{step}")
    trainer(tmp_path, saver, max_steps=6, enable_checkpointing=True).fit(
        Regression(check=False), data()
    )
    late = LightningCallback(4)
    path = str(tmp_path / "at-step=6.ckpt")
    trainer(tmp_path, late, max_steps=9).fit(Regression(check=False), data(), ckpt_path=path)
    assert [row["step"] for row in late.monitor.records] == [8]


def test_an_exception_leaves_nothing_on_the_model(tmp_path: Path) -> None:
    callback = LightningCallback(2)
    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path, callback, max_steps=9).fit(Regression(check=False, fail_at=3), data())
    assert [row["step"] for row in callback.monitor.records] == [1, 2]
    assert callback.monitor.step == 3


def test_steps_that_end_in_the_middle_of_an_accumulation_are_not_counted(tmp_path: Path) -> None:
    callback = LightningCallback(1)

    class Stops(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.trainer.should_stop = True

    module = Stops(check=False)
    trainer(tmp_path, callback, accumulate_grad_batches=4, max_epochs=1).fit(module, data())
    assert callback.monitor.step == len(callback.monitor.records)


def test_half_precision_and_its_scale(tmp_path: Path) -> None:
    class Scaled(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = scaler
    scaled, plain = LightningCallback(1), LightningCallback(1)
    for callback, plugins in ((scaled, [plugin]), (plain, [MixedPrecision("bf16-mixed", "cpu")])):
        module = Scaled(check=False).float()
        trainer(tmp_path, callback, plugins=plugins, max_steps=3).fit(module, data(torch.float32))
    for row, other in zip(scaled.monitor.records, plain.monitor.records, strict=True):
        assert math.isclose(row["model/gradient_norm"], other["model/gradient_norm"], rel_tol=1e-2)


def test_without_a_constrained_weight_the_fit_does_not_start(tmp_path: Path) -> None:
    module = Regression(check=False)
    stiefel.release(module)
    with pytest.raises(ConfigurationError, match="no constrained weight"):
        trainer(tmp_path, LightningCallback(), max_steps=1).fit(module, data())


def test_lightning_is_loaded_when_the_callback_is_asked_for() -> None:
    code = (
        "import sys, stiefel\n"
        "from stiefel.diagnostics import *\n"
        "assert not {'lightning', 'tensorboard'} & set(sys.modules)\n"
        "assert 'LightningCallback' in dir(stiefel.diagnostics)\n"
        "from stiefel.diagnostics import LightningCallback\n"
        "from lightning.pytorch import Callback\n"
        "assert issubclass(LightningCallback, Callback)\n"
        "assert stiefel.diagnostics.loggers.LightningCallback is LightningCallback\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)
