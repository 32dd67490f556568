"""How long do a thousand small weights take, in one batch?

Every case reads a weight of 1024 orthogonal matrices 16 x 16 (float32) and goes backward from a
fixed cotangent: every chart that takes batches, and torch's `orthogonal` with its Householder map.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, Goal, Section, Settings, Study, measure
from benchmarks.ours import constrained
from benchmarks.peers import torch_batch
from benchmarks.weights import perturb_below_diagonal, weight_case
from stiefel.parametrizations import CHARTS

__all__ = ["sections"]

_TORCH = "torch orthogonal, householder"
_GAUSSIAN = ", Gaussian proxy"
#: Charts whose time depends on the proxy: they start at the weight, where they are fast.
_PROXIES = ("own", "polar")
#: Options beside the defaults that are timed too.
_VARIANTS = {"polar": [{"method": "exact"}], "givens": [{"layers": 4, "style": "fft"}]}
#: Timed without a goal: what depends on the proxy, and a method that decomposes every matrix.
_NO_GOAL = (_GAUSSIAN, ", method exact")


def _cases(count: int, n: int, device: str) -> list[Case]:
    cases = []
    for via, chart in CHARTS.items():
        if not chart.batched or via == "tcwy":
            continue
        for options in ({}, *_VARIANTS.get(via, [])):
            said = ", ".join(f"{key} {value}" for key, value in options.items())
            layer = constrained((count, n, n), via, device, **options)
            name = f"stiefel {via}" + (f", {said}" if said else "")
            cases.append(weight_case(name, layer, ours=True))
    for via in _PROXIES:
        layer = constrained((count, n, n), via, device)
        with torch.no_grad():
            for leaf in layer.parameters():
                leaf.normal_()
        cases.append(weight_case(f"stiefel {via}{_GAUSSIAN}", layer, ours=True))
    theirs = torch_batch((count, n, n), "householder", device)
    return [*cases, weight_case(_TORCH, theirs, noise=perturb_below_diagonal)]


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    count, n = (8, 16) if settings.quick else (1024, 16)
    cases = _cases(count, n, settings.device)
    goals = [
        Goal(f"{case.name} at least 2 times faster than torch", case.name, _TORCH, at_least=2)
        for case in cases
        if case.name != _TORCH and not case.name.endswith(_NO_GOAL)
    ]
    title = f"forward + backward of {count} matrices {n} x {n}, float32"
    yield measure(Study(title, cases, _TORCH, goals), settings)
