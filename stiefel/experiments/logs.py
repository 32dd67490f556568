"""``metrics.csv`` as a Lightning logger that a killed and resumed run can go on writing."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from stiefel.errors import DataError
from stiefel.experiments.folder import atomic_path

__all__ = ["COLUMNS", "MetricsFile", "read_metrics"]

#: Columns of ``metrics.csv``; a cell is empty where a row does not measure it.
COLUMNS = (
    "step",
    "loss",
    "accuracy",
    "orthogonality_error",
    "evaluation_loss",
    "evaluation_accuracy",
    "seconds",
)


class MetricsFile(Logger):
    """Rows of numbers by training step, appended and flushed as they come.

    Args:
        path: The file. Rows after `resume_step` are dropped: a run that was killed goes back to
            its last checkpoint and writes them again.
        resume_step: Training steps that are already done.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        super().__init__()
        self._path, self._resume_step = path, resume_step
        self._started = False

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "metrics"

    @property
    def version(self) -> str:
        """No versions: a run has one file."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends the row of `step`."""
        if not self._started:
            self._start()
        with self._path.open("a", newline="") as file:
            _write(file, [{**metrics, "step": step}])

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Nothing: the options are in ``config.yaml``."""

    def _start(self) -> None:
        kept = [row for row in read_metrics(self._path) if row["step"] <= self._resume_step]
        with atomic_path(self._path) as path, path.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
            _write(file, kept)
        self._started = True


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the rows of a ``metrics.csv``, without empty cells and a half-written last row.

    Args:
        path: The file; no rows where it is absent.

    Returns:
        One dictionary a row, by column.

    Raises:
        DataError: If a whole row is not one of numbers.
    """
    if not path.exists():
        return []
    try:
        whole, newline, _ = path.read_text().rpartition("\n")
        reader = csv.DictReader(io.StringIO(whole + newline), restkey="more")
        rows = [_numbers(row, number) for number, row in enumerate(reader, 2)]
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: damaged ({error}); repair or delete the bad rows, or delete the file and "
            "go on without the rows so far"
        ) from error
    return rows


def _numbers(row: dict[str, Any], line: int) -> dict[str, float]:
    """The cells of a row that are not empty.

    Raises:
        ValueError: If one is not a number, there are too many, or the step is missing.
    """
    if not row.get("step") or "more" in row:
        raise ValueError(f"line {line}: expected the columns {','.join(COLUMNS)}")
    try:
        return {name: float(cell) for name, cell in row.items() if cell}
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from error


def _write(file: Any, rows: list[dict[str, Any]]) -> None:
    writer = csv.writer(file)
    for row in rows:
        writer.writerow([int(row["step"]), *(row.get(name, "") for name in COLUMNS[1:])])
