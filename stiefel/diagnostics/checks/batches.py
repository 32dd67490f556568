"""Does a function give for a batch what it gives for its members one by one?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.ledger import Ledger, in_a_line
from stiefel.diagnostics.checks.places import ATOL, Place, plain

__all__ = ["note_batch", "two_places"]


def two_places(place: Place) -> tuple[Place, Place]:
    """The place, and another close by; twice the same without a usable projx."""
    if place.source == "proju":
        return place, place
    return place, place.at(plain(place.manifold.projx(place.x + 0.1 * place.vector())))


def note_batch(
    ledger: Ledger, name: str, function: Callable[..., Any], pairs: list[list[Tensor]], where: str
) -> None:
    """Notes how far two stacked points are from each alone.

    Args:
        ledger: Where it is noted.
        name: What the function is called.
        function: The function.
        pairs: The arguments for the first point and those for the second.
        where: The shape of the points.
    """
    try:
        each = torch.stack([plain(function(*(a.clone() for a in args))) for args in pairs])
    except NotImplementedError:
        ledger.skip(f"{name} is not implemented")
        return
    except Exception as error:
        ledger.skip(f"batches of {name}: one by one it raised {in_a_line(error)}")
        return
    stacked = [torch.stack(args) for args in zip(*pairs, strict=True)]
    together = ledger.call(f"{name} of a batch", function, *stacked)
    if together is None:
        return
    together, defect = plain(together), float("inf")
    if together.shape == each.shape:
        difference = (together - each).abs() / (1 + each.abs())
        defect = float(difference.max()) if difference.numel() else 0.0
    ledger.note(
        "a batch gives what its members give", defect, "<=", ATOL,
        f"{name} of two stacked points is not {name} of each: it mixes the members, or its shape "
        "is wrong.", where,
    )  # fmt: skip
