"""One training run: the loop is Lightning's, the folder it leaves is described in `folder`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from stiefel.errors import ConfigurationError
from stiefel.experiments.callbacks import AtomicCheckpointIO, Checkpointer, ProgressLine, Recorder
from stiefel.experiments.folder import RunFolder
from stiefel.experiments.logs import MetricsFile
from stiefel.experiments.module import Experiment, build_model
from stiefel.experiments.options import PRECISIONS, TrainOptions, make_task, resolve
from stiefel.experiments.report import plot_loss, print_table
from stiefel.experiments.tasks import Task

__all__ = ["train"]

_FOLDER_OF_LAUNCHER = "STIEFEL_RUN_FOLDER"


def train(options: TrainOptions, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates, and leaves a run folder.

    Two calls with the same options and number of threads give the same numbers, bit for bit, on
    the CPU, also when one of them was killed and resumed.

    Args:
        options: What to train; see `TrainOptions`.
        console: Where progress and the closing table are written; standard output if None.

    Returns:
        The content of ``summary.json``.

    Raises:
        ConfigurationError: If options do not go together, or the folder is taken.
        UnknownNameError: If a task, method, layout or precision is unknown.
        DataError: If a data file is missing or wrong.
        NonFiniteError: If the loss stops being finite.
    """
    began = time.perf_counter()
    console = console or Console()
    task = make_task(options)
    resolved = resolve(options, task)
    accelerator, devices = parse_devices(options.devices)
    if (
        resolved.batch_size is not None
        and isinstance(devices, int)
        and devices > resolved.batch_size
    ):
        raise ConfigurationError(
            f"--devices {devices}: more than the {resolved.batch_size} sequences of a batch"
        )
    folder = _open_folder(options, resolved)
    if folder.summary.exists() and (done := _already_done(folder, resolved)):
        print_table(console, done)
        return done
    with _threads(options.threads), _quiet():
        torch.manual_seed(resolved.seed)
        experiment = Experiment(build_model(resolved, task), task, resolved)
        resuming = folder.checkpoint.exists()
        recorder = _recorder(resolved, task, began)
        trainer = _trainer(folder, resolved, recorder, console, (accelerator, devices), resuming)
        if trainer.is_global_zero:
            _announce(console, folder, experiment, resuming, asked=options.resume)
        trainer.fit(experiment, ckpt_path=str(folder.checkpoint) if resuming else None)
    if recorder.evaluation is None:
        raise ConfigurationError(
            f"--iterations {resolved.iterations}: the run in {folder.path} is already past that "
            f"(step {trainer.global_step}); ask for more, or for another folder"
        )
    summary = _summary(resolved, task, recorder, trainer.global_step)
    if trainer.is_global_zero:
        _report(console, folder, summary, task)
    return summary


def parse_devices(text: str) -> tuple[str, int]:
    """Reads ``--devices``: what to compute on, and on how many.

    Args:
        text: ``"auto"`` (a GPU if there is one), a number of them, or a kind and a number such
            as ``"cpu"``, ``"cpu:2"``, ``"cuda:4"``.

    Returns:
        The accelerator and the number of devices, as Lightning takes them.

    Raises:
        ConfigurationError: If it is none of these, or the machine has fewer GPUs.
    """
    found = re.fullmatch(r"(auto|cpu|cuda)?(?:(?:(?<=[a-z]):|^)([1-9][0-9]*))?", text)
    if not text or found is None:
        raise ConfigurationError(
            f"--devices {text!r}: expected auto, a number, or a kind and a number such as cpu, "
            "cpu:2 or cuda:4"
        )
    kind, count = found[1] or "auto", int(found[2] or 1)
    present = torch.cuda.device_count()
    if kind == "auto":
        kind = "cuda" if present else "cpu"
    if kind == "cuda" and count > present:
        raise ConfigurationError(f"--devices {text}: this machine has {present} CUDA devices")
    return kind, count


def _open_folder(options: TrainOptions, resolved: TrainOptions) -> RunFolder:
    """The folder of the run, checked, with the options of the run in it."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:  # started by the process of rank 0
        return RunFolder(os.environ.get(_FOLDER_OF_LAUNCHER) or options.output or ".")
    folder = RunFolder.of(options)
    if not options.resume:
        folder.check_free()
    elif folder.config.exists():
        folder.check_same(resolved)
    os.environ[_FOLDER_OF_LAUNCHER] = str(folder.path)
    if not (options.resume and folder.summary.exists()):
        folder.write_config(resolved)
    return folder


def _already_done(folder: RunFolder, resolved: TrainOptions) -> dict[str, Any] | None:
    """The summary of a finished run; None, and no longer finished, if more steps are asked for."""
    summary = json.loads(folder.summary.read_text())
    if resolved.iterations is not None and summary["iterations"] >= resolved.iterations:
        return summary
    folder.summary.unlink()
    folder.write_config(resolved)
    return None


def _recorder(resolved: TrainOptions, task: Task, began: float) -> Recorder:
    assert resolved.iterations is not None
    assert resolved.batch_size is not None
    every = max(1, min(10, resolved.iterations // 20))
    return Recorder(every, task.steps_per_epoch(resolved.batch_size), began)


def _trainer(
    folder: RunFolder,
    resolved: TrainOptions,
    recorder: Recorder,
    console: Console,
    hardware: tuple[str, int],
    resuming: bool,
) -> Trainer:
    done = 0
    if resuming:
        done = int(AtomicCheckpointIO().load_checkpoint(folder.checkpoint)["global_step"])
    accelerator, devices = hardware
    assert resolved.iterations is not None
    assert resolved.checkpoint_every is not None
    return Trainer(
        accelerator="gpu" if accelerator == "cuda" else accelerator,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=PRECISIONS[resolved.precision],  # pyright: ignore[reportArgumentType]
        max_steps=resolved.iterations,
        max_epochs=-1,
        default_root_dir=folder.path,
        logger=[
            MetricsFile(folder.metrics, resume_step=done),
            TensorBoardLogger(
                folder.path,
                name="",
                version=folder.tensorboard.name,
                purge_step=done + 1 if resuming else None,
            ),
        ],
        callbacks=[
            recorder,
            Checkpointer(folder.checkpoint, resolved.checkpoint_every),
            ProgressLine(console, recorder),
        ],
        plugins=[AtomicCheckpointIO()],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _announce(
    console: Console, folder: RunFolder, experiment: Experiment, resuming: bool, *, asked: bool
) -> None:
    options, task = experiment.options, experiment.task
    count = sum(weight.numel() for weight in experiment.parameters() if weight.requires_grad)
    rates = f"lr {options.lr:g}"
    if options.lr_orthogonal is not None:
        rates += f", recurrent weight {options.lr_orthogonal:.3g}"
    lines = [
        f"{task.describe()}; method {options.method} ({experiment.method.summary})",
        f"hidden {options.hidden}, {count:,} parameters; batch {options.batch_size}; {rates}",
        f"{options.iterations:,} steps; baseline {task.baseline:.4g}; run folder {folder.path}",
    ]
    if resuming:
        lines.append("continuing from the last checkpoint")
    elif asked:
        lines.append("no checkpoint there yet: starting from the beginning")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _summary(
    resolved: TrainOptions, task: Task, recorder: Recorder, iterations: int
) -> dict[str, Any]:
    assert recorder.evaluation is not None
    return {
        "task": resolved.task,
        "method": resolved.method,
        "seed": resolved.seed,
        "iterations": iterations,
        "loss": recorder.evaluation.loss,
        "baseline": task.baseline,
        "accuracy": recorder.evaluation.accuracy,
        "orthogonality_error": recorder.orthogonality_error,
        "seconds": round(recorder.seconds, 3),
    }


def _report(console: Console, folder: RunFolder, summary: dict[str, Any], task: Task) -> None:
    plot_loss(
        folder.metrics,
        folder.plot,
        baseline=task.baseline,
        title=f"{task.describe()}; {summary['method']}",
    )
    folder.write_summary(summary)
    print_table(console, summary)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the loop's remarks on the machine; its warnings and errors still come through."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Lightning looks at torch's trees in a way that newer torch deprecates.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        try:
            yield
        finally:
            logger.setLevel(before)
