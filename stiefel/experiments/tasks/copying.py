"""The copying task: ten symbols, a long silence, a marker, and the ten symbols again.

Vocabulary: 0 is blank, 1 to 8 are data, 9 is the marker. With K = 10 symbols and a delay of T,
sequences have T + 2K steps and targets are T + K blanks followed by the K symbols. Two layouts of
the inputs are in use, which differ in where the marker stands:

- ``"expRNN"`` [data K][blank T][marker][blank K - 1]: marker at T + 10, where the first answer is
  due (Lezcano-Casado and Martinez-Rubio 2019, and the experiments that followed);
- ``"scoRNN"`` [data K][blank T - 1][marker][blank K]: marker at T + 9, one step before the first
  answer is due (Arjovsky, Shah and Bengio 2016; Helfrich, Willmott and Ye 2018).

A network that remembers nothing does best with blanks, then one of eight symbols at random: its
mean cross-entropy over all steps is K ln 8 / (T + 2K).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stiefel.errors import ConfigurationError, unknown
from stiefel.experiments.streams import EVALUATION, TRAINING, random_bits, shard
from stiefel.experiments.tasks.base import Batch, Task

__all__ = ["LAYOUTS", "Copying"]

#: Where the marker stands, counted from the end of the data and the delay.
LAYOUTS = {"expRNN": 0, "scoRNN": -1}

_SYMBOLS = 10  # K, symbols to remember
_BLANK, _MARKER = 0, 9
_BITS = 3  # bits of a symbol: eight of them


class Copying(Task):
    """Remember ten symbols over `delay` steps.

    Args:
        delay: Blank steps T between the data and the answer, T >= 1.
        layout: ``"expRNN"`` or ``"scoRNN"``: where the marker stands.
        evaluation_sequences: Fresh sequences that the final numbers are measured on.

    Raises:
        ConfigurationError: If a number is out of range.
        UnknownNameError: If there is no such layout.

    Example:
        >>> task = Copying(delay=5)
        >>> batch = task.train_batch(0, 2, seed=0)
        >>> batch.inputs.shape, batch.targets.shape
        (torch.Size([25, 2, 10]), torch.Size([25, 2]))
        >>> bool((batch.inputs[:10].argmax(-1) == batch.targets[-10:]).all())
        True
    """

    name: ClassVar[str] = "copying"
    options = ("delay", "layout", "evaluation_sequences")
    input_size = 10
    output_size = 9
    readout = "all"

    def __init__(
        self, delay: int = 100, layout: str = "expRNN", evaluation_sequences: int = 1280
    ) -> None:
        if delay < 1:
            raise ConfigurationError(f"expected a delay of at least 1 step, got {delay}")
        if evaluation_sequences < 1:
            raise ConfigurationError(
                f"expected at least 1 evaluation sequence, got {evaluation_sequences}"
            )
        if layout not in LAYOUTS:
            raise unknown("layout of the copying task", layout, LAYOUTS)
        self.delay, self.layout = delay, layout
        self.evaluation_sequences = evaluation_sequences
        self.length = delay + 2 * _SYMBOLS
        self.marker = delay + _SYMBOLS + LAYOUTS[layout]
        self.baseline = _SYMBOLS * math.log(2**_BITS) / self.length

    def describe(self) -> str:
        """``copying, delay 100`` and the layout where it is not the default."""
        layout = "" if self.layout == "expRNN" else f", layout {self.layout}"
        return f"copying, delay {self.delay}{layout}"

    def train_batch(
        self, step: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Batch:
        """Fresh sequences of step `step`: inputs (T, B, 10) one-hot, targets (T, B)."""
        words = random_bits(seed, TRAINING, step, batch_size)
        return self._batch(words[shard(rank, world)], batch_size)

    def evaluation_batches(
        self, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The `evaluation_sequences` of this seed, from a stream that training never draws."""
        words = random_bits(seed, EVALUATION, 0, self.evaluation_sequences)
        for start in range(0, len(words), batch_size):
            rows = words[start : start + batch_size]
            yield self._batch(rows[shard(rank, world)], len(rows))

    def answered(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The last ten steps, where the symbols are due."""
        return logits[-_SYMBOLS:], targets[-_SYMBOLS:]

    def _batch(self, words: np.ndarray, rows: int) -> Batch:
        """Sequences from one random word each: 3 bits a symbol, so that all are equally likely."""
        shifts = np.arange(0, _BITS * _SYMBOLS, _BITS, dtype=np.uint64)[:, None]
        data = torch.from_numpy(((words >> shifts) & np.uint64(7)).astype(np.int64) + 1)
        tokens = torch.full((self.length, data.shape[1]), _BLANK)
        tokens[:_SYMBOLS] = data
        tokens[self.marker] = _MARKER
        targets = torch.full_like(tokens, _BLANK)
        targets[-_SYMBOLS:] = data
        inputs = functional.one_hot(tokens, self.input_size).to(torch.get_default_dtype())
        return Batch(inputs, targets, rows)
