"""The folder of a run: what is in it, and files that are whole or absent, never half written."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from stiefel.errors import ConfigurationError
from stiefel.experiments.options import TrainOptions

__all__ = ["RunFolder", "atomic_path"]

_CONFIG_HEAD = """\
# The options of this run, all of them. To run it again:
#   stiefel train --config {name} --output ANOTHER_FOLDER
# To run another method with its own learning rates, delete lr_orthogonal and reflections.
"""
_PACKAGES = ("stiefel", "torch", "geoopt", "numpy", "scipy", "lightning")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary file beside `path` that takes its place when the block ends well.

    Whatever interrupts the block, even a kill, `path` is either as it was or wholly new.

    Args:
        path: The file to write.

    Yields:
        A path in the same folder, to be written in the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class RunFolder:
    """A run folder and its files.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.csv"
        self.checkpoint = self.path / "checkpoint.ckpt"
        self.plot = self.path / "loss.png"
        self.summary = self.path / "summary.json"
        self.tensorboard = self.path / "tensorboard"

    @classmethod
    def of(cls, options: TrainOptions) -> RunFolder:
        """The folder that `options` name, ``runs/<task>-<method>-<time>`` where they name none."""
        if options.output is not None:
            return cls(options.output)
        if options.resume:
            raise ConfigurationError("--resume needs the folder of the run: add --output DIR")
        stem = f"{options.task}-{options.method}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        names = (stem, *(f"{stem}-{k}" for k in range(2, 1000)))
        return cls(next(path for name in names if not (path := Path("runs") / name).exists()))

    def check_free(self) -> None:
        """Refuses a folder that another run would be written over.

        Raises:
            ConfigurationError: If the folder holds a run, finished or not.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"--output {self.path}: is a file, expected a folder")
        if self.summary.exists():
            raise ConfigurationError(
                f"--output {self.path}: holds a finished run; name another folder, or delete it"
            )
        if self.config.exists() or self.checkpoint.exists():
            raise ConfigurationError(
                f"--output {self.path}: holds an unfinished run; add --resume to continue it, "
                "name another folder, or delete it"
            )

    def check_same(self, options: TrainOptions) -> None:
        """Refuses to continue a run with options that would make it another one.

        Raises:
            ConfigurationError: If an option that decides what is trained has changed.
        """
        changed = options.changed_from(self.read_config())
        if changed:
            listed = "; ".join(
                f"{name} was {before}, now {now}" for name, (before, now) in changed.items()
            )
            raise ConfigurationError(
                f"--resume: {self.path} was started with other options ({listed}); give the same "
                "ones, or start anew in another folder"
            )

    def read_config(self) -> TrainOptions:
        """The options of the run that is here.

        Raises:
            ConfigurationError: If there is none, or it cannot be read.
        """
        try:
            return TrainOptions(**yaml.safe_load(self.config.read_text()))
        except FileNotFoundError as error:
            raise ConfigurationError(f"{self.config}: no such file, so no run to resume") from error
        except (TypeError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{self.config}: not the options of a run: {error}") from error

    def write_config(self, options: TrainOptions) -> None:
        """Writes the resolved options, and the versions and machine that they run with."""
        values = dataclasses.asdict(options)
        for name in ("output", "resume"):
            del values[name]
        with atomic_path(self.config) as path:
            head = _CONFIG_HEAD.format(name=self.config.name)
            path.write_text(head + yaml.safe_dump(values, sort_keys=False))
        with atomic_path(self.versions) as path:
            path.write_text(json.dumps(_versions(), indent=2) + "\n")

    def write_summary(self, values: dict[str, Any]) -> None:
        """Writes ``summary.json``: the run is finished once it is there."""
        with atomic_path(self.summary) as path:
            path.write_text(json.dumps(values, indent=2) + "\n")


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    found["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
