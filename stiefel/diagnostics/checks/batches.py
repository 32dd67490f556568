"""Does a function give for a batch what it gives for its members one by one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.report_builder import ReportBuilder, in_a_line
from stiefel.diagnostics.checks.sample_points import ATOL, SamplePoint
from stiefel.numerics import plain

__all__ = ["note_batch", "two_points"]


def two_points(point: SamplePoint) -> tuple[SamplePoint, SamplePoint]:
    """The point, and another close by; twice the same without a usable projx."""
    if point.source == "proju":
        return point, point
    return point, point.at(plain(point.manifold.projx(point.x + 0.1 * point.vector())))


def note_batch(
    builder: ReportBuilder,
    name: str,
    function: Callable[..., Any],
    pairs: list[list[Tensor]],
    where: str,
) -> None:
    """Notes how far two stacked points are from each alone.

    Args:
        builder: Where it is noted.
        name: What the function is called.
        function: The function.
        pairs: The arguments for the first point and those for the second.
        where: The shape of the points.
    """
    try:
        each = torch.stack([plain(function(*(a.clone() for a in args))) for args in pairs])
    except NotImplementedError:
        builder.skip(f"{name} is not implemented")
        return
    except Exception as error:
        builder.skip(f"batches of {name}: one by one it raised {in_a_line(error)}")
        return
    stacked = [torch.stack(args) for args in zip(*pairs, strict=True)]
    together = builder.call(f"{name} of a batch", function, *stacked)
    if together is None:
        return
    together, defect = plain(together), float("inf")
    if together.shape == each.shape:
        difference = (together - each).abs() / (1 + each.abs())
        defect = float(difference.max()) if difference.numel() else 0.0
    builder.note(
        "a batch gives what its members give", defect, "<=", ATOL,
        f"{name} of two stacked points is not {name} of each: it mixes the members, or its shape "
        "is wrong.", where,
    )  # fmt: skip
