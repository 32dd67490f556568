"""Rows in memory, by figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from stiefel.diagnostics.columns import STEP

__all__ = ["DictLogger", "Logger", "Row"]

#: A row: ``"step"``, and figures, which are numbers or words.
Row = Mapping[str, Any]


class Logger(Protocol):
    """What a monitor asks of a logger."""

    def log(self, row: Row) -> None:
        """Takes a row; called once for each."""
        ...


class DictLogger:
    """Keeps every figure as a dictionary from step to value.

    ``pandas.DataFrame(logger.series)`` is a table with the steps as its index.

    Attributes:
        series: ``series[figure][step]``.

    Example:
        >>> from stiefel.diagnostics import DictLogger
        >>> logger = DictLogger()
        >>> logger.log({"step": 1, "model/canonical_norm": 0.5})
        >>> logger.log({"step": 50, "model/canonical_norm": 0.25})
        >>> logger.series
        {'model/canonical_norm': {1: 0.5, 50: 0.25}}
    """

    def __init__(self) -> None:
        self.series: dict[str, dict[int, Any]] = {}

    def log(self, row: Row) -> None:
        """Takes a row."""
        step = int(row[STEP])
        for name, value in row.items():
            if name != STEP:
                self.series.setdefault(name, {})[step] = value
