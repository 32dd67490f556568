"""Starting points: fill a tensor in place with orthonormal columns (wide: rows).

Each takes a tensor ``(..., n, p)``, real or complex, square, tall or wide, and serves as
``init=`` of `stiefel.orthogonal`: ``initialiser(tensor, *, generator=None, determinant=None)``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ShapeError, unknown
from stiefel.geometry import haar, with_determinant
from stiefel.numerics import compute_dtype, real_dtype

__all__ = ["INITIALIZERS", "Initializer", "cayley_", "fill_", "haar_", "henaff_", "initializer"]

#: ``init(tensor, *, generator=None, determinant=None)``; either keyword may be missing.
Initializer = Callable[..., Any]


def _sizes(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Batch, long and short side."""
    if tensor.ndim < 2:
        raise ShapeError(
            f"expected a tensor of shape (..., n, p) to initialise, got {tuple(tensor.shape)}"
        )
    *batch, rows, columns = tensor.shape
    return tuple(batch), max(rows, columns), min(rows, columns)


@torch.no_grad()
def _fill(tensor: Tensor, X: Tensor) -> Tensor:
    """Copies a tall X into the tensor, transposed where the tensor is wide."""
    return tensor.copy_(X.mT if tensor.shape[-2] < tensor.shape[-1] else X)


def haar_(
    tensor: Tensor,
    *,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills a tensor with Haar distributed matrices with orthonormal columns (wide: rows).

    The phase-fixed Q factor of a Gaussian matrix: uniform on O(n), U(n) or St(n, p).

    Args:
        tensor: Shape ``(..., n, p)``, real or complex.
        generator: Source of randomness.
        determinant: +1 or -1 (or a tensor of them, shape ``(...)``) for real square matrices:
            uniform on that component.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        ConfigurationError: If a determinant is asked of a matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.

    Example:
        >>> import torch
        >>> from stiefel.init import haar_
        >>> W = haar_(torch.empty(3, 5, dtype=torch.float64))
        >>> torch.allclose(W @ W.mT, torch.eye(3, dtype=torch.float64))
        True
    """
    batch, n, p = _sizes(tensor)
    X = haar(n, p, batch, dtype=tensor.dtype, device=tensor.device, generator=generator)
    if determinant is not None:
        X = with_determinant(X, determinant)
    return _fill(tensor, X)


def _block_rotations(
    tensor: Tensor,
    angles: Callable[[Tensor], Tensor],
    generator: torch.Generator | None,
    determinant: int | Tensor | None,
) -> Tensor:
    """Fills with the first columns of exp(A), A = diag([[0, a], [-a, 0]], ...).

    exp of a block is [[cos a, sin a], [-sin a, cos a]]; for odd n the last entry of A is 0.

    Args:
        tensor: The tensor to fill.
        angles: Maps uniform numbers on [0, 1) to the angles a.
        generator: Source of randomness.
        determinant: As in `haar_`; exp(A) has +1, -1 negates the last row.
    """
    batch, n, p = _sizes(tensor)
    dtype = compute_dtype(tensor.dtype)
    uniform = torch.rand(
        *batch, n // 2, dtype=real_dtype(dtype), device=tensor.device, generator=generator
    )
    a = angles(uniform).to(dtype)
    X = torch.zeros(*batch, n, n, dtype=dtype, device=tensor.device)
    even = torch.arange(0, 2 * (n // 2), 2, device=tensor.device)
    X[..., even, even] = X[..., even + 1, even + 1] = a.cos()
    X[..., even, even + 1] = a.sin()
    X[..., even + 1, even] = -a.sin()
    if n % 2:
        X[..., -1, -1] = 1
    X = X[..., :p]
    if determinant is not None:
        X = with_determinant(X, determinant)
    return _fill(tensor, X)


def henaff_(
    tensor: Tensor,
    *,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills with exp(A), A block diagonal with blocks [[0, a], [-a, 0]], a ~ U(-pi, pi).

    Henaff, Szlam, LeCun (2016), as in expRNN; the start of the copying task. The matrix acts on
    columns, ``y = W h``; expRNN multiplies rows, ``h B`` with B = exp(A), whose column form is
    ``W^T``: the same distribution, for a and -a are equally likely. For odd n the last coordinate
    is fixed; a tall tensor takes the first columns, a wide one is the transpose of a tall one.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex (then with real entries).
        generator: Source of randomness.
        determinant: +1 (what exp has) or -1 (the last row is negated), real square matrices only.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        ConfigurationError: If a determinant is asked of a matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.
    """
    return _block_rotations(tensor, lambda r: math.pi * (2 * r - 1), generator, determinant)


def cayley_(
    tensor: Tensor,
    *,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills with exp(A), blocks [[0, a], [-a, 0]], a = -tan(theta / 2), theta ~ U(0, pi / 2).

    The "Cayley initialiser" of Helfrich, Willmott, Ye (2018) as used by expRNN: the distribution
    of A is named after the Cayley map, but the matrix is exp(A), so its angles lie in (-1, 0].
    The matrix acts on columns, ``y = W h``; expRNN multiplies rows, ``h B`` with B = exp(A), whose
    column form is ``W^T``, the rotation by the opposite angles.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex (then with real entries).
        generator: Source of randomness.
        determinant: +1 (what exp has) or -1 (the last row is negated), real square matrices only.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        ConfigurationError: If a determinant is asked of a matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.
    """
    return _block_rotations(tensor, lambda r: -torch.tan(math.pi / 4 * r), generator, determinant)


#: Initialisers by the names that ``init=`` takes.
INITIALIZERS: dict[str, Initializer] = {
    "haar": haar_,
    "henaff": henaff_,
    "cayley": cayley_,
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
