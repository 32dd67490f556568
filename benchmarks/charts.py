"""How long does each chart take to build a square weight, beside what users have today?

Every case reads ``layer.weight`` (n x n, float32) and goes backward from a fixed cotangent. The
angles of `matrix_exp` are those of its skew matrix A: |A|_2 = pi and 3 pi, for torch and geotorch
on the same A; our time includes the estimate of the norm. `cwy`, `householder` and the plain loop
of rank-one updates have the same n reflections; autograd keeps every partial product of the loop,
4 GB at n = 1024. The other plain forms are the textbook ones under autograd: Cayley by
`torch.linalg.solve`, and the symmetric orthonormalisation Z (Z^T Z)^(-1/2) by `torch.linalg.eigh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import oracles
from benchmarks.harness import Absent, Case, Goal, Section, Settings, Study, installed, measure
from benchmarks.ours import constrained, reflections_oracle
from benchmarks.peers import (
    cayley_linear,
    eigh_linear,
    geotorch_linear,
    loop_linear,
    tame_proxy,
    torch_linear,
)
from benchmarks.weights import weight_case

__all__ = ["sections"]

_CAYLEY = "Cayley by torch.linalg.solve"
_LOOP = "reflections one by one under autograd"
_EIGH = "orthonormalisation by torch.linalg.eigh"
_ANGLES = {"pi": math.pi, "3 pi": 3 * math.pi}


def _set_angle(layer: nn.Module, angle: float) -> nn.Module:
    """Gives a layer with skew coordinates a random A with |A|_2 = angle."""
    (leaf,) = layer.parameters()
    torch.manual_seed(1)
    A = torch.randn_like(leaf)
    A = A - A.mT
    A *= angle / torch.linalg.matrix_norm(A.double(), 2).to(A)
    with torch.no_grad():
        leaf.copy_(A)
    return layer


def _exponentials(n: int, device: str) -> list[Case | Absent]:
    cases: list[Case | Absent] = []
    for name, angle in _ANGLES.items():
        ours = _set_angle(constrained((n, n), "matrix_exp", device), angle)
        oracle = oracles.against(oracles.exponential)
        cases.append(weight_case(f"stiefel matrix_exp, {name}", ours, ours=True, oracle=oracle))
        theirs = _set_angle(torch_linear(n, n, "matrix_exp", device), angle)
        cases.append(weight_case(f"torch matrix_exp, {name}", theirs))
        peer = f"geotorch, {name}"
        if installed("geotorch"):
            cases.append(weight_case(peer, _set_angle(geotorch_linear(n, n, device), angle)))
        else:
            cases.append(Absent(peer, "geotorch"))
    return cases


def _reflections(n: int, device: str) -> list[Case | Absent]:
    layers = [constrained((n, n), via, device) for via in ("cwy", "householder")]
    layers.append(loop_linear(n, device))
    vectors = torch.randn(n, n, device=device)
    with torch.no_grad():
        for layer in layers:
            for leaf in layer.parameters():
                leaf.copy_(vectors)
    cwy, householder, loop = layers
    return [
        weight_case("stiefel cwy", cwy, ours=True, oracle=reflections_oracle()),
        weight_case("stiefel householder", householder, ours=True, oracle=reflections_oracle()),
        weight_case(_LOOP, loop, oracle=reflections_oracle()),
    ]


def _proxies(n: int, device: str) -> list[Case | Absent]:
    cases: list[Case | Absent] = []
    tame, gaussian = tame_proxy(n, device), torch.randn(n, n, device=device)
    variants: list[tuple[str, str, dict[str, Any], Tensor]] = [
        ("stiefel own", "own", {}, tame),
        ("stiefel own, Gaussian proxy", "own", {}, gaussian),
        ("stiefel polar, newton-schulz", "polar", {}, tame),
        ("stiefel polar, newton-schulz, Gaussian proxy", "polar", {}, gaussian),
        ("stiefel polar, exact", "polar", {"method": "exact"}, tame),
    ]
    for name, via, options, proxy in variants:
        layer = constrained((n, n), via, device, **options)
        with torch.no_grad():
            for leaf in layer.parameters():
                leaf.copy_(proxy)
        # a square Gaussian matrix has a condition number of about n
        oracle = None if proxy is gaussian else oracles.against(oracles.polar)
        cases.append(weight_case(name, layer, ours=True, oracle=oracle))
    return [*cases, weight_case(_EIGH, eigh_linear(n, device))]


def _cases(n: int, device: str) -> list[Case | Absent]:
    cayley = constrained((n, n), "cayley", device)
    with torch.no_grad():
        for leaf in cayley.parameters():
            leaf.normal_().div_(n**0.5)
    oracle = oracles.against(oracles.cayley)
    some = min(16, n // 2)
    full, few = (constrained((n, n), "givens", device, layers=layers) for layers in (n, some))
    return [
        *_reflections(n, device),
        weight_case("stiefel cayley", cayley, ours=True, oracle=oracle),
        weight_case(_CAYLEY, cayley_linear(n, device)),
        *_exponentials(n, device),
        *_proxies(n, device),
        weight_case(f"stiefel givens, {n} layers", full, ours=True),
        weight_case(f"stiefel givens, {some} layers", few, ours=True),
    ]


def _goals(n: int) -> list[Goal]:
    goals = [
        Goal(
            f"n = {n}: matrix_exp at {angle} at least 4 times faster than {peer}",
            f"stiefel matrix_exp, {angle}",
            f"{peer}, {angle}",
            at_least=4,
        )
        for angle in _ANGLES
        for peer in ("torch matrix_exp", "geotorch")
    ]
    goals += [
        Goal(f"n = {n}: cwy at most 0.95 of Cayley by solve", "stiefel cwy", _CAYLEY, at_most=0.95),
        Goal(
            f"n = {n}: cayley at most 0.9 of Cayley by solve",
            "stiefel cayley",
            _CAYLEY,
            at_most=0.9,
        ),
        Goal(f"n = {n}: own no slower than eigh", "stiefel own", _EIGH, at_most=1),
    ]
    if n == 1024:
        goals += [
            Goal(f"cwy at least 20 times faster than {peer}", "stiefel cwy", peer, at_least=20)
            for peer in ("stiefel householder", _LOOP)
        ]
    return goals


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    for n in (16,) if settings.quick else (512, 1024):
        title = f"forward + backward of one {n} x {n} weight, float32"
        yield measure(Study(title, _cases(n, settings.device), _CAYLEY, _goals(n)), settings)
