"""Remembers ten symbols over a hundred steps: asRNN and nnRNN, by a chart and by RGD.

Run it with ``python examples/copying_memory.py`` (a minute or two for each line on two cores). A
network that remembers nothing ends at the baseline, 10 ln 8 / (delay + 20); every line says which
share of it is left. ``--model`` and ``--via`` choose other pairs, ``--steps`` shorter runs.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

import stiefel
from stiefel.experiments.tasks import Copying
from stiefel.models import ASRNN, NNRNN, OrthogonalRNN, SequenceModel

MODELS = {"asrnn": ASRNN, "nnrnn": NNRNN, "orthogonal": OrthogonalRNN}


def train(name: str, via: str, task: Copying, *, hidden: int, steps: int, batch: int) -> float:
    """Trains one model and returns its loss on sequences that it has not seen."""
    torch.manual_seed(0)
    network = MODELS[name](task.input_size, hidden, via=via, init="henaff")
    model = SequenceModel(network, task.output_size)
    riemannian = 100 * 1e-3 / (task.baseline * task.length)  # steps follow the size of the loss
    optimizer = stiefel.optim.build(
        model, lr=1e-3, lr_orthogonal=1e-4, lr_riemannian=riemannian, optimizer="rmsprop"
    )
    for step in range(steps):
        data = task.train_batch(step, batch, seed=0)
        optimizer.zero_grad()
        task.loss(model(data.inputs), data).backward()
        stiefel.optim.clip_grad_norm_(model, 10.0)
        optimizer.step()
    data = task.train_batch(steps, 512, seed=1)
    with torch.no_grad():
        return float(task.loss(model(data.inputs), data))


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], float]:
    """Trains every pair of a model and a way, and prints what is left of the baseline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="+", default=["asrnn", "nnrnn"], choices=MODELS)
    parser.add_argument("--via", nargs="+", default=["exprnn", "rgd-c-c"])
    parser.add_argument("--delay", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args(arguments)
    task = Copying(options.delay)
    print(f"delay {options.delay}, baseline {task.baseline:.4f}")
    shares = {}
    for name in options.model:
        for via in options.via:
            start = time.perf_counter()
            loss = train(
                name,
                via,
                task,
                hidden=options.hidden,
                steps=options.steps,
                batch=options.batch,
            )
            shares[name, via] = loss / task.baseline
            seconds = time.perf_counter() - start
            print(f"{name}, {via}: {100 * loss / task.baseline:.1f} % ({seconds:.0f} s)")
    return shares


if __name__ == "__main__":
    main()
