"""The words of the command line and of configuration files, read into options."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
)

from stiefel.errors import ConfigurationError, unknown
from stiefel.experiments.folder import RunFolder
from stiefel.experiments.methods import fitting
from stiefel.experiments.options import (
    EXPERIMENTS,
    PRECISIONS,
    DiagnoseOptions,
    TrainOptions,
    check_names,
)
from stiefel.experiments.recipes import RECIPES
from stiefel.experiments.sprites import SOURCES
from stiefel.experiments.tasks import FRAME_SIZES, LAYOUTS, TASKS

__all__ = ["parse"]

# the noise of a batch is seen by comparing batches; all their gradients are kept
_Samples: Any = restricted_number_type("Samples", int, [(">=", 4), ("<=", 4096)])
_Threads: Any = restricted_number_type("Threads", int, [(">=", 1), ("<=", 1024)])

_EXPECTED = {
    _Threads: "a whole number from 1 to 1024",
    _Samples: "a whole number from 4 to 4096",
    PositiveInt: "a whole number of at least 1",
    NonNegativeInt: "a whole number of at least 0",
    NonNegativeFloat: "a number of at least 0",
}


@dataclasses.dataclass(frozen=True)
class _Flag:
    """A flag of a command: how its value is written, what it is, and what it must be."""

    metavar: str
    help: str
    type: Any = str


def _of_task(name: str) -> str:
    return ", ".join(f"{getattr(recipe, name):g} for {task}" for task, recipe in RECIPES.items())


def _length() -> str:
    return ", ".join(
        f"{recipe.iterations} iterations" if recipe.iterations else f"{recipe.epochs} epochs"
        for recipe in RECIPES.values()
    )


def _methods() -> str:
    networks = dict.fromkeys(task.network for task in TASKS.values())
    return "; for ".join(
        f"{', '.join(name for name, task in TASKS.items() if task.network == network)}: "
        f"{', '.join(fitting(network))}"
        for network in networks
    )


_FLAGS = {
    "method": _Flag(
        "METHOD", f"how the recurrent weight is trained (default: cwy), for {_methods()}"
    ),
    "delay": _Flag("STEPS", "copying: steps between the symbols and the answer (100)", PositiveInt),
    "layout": _Flag(
        "NAME", f"copying: where the marker stands, {' or '.join(LAYOUTS)} (default: expRNN)"
    ),
    "frames": _Flag("NUMBER", "moving-digits: frames of a video (10)", PositiveInt),
    "frame_size": _Flag(
        "PIXELS",
        f"moving-digits: side of a frame, of {', '.join(map(str, FRAME_SIZES))} (32)",
        PositiveInt,
    ),
    "digits": _Flag("NUMBER", "moving-digits: digits in a video (2)", PositiveInt),
    "source": _Flag(
        "NAME",
        f"moving-digits: {' or '.join(SOURCES)} (default: mnist with --data-dir, else shapes, "
        "which are generated)",
    ),
    "hidden": _Flag("SIZE", f"hidden size ({_of_task('hidden')})", PositiveInt),
    "reflections": _Flag("NUMBER", "cwy: reflections (default: the hidden size)", PositiveInt),
    "iterations": _Flag("STEPS", f"training steps (default: {_length()})", PositiveInt),
    "epochs": _Flag("NUMBER", "smnist, pmnist: epochs, instead of --iterations", PositiveInt),
    "batch_size": _Flag(
        "NUMBER", f"sequences in a batch, over all devices ({_of_task('batch_size')})", PositiveInt
    ),
    "lr": _Flag("RATE", f"main learning rate ({_of_task('lr')})", NonNegativeFloat),
    "lr_orthogonal": _Flag(
        "RATE", "learning rate of the recurrent weight (default: the method's)", NonNegativeFloat
    ),
    "seed": _Flag("NUMBER", "seed of the start and of the data (default: 0)", NonNegativeInt),
    "output": _Flag("DIR", "run folder (default: runs/TASK-METHOD-TIME)"),
    "data_dir": _Flag(
        "DIR",
        "folder with the MNIST files (default: STIEFEL_DATA if set, else downloaded; "
        "moving-digits: none, unless --source mnist)",
    ),
    "devices": _Flag(
        "WHAT", "auto, a number, or such as cpu, cpu:2, cuda:4 (default: auto)", str | int
    ),
    "precision": _Flag("NAME", f"{', '.join(PRECISIONS)} (default: 32)", str | int),
    "threads": _Flag(
        "NUMBER",
        "CPU threads (default: 1 for copying and moving-digits, torch's choice for the others)",
        _Threads,
    ),
    "evaluation_sequences": _Flag(
        "NUMBER",
        "copying: fresh sequences to evaluate on (1280); moving-digits: videos (200)",
        PositiveInt,
    ),
    "checkpoint_every": _Flag(
        "STEPS", "steps between checkpoints (default: a fifth of the run, at most 100)", PositiveInt
    ),
    "monitor_every": _Flag(
        "STEPS",
        "steps between rows of stationarity.csv for stiefel diagnose: the norm of the gradient of "
        "all that is trained, by any method; gradient norms and residuals of orthogonal weights, "
        "where there are any; 0 writes none (default: 0)",
        NonNegativeInt,
    ),
}
_DIAGNOSE_FLAGS = {
    "experiment": _Flag("NAME", f"instead of a run: {', '.join(EXPERIMENTS)}"),
    "samples": _Flag(
        "NUMBER",
        "run: batches of its size that the gradient is estimated from, 4 to 4096 (default: 16)",
        _Samples,
    ),
    "confidence": _Flag(
        "SHARE", "run: confidence of intervals, between 0 and 1 (default: 0.95)", NonNegativeFloat
    ),
    "threads": _Flag("NUMBER", "run: CPU threads (default: those of the run)", _Threads),
    "data_dir": _Flag("DIR", "run: folder with the MNIST files (default: that of the run)"),
    "steps": _Flag("STEPS", "experiment: training steps, at least 400 (20000)", PositiveInt),
    "seeds": _Flag("NUMBER", "experiment: draws of the noise (5)", PositiveInt),
    "seed": _Flag(
        "NUMBER",
        "seed of the batches (default: the run's), or of the experiment (0)",
        NonNegativeInt,
    ),
    "output": _Flag(
        "DIR",
        "where diagnosis.png and diagnosis.json go (default: the run folder; of an experiment: "
        "runs/NAME-TIME)",
    ),
}
_OF_RUNS = ("samples", "confidence", "threads", "data_dir")
_OF_EXPERIMENTS = ("steps", "seeds")
_TRAIN = """\
Train one method on one task and leave a run folder: options, versions, metrics, checkpoint, a
picture of the loss, and summary.json. Numbers in brackets are defaults."""
_DIAGNOSE = """\
Is the weight on its manifold, has training come to a stationary point, do gradients survive? Reads
a run that `stiefel train` has left (finished, killed, or going on) or its checkpoint, on the CPU.
Prints answers and tables, and writes a page of figures, diagnosis.png, and the numbers,
diagnosis.json, over those of an earlier diagnosis: into the run folder, whose other files stay as
they are, or into --output DIR. With --experiment: runs an experiment with a known answer. The exit
status is 0 whatever is found."""


class _Help(argparse.HelpFormatter):
    """Help whose lines never break within a name such as ``orth-init``."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(ArgumentParser):
    """A parser of whole names of options, whose complaints are one line long."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Says what is wrong in one line, and ends the process with status 2."""
        key = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
        if key:
            name = key[1].rpartition(".")[2]
            flag, reason = {**_DIAGNOSE_FLAGS, **_FLAGS}.get(name), key[2]
            value = re.search(r"Given value: (.*)", message) or re.search(
                r"type \w+: (?:.*: )?(\S+)", message
            )
            if flag is not None and value:
                got = value[1].strip("'")
                reason = f"expected {_EXPECTED.get(flag.type, 'a word')}, got {got!r}"
            message = f"--{name.replace('_', '-')}: {reason}"
        line = " ".join(message.split()) + self._nearest(message)
        sys.stderr.write(f"stiefel: error: {line} (see {self.prog} --help)\n")
        sys.exit(2)

    def _nearest(self, message: str) -> str:
        """What may have been meant by options that there are not."""
        unknown = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
        words = unknown[1].split() if unknown else ()
        names = [name for name in self._option_string_actions if name.startswith("--")]
        words = [word.partition("=")[0] for word in words if word.strip("-") and word[0] == "-"]
        late = [word for word in words if word in names]
        said = f"; {late[0]} is no option after --: write it before" if late else ""
        for word in (word for word in words if word not in late):
            near = difflib.get_close_matches(word, names, 1) or [
                name for name in names if len(word) > 3 and name.startswith(word)
            ]
            said += f"; for {word} did you mean {near[0]}?" if near else ""
        return said


def parse(words: list[str]) -> TrainOptions | DiagnoseOptions:
    """Reads the words after ``stiefel``.

    With ``--resume``, what the words leave out is as in the run that is resumed.

    Args:
        words: Such as ``["train", "copying", "--method", "rgd-c-c"]``.

    Returns:
        The options of the command; of a run with None where the task or the method decides.

    Raises:
        ConfigurationError: If no task or no run is named, or the run to resume cannot be read.
        UnknownNameError: If there is no such task, method, precision or experiment.
        SystemExit: With status 2 for words that are not understood, 0 after ``--help``.
    """
    parsed = _parser({}).parse_args(words)
    if parsed.command == "diagnose":
        return _diagnosis(parsed.diagnose)
    options = _of(parsed.train, {})
    if options.resume and options.output is not None:
        folder = RunFolder(options.output)
        if folder.config.exists():
            stored = dataclasses.asdict(folder.read_config())
            kept = (name for name in (*_FLAGS, "task") if name != "output")
            defaults = {name: stored[name] for name in kept}
            options = _of(_parser(defaults).parse_args(words).train, defaults)
            if options.epochs is not None and options.iterations == stored["iterations"]:
                options = dataclasses.replace(options, iterations=None)
    check_names(options)
    return options


def _of(parsed: Any, defaults: dict[str, Any]) -> TrainOptions:
    values = {field.name: _plain(parsed[field.name]) for field in dataclasses.fields(TrainOptions)}
    values.update({name: str(values[name]) for name in ("devices", "precision")})
    for config in parsed.config or ():
        values["task"] = values["task"] or _task_of(Path(config))
    values["task"] = values["task"] or defaults.get("task")
    if values["task"] is None:
        raise ConfigurationError(f"which task? stiefel train TASK, TASK one of {', '.join(TASKS)}")
    return TrainOptions(**values)


def _diagnosis(parsed: Any) -> DiagnoseOptions:
    fields = dataclasses.fields(DiagnoseOptions)
    options = DiagnoseOptions(**{field.name: _plain(parsed[field.name]) for field in fields})
    if (options.run is None) == (options.experiment is None):
        got = "neither" if options.run is None else "both"
        raise ConfigurationError(
            "expected a run folder, or its checkpoint, or --experiment NAME, got "
            f"{got}: stiefel diagnose RUN"
        )
    if options.experiment is not None and options.experiment not in EXPERIMENTS:
        raise unknown("experiment", options.experiment, EXPERIMENTS)
    kind, other = ("runs", _OF_EXPERIMENTS) if options.run else ("experiments", _OF_RUNS)
    for name in other:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{flag}: is no option of the diagnosis of {kind}")
    if options.confidence is not None and not 0 < options.confidence < 1:
        raise ConfigurationError(f"expected --confidence between 0 and 1, got {options.confidence}")
    return options


def _plain(value: Any) -> Any:
    """A bool, int or float itself in place of the parser's restricted kinds of them."""
    kinds = (kind for kind in (bool, int, float) if isinstance(value, kind))
    return next((kind(value) for kind in kinds), value)


def _task_of(config: Path) -> str | None:
    """The task that a configuration file names; on the command line it is the first word."""
    return (yaml.safe_load(config.read_text()) or {}).get("task")


def _parser(defaults: dict[str, Any]) -> ArgumentParser:
    parser = _Parser(
        prog="stiefel",
        description="Train models with orthogonal weights.",
    )
    commands = parser.add_subcommands(dest="command", required=True)
    train, diagnose = _train_parser(defaults), _diagnose_parser()
    commands.add_subcommand("train", train, help="train a method on a task")
    commands.add_subcommand("diagnose", diagnose, help="look into a run that train has left")
    train.prog, diagnose.prog = "stiefel train", "stiefel diagnose"
    return parser


def _train_parser(defaults: dict[str, Any]) -> ArgumentParser:
    train = _Parser(
        usage="stiefel train TASK [--method METHOD] [options]",
        description=_TRAIN,
    )
    train.add_argument("task", nargs="?", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    train.add_argument("--config", action="config", metavar="FILE", help="YAML file of options")
    own = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for name, flag in _FLAGS.items():
        _add(train, name, flag, defaults.get(name, own[name]), required=own[name] is not None)
    train.add_argument("--resume", action="store_true", help="continue the run in --output DIR")
    return train


def _diagnose_parser() -> ArgumentParser:
    diagnose = _Parser(
        usage="stiefel diagnose RUN | --experiment NAME [options]",
        description=_DIAGNOSE,
    )
    diagnose.add_argument(
        "run", nargs="?", metavar="RUN", help="folder of the run, or a checkpoint in it"
    )
    own = {field.name: field.default for field in dataclasses.fields(DiagnoseOptions)}
    for name, flag in _DIAGNOSE_FLAGS.items():
        _add(diagnose, name, flag, own[name], required=own[name] is not None)
    return diagnose


def _add(parser: ArgumentParser, name: str, flag: _Flag, default: Any, *, required: bool) -> None:
    """Adds a flag; one that is not required may be None."""
    parser.add_argument(
        "--" + name.replace("_", "-"),
        type=flag.type if required else flag.type | None,
        default=default,
        metavar=flag.metavar,
        help=flag.help,
    )
