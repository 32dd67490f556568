"""Where the rows of a monitor go: a CSV file, TensorBoard, a dictionary.

A logger is any object with ``log(row)``. A row is a flat dictionary with the key ``"step"``; the
other values are numbers, or words where something has to be said.
"""

from __future__ import annotations

from stiefel.diagnostics.loggers.csv import CSVLogger
from stiefel.diagnostics.loggers.dictionary import DictLogger, Logger, Row
from stiefel.diagnostics.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "DictLogger", "Logger", "Row", "TensorBoardLogger"]
