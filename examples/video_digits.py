"""Predicts the next frames of moving digits: ConvNERU by a chart and by RGD, and ConvLSTM.

Run it with ``python examples/video_digits.py`` (about two minutes on one core). The digits are
those of MNIST, read from ``--data-dir`` (``../shared/data/mnist`` by default); where there are
none, drawings of two strokes take their place, and the first line says so. For every model it
prints the l1 distance to the next frame on held-out digits, beside that of repeating the last
frame and that of a black frame.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, l1_loss, max_pool2d

import stiefel
from stiefel.errors import DataError
from stiefel.experiments.mnist_files import load_mnist
from stiefel.models import VideoPredictor

SIZE, DIGIT, FRAMES = 32, 14, 8  # pixels of a frame and of a digit, frames of a video


def digits(data_dir: Path) -> tuple[Tensor, Tensor]:
    """Images `(N, 14, 14)` in [0, 1] to train on, and held-out ones."""
    try:
        mnist = load_mnist(data_dir)
    except DataError:
        print(f"no MNIST in {data_dir}: drawings of two strokes instead")
        return strokes(2000, seed=1), strokes(500, seed=2)
    print(f"digits of MNIST, from {data_dir}")
    images = (mnist.train_images, mnist.test_images)
    train, test = (torch.tensor(part[:10000]).float() / 255 for part in images)
    return max_pool2d(train, 2), max_pool2d(test, 2)


def strokes(count: int, seed: int) -> Tensor:
    """Two thick lines between random points, `(count, 14, 14)`."""
    generator = torch.Generator().manual_seed(seed)
    ends = 2 + 9 * torch.rand(count, 2, 2, 2, generator=generator)  # image, line, end, (y, x)
    share = torch.linspace(0, 1, 24)[:, None]
    points = ends[:, :, None, 0] * (1 - share) + ends[:, :, None, 1] * share
    grid = torch.stack(torch.meshgrid(torch.arange(DIGIT), torch.arange(DIGIT), indexing="ij"), -1)
    apart = (grid.flatten(0, 1)[None, :, None] - points.flatten(1, 2)[:, None]).square().sum(-1)
    return torch.exp(-apart.amin(-1)).view(count, DIGIT, DIGIT)


def videos(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """One digit a video, at a constant speed between walls: `(T, count, 1, 32, 32)`."""
    chosen = images[torch.randint(len(images), (count,), generator=generator)]
    room = SIZE - DIGIT
    start = torch.randint(room + 1, (count, 2), generator=generator)
    speed = 4 * torch.randint(2, (count, 2), generator=generator) - 2
    way = (start + speed * torch.arange(FRAMES)[:, None, None]) % (2 * room)
    corner = torch.minimum(way, 2 * room - way)  # there and back again
    video = torch.zeros(FRAMES, count, 1, SIZE, SIZE)
    for t in range(FRAMES):
        for b, (y, x) in enumerate(corner[t].tolist()):
            video[t, b, 0, y : y + DIGIT, x : x + DIGIT] = chosen[b]
    return video


def train(model: VideoPredictor, images: Tensor, iterations: int, batch: int = 8) -> None:
    """Adam for the coordinates of charts and all the rest, RGD for points on the manifold."""
    optimizer = stiefel.optim.build(model, lr=5e-3, lr_orthogonal=5e-3, lr_riemannian=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    generator = torch.Generator().manual_seed(1)
    for _ in range(iterations):
        video = videos(images, batch, generator)
        optimizer.zero_grad()
        prediction = model(video[:-1])
        # cross-entropy leads away from black frames, where l1 alone may stay
        loss = l1_loss(prediction, video[1:]) + binary_cross_entropy(prediction, video[1:])
        loss.backward()
        optimizer.step()
        schedule.step()


def make(name: str) -> VideoPredictor:
    """A small predictor with ConvLSTM inside, or ConvNERU trained by ``via=name``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"widths": (12, 24), "head_channels": 12, "kernel_size": 5}
    if name == "convlstm":
        model = VideoPredictor(cell="convlstm", **sizes)
    else:
        model = VideoPredictor(cell="convneru", via=name, **sizes)
    torch.nn.init.constant_(model.get_parameter("head.1.bias"), -2)  # frames are dark
    return model


def main(
    data_dir: Path, vias: list[str], iterations: int = 300, held_out: int = 100
) -> dict[str, float]:
    """Trains every model.

    Args:
        data_dir: Folder of the MNIST files.
        vias: How ConvNERU's kernels are trained, a model each; ConvLSTM follows.
        iterations: Training steps of each.
        held_out: Videos to test on.

    Returns:
        The l1 distance of each model on held-out digits, and of ``"repeat"`` and ``"black"``.
    """
    images, unseen = digits(data_dir)
    test = videos(unseen, held_out, torch.Generator().manual_seed(2))
    found = {
        "repeat": l1_loss(test[:-1], test[1:]).item(),
        "black": test[1:].mean().item(),
    }
    print(f"l1 of the last frame {found['repeat']:.4f}, of a black frame {found['black']:.4f}")
    for name in [*vias, "convlstm"]:
        model, begin = make(name), time.perf_counter()
        train(model, images, iterations)
        with torch.no_grad():
            found[name] = l1_loss(model(test[:-1]), test[1:]).item()
        print(
            f"{name}: l1 {found[name]:.4f}, {model.expected_parameters()} parameters, "
            f"{time.perf_counter() - begin:.0f} s"
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data/mnist"))
    parser.add_argument("--via", nargs="*", default=["cwy", "rgd-c-c"])
    parser.add_argument("--iterations", type=int, default=300)
    arguments = parser.parse_args()
    main(arguments.data_dir, arguments.via, arguments.iterations)
