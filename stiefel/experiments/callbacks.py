"""What happens between training steps: measuring, saving, and telling how far the run has come."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stiefel.errors import NonFiniteError
from stiefel.experiments.folder import atomic_path
from stiefel.experiments.module import Evaluation, Experiment, orthogonality_error

__all__ = ["AtomicCheckpointIO", "Checkpointer", "ProgressLine", "Recorder"]

_REFRESH_SECONDS = 0.2


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are whole or absent, and that load without running code."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Writes beside `path`, then takes its place."""
        with atomic_path(Path(path)) as temporary:
            torch.save(checkpoint, temporary)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads tensors and plain values only."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


class Recorder(Callback):
    """Measures every `every` steps, evaluates at the end of each epoch and of the run.

    Args:
        every: Training steps between rows of the metrics.
        evaluate_every: Training steps between evaluations; None evaluates at the end only.
        began: `time.perf_counter()` at the start of the run.
    """

    def __init__(self, every: int, evaluate_every: int | None, began: float) -> None:
        self.every, self.evaluate_every, self._began = every, evaluate_every, began
        self._seconds_before = 0.0
        self.latest: dict[str, float] = {}
        self.evaluation: Evaluation | None = None
        self.orthogonality_error = math.nan

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its parts; the time lost by a kill is not in it."""
        return self._seconds_before + time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on, or to report if it was already done."""
        found = self.evaluation
        return {
            "seconds": self.seconds,
            "orthogonality_error": self.orthogonality_error,
            "evaluation": None if found is None else (found.loss, found.accuracy),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over from the run that was interrupted."""
        self._seconds_before = state_dict["seconds"]
        self.orthogonality_error = state_dict["orthogonality_error"]
        found = state_dict["evaluation"]
        self.evaluation = None if found is None else Evaluation(*found)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Measures, on the steps where it is due."""
        assert isinstance(pl_module, Experiment)
        step = trainer.global_step
        last = step >= trainer.max_steps
        evaluating = last or (self.evaluate_every and step % self.evaluate_every == 0)
        if not (evaluating or step == 1 or step % self.every == 0):
            return
        row = self._measure(pl_module, outputs, batch, step)
        if evaluating:
            self.evaluation = pl_module.evaluate()
            if not math.isfinite(self.evaluation.loss):
                raise _not_finite(f"the evaluation loss is {self.evaluation.loss}", step, pl_module)
            row["evaluation_loss"] = self.evaluation.loss
            row["evaluation_accuracy"] = self.evaluation.accuracy
        self.latest = {**self.latest, **row}
        for logger in trainer.loggers:
            logger.log_metrics({**row, "seconds": self.seconds}, step)

    def _measure(
        self, experiment: Experiment, outputs: Mapping[str, Any], batch: Any, step: int
    ) -> dict[str, float]:
        scores = experiment.scores_of(outputs["logits"], batch)
        if not math.isfinite(scores.loss):
            raise _not_finite(f"the training loss is {scores.loss}", step, experiment)
        self.orthogonality_error = orthogonality_error(experiment.model)
        return {
            "loss": scores.loss,
            "accuracy": scores.accuracy,
            "orthogonality_error": self.orthogonality_error,
        }


def _not_finite(what: str, step: int, experiment: Experiment) -> NonFiniteError:
    return NonFiniteError(
        f"{what} at step {step}, so a learning rate is too large: lower --lr (now "
        f"{experiment.options.lr:g}) or --lr-orthogonal (now {experiment.options.lr_orthogonal})"
    )


class Checkpointer(Callback):
    """Saves the run every `every` steps and at its end, over the checkpoint before.

    Weights that are not finite are not saved: they end the run, and the checkpoint before stays.

    Args:
        path: The one checkpoint of the run.
        every: Training steps between checkpoints.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Saves, on the steps where it is due."""
        step = trainer.global_step
        if not (step % self.every == 0 or step >= trainer.max_steps):
            return
        assert isinstance(pl_module, Experiment)
        for name, weight in pl_module.model.named_parameters():
            if not bool(torch.isfinite(weight.detach()).all()):
                raise _not_finite(f"the weight {name} is not finite", step, pl_module)
        trainer.save_checkpoint(self.path)


class ProgressLine(Callback):
    """A bar on a terminal; elsewhere a line at each tenth of the run.

    Args:
        console: Where to write.
        recorder: Where the loss is read, so that a bar never waits for the device.
    """

    def __init__(self, console: Console, recorder: Recorder) -> None:
        self._console, self._recorder = console, recorder
        self._bar: Progress | None = None
        self._shown = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the bar."""
        if not (trainer.is_global_zero and self._console.is_terminal):
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(
            "", total=trainer.max_steps, completed=trainer.global_step, loss="-"
        )
        self._bar.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Moves the bar, a few times a second."""
        step, total = trainer.global_step, trainer.max_steps
        loss = self._recorder.latest.get("loss", math.nan)
        if self._bar is not None:
            now = time.perf_counter()
            if now - self._shown > _REFRESH_SECONDS or step >= total:
                self._bar.update(self._task, completed=step, loss=f"{loss:.4g}")
                self._shown = now
        elif trainer.is_global_zero and (step * 10) // total > ((step - 1) * 10) // total:
            self._console.print(
                f"step {step} of {total}: loss {loss:.4g}, {self._recorder.seconds:.0f} s"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the bar as it is."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leaves the bar, so that the message stands alone."""
        self._stop()
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            self._console.print(
                "interrupted; the same command with --output "
                f"{trainer.default_root_dir} --resume goes on from the last checkpoint",
                soft_wrap=True,
                highlight=False,
            )

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
