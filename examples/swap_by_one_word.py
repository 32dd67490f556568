"""The same recurrent network trained through a chart and along the manifold: one word differs.

Run it with ``python examples/swap_by_one_word.py``; it takes about half a minute and needs nothing
but the library itself. The task is to remember the class of a sequence's first step for fifty
steps of noise.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import torch
from torch import Tensor

import stiefel

STEPS, BATCH, CLASSES, HIDDEN = 50, 64, 4, 32


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (STEPS, BATCH, CLASSES) of noise with the class in their first step."""
    x = 0.1 * torch.randn(STEPS, BATCH, CLASSES, generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    x[0] += torch.nn.functional.one_hot(y, CLASSES)
    return x, y


def train(via: str | None, iterations: int = 200) -> float:
    """Trains with `via`, and returns the loss on the last batch."""
    torch.manual_seed(0)
    rnn = stiefel.models.OrthogonalRNN(CLASSES, HIDDEN, via=via)
    model = stiefel.models.SequenceModel(rnn, CLASSES, readout="last")
    optimizer = stiefel.optim.build(model, lr=1e-3, lr_riemannian=1e-2)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for _ in range(iterations):
        x, y = batch(generator)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for constraint in stiefel.constraints(model):
        residual = stiefel.geometry.orthonormality_residual(constraint.point).item()
        print(f"{via}: loss {loss.item():.4f}, largest entry of |Q^T Q - I| {residual:.1e}")
    return loss.item()


def main(iterations: int = 200) -> None:
    """Trains once through each of two charts of the same manifold."""
    for via in ("cwy", "rgd-c-c"):
        train(via, iterations)


if __name__ == "__main__":
    main()
