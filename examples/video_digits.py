"""Predicts the next frames of moving digits: ConvNERU by a chart and by RGD, and ConvLSTM.

Run it with ``python examples/video_digits.py`` (about two minutes on one core). The digits are
those of MNIST, read from ``--data-dir`` (``../shared/data/mnist`` by default); where there are
none, generated drawings of two strokes take their place, and the first line says so. For every
model it prints the l1 distance to the next frame on held-out digits, beside that of repeating the
last frame and that of a black frame. ``stiefel train moving-digits`` trains on the same videos and
has more methods; this is how to do it with a loop of your own.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy, l1_loss

import stiefel
from stiefel.errors import DataError
from stiefel.experiments.tasks import MovingDigits
from stiefel.models import VideoPredictor


def videos_of(data_dir: Path, held_out: int) -> MovingDigits:
    """Eight frames of 32 x 32 pixels with a digit each."""
    options: dict[str, Any] = {"frames": 8, "digits": 1, "evaluation_sequences": held_out}
    try:
        task = MovingDigits(data_dir=data_dir, **options)
    except DataError:
        print(f"no MNIST in {data_dir}: drawings of two strokes instead")
        task = MovingDigits(source="shapes", **options)
    print(task.describe())
    return task


def train(model: VideoPredictor, task: MovingDigits, iterations: int, batch: int = 8) -> None:
    """Adam for the coordinates of charts and all the rest, RGD for points on the manifold."""
    optimizer = stiefel.optim.build(model, lr=5e-3, lr_orthogonal=5e-3, lr_riemannian=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for step in range(iterations):
        seen, due, _ = task.train_batch(step, batch, seed=1)
        optimizer.zero_grad()
        prediction = model(seen)
        # cross-entropy leads away from black frames, where l1 alone may stay
        loss = l1_loss(prediction, due) + binary_cross_entropy(prediction, due)
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
    task = videos_of(data_dir, held_out)
    (test,) = task.evaluation_batches(held_out, seed=0)
    found = {"repeat": task.baseline, "black": test.targets.mean().item()}
    print(f"l1 of the last frame {found['repeat']:.4f}, of a black frame {found['black']:.4f}")
    for name in [*vias, "convlstm"]:
        model, begin = make(name), time.perf_counter()
        train(model, task, iterations)
        with torch.no_grad():
            found[name] = l1_loss(model(test.inputs), test.targets).item()
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
