"""How much of a training pass goes into building the weight, for L = 16 ... N reflections?

A recurrent weight is built once per pass and used at every step. The table puts the time to build
it, forward and backward, beside the time of the rollout that uses it (`OrthogonalRNN` with a plain
weight), and gives the time of the whole pass with ``via="cwy"``, which never forms the matrix where
2 L < N. The last column divides by the rollout: 0.1 means that building costs a tenth of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.harness import Case, Section, Settings, Study, measure
from benchmarks.ours import reflections_linear, reflections_oracle, rnn_like
from benchmarks.rollout import sequence_case
from benchmarks.weights import weight_case

__all__ = ["sections"]

_ROLLOUT = "rollout, plain weight"
_FEATURES = 10


def _study(steps: int, batch: int, n: int, counts: list[int], device: str) -> Study:
    """Makes the study of one size."""
    x = torch.randn(steps, batch, _FEATURES, device=device)
    cotangent = torch.randn(steps, batch, n, device=device)
    rnn = nn.RNN(_FEATURES, n).to(device)
    plain, _ = rnn_like(rnn)
    cases: list[Case] = [sequence_case(_ROLLOUT, plain, x, cotangent)]
    for count in counts:
        layer = reflections_linear(n, n, "cwy", device, reflections=count)
        oracle = reflections_oracle()
        cases.append(weight_case(f"build, L = {count}", layer, ours=True, oracle=oracle))
    for count in counts:
        built, _ = rnn_like(rnn, via="cwy", reflections=count)
        cases.append(sequence_case(f"whole pass, L = {count}", built, x, cotangent))
    title = f"forward + backward, N = {n}, T = {steps}, B = {batch}, float32"
    return Study(title, cases, _ROLLOUT)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    if settings.quick:
        yield measure(_study(10, 2, 16, [4, 16], settings.device), settings)
        return
    counts = [16, 32, 64, 128, 256, 512]
    yield measure(_study(200, 128, 512, counts, settings.device), settings)
