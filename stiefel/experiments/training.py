"""One training run: the loop is Lightning's, the folder it leaves is described in `folder`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from stiefel.diagnostics import CSVLogger, LightningCallback
from stiefel.errors import ConfigurationError, DataError
from stiefel.experiments.callbacks import AtomicCheckpointIO, Checkpointer, ProgressLine, Recorder
from stiefel.experiments.folder import RunFolder
from stiefel.experiments.history import read_record
from stiefel.experiments.logs import MetricsFile, read_metrics
from stiefel.experiments.module import Experiment, build_model
from stiefel.experiments.options import PRECISIONS, TrainOptions, make_task, resolve
from stiefel.experiments.report import plot_loss, print_table, warn_if_diverged
from stiefel.experiments.tasks import Task

__all__ = ["read_checkpoint", "torch_threads", "train"]

_FOLDER_OF_LAUNCHER = "STIEFEL_RUN_FOLDER"
_IN_CHECKPOINT = (
    *("global_step", "state_dict", "optimizer_states", "loops", "callbacks", "rng_state"),
)


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
        ConfigurationError: If options do not go together, or the folder is taken or cannot be
            written.
        UnknownNameError: If a task, method, layout or precision is unknown.
        DataError: If a data file, or a file of the run to resume, is missing or wrong.
        NonFiniteError: If the loss or a weight stops being finite.
    """
    began = time.perf_counter()
    console = console or Console()
    task = make_task(options)
    resolved = resolve(options, task)
    hardware = _hardware(resolved)
    with _disk_errors(), _environment_restored():
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:  # started by the process of rank 0
            folder = RunFolder(os.environ.get(_FOLDER_OF_LAUNCHER) or options.output or ".")
            return _run(_Run(folder, resolved, task, hardware, console, began))
        folder = RunFolder.of(options)
        if options.resume and (done := _finished(folder, resolved)):
            _conclude(console, folder, done)
            return done
        with folder.locked():
            _check(folder, resolved)
            folder.summary.unlink(missing_ok=True)  # from here on the run is not finished
            folder.write_config(resolved)
            os.environ[_FOLDER_OF_LAUNCHER] = str(folder.path)
            return _run(_Run(folder, resolved, task, hardware, console, began))


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run whose folder is ready.

    Attributes:
        folder: Where its files go.
        options: Resolved options.
        task: The task.
        hardware: What `parse_devices` returns.
        console: Where to write.
        began: `time.perf_counter()` at the start of the run.
    """

    folder: RunFolder
    options: TrainOptions
    task: Task
    hardware: tuple[str, int]
    console: Console
    began: float


def _run(run: _Run) -> dict[str, Any]:
    """Trains to the end, from the checkpoint if there is one."""
    folder, options, task = run.folder, run.options, run.task
    with torch_threads(options.threads), _quiet():
        torch.manual_seed(options.seed)
        experiment = Experiment(build_model(options, task), task, options)
        resuming = folder.checkpoint.exists()
        done = int(read_checkpoint(folder.checkpoint)["global_step"]) if resuming else 0
        recorder = _recorder(options, task, run.began)
        trainer = _trainer(run, recorder, done if resuming else None)
        if trainer.is_global_zero:
            _announce(run.console, folder, experiment, resuming)
        trainer.fit(experiment, ckpt_path=str(folder.checkpoint) if resuming else None)
    summary = _summary(options, task, recorder, trainer.global_step)
    if trainer.is_global_zero:
        title = f"{task.describe()}; {options.method}"
        plot_loss(
            folder.metrics, folder.plot, baseline=task.baseline, title=title, measure=task.measure
        )
        folder.write_summary(summary)
        _conclude(run.console, folder, summary)
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint whole, and checks that it is one.

    Args:
        path: The file; its sums are checked, so that a changed byte is found as well as a lost one.

    Returns:
        What is in it, on the CPU.

    Raises:
        DataError: If it is damaged, or not a checkpoint of a run.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
        if changed is not None:
            raise ValueError(f"{changed} does not have its sum")
        found = AtomicCheckpointIO().load_checkpoint(path)
        missing = [name for name in _IN_CHECKPOINT if name not in found]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
    except OSError:
        raise
    except Exception as error:  # what torch raises for a bad file depends on where it is bad
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"checkpoint damaged: {path} ({reason}); put a copy of it back, or start anew with "
            "another --output. The other files of the run are as they were"
        ) from error
    return found


def _hardware(resolved: TrainOptions) -> tuple[str, int]:
    """What to compute on, with at least one sequence of a batch for each device."""
    accelerator, devices = parse_devices(resolved.devices)
    assert resolved.batch_size is not None
    if devices > resolved.batch_size:
        raise ConfigurationError(
            f"--devices {devices}: more than the {resolved.batch_size} sequences of a batch"
        )
    return accelerator, devices


def _finished(folder: RunFolder, resolved: TrainOptions) -> dict[str, Any] | None:
    """The summary of a run that is there and as long as asked for; None if there is more to do."""
    if not folder.summary.exists():
        return None
    if folder.config.exists():
        folder.check_same(resolved)
    summary = folder.read_summary()
    assert resolved.iterations is not None
    return summary if summary["iterations"] >= resolved.iterations else None


def _check(folder: RunFolder, resolved: TrainOptions) -> None:
    """Refuses a run that could not be written or continued, before any file is touched."""
    if not resolved.resume:
        return folder.check_free()
    if folder.config.exists():
        folder.check_same(resolved)
    read_metrics(folder.metrics)
    read_record(folder.stationarity)
    if not folder.checkpoint.exists():
        if folder.summary.exists():
            raise DataError(
                f"{folder.checkpoint}: no such file, so the finished run there cannot be "
                "continued; put a copy of it back, or start anew with another --output"
            )
        return None
    checkpoint = read_checkpoint(folder.checkpoint)
    done, state = checkpoint["global_step"], checkpoint["callbacks"].get(Recorder.__qualname__, {})
    assert resolved.iterations is not None
    if done > resolved.iterations or (
        done == resolved.iterations and state.get("evaluation") is None
    ):
        raise ConfigurationError(
            f"--iterations {resolved.iterations}: the run in {folder.path} is already past that "
            f"(step {done}); ask for more, or for another folder"
        )
    return None


def _recorder(resolved: TrainOptions, task: Task, began: float) -> Recorder:
    assert resolved.iterations is not None
    assert resolved.batch_size is not None
    every = max(1, min(10, resolved.iterations // 20))
    return Recorder(every, task.steps_per_epoch(resolved.batch_size), began)


def _monitor(run: _Run) -> list[Callback]:
    """What writes ``stationarity.csv``, where that is asked for."""
    every = run.options.monitor_every
    if not every:
        return []
    # rows that a killed run wrote after its last checkpoint are dropped when they come again
    record = CSVLogger(run.folder.stationarity, resume=True)
    return [LightningCallback(every, loggers=[record], unconstrained=True)]


def _trainer(run: _Run, recorder: Recorder, resume_step: int | None) -> Trainer:
    folder, resolved = run.folder, run.options
    accelerator, devices = run.hardware
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
            MetricsFile(folder.metrics, resume_step=resume_step or 0),
            TensorBoardLogger(
                folder.path,
                name="",
                version=folder.tensorboard.name,
                purge_step=None if resume_step is None else resume_step + 1,
            ),
        ],
        callbacks=[
            recorder,
            *_monitor(run),  # before the checkpoint, so that no row is lost between the two
            Checkpointer(folder.checkpoint, resolved.checkpoint_every),
            ProgressLine(run.console, recorder),
        ],
        plugins=[AtomicCheckpointIO()],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _announce(console: Console, folder: RunFolder, experiment: Experiment, resuming: bool) -> None:
    options, task = experiment.options, experiment.task
    count = sum(weight.numel() for weight in experiment.parameters() if weight.requires_grad)
    rates = f"lr {options.lr:g}"
    if options.lr_orthogonal is not None:
        rates += f", recurrent weight {options.lr_orthogonal:.3g}"
    lines = [
        f"{task.describe()}; method {options.method} ({experiment.method.summary})",
        f"hidden {options.hidden}, {count:,} parameters; batch {options.batch_size}; {rates}",
        f"{options.iterations:,} steps; baseline {task.baseline:.4g} ({task.baseline_word})",
        f"run folder {folder.path}",
    ]
    if resuming:
        lines.append("continuing from the last checkpoint")
    elif options.resume:
        lines.append("no checkpoint there yet: starting from the beginning")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _summary(
    resolved: TrainOptions, task: Task, recorder: Recorder, iterations: int
) -> dict[str, Any]:
    assert recorder.evaluation is not None
    error = recorder.orthogonality_error
    return {
        "task": resolved.task,
        "method": resolved.method,
        "seed": resolved.seed,
        "iterations": iterations,
        "loss": recorder.evaluation.loss,
        "baseline": task.baseline,
        "accuracy": recorder.evaluation.accuracy,
        # JSON has no NaN: null where a model has no weight to measure
        "orthogonality_error": None if math.isnan(error) else error,
        "seconds": round(recorder.seconds, 3),
    }


def _conclude(console: Console, folder: RunFolder, summary: dict[str, Any]) -> None:
    warn_if_diverged(console, summary, folder.metrics)
    print_table(console, summary)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turns what the system says about files into an error of this library."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the files of the run cannot be read or written: {error}; name another folder with "
            "--output, or mend this one"
        ) from error


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """Takes back what the run and its launcher tell the processes that they start."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Computes with `count` CPU threads inside the block; None leaves torch's choice."""
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
        # A run may be continued with another --monitor-every, or without.
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
        try:
            yield
        finally:
            logger.setLevel(before)
