"""How much memory does it take to train a very tall weight?

A 30000 x 50 weight (float32, 6 MB) is trained for a few steps towards a target with orthonormal
columns, by Adam in every chart that claims tall weights and by `rgd-c-c`, each in a process of its
own. `peak MB` is how far the resident memory of that process rose above what it was with everything
imported and one small weight trained; `weights` is the same in sizes of the weight (one n x n
matrix would be 600 of them). The loss must fall and the weight stay orthonormal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, Section, Settings, judge, require
from benchmarks.ours import constrained
from stiefel.geometry import haar, orthonormality_residual
from stiefel.numerics import tolerance
from stiefel.optim import build
from stiefel.parameter import constraints
from stiefel.parametrizations import CHARTS

__all__ = ["sections"]

#: Peak memory that is allowed, in sizes of the weight.
_ALLOWED = 60


def _resident(key: str) -> int:
    """Bytes of this process by the kernel's account: ``VmRSS`` now, ``VmHWM`` at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {key} in /proc/self/status")


def _train(via: str, n: int, p: int, steps: int) -> dict[str, float]:
    """Trains one weight and says how; the loss is |X - T|^2 / 2p, between 0 and 2."""
    torch.manual_seed(0)
    module = constrained((n, p), via, "cpu")
    target = haar(n, p)
    optimizer = build(module, lr=1e-3, lr_orthogonal=1e-3, lr_riemannian=10.0)
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module.weight - target).square().sum() / (2 * p)  # pyright: ignore[reportOperatorIssue]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - start) / steps
    (constraint,) = constraints(module)
    residual = float(orthonormality_residual(constraint.point).max())
    return {"first": losses[0], "last": losses[-1], "seconds": seconds, "residual": residual}


def measured(via: str, n: int, p: int, steps: int) -> dict[str, float]:
    """Trains a small weight, then the large one; adds by how many bytes memory rose."""
    _train(via, 64, 4, 2)
    before = _resident("VmRSS")
    result = _train(via, n, p, steps)
    return {**result, "bytes": _resident("VmHWM") - before}


def _in_a_process(*arguments: Any) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.tall_memory", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:])} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its table.

    Args:
        settings: Sizes. Memory of the CPU is what is measured.
    """
    n, p = (300, 5) if settings.quick else (30_000, 50)
    vias = [*(name for name, chart in CHARTS.items() if chart.tall), "rgd-c-c"]
    if settings.quick:
        vias = vias[:1]
    rows, goals = [], []
    for via in vias:
        result = _in_a_process(via, n, p, 6)
        require(f"{via}: last loss over first", result["last"] / result["first"], 0.999)
        require(f"{via}: residual", result["residual"], tolerance(torch.float32, n, p))
        weights = result["bytes"] / (4 * n * p)
        values = {
            "peak MB": result["bytes"] / 1e6,
            "weights": weights,
            "ms a step": 1e3 * result["seconds"],
            "first loss": result["first"],
            "last loss": result["last"],
            "residual": result["residual"],
        }
        rows.append(Row(f"stiefel {via}", values))
        text = f"{via}: at most {_ALLOWED} times the weight"
        goals.append(judge(text, weights, _ALLOWED, weights <= _ALLOWED, settings))
    yield Section(f"training a {n} x {p} weight, float32, 6 steps", rows, goals)


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], *map(int, sys.argv[2:]))))
