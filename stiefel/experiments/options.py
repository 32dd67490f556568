"""What can be asked of a training run, and how what was left out is filled in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from stiefel.errors import ConfigurationError, unknown
from stiefel.experiments.blocks import KERNEL_SIZE
from stiefel.experiments.methods import check_reflections, fitting, method
from stiefel.experiments.recipes import RECIPES
from stiefel.experiments.tasks import TASKS, Task

__all__ = [
    "EXPERIMENTS",
    "PRECISIONS",
    "DiagnoseOptions",
    "TrainOptions",
    "check_names",
    "make_task",
    "resolve",
]

#: Accepted precisions, and what Lightning calls them.
PRECISIONS = {
    "32": "32-true",
    "64": "64-true",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
}

#: What ``stiefel diagnose --experiment`` runs.
EXPERIMENTS = ("theorem4",)

#: What may differ between a run and its continuation. Devices, threads and the monitor, which
#: forms the weight on its steps, change the order of sums, hence the last bits; the others change
#: nothing.
_FREE_TO_CHANGE = (
    *("output", "resume", "data_dir", "iterations", "epochs", "checkpoint_every"),
    *("devices", "threads", "monitor_every"),
)

#: Options that belong to some tasks only, beside the folder of data.
_OF_TASKS = ("delay", "layout", "frames", "frame_size", "digits", "source", "evaluation_sequences")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """A training run. None means: the default of the task or of the method.

    Attributes:
        task: A name from `TASKS`.
        method: A name from `METHODS`.
        delay: Blank steps of the copying task.
        layout: Layout of the copying task.
        frames: Frames of a video of moving digits.
        frame_size: Pixels of a side of its frames.
        digits: Digits in it.
        source: Where its digits come from, ``"mnist"`` or ``"shapes"``.
        hidden: Hidden size; for frames, channels of the first level.
        reflections: Householder reflections of ``cwy``.
        iterations: Training steps.
        epochs: Epochs, instead of `iterations`, for a task that has them.
        batch_size: Sequences in a batch, over all devices together.
        lr: Main learning rate.
        lr_orthogonal: Learning rate of the recurrent weight.
        seed: Seed of the start and of the data.
        output: Run folder.
        resume: Continue the run in `output`.
        data_dir: Folder of data files; moving digits are generated shapes without one.
        devices: ``"auto"``, a number, or ``"cpu"``, ``"cpu:2"``, ``"cuda:4"``.
        precision: A name from `PRECISIONS`.
        threads: CPU threads of torch.
        evaluation_sequences: Fresh sequences or videos that a generated task is evaluated on.
        checkpoint_every: Training steps between checkpoints.
        monitor_every: Training steps between rows of ``stationarity.csv``; 0 for none.
    """

    task: str
    method: str = "cwy"
    delay: int | None = None
    layout: str | None = None
    frames: int | None = None
    frame_size: int | None = None
    digits: int | None = None
    source: str | None = None
    hidden: int | None = None
    reflections: int | None = None
    iterations: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    lr_orthogonal: float | None = None
    seed: int = 0
    output: str | None = None
    resume: bool = False
    data_dir: str | None = None
    devices: str = "auto"
    precision: str = "32"
    threads: int | None = None
    evaluation_sequences: int | None = None
    checkpoint_every: int | None = None
    monitor_every: int = 0

    def changed_from(self, other: TrainOptions) -> dict[str, tuple[Any, Any]]:
        """Options that decide what is trained and differ: name -> (other's, ours)."""
        pairs = {
            field.name: (getattr(other, field.name), getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in _FREE_TO_CHANGE
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclasses.dataclass(frozen=True)
class DiagnoseOptions:
    """A diagnosis, of a run or of an experiment. None means: the default.

    Attributes:
        run: A run folder, or a checkpoint in one.
        experiment: A name from `EXPERIMENTS`, instead of `run`.
        samples: Batches that the gradient of a run is estimated from.
        confidence: Confidence of intervals.
        threads: CPU threads of torch; None takes the run's.
        data_dir: Folder of data files; None takes the run's.
        steps: Training steps of an experiment.
        seeds: Draws of the noise in an experiment.
        seed: Seed of the batches, None takes the run's; or of the experiment, None takes 0.
        output: Folder of the picture and the numbers; None takes the run folder.
    """

    run: str | None = None
    experiment: str | None = None
    samples: int | None = None
    confidence: float | None = None
    threads: int | None = None
    data_dir: str | None = None
    steps: int | None = None
    seeds: int | None = None
    seed: int | None = None
    output: str | None = None


def check_names(options: TrainOptions) -> None:
    """Refuses names that do not exist or do not go together, before anything is loaded.

    Raises:
        UnknownNameError: If there is no such task, method or precision; the message lists the
            names that there are.
        ConfigurationError: If the method does not fit the task; the message lists those that do.
    """
    chosen = method(options.method)
    for kind, got, valid in (
        ("task", options.task, TASKS),
        ("precision", options.precision, PRECISIONS),
    ):
        if got not in valid:
            raise unknown(kind, got, valid)
    network = TASKS[options.task].network
    if not chosen.fits(network):
        raise ConfigurationError(
            f"--method {chosen.name}: does not fit {options.task}; expected one of "
            f"{', '.join(fitting(network))}"
        )


def make_task(options: TrainOptions) -> Task:
    """Makes the task of `options`.

    Raises:
        UnknownNameError: If there is no such task, layout, source, method or precision.
        ConfigurationError: If an option belongs to another task, is out of range, or the method
            does not fit.
        DataError: If a data file is missing or wrong.
    """
    check_names(options)
    kind = TASKS[options.task]
    values = {name: getattr(options, name) for name in (*_OF_TASKS, "data_dir")}
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in kind.options and name in _OF_TASKS:
            flag = "--" + name.replace("_", "-")
            owners = [task for task, other in TASKS.items() if name in other.options]
            raise ConfigurationError(
                f"{flag}: of the {' and '.join(owners)} task{'s' * (len(owners) > 1)} only, "
                f"{options.task} has no such"
            )
    return kind(**{name: value for name, value in given.items() if name in kind.options})


def resolve(options: TrainOptions, task: Task) -> TrainOptions:
    """Fills in everything that was left out, from the recipe of the task and the method's rule.

    Args:
        options: What was asked.
        task: The task, for its baseline and the length of its epochs.

    Returns:
        Options with sizes, rates and the number of iterations set.

    Raises:
        ConfigurationError: If options do not go together or are out of range.
    """
    chosen, recipe = method(options.method), RECIPES[options.task]
    hidden = _positive("--hidden", _default(options.hidden, recipe.hidden))
    batch_size = _positive("--batch-size", _default(options.batch_size, recipe.batch_size))
    _check_reflections(options, task, hidden)
    lr = _rate("--lr", _default(options.lr, recipe.lr))
    frames = task.network == "frames"
    shape = (KERNEL_SIZE**2 * hidden if frames else hidden, hidden)
    own_rate = chosen.orthogonal_rate(lr, task.baseline, task.length, shape)
    if own_rate is None and options.lr_orthogonal is not None:
        raise ConfigurationError(
            f"--lr-orthogonal: {chosen.name} has no learning rate of its own for the recurrent "
            "weight; leave it out, or choose another method"
        )
    if options.lr_orthogonal is not None:
        own_rate = _rate("--lr-orthogonal", options.lr_orthogonal)
    iterations = _length(options, task, batch_size)
    every = _default(options.checkpoint_every, max(1, min(100, iterations // 5)))
    reflects = chosen.takes_reflections and not frames
    return dataclasses.replace(
        options,
        threads=recipe.threads if options.threads is None else options.threads,
        **{name: getattr(task, name) if name in task.options else None for name in _OF_TASKS},
        hidden=hidden,
        reflections=_default(options.reflections, hidden) if reflects else None,
        iterations=iterations,
        epochs=None,
        batch_size=batch_size,
        lr=lr,
        lr_orthogonal=own_rate,
        checkpoint_every=_positive("--checkpoint-every", every),
    )


def _check_reflections(options: TrainOptions, task: Task, hidden: int) -> None:
    """Refuses a number of reflections that the task or the method cannot use."""
    if task.network == "frames" and options.reflections is not None:
        raise ConfigurationError(
            f"--reflections: {task.name} has kernels of several widths, each with as many "
            "reflections as columns; leave it out"
        )
    check_reflections(method(options.method), options.reflections, hidden)


def _length(options: TrainOptions, task: Task, batch_size: int) -> int:
    """Training steps, from iterations or epochs, asked for or of the recipe."""
    recipe, steps = RECIPES[options.task], task.steps_per_epoch(batch_size)
    if options.iterations is not None and options.epochs is not None:
        raise ConfigurationError("--iterations and --epochs say the same thing: give one of them")
    if options.iterations is not None:
        return _positive("--iterations", options.iterations)
    if options.epochs is not None and steps is None:
        raise ConfigurationError(
            f"--epochs: {task.name} makes data without end, so it has no epochs; "
            "say --iterations instead"
        )
    epochs = _default(options.epochs, recipe.epochs)
    if epochs is None or steps is None:
        return _positive("--iterations", _default(recipe.iterations, 1))
    return _positive("--epochs", epochs) * steps


_Value = TypeVar("_Value")


def _default(value: _Value | None, otherwise: _Value) -> _Value:
    return otherwise if value is None else value


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"expected {flag} to be at least 1, got {value}")
    return value


def _rate(flag: str, value: float) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigurationError(f"expected {flag} to be finite and not negative, got {value}")
    return value
