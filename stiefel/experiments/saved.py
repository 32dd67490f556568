"""A run that was left in a folder, read back: its options, its task, and its weights."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, DataError
from stiefel.experiments.folder import RunFolder
from stiefel.experiments.methods import Method, method
from stiefel.experiments.module import build_model
from stiefel.experiments.options import TrainOptions, make_task, resolve
from stiefel.experiments.tasks import Batch, Task
from stiefel.experiments.training import read_checkpoint

__all__ = ["SavedRun"]

_MODEL = "model."  # what the keys of a checkpoint begin with
_NEVER_TRAINED = 2**40  # an epoch, or a step where there are none, that no run comes to


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run as it was when its checkpoint was written. Nothing of it is changed.

    Attributes:
        folder: Where its files are.
        checkpoint: The file that the weights come from.
        options: Its options, resolved.
        task: Its task.
        step: Training steps that are done.
    """

    folder: RunFolder
    checkpoint: Path
    options: TrainOptions
    task: Task
    step: int
    _state: dict[str, Tensor] = dataclasses.field(repr=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, data_dir: str | None = None) -> SavedRun:
        """Reads a run, finished or not.

        Args:
            path: The run folder, or a checkpoint in it.
            data_dir: Folder of data files, instead of the run's.

        Returns:
            The run, on the CPU.

        Raises:
            ConfigurationError: If there is no run at `path`, or no checkpoint in it yet.
            DataError: If the checkpoint is damaged or belongs to another run, or a data file is
                missing or wrong.
        """
        folder, checkpoint = _find(Path(path))
        options = folder.read_config()
        if data_dir is not None:
            options = dataclasses.replace(options, data_dir=data_dir)
        content = read_checkpoint(checkpoint)
        task = make_task(options)
        run = cls(
            folder,
            checkpoint,
            resolve(options, task),
            task,
            int(content["global_step"]),
            _weights(content["state_dict"]),
        )
        run.model()  # whether the weights fit is known now
        return run

    @property
    def method(self) -> Method:
        """How its recurrent weight is trained."""
        return method(self.options.method)

    @property
    def finished(self) -> bool:
        """Whether the checkpoint is that of the end of the run."""
        assert self.options.iterations is not None
        return self.step >= self.options.iterations and self.folder.summary.exists()

    def model(self, precision: str | None = None) -> nn.Module:
        """The model with its weights.

        Args:
            precision: ``"64"`` for a copy in float64 and complex128; None for the run's own.

        Returns:
            A new model at each call.

        Raises:
            DataError: If the weights do not fit the options.
        """
        options = dataclasses.replace(self.options, precision=precision or self.options.precision)
        with torch.random.fork_rng(devices=[]):
            model = build_model(options, self.task)
        try:
            model.load_state_dict(self._state)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{self.checkpoint}: its weights do not fit the options in {self.folder.config} "
                f"({reason}); put the checkpoint and the config.yaml of one run side by side"
            ) from error
        return model

    def batches(self, count: int, *, seed: int | None = None) -> list[Batch]:
        """Batches of the data that the run trains on, the same ones for the same arguments.

        They are those of steps that no run comes to. Where data is generated they are independent,
        and never trained on. Where there is a training set they are drawn from it without
        replacement, in an order that no epoch takes.

        Args:
            count: Number of batches, of the run's size.
            seed: Seed of the draw; the run's if None.

        Returns:
            The batches, their inputs in float64.

        Raises:
            ConfigurationError: If the training set has fewer.
        """
        task, size = self.task, self.options.batch_size
        assert size is not None
        if task.epoch_size is not None and count > task.epoch_size // size:
            raise ConfigurationError(
                f"--samples {count}: the training set has {task.epoch_size // size} batches of "
                f"{size}"
            )
        seed = self.options.seed if seed is None else seed
        first = _NEVER_TRAINED * (task.steps_per_epoch(size) or 1)
        drawn = (task.train_batch(first + k, size, seed=seed) for k in range(count))
        return [batch._replace(inputs=batch.inputs.double()) for batch in drawn]

    @property
    def population(self) -> int | None:
        """Sequences that `batches` draws from without replacement; None for independent draws."""
        return self.task.epoch_size


def _find(path: Path) -> tuple[RunFolder, Path]:
    """The folder and the checkpoint that `path` means.

    Raises:
        ConfigurationError: If it means none.
    """
    wanted = "expected a folder that stiefel train has left, or the checkpoint in one"
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file or folder; {wanted}")
    if path.is_dir():
        folder = RunFolder(path)
        if not folder.config.exists() and not folder.checkpoint.exists():
            raise ConfigurationError(
                f"{path}: is no run folder, for it has neither {folder.config.name} nor "
                f"{folder.checkpoint.name}; {wanted}"
            )
        checkpoint = folder.checkpoint
    else:
        folder, checkpoint = RunFolder(path.parent), path
        if path.name != folder.checkpoint.name and not zipfile.is_zipfile(path):
            raise ConfigurationError(f"{path}: is no checkpoint; {wanted}")
    if not folder.config.exists():
        raise ConfigurationError(
            f"{folder.config}: no such file; a checkpoint has the weights alone, and the "
            "config.yaml beside it says of which model and task: keep both in the run folder"
        )
    if not checkpoint.exists():
        raise ConfigurationError(
            f"{checkpoint}: no such file, so there are no weights to diagnose yet; a run writes "
            "it at every --checkpoint-every steps and at its end"
        )
    return folder, checkpoint


def _weights(state: Any) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        return {}
    return {str(name).removeprefix(_MODEL): value for name, value in state.items()}
