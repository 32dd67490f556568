"""Where the rows of a monitor go: a CSV file, TensorBoard, a dictionary, or Lightning's loggers.

A logger is any object with ``log(row)``. A row is a flat dictionary with the key ``"step"``; the
other values are numbers, or words where something has to be said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stiefel.diagnostics.loggers.csv import CSVLogger
from stiefel.diagnostics.loggers.dictionary import DictLogger, Logger, Row
from stiefel.diagnostics.loggers.tensorboard import TensorBoardLogger

if TYPE_CHECKING:
    from stiefel.diagnostics.loggers.lightning import LightningCallback as LightningCallback

__all__ = ["CSVLogger", "DictLogger", "Logger", "Row", "TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    """Loads Lightning when `LightningCallback` is asked for, and not before."""
    if name == "LightningCallback":
        from stiefel.diagnostics.loggers.lightning import LightningCallback

        return LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
