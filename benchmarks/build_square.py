"""How long does a square orthogonal matrix take to build, forward and backward?

Every case reads ``layer.weight`` of a linear layer and, in the first studies, goes backward from a
fixed cotangent to the coordinates: CWY with L reflections, torch's own `orthogonal` with both of
its maps, geotorch, and the Cayley map by `torch.linalg.solve` under autograd. The arguments are
random: Gaussian reflection vectors, skew coordinates of spread 1/sqrt(n).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Absent, Case, Goal, Section, Settings, Study, installed, measure
from benchmarks.ours import reflections_linear, reflections_oracle
from benchmarks.peers import cayley_linear, geotorch_linear, torch_linear
from benchmarks.weights import perturb_below_diagonal, weight_case

__all__ = ["sections"]

_CAYLEY = "Cayley by torch.linalg.solve"
_TORCH_EXP = "torch orthogonal, matrix_exp"
_TORCH_HR = "torch orthogonal, householder"
_GEOTORCH = "geotorch orthogonal"


def _ours(reflections: int) -> str:
    return f"stiefel cwy, L = {reflections}"


def _cases(n: int, few: int, device: str, backward: bool) -> list[Case | Absent]:
    """Makes the cases of one size, ours with n and with `few` reflections."""
    cases: list[Case | Absent] = []
    for reflections in (n, few):
        layer = reflections_linear(n, n, "cwy", device, reflections=reflections)
        cases.append(
            weight_case(
                _ours(reflections), layer, ours=True, backward=backward, oracle=reflections_oracle()
            )
        )
    exp, hr = torch_linear(n, n, "matrix_exp", device), torch_linear(n, n, "householder", device)
    cases += [
        weight_case(_CAYLEY, cayley_linear(n, device), backward=backward),
        weight_case(_TORCH_EXP, exp, backward=backward),
        weight_case(_TORCH_HR, hr, backward=backward, noise=perturb_below_diagonal),
        weight_case(_GEOTORCH, geotorch_linear(n, n, device), backward=backward)
        if installed("geotorch")
        else Absent(_GEOTORCH, "geotorch"),
    ]
    return cases


def _goals(n: int, few: int, device: str) -> list[Goal]:
    """Returns what is asked at n = 1024 on a CPU and, for the order alone, on a GPU."""
    full = _ours(n)
    if device == "cuda":
        peers = (_CAYLEY, _TORCH_EXP) if n >= 256 else ()
        return [
            Goal(f"n = {n}: cwy faster than {peer}", full, peer, at_least=1, device="cuda")
            for peer in peers
        ]
    if n != 1024:
        return []
    return [
        Goal("cwy at least 15 times faster than torch matrix_exp", full, _TORCH_EXP, 15),
        Goal("cwy at least 15 times faster than torch householder", full, _TORCH_HR, 15),
        Goal("cwy at least 15 times faster than geotorch", full, _GEOTORCH, 15),
        Goal("cwy no slower than Cayley by solve", full, _CAYLEY, at_most=1),
        Goal(f"L = {few} at least 9 times faster than Cayley", _ours(few), _CAYLEY, 9),
    ]


def _sizes(settings: Settings) -> list[tuple[int, int]]:
    """Returns (n, few reflections) of every study."""
    if settings.quick:
        return [(24, 6)]
    if settings.device == "cuda":
        return [(n, n // 8) for n in (64, 128, 256, 512, 1024, 2048, 4096)]
    return [(256, 32), (512, 64), (1024, 128)]


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    device = settings.device
    for n, few in _sizes(settings):
        yield measure(
            Study(
                f"forward + backward of one {n} x {n} matrix, float32",
                _cases(n, few, device, backward=True),
                _CAYLEY,
                _goals(n, few, device),
            ),
            settings,
        )
    n, few = _sizes(settings)[-1]
    cases = _cases(n, few, device, backward=False)
    yield measure(Study(f"forward of one {n} x {n} matrix, float32", cases, _CAYLEY), settings)
