"""MNIST one pixel at a time: 784 steps of one number, then a digit.

Pixels are in [0, 1], row by row (``smnist``) or in one fixed random order (``pmnist``), which is
``numpy.random.RandomState(92916).permutation(784)`` as in the published experiments of Helfrich,
Willmott and Ye (2018) and those that followed. The answer is read off the last hidden state. The
baseline is that of a uniform guess, ln 10.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from stiefel.experiments.mnist_files import Mnist, load_mnist
from stiefel.experiments.streams import TRAINING, permutation, shard
from stiefel.experiments.tasks.base import Batch, Task

__all__ = ["PermutedMnist", "PixelMnist", "pixel_permutation"]

_PIXELS = 28 * 28
_PERMUTATION_SEED = 92916


def pixel_permutation() -> npt.NDArray[np.int64]:
    """The order in which ``pmnist`` reads the 784 pixels."""
    return np.random.RandomState(_PERMUTATION_SEED).permutation(_PIXELS)


class PixelMnist(Task):
    """``smnist``: classify a digit from its 784 pixels, row by row.

    An epoch is the training set in an order keyed by (seed, epoch), in batches of which the last
    may be smaller. The test set is what the final numbers are measured on.

    Args:
        data_dir: Folder with the MNIST files; see `load_mnist`.
        data: The arrays themselves instead, of any size.

    Raises:
        DataError: If a file is missing or wrong.
    """

    name: ClassVar[str] = "smnist"
    options = ("data_dir",)
    input_size = 1
    output_size = 10
    readout = "last"
    length = _PIXELS
    baseline = math.log(10)

    def __init__(
        self, data_dir: str | os.PathLike[str] | None = None, *, data: Mnist | None = None
    ) -> None:
        data = load_mnist(data_dir) if data is None else data
        order = self._pixel_order()
        self._images, self._test_images = (
            torch.from_numpy(np.ascontiguousarray(images.reshape(-1, _PIXELS)[:, order]))
            for images in (data.train_images, data.test_images)
        )
        self._labels, self._test_labels = (
            torch.from_numpy(labels.astype(np.int64))
            for labels in (data.train_labels, data.test_labels)
        )
        self.epoch_size = len(self._images)
        self._epoch_order = functools.lru_cache(maxsize=2)(self._draw_order)

    def describe(self) -> str:
        """``smnist, 784 pixels one by one``."""
        return f"{self.name}, {_PIXELS} pixels one by one"

    def train_batch(
        self, step: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Batch:
        """Step `step` of the run: inputs (784, B, 1), targets (B,)."""
        steps = -(-len(self._images) // batch_size)
        epoch, position = divmod(step, steps)
        rows = self._epoch_order(seed, epoch)[position * batch_size :][:batch_size]
        return self._batch(self._images, self._labels, rows[shard(rank, world)], len(rows))

    def evaluation_batches(
        self, batch_size: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The test set, whole and in order; the seed makes no difference."""
        for rows in torch.arange(len(self._test_images)).split(batch_size):
            yield self._batch(
                self._test_images, self._test_labels, rows[shard(rank, world)], len(rows)
            )

    def _pixel_order(self) -> npt.NDArray[np.int64]:
        return np.arange(_PIXELS)

    def _draw_order(self, seed: int, epoch: int) -> torch.Tensor:
        return torch.from_numpy(permutation(seed, TRAINING, epoch, len(self._images)))

    @staticmethod
    def _batch(images: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, whole: int) -> Batch:
        pixels = images[rows].T.to(torch.get_default_dtype()) / 255
        return Batch(pixels.unsqueeze(-1).contiguous(), labels[rows], whole)


class PermutedMnist(PixelMnist):
    """``pmnist``: the same with the pixels in one fixed random order, `pixel_permutation`."""

    name: ClassVar[str] = "pmnist"

    def describe(self) -> str:
        """``pmnist, 784 pixels in a fixed random order``."""
        return f"{self.name}, {_PIXELS} pixels in a fixed random order"

    def _pixel_order(self) -> npt.NDArray[np.int64]:
        return pixel_permutation()
