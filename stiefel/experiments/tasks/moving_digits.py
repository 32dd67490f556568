"""Moving digits: after every frame of a video, predict the next one.

Digits cross a frame at constant speed and bounce off its walls, as in moving MNIST; the digits are
those of MNIST, or drawings that are generated where no data is at hand. Videos of the evaluation
show digits that are never trained on, the same ones whatever the seed.

The loss is l1, the mean of |prediction - truth| over pixels, frames and videos, beside that of
repeating the last frame. Black frames are a second figure to keep in mind: most pixels are black.

The accuracy is the share of right pixels among those that go on or off from a frame to the next
(through one half), from the second prediction on, for one frame does not say where a digit goes.
Repeating the last frame has none of them right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.experiments.sprites import SOURCES, MnistDigits, Shapes, Sprites, Words, videos
from stiefel.experiments.streams import EVALUATION, TRAINING, random_bits, shard
from stiefel.experiments.tasks.base import Batch, Scores, Task

__all__ = ["FRAME_SIZES", "MovingDigits"]

#: Pixels of a side of a frame; digits are 28 pixels wide in the largest, as in moving MNIST.
FRAME_SIZES = (16, 32, 64)

_WORDS = 2  # of a digit: its look and its walk
_EVALUATION_SEED = 0


class MovingDigits(Task):
    """Predict every next frame of a video of moving digits.

    Args:
        frames: Frames of a video, at least 3: the first is seen, all others are predicted.
        frame_size: Pixels of a side, one of `FRAME_SIZES`.
        digits: Digits in a video.
        source: ``"mnist"`` or ``"shapes"``, drawings of two strokes that need no file; without it
            MNIST where `data_dir` or `sprites` says so, and shapes where neither is given.
        data_dir: Folder with the MNIST files; see `load_mnist`.
        evaluation_sequences: Videos that the final numbers are measured on.
        sprites: The images themselves, instead of a source.

    Raises:
        ConfigurationError: If a number is out of range, or a folder is given for shapes.
        UnknownNameError: If there is no such source.
        DataError: If a data file is missing or wrong.

    Example:
        >>> task = MovingDigits(evaluation_sequences=4)
        >>> batch = task.train_batch(0, 2, seed=0)
        >>> batch.inputs.shape
        torch.Size([9, 2, 1, 32, 32])
        >>> bool((batch.inputs[1:] == batch.targets[:-1]).all())
        True
    """

    name: ClassVar[str] = "moving-digits"
    network = "frames"
    options = ("frames", "frame_size", "digits", "source", "data_dir", "evaluation_sequences")
    measure = "l1 per pixel"
    loss_word = "l1 per pixel"
    baseline_word = "that of repeating the last frame"
    evaluation_batch = 25
    input_size = output_size = 1
    readout = "all"

    def __init__(
        self,
        frames: int = 10,
        frame_size: int = 32,
        digits: int = 2,
        source: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        evaluation_sequences: int = 200,
        *,
        sprites: Sprites | None = None,
    ) -> None:
        if frames < 3:
            raise ConfigurationError(f"expected at least 3 frames of a video, got {frames}")
        if frame_size not in FRAME_SIZES:
            sizes = ", ".join(map(str, FRAME_SIZES))
            raise ConfigurationError(f"expected a frame size of {sizes}, got {frame_size}")
        for what, number in (("digit", digits), ("evaluation sequence", evaluation_sequences)):
            if number < 1:
                raise ConfigurationError(f"expected at least 1 {what}, got {number}")
        self.source = self._source(source, data_dir, sprites)
        if sprites is None:
            sprites = MnistDigits(data_dir) if self.source == "mnist" else Shapes()
        self._sprites = sprites
        self.frames, self.frame_size, self.digits = frames, frame_size, digits
        self.evaluation_sequences = evaluation_sequences
        self.length = frames - 1
        self.baseline = self._repeating()

    @staticmethod
    def _source(
        source: str | None, data_dir: str | os.PathLike[str] | None, sprites: Sprites | None
    ) -> str:
        """The word for where the digits come from."""
        if sprites is not None:
            named = (name for name, kind in SOURCES.items() if isinstance(sprites, kind))
            return next(named, type(sprites).__name__)
        if source is None:
            return "shapes" if data_dir is None else "mnist"
        if source not in SOURCES:
            raise unknown("source of moving digits", source, SOURCES)
        if source == "shapes" and data_dir is not None:
            raise ConfigurationError(
                f"expected no data_dir with source='shapes', got {os.fspath(data_dir)}: shapes "
                "are generated; leave one of the two out"
            )
        return source

    def describe(self) -> str:
        """``moving-digits, 2 digits of MNIST, 10 frames of 32 x 32``, or of generated shapes."""
        what, size = f"{self.digits} {self._sprites.plural}", self.frame_size
        return f"{self.name}, {what}, {self.frames} frames of {size} x {size}"

    def train_batch(
        self, step: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Batch:
        """Fresh videos of step `step`: inputs and targets (T, B, 1, S, S), T = frames - 1."""
        words = self._words(seed, TRAINING, step, batch_size)
        return self._batch(words[shard(rank, world)], batch_size, held_out=False)

    def evaluation_batches(
        self, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The `evaluation_sequences`, in order; the seed makes no difference."""
        words = self._words(_EVALUATION_SEED, EVALUATION, 0, self.evaluation_sequences)
        for start in range(0, len(words), batch_size):
            rows = words[start : start + batch_size]
            yield self._batch(rows[shard(rank, world)], len(rows), held_out=True)

    def loss(self, logits: Tensor, batch: Batch, *, world: int = 1) -> Tensor:
        """Mean l1 of a pixel, scaled as `Task.loss` has it.

        Args:
            logits: Predictions (T, B, 1, S, S) in [0, 1].
            batch: The batch that they answer.
            world: Number of processes.

        Returns:
            A scalar.
        """
        total = (logits - batch.targets.to(logits.dtype)).abs().sum(dtype=_wide(logits.dtype))
        return total * (world / (batch.rows * self.length * self.frame_size**2))

    def scores(self, logits: Tensor, targets: Tensor) -> Scores:
        """Sums of l1 over all pixels, and of right pixels among those that change.

        Args:
            logits: Predictions (T, B, 1, S, S) in [0, 1].
            targets: The frames that were due, of the same shape.

        Returns:
            The four sums.
        """
        lit, shown = targets > 0.5, logits[1:] > 0.5
        changed = lit[1:] != lit[:-1]
        return Scores(
            (logits.double() - targets.double()).abs().sum(),
            targets.numel(),
            (changed & (shown == lit[1:])).sum(dtype=torch.float64),
            changed.sum(),
        )

    def _words(self, seed: int, stream: int, counter: int, count: int) -> Words:
        words = random_bits(seed, stream, counter, count * self.digits * _WORDS)
        return words.reshape(count, self.digits, _WORDS)

    def _batch(self, words: Words, rows: int, *, held_out: bool) -> Batch:
        video = videos(
            self._sprites,
            np.ascontiguousarray(words),
            frames=self.frames,
            frame_size=self.frame_size,
            held_out=held_out,
        )
        return Batch(video[:-1], video[1:], rows)

    def _repeating(self) -> float:
        """The l1 of repeating the last frame, over the videos of the evaluation."""
        total, count = 0.0, 0
        for batch in self.evaluation_batches(self.evaluation_batch, seed=_EVALUATION_SEED):
            total += float((batch.inputs.double() - batch.targets.double()).abs().sum())
            count += batch.targets.numel()
        return total / count


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
