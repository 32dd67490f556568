"""The defaults of each task: sizes, length of training, start, and the main learning rate.

`copying` is sized to train within a minute on two CPU cores. `smnist` and `pmnist` follow the
published experiments of expRNN (hidden 170, batch 128, 70 epochs, RMSprop): one epoch takes
minutes on a CPU, so ``--epochs 1`` is the first thing to try.
"""

from __future__ import annotations

import dataclasses

__all__ = ["RECIPES", "Recipe"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a task takes where the command line says nothing.

    Attributes:
        hidden: Hidden size; for frames, channels of the first level.
        batch_size: Sequences in a batch, over all devices.
        lr: Main learning rate.
        initialiser: Start of the recurrent weight.
        iterations: Training steps, or None where `epochs` says it.
        epochs: Epochs, or None where `iterations` says it.
        threads: CPU threads; None leaves torch's choice. The steps of a small recurrence are too
            short to share: a second thread gains nothing, and waits for the first at every
            product where the machine has other work.
        head_initialiser: Start of the output layer: ``"kaiming"`` (normal, zero bias) or
            ``"default"`` (torch's own).
        optimizer: What trains everything that is not on a manifold, a name of
            `stiefel.optim.build`.
    """

    hidden: int
    batch_size: int
    lr: float
    initialiser: str
    iterations: int | None = None
    epochs: int | None = None
    threads: int | None = None
    head_initialiser: str = "default"
    optimizer: str = "rmsprop"


RECIPES: dict[str, Recipe] = {
    "copying": Recipe(
        hidden=128,
        batch_size=128,
        lr=1e-3,
        initialiser="henaff",
        iterations=500,
        threads=1,
        head_initialiser="kaiming",
    ),
    "smnist": Recipe(hidden=170, batch_size=128, lr=7e-4, initialiser="cayley", epochs=70),
    "pmnist": Recipe(hidden=170, batch_size=128, lr=1e-3, initialiser="cayley", epochs=70),
    "moving-digits": Recipe(
        hidden=12,
        batch_size=8,
        lr=3e-3,
        initialiser="haar",
        iterations=500,
        threads=1,
        optimizer="adam",
    ),
}
