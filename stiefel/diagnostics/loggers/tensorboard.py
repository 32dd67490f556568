"""Rows as curves in TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from stiefel.diagnostics.columns import STEP
from stiefel.diagnostics.loggers.dictionary import Row
from stiefel.errors import ConfigurationError

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes figures as scalars, and words as text, for TensorBoard.

    Needs the package tensorboard, which the extra ``stiefel[experiments]`` brings. The logger can
    be copied and pickled: it then opens a new file of events in the same folder.

    Args:
        target: The folder, or a `torch.utils.tensorboard.SummaryWriter` that is there already.

    Raises:
        ConfigurationError: If tensorboard is not installed.

    Example:
        >>> import tempfile
        >>> from stiefel.diagnostics import TensorBoardLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = TensorBoardLogger(folder)
        ...     logger.log({"step": 1, "model/canonical_norm": 0.5})
        ...     logger.close()
    """

    def __init__(self, target: str | Path | Any) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                'TensorBoardLogger needs tensorboard: pip install "stiefel[experiments]"'
            )
        self._writer: Any = None if isinstance(target, str | Path) else target
        self.folder = str(target if self._writer is None else self._writer.log_dir)

    def log(self, row: Row) -> None:
        """Takes a row."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder)
        step = int(row[STEP])
        for name, value in row.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif name != STEP:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file of events; a later row opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_writer": None}
