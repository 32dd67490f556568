"""Rows in a CSV file that a killed process leaves whole."""

from __future__ import annotations

import csv
import io
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stiefel.diagnostics.columns import STEP
from stiefel.diagnostics.loggers.dictionary import Row
from stiefel.errors import ConfigurationError, DataError

__all__ = ["CSVLogger"]


class CSVLogger:
    """Appends every row to a CSV file as it comes.

    A row is written by one system call, so that a killed process leaves whole lines. A figure that
    was not there before makes a new column: the file is then written again beside itself and takes
    its own place, so that it is never half there. One process writes a file.

    Args:
        path: The file; its folder is made.
        resume: Whether to continue the file if it exists. Rows of steps that this run logs again,
            from its first row on, are dropped: a run that was killed goes back to its last
            checkpoint.

    Raises:
        ConfigurationError: If the file exists and `resume` is not set.
        DataError: If the file to continue is not one of this logger.

    Example:
        >>> import tempfile
        >>> from stiefel.diagnostics import CSVLogger
        >>> folder = tempfile.TemporaryDirectory()
        >>> logger = CSVLogger(folder.name + "/figures.csv")
        >>> logger.log({"step": 1, "model/canonical_norm": 0.5})
        >>> logger.log({"step": 50, "model/canonical_norm": 0.25, "model/relative": 0.125})
        >>> print(logger.path.read_text().strip())
        step,model/canonical_norm,model/relative
        1,0.5,
        50,0.25,0.125
        >>> CSVLogger.read(logger.path)[0]
        {'step': 1, 'model/canonical_norm': 0.5}
        >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not resume:
            raise ConfigurationError(
                f"{self.path} exists already: pass resume=True to continue it, or another path"
            )
        self._resume = resume
        self._columns: list[str] | None = None  # None until the first row

    def log(self, row: Row) -> None:
        """Takes a row.

        Raises:
            ConfigurationError: If its step is no whole number from 0 on, or another process has
                made the file since this logger was made.
        """
        row = _plain(row)
        kept: list[dict[str, Any]] | None = None
        if self._columns is None:
            if self.path.exists() and not self._resume:
                raise ConfigurationError(
                    f"{self.path} was made by another logger or process: give each its own file"
                )
            kept = [old for old in self.read(self.path) if not _again(old, row)]
            self._columns = list(dict.fromkeys([STEP, *(name for old in kept for name in old)]))
        new = [name for name in row if name not in self._columns]
        if kept is None and new:
            kept = self.read(self.path)
        self._columns += new
        if kept is not None:
            self._write([*kept, row])
            return
        line = _lines([row], self._columns)
        with self.path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            if file.write(line) != len(line):
                file.truncate(before)  # the next row begins on a line of its own
                raise OSError(f"{self.path}: a row was not written whole: is the disk full?")

    @staticmethod
    def read(path: str | Path) -> list[dict[str, Any]]:
        """Reads the rows of such a file, without empty cells and a half-written last line.

        Args:
            path: The file; no rows where it is absent.

        Returns:
            One dictionary a row: ``"step"`` an int, numbers as floats, the rest as words.

        Raises:
            DataError: If it is not a file of this logger.
        """
        path = Path(path)
        if not path.exists():
            return []
        whole, newline, _ = path.read_bytes().rpartition(b"\n")  # the rest may end in a letter
        reader = csv.DictReader(io.StringIO((whole + newline).decode()), restkey="", restval="")
        rows = []
        for number, cells in enumerate(reader, 2):
            if "" in cells or not cells.get(STEP, "").isdigit():
                raise DataError(
                    f"{path}, line {number}: expected a step and at most one cell for each column "
                    "of the first line: repair or delete the line, or log to another file"
                )
            figures = {name: _value(cell) for name, cell in cells.items() if cell}
            rows.append({**figures, STEP: int(cells[STEP])})
        return rows

    def _write(self, rows: Iterable[Row]) -> None:
        """Writes the whole file beside itself, and puts it in its place."""
        assert self._columns is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        temporary = self.path.with_name(f".{self.path.name}.{mark}.part")
        try:
            with temporary.open("wb") as file:
                file.write(_lines([{name: name for name in self._columns}, *rows], self._columns))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _plain(row: Row) -> dict[str, Any]:
    """The row with its step as an int and tensors as numbers."""
    values = {name: v.item() if hasattr(v, "item") else v for name, v in row.items()}
    step = values.get(STEP)
    if not isinstance(step, int | float) or not step >= 0 or step % 1:
        raise ConfigurationError(f"expected a row with a step 0, 1, 2, ..., got step={step!r}")
    return {**values, STEP: int(step)}


def _again(old: Row, row: Row) -> bool:
    """Whether a run that begins with `row` logs `old` again: a later step, or its own figures."""
    if old[STEP] != row[STEP]:
        return old[STEP] > row[STEP]
    return len(old.keys() & row.keys()) > 1


def _lines(rows: list[Row], columns: list[str]) -> bytes:
    """Lines of cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        writer.writerow([" ".join(c.split()) if isinstance(c, str) else c for c in cells])
    return text.getvalue().encode()


def _value(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
