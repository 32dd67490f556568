"""The words of the command line and of configuration files, read into options."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from stiefel.errors import ConfigurationError
from stiefel.experiments.folder import RunFolder
from stiefel.experiments.methods import fitting
from stiefel.experiments.options import PRECISIONS, TrainOptions, check_names
from stiefel.experiments.recipes import RECIPES
from stiefel.experiments.sprites import SOURCES
from stiefel.experiments.tasks import FRAME_SIZES, LAYOUTS, TASKS

__all__ = ["parse"]

_EXPECTED = {
    PositiveInt: "a whole number of at least 1",
    NonNegativeInt: "a whole number of at least 0",
    NonNegativeFloat: "a number of at least 0",
}


@dataclasses.dataclass(frozen=True)
class _Flag:
    """A flag of ``stiefel train``: how its value is written, what it is, and what it must be."""

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
        PositiveInt,
    ),
    "evaluation_sequences": _Flag(
        "NUMBER",
        "copying: fresh sequences to evaluate on (1280); moving-digits: videos (200)",
        PositiveInt,
    ),
    "checkpoint_every": _Flag(
        "STEPS", "steps between checkpoints (default: a fifth of the run, at most 100)", PositiveInt
    ),
}
_TRAIN = """\
Train one method on one task and leave a run folder: options, versions, metrics, checkpoint, a
picture of the loss, and summary.json. Numbers in brackets are defaults."""


class _Help(argparse.HelpFormatter):
    """Help whose lines never break within a name such as ``orth-init``."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(ArgumentParser):
    """A parser whose complaints are one line long."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Says what is wrong in one line, and ends the process with status 2."""
        key = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
        if key:
            name = key[1].rpartition(".")[2]
            flag, reason = _FLAGS.get(name), key[2]
            value = re.search(r"Given value: (.*)", message) or re.search(
                r"type \w+: (?:.*: )?(\S+)", message
            )
            if flag is not None and value:
                got = value[1].strip("'")
                reason = f"expected {_EXPECTED.get(flag.type, 'a word')}, got {got!r}"
            message = f"--{name.replace('_', '-')}: {reason}"
        line = " ".join(message.split())
        sys.stderr.write(f"stiefel: error: {line} (see {self.prog} --help)\n")
        sys.exit(2)


def parse(words: list[str]) -> TrainOptions:
    """Reads the words after ``stiefel``.

    With ``--resume``, what the words leave out is as in the run that is resumed.

    Args:
        words: Such as ``["train", "copying", "--method", "rgd-c-c"]``.

    Returns:
        The options of the run, with None where the task or the method decides.

    Raises:
        ConfigurationError: If no task is named, or the run to resume cannot be read.
        UnknownNameError: If there is no such task, method or precision.
        SystemExit: With status 2 for words that are not understood, 0 after ``--help``.
    """
    options = _read(words, {})
    if options.resume and options.output is not None:
        folder = RunFolder(options.output)
        if folder.config.exists():
            stored = dataclasses.asdict(folder.read_config())
            kept = (name for name in (*_FLAGS, "task") if name != "output")
            options = _read(words, {name: stored[name] for name in kept})
            if options.epochs is not None and options.iterations == stored["iterations"]:
                options = dataclasses.replace(options, iterations=None)
    check_names(options)
    return options


def _read(words: list[str], defaults: dict[str, Any]) -> TrainOptions:
    parsed = _parser(defaults).parse_args(words).train
    values = {field.name: _plain(parsed[field.name]) for field in dataclasses.fields(TrainOptions)}
    values.update({name: str(values[name]) for name in ("devices", "precision")})
    for config in parsed.config or ():
        values["task"] = values["task"] or _task_of(Path(config))
    values["task"] = values["task"] or defaults.get("task")
    if values["task"] is None:
        raise ConfigurationError(f"which task? stiefel train TASK, TASK one of {', '.join(TASKS)}")
    return TrainOptions(**values)


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
        formatter_class=_Help,
    )
    commands = parser.add_subcommands(dest="command", required=True)
    train = _train_parser(defaults)
    commands.add_subcommand("train", train, help="train a method on a task")
    train.prog = "stiefel train"
    return parser


def _train_parser(defaults: dict[str, Any]) -> ArgumentParser:
    train = _Parser(
        usage="stiefel train TASK [--method METHOD] [options]",
        description=_TRAIN,
        formatter_class=_Help,
    )
    train.add_argument("task", nargs="?", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    train.add_argument("--config", action="config", metavar="FILE", help="YAML file of options")
    own = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for name, flag in _FLAGS.items():
        default = defaults.get(name, own[name])
        optional = flag.type if own[name] is not None else flag.type | None
        train.add_argument(
            "--" + name.replace("_", "-"),
            type=optional,
            default=default,
            metavar=flag.metavar,
            help=flag.help,
        )
    train.add_argument("--resume", action="store_true", help="continue the run in --output DIR")
    return train
