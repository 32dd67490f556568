"""What every task is: where batches come from, what the loss is, and what a score of 1 means."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Batch", "Scores", "Task"]


class Batch(NamedTuple):
    """One process's rows of a batch.

    Attributes:
        inputs: Sequences, (T, B, features), or frames, (T, B, 1, S, S).
        targets: Class indices, (T, B) when every step is answered, (B,) when the last one is; or
            the frames that are due, (T, B, 1, S, S).
        rows: Rows of the whole batch, over all processes: what the loss is divided by.
    """

    inputs: Tensor
    targets: Tensor
    rows: int


class Scores(NamedTuple):
    """Sums that add up over batches and processes; `loss` and `accuracy` are their quotients."""

    loss_sum: Tensor
    loss_count: int
    correct: Tensor
    answers: int | Tensor


class Task(abc.ABC):
    """A source of sequences with a loss, an accuracy and a baseline to beat.

    Batches are pure functions of (seed, step): asking twice gives the same tensors, whatever was
    asked in between.

    Attributes:
        name: The word on the command line.
        network: ``"sequence"``, a recurrent network with a head, or ``"frames"``, a
            `stiefel.models.VideoPredictor`.
        options: Names of `TrainOptions` that the class takes.
        measure: What the loss that is reported measures, and its unit.
        loss_word: What the closing table calls it.
        baseline_word: What the baseline is the loss of.
        evaluation_batch: Sequences that are evaluated at a time.
        input_size: Features of a step.
        output_size: Number of classes.
        readout: ``"all"`` when every step is answered, ``"last"`` when only the last one is.
        length: Steps of a sequence.
        baseline: The loss of the best answer that remembers nothing, or what `baseline_word` says.
        epoch_size: Training sequences of an epoch, or None when data is generated without end.
    """

    name: ClassVar[str]
    network: ClassVar[Literal["sequence", "frames"]] = "sequence"
    options: ClassVar[tuple[str, ...]]
    measure: ClassVar[str] = "cross-entropy, nats"
    loss_word: ClassVar[str] = "loss"
    baseline_word: ClassVar[str] = "the loss without memory"
    evaluation_batch: ClassVar[int] = 250
    input_size: int
    output_size: int
    readout: Literal["all", "last"]
    length: int
    baseline: float
    epoch_size: int | None = None

    @abc.abstractmethod
    def train_batch(
        self, step: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Batch:
        """The batch of training step `step` (from 0): the rows of process `rank` of `world`."""

    @abc.abstractmethod
    def evaluation_batches(
        self, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The sequences that the final numbers are measured on, never trained on."""

    @abc.abstractmethod
    def describe(self) -> str:
        """A few words for the head line of a run, such as ``copying, delay 100``."""

    def answered(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The part of (logits, targets) that the accuracy counts; all of it unless overridden."""
        return logits, targets

    def steps_per_epoch(self, batch_size: int) -> int | None:
        """Training steps of an epoch, the last of them possibly of a smaller batch."""
        return None if self.epoch_size is None else -(-self.epoch_size // batch_size)

    def loss(self, logits: Tensor, batch: Batch, *, world: int = 1) -> Tensor:
        """Mean cross-entropy in nats, scaled so that the mean over processes is the true mean.

        The sum over this process's rows is divided by the rows of the whole batch and multiplied
        by `world`: averaging gradients over processes, as distributed training does, then gives
        the gradient of the whole batch even when the rows do not divide evenly.

        Args:
            logits: (T, B, classes) or (B, classes).
            batch: The batch that the logits answer.
            world: Number of processes.

        Returns:
            A scalar.
        """
        steps = batch.targets.shape[0] if self.readout == "all" else 1
        return self._loss_sum(logits, batch.targets) * (world / (batch.rows * steps))

    def scores(self, logits: Tensor, targets: Tensor) -> Scores:
        """Sums of the loss and of right answers over a batch, in float64.

        Args:
            logits: (T, B, classes) or (B, classes).
            targets: (T, B) or (B,).

        Returns:
            The four sums, tensors on the device of `logits`: reading them is left to the caller.
        """
        counted, truth = self.answered(logits, targets)
        return Scores(
            self._loss_sum(logits, targets).double(),
            targets.numel(),
            (counted.argmax(-1) == truth).sum(dtype=torch.float64),
            truth.numel(),
        )

    @staticmethod
    def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(end_dim=-2)
        if flat.dtype in (torch.bfloat16, torch.float16):
            flat = flat.float()
        return functional.cross_entropy(flat, targets.flatten(), reduction="sum")
