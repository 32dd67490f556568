"""The folder of a run: what is in it, and files that are whole or absent, never half written.

One process at a time trains in a folder: it holds a lock that the system takes back when the
process ends, however it ends, so that a killed run can be resumed at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import secrets
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml

from stiefel.errors import ConfigurationError, DataError
from stiefel.experiments.options import TrainOptions

if sys.platform != "win32":
    import fcntl

__all__ = ["SUMMARY_KEYS", "RunFolder", "atomic_path", "new_folder"]

#: The keys of ``summary.json`` that the closing table shows.
SUMMARY_KEYS = ("loss", "baseline", "accuracy", "orthogonality_error", "seconds")

_CONFIG_HEAD = """\
# The options of this run, all of them. To run it again:
#   stiefel train --config {name} --output ANOTHER_FOLDER
# To run another method with its own learning rates, delete lr_orthogonal and reflections.
"""
_PACKAGES = ("stiefel", "torch", "geoopt", "numpy", "scipy", "lightning")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a temporary file beside `path` that takes its place when the block ends well.

    Whatever interrupts the block, even a kill, `path` is either as it was or wholly new. The
    name of the temporary file is used once, so that no two writers ever share it.

    Args:
        path: The file to write.

    Yields:
        A path in the same folder, to be written in the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def new_folder(name: str) -> Path:
    """Makes ``runs/<name>-<time>``, with a number behind it where that is taken."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (stem, *(f"{stem}-{k}" for k in range(2, 1000)))
    return next(path for name in names if _made(path := Path("runs") / name))


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
        self.stationarity = self.path / "stationarity.csv"
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / ".lock"

    @classmethod
    def of(cls, options: TrainOptions) -> RunFolder:
        """The folder that `options` name; a new ``runs/<task>-<method>-<time>`` if they name none.

        Raises:
            ConfigurationError: If they name none and ask for a run to be resumed.
        """
        if options.output is not None:
            return cls(options.output)
        if options.resume:
            raise ConfigurationError("--resume needs the folder of the run: add --output DIR")
        return cls(new_folder(f"{options.task}-{options.method}"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder if need be, and keeps every other process from training in it.

        What a killed process left half written is removed. Where the system has no such lock
        (Windows, some network file systems), the block runs without one.

        Raises:
            ConfigurationError: If another process holds the folder, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigurationError(
                f"--output {self.path}: is a file, expected a folder"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"--output {self.path}: no folder can be made there ({error.strerror}); "
                "name another"
            ) from error
        descriptor = self._acquire()
        try:
            for left in self.path.glob(".*.part"):
                left.unlink(missing_ok=True)
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    if _is_open_as(descriptor, self.lock):
                        self.lock.unlink()  # before it is let go: see `_acquire`
                os.close(descriptor)

    def _acquire(self) -> int | None:
        """The descriptor that holds the lock, or None where files cannot be locked."""
        if sys.platform == "win32":
            return None
        while True:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before may have removed the file after we opened it: then what we
                # hold is nobody's lock any more, and the next process would make another.
                if _is_open_as(descriptor, self.lock):
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
                    return descriptor
                os.close(descriptor)
            except BlockingIOError as error:
                holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
                os.close(descriptor)
                raise ConfigurationError(
                    f"--output {self.path}: {holder} is training in this folder now; wait until "
                    "it has ended, or name another folder"
                ) from error
            except OSError as error:
                os.close(descriptor)
                warnings.warn(
                    f"{self.path}: cannot be locked ({error.strerror}), so take care that no "
                    "other process trains in it",
                    stacklevel=2,
                )
                return None

    def check_free(self) -> None:
        """Refuses a folder that another run would be written over.

        Raises:
            ConfigurationError: If the folder holds a run, finished or not.
        """
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
            options = TrainOptions(**yaml.safe_load(self.config.read_text()))
            _check_kinds(options)
            return options
        except FileNotFoundError as error:
            raise ConfigurationError(f"{self.config}: no such file, so no run to resume") from error
        except (TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(
                f"{self.config}: not the options of a run ({reason}); mend or delete this file, "
                "or start anew in another folder"
            ) from error

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

    def read_summary(self) -> dict[str, Any]:
        """What the finished run that is here ended with.

        Raises:
            DataError: If the file is not one that `write_summary` wrote.
        """
        try:
            values = json.loads(self.summary.read_text())
            for name in ("iterations", *SUMMARY_KEYS):
                if name != "orthogonality_error" or values[name] is not None:
                    float(values[name])
            _ = values["task"], values["method"]
        except (ValueError, TypeError, KeyError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{self.summary}: damaged ({reason}); delete it, and --resume writes it again "
                "from the checkpoint"
            ) from error
        return values

    def write_summary(self, values: dict[str, Any]) -> None:
        """Writes ``summary.json``: the run is finished once it is there."""
        with atomic_path(self.summary) as path:
            path.write_text(json.dumps(values, indent=2) + "\n")


def _check_kinds(options: TrainOptions) -> None:
    """Refuses values that are not of the kind of their option.

    Raises:
        TypeError: If there is one, such as a hidden size that is a word.
    """
    for name, kind in get_type_hints(TrainOptions).items():
        value = getattr(options, name)
        whole_rate = isinstance(value, int) and kind == float | None
        if not (isinstance(value, kind) or whole_rate):
            expected = getattr(kind, "__name__", str(kind))
            raise TypeError(f"{name}: expected {expected}, got {value!r}")


def _made(path: Path) -> bool:
    """Makes a folder; False if it is already there."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one that is found under `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    found["torch"] = torch.__version__  # with the kind of build, which metadata may leave out
    found["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
