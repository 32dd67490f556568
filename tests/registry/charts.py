"""Charts, with the shapes, dtypes and options that they claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from stiefel.parametrizations import CHARTS as CHARTS_BY_NAME
from stiefel.parametrizations import Parametrization
from tests.registry.geometry import DTYPES, SHAPES

SQUARE = [shape for shape in SHAPES if shape[1] == shape[2]]
TALL = [shape for shape in SHAPES if shape[1] > shape[2]]
#: Shapes of at least three rows, for ``negative=3``.
FIXED = [((), 6, 6), ((), 3, 3), ((2,), 4, 4)]
#: Shapes where two reflections are few (the operator is not dense), four are neither few nor all.
FEW = [((), 7, 7), ((2,), 5, 5), ((), 7, 3)]
#: Square shapes for layers of rotations: full, few, and butterflies.
LAYERED = [((), 6, 6), ((), 7, 7), ((), 2, 2), ((), 1, 1), ((2,), 4, 4), ((2, 3), 3, 3)]
LAYERED_FEW = [((), 7, 7), ((2,), 4, 4)]
BUTTERFLIES = [((), 8, 8), ((2,), 4, 4), ((), 1, 1)]


@dataclass(frozen=True)
class ChartCase:
    """A chart with its options, and the shapes and dtypes that it claims.

    ``onto``: every matrix of the right determinant is reached, not products of few factors only.
    ``almost``: all but a null set; special points may be refused, with a reason.
    ``inverts``: the chart finds coordinates of a given point at all.
    ``component``: `set_determinant` chooses the component of a real square weight.
    ``carries``: which of an optimizer's moments a rebase carries into the new coordinates, sums of
    gradients (``linear``) and of their squares (``squared``); the others are reset.
    """

    name: str
    shapes: list[tuple[tuple[int, ...], int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)
    onto: bool = True
    almost: bool = False
    inverts: bool = True
    component: bool = True
    carries: tuple[str, ...] = ("linear", "squared")

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}{value}" for key, value in self.options.items())])

    def make(self, shape: tuple[tuple[int, ...], int, int]) -> Parametrization:
        """The chart for one (batch, n, p)."""
        batch, n, p = shape
        return CHARTS_BY_NAME[self.name](n, p, batch=batch, **self.options)

    @property
    def batched(self) -> bool:
        """Whether the chart takes batches of matrices."""
        return CHARTS_BY_NAME[self.name].batched


CHARTS = [
    ChartCase("cwy", SHAPES),
    ChartCase("cwy", FEW, {"reflections": 2}, onto=False),
    ChartCase("cwy", FEW, {"reflections": 4}, onto=False),
    ChartCase("tcwy", [*TALL, ((), 9, 3)]),
    ChartCase("householder", [*SHAPES, ((), 7, 3), ((), 9, 3)]),
    ChartCase(
        "urnn",
        [((), n, n) for n in (1, 6, 7, 8)],
        dtypes=[torch.complex64, torch.complex128],
        onto=False,
        inverts=False,
    ),
    ChartCase("householder", FEW, {"reflections": 2}, onto=False),
    ChartCase("cayley", SQUARE, onto=False, almost=True),
    ChartCase("cayley", FIXED, {"negative": 3}, onto=False, almost=True, component=False),
    ChartCase("cayley", SQUARE, {"rebase_every": 5}, carries=()),
    ChartCase("matrix_exp", SHAPES, carries=()),
    ChartCase("matrix_exp", SQUARE, {"base": "identity"}),
    ChartCase("matrix_exp", [((), 7, 3), ((2,), 5, 1)], {"base": "identity"}, onto=False),
    ChartCase("matrix_exp", FEW, {"rebase_every": 2, "project_every": 2}, carries=()),
    ChartCase("own", SHAPES, component=False, carries=("linear",)),
    ChartCase("own", TALL, {"center": True}, onto=False, component=False, carries=("linear",)),
    ChartCase("polar", [*SHAPES, ((), 9, 2)], component=False, carries=("linear",)),
    ChartCase("polar", SHAPES, {"method": "exact"}, component=False, carries=("linear",)),
    ChartCase("givens", LAYERED),
    ChartCase("givens", LAYERED_FEW, {"layers": 2}, onto=False, inverts=False),
    ChartCase("givens", BUTTERFLIES, {"style": "fft"}, onto=False, inverts=False),
]
