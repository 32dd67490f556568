"""Starting points: fill a tensor in place with orthonormal columns (wide: rows).

Each takes a tensor ``(..., n, p)``, real or complex, square, tall or wide, and serves as
``init=`` of `stiefel.orthogonal`: ``initialiser(tensor, *, generator=None, determinant=None)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import unknown
from stiefel.init.points import haar_, identity_, orthogonalize_, permutation_
from stiefel.init.rotations import cayley_, henaff_, torus_

__all__ = [
    "INITIALIZERS",
    "Initializer",
    "cayley_",
    "fill_",
    "haar_",
    "henaff_",
    "identity_",
    "initializer",
    "orthogonalize_",
    "permutation_",
    "torus_",
]

#: ``init(tensor, *, generator=None, determinant=None)``; either keyword may be missing.
Initializer = Callable[..., Any]

#: Initialisers by the names that ``init=`` takes.
INITIALIZERS: dict[str, Initializer] = {
    "haar": haar_,
    "identity": identity_,
    "permutation": permutation_,
    "henaff": henaff_,
    "cayley": cayley_,
    "torus": torus_,
    "orthogonalize": orthogonalize_,
}


def initializer(init: str | Initializer, further: tuple[str, ...] = ()) -> Initializer:
    """The initialiser of a name; a callable is its own.

    Args:
        init: A name of `INITIALIZERS`, or a callable.
        further: More names that the caller takes, for the message of the error.

    Raises:
        UnknownNameError: If the name is unknown; the message lists the valid ones.
    """
    if callable(init):
        return init
    if init not in INITIALIZERS:
        raise unknown("init", init, [*INITIALIZERS, *further])
    return INITIALIZERS[init]


@torch.no_grad()
def fill_(tensor: Tensor, init: Initializer, **offered: Any) -> list[str]:
    """Fills a tensor by an initialiser that may know some keywords and not others.

    Args:
        tensor: What is filled in place; a callable that returns a new tensor is copied from.
        init: The initialiser, such as ``stiefel.init.haar_`` or ``torch.nn.init.orthogonal_``.
        **offered: Keywords such as ``generator=`` and ``determinant=``; those that are None or
            that the initialiser does not take are left out.

    Returns:
        The keywords that were passed on.
    """
    try:
        known = inspect.signature(init).parameters
    except (TypeError, ValueError):
        known = {}
    given = {name: value for name, value in offered.items() if value is not None and name in known}
    result = init(tensor, **given)
    if isinstance(result, Tensor) and result is not tensor:
        tensor.copy_(result)
    return list(given)
