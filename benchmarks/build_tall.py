"""How long does a tall matrix with orthonormal columns take to build, forward and backward?

Every case reads ``layer.weight`` (n x p) of a linear layer and goes backward from a fixed
cotangent: T-CWY, torch's own `orthogonal` (its default map for such a shape is Householder), and
geotorch. Only T-CWY keeps to O(n p) memory: torch and geotorch hold an n x n matrix. The matrix
exponential of an n x n matrix would take minutes at n = 4096, so geotorch is timed at 1024 only.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Absent, Case, Goal, Section, Settings, Study, installed, measure
from benchmarks.ours import reflections_linear, reflections_oracle
from benchmarks.peers import geotorch_linear, torch_linear
from benchmarks.weights import perturb_below_diagonal, weight_case

__all__ = ["sections"]

_OURS = "stiefel tcwy"
_TORCH_HR = "torch orthogonal, householder"
_GEOTORCH = "geotorch orthogonal"


def _cases(n: int, p: int, device: str, with_geotorch: bool) -> list[Case | Absent]:
    """Makes the cases of one shape."""
    ours = reflections_linear(n, p, "tcwy", device)
    torch_layer = torch_linear(n, p, "householder", device)
    cases: list[Case | Absent] = [
        weight_case(_OURS, ours, ours=True, oracle=reflections_oracle()),
        weight_case(_TORCH_HR, torch_layer, noise=perturb_below_diagonal),
    ]
    if with_geotorch and installed("geotorch"):
        cases.append(weight_case(_GEOTORCH, geotorch_linear(n, p, device)))
    elif with_geotorch:
        cases.append(Absent(_GEOTORCH, "geotorch"))
    return cases


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    shapes = [(24, 4)] if settings.quick else [(1024, 64), (4096, 32)]
    for n, p in shapes:
        goals = []
        if (n, p) == (4096, 32):
            goals = [
                Goal("tcwy at least 1,000 times faster than torch", _OURS, _TORCH_HR, 1000),
            ]
        cases = _cases(n, p, settings.device, with_geotorch=n <= 1024)
        title = f"forward + backward of one {n} x {p} matrix, float32"
        yield measure(Study(title, cases, _OURS, goals), settings)
