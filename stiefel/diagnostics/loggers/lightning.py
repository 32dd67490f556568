"""The monitor as a callback of Lightning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stiefel.diagnostics.columns import STEP
from stiefel.diagnostics.loggers.dictionary import Logger, Row
from stiefel.diagnostics.monitor import StationarityMonitor
from stiefel.diagnostics.side_conditions import SideConditions
from stiefel.errors import ConfigurationError

__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """A `StationarityMonitor` around the training steps of a `lightning.pytorch.Trainer`.

    A step is what moves the weights: with ``accumulate_grad_batches=`` all batches of it, and their
    gradients add up. Under ``precision="16-mixed"`` the scale of the loss is taken off. The state
    goes into Lightning's checkpoints, and a resumed run goes on counting from there. The monitor is
    `monitor`, from the start of the fit on: ``callback.monitor.report()``.

    Args:
        every: As for `StationarityMonitor`.
        loggers: Where rows go; None for the loggers of the trainer, which get the numbers.
        side_conditions: As for `StationarityMonitor`.
        differential_every: As for `StationarityMonitor`.
        unconstrained: As for `StationarityMonitor`.

    Raises:
        ConfigurationError: At the start of the fit, if the module has no constrained weight and
            `unconstrained` is not set.

    Example:
        >>> import torch, stiefel
        >>> from lightning.pytorch import Trainer
        >>> from stiefel.diagnostics import LightningCallback
        >>> trainer = Trainer(callbacks=[LightningCallback(every=100)])  # doctest: +SKIP
    """

    def __init__(
        self,
        every: int = 50,
        *,
        loggers: Iterable[Logger] | None = None,
        side_conditions: SideConditions | None = None,
        differential_every: int | None = None,
        unconstrained: bool = False,
    ) -> None:
        self.every = every
        self._loggers = None if loggers is None else list(loggers)
        self._options: dict[str, Any] = {
            "side_conditions": side_conditions,
            "differential_every": differential_every,
            "unconstrained": unconstrained,
        }
        self._monitor: StationarityMonitor | None = None
        self._state: dict[str, Any] | None = None  # of a checkpoint, until there is a monitor
        self._joins = True  # there is no state to go on from
        self._begun: int | None = None  # optimizer steps at the start of the block that is open

    @property
    def monitor(self) -> StationarityMonitor:
        """The monitor.

        Raises:
            ConfigurationError: Before the fit has started.
        """
        if self._monitor is None:
            raise ConfigurationError("there is no monitor yet: it is made when the fit starts")
        return self._monitor

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint, with the interval, so that there may be several."""
        return self._generate_state_key(every=self.every)

    def state_dict(self) -> dict[str, Any]:
        """Steps and records, for the checkpoint."""
        return self._state or {} if self._monitor is None else self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over from the run that was interrupted."""
        self._state = state_dict or None
        if self._monitor is not None and self._state is not None:
            self._monitor.load_state_dict(self._state)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the monitor."""
        state = self._state if self._monitor is None else self._monitor.state_dict()
        self._monitor = StationarityMonitor(
            pl_module,
            self.every,
            loggers=[_TrainerLoggers(trainer)] if self._loggers is None else self._loggers,
            scale=getattr(trainer.precision_plugin, "scaler", None) or 1.0,
            **self._options,
        )
        self._joins = not state
        if state:
            self._monitor.load_state_dict(state)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts from where the run is, if it began without this callback."""
        if self._joins:
            self.monitor.step = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enters the block, with the first batch of a step."""
        if self._begun is None:
            self._begun = trainer.global_step
            self.monitor.__enter__()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Leaves the block, when the weights have moved."""
        if self._begun is not None and trainer.global_step > self._begun:
            self._begun = None
            self.monitor.__exit__(None, None, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves a block whose step never came."""
        self._abandon()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leaves the block, so that nothing stays on the model."""
        self._abandon()

    def _abandon(self) -> None:
        self._begun = None
        if self._monitor is not None:
            self._monitor.abandon()


class _TrainerLoggers:
    """The loggers of a trainer, as one of ours."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log(self, row: Row) -> None:
        """Passes the numbers on."""
        numbers = {
            name: float(value)
            for name, value in row.items()
            if name != STEP and not isinstance(value, str)
        }
        for logger in self._trainer.loggers:
            logger.log_metrics(numbers, int(row[STEP]))
