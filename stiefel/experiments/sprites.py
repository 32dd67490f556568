"""What moves in a video, and the videos: small images that cross a frame and bounce off its walls.

An image is a pure function of one random word of 64 bits, and so is a walk: a batch of videos can
be drawn again from the words of its step, row by row.
"""

from __future__ import annotations

import abc
import os
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from stiefel.experiments.mnist_files import Mnist, load_mnist

__all__ = ["SOURCES", "MnistDigits", "Shapes", "Sprites", "Words", "videos"]

Words = npt.NDArray[np.uint64]

_MNIST_SIZE = 28
_POINTS = 24  # dots along a stroke


class Sprites(abc.ABC):
    """A source of small square images.

    Attributes:
        plural: What they are, in words.
    """

    plural: ClassVar[str]

    @abc.abstractmethod
    def draw(self, words: Words, size: int, *, held_out: bool) -> Tensor:
        """One image of each word.

        Args:
            words: Random words, (k,).
            size: Pixels of a side.
            held_out: Whether images are those that are never trained on.

        Returns:
            (k, size, size), values in [0, 1].
        """


class MnistDigits(Sprites):
    """The handwritten digits of MNIST: of the training set, or of the test set where held out.

    Args:
        data_dir: Folder with the files; see `load_mnist`.
        data: The arrays themselves instead.

    Raises:
        DataError: If a file is missing or wrong.
    """

    plural = "digits of MNIST"

    def __init__(
        self, data_dir: str | os.PathLike[str] | None = None, *, data: Mnist | None = None
    ) -> None:
        data = load_mnist(data_dir) if data is None else data
        self._train, self._test = data.train_images, data.test_images

    def draw(self, words: Words, size: int, *, held_out: bool) -> Tensor:
        """Any digit as likely as any other; smaller sizes, of 28 / 2^k, are the brightest pixels.

        A word w chooses image floor(w N / 2^64), from its top 32 bits.
        """
        images = self._test if held_out else self._train
        rows = ((words >> np.uint64(32)) * np.uint64(len(images))) >> np.uint64(32)
        chosen = torch.from_numpy(images[rows.astype(np.int64)])
        return functional.max_pool2d(
            chosen.to(torch.get_default_dtype()) / 255, _MNIST_SIZE // size
        )


class Shapes(Sprites):
    """Drawings of two straight strokes, generated: no file is read.

    A word has 64 bits, and the four ends of two strokes eight coordinates of 8 bits each. With
    s = size / 14 the ends lie in [2 s, 11 s], and a pixel at distance d of the nearest dot of a
    stroke is exp(-(d / s)^2) bright.
    """

    plural = "generated shapes"

    def draw(self, words: Words, size: int, *, held_out: bool) -> Tensor:
        """The drawing that a word stands for; other words are other drawings."""
        scale, dtype = size / 14, torch.get_default_dtype()
        shifts = np.arange(0, 64, 8, dtype=np.uint64)
        bits = ((words[:, None] >> shifts) & np.uint64(255)).astype(np.int64)
        ends = torch.from_numpy(bits).to(dtype).view(-1, 2, 2, 2)  # image, stroke, end, (y, x)
        ends = scale * (2 + 9 * ends / 255)
        share = torch.linspace(0, 1, _POINTS, dtype=dtype)[:, None]
        dots = ends[:, :, None, 0] * (1 - share) + ends[:, :, None, 1] * share
        line = torch.arange(size, dtype=dtype)
        y, x = (dots.flatten(1, 2)[..., axis, None] - line for axis in (0, 1))  # (k, dots, size)
        apart = y.square()[..., :, None] + x.square()[..., None, :]
        return torch.exp(-apart.amin(1) / scale**2)


#: Sources by the word of ``--source``.
SOURCES: dict[str, type[Sprites]] = {"mnist": MnistDigits, "shapes": Shapes}


def _walk(words: Words, frames: int, room: int, unit: int) -> Tensor:
    """Corners of images that move at constant speed between walls, (frames, k, 2).

    In each direction the speed is ``unit`` times -3, -2, -1, 1, 2 or 3, and the start is uniform
    over 0 .. room; a walk turns back at a wall as a ball does.
    """
    halves = np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], axis=-1)
    step = (halves % np.uint64(6)).astype(np.int64)
    speed = unit * np.where(step < 3, step - 3, step - 2)
    start = ((halves // np.uint64(6)) % np.uint64(room + 1)).astype(np.int64)
    way = (start + speed * np.arange(frames)[:, None, None]) % (2 * room)
    return torch.from_numpy(np.minimum(way, 2 * room - way))


def videos(
    sprites: Sprites, words: Words, *, frames: int, frame_size: int, held_out: bool
) -> Tensor:
    """Videos of moving images, the brighter one in front where they overlap.

    Args:
        sprites: Where the images come from.
        words: Random words, (B, digits, 2): of every image its look and its walk.
        frames: Frames of a video, T.
        frame_size: Pixels of a side of a frame, S, a multiple of 16: images are 7 S / 16 wide.
        held_out: Whether images are those that are never trained on.

    Returns:
        (T, B, 1, S, S), values in [0, 1].

    Example:
        >>> import numpy as np
        >>> words = np.arange(12, dtype=np.uint64).reshape(3, 2, 2)
        >>> videos(Shapes(), words, frames=5, frame_size=32, held_out=False).shape
        torch.Size([5, 3, 1, 32, 32])
    """
    size, (count, digits) = 7 * frame_size // 16, words.shape[:2]
    room, unit = frame_size - size, max(1, frame_size // 32)
    canvas = torch.zeros(frames, count, frame_size * frame_size, dtype=torch.get_default_dtype())
    line = torch.arange(size)
    within = (frame_size * line[:, None] + line).flatten()  # pixels of an image in the corner
    for digit in range(digits):
        look, walk = words[:, digit, 0], words[:, digit, 1]
        images = sprites.draw(look, size, held_out=held_out).flatten(1)
        corner = _walk(walk, frames, room, unit)
        pixels = (frame_size * corner[..., 0] + corner[..., 1])[..., None] + within
        canvas.scatter_reduce_(2, pixels, images.expand(frames, -1, -1), "amax")
    return canvas.view(frames, count, 1, frame_size, frame_size)
