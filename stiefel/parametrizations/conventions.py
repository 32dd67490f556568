"""How other libraries write the Cayley map, and how to carry their parameters over to `Cayley`.

Ours is ``C(A) = (I + A)^-1 (I - A)``, A skew, its entries above the diagonal the coordinates
(`stiefel.geometry.cayley_map`). Theirs, with S skew and a base B:

- torch ``orthogonal(orthogonal_map="cayley")`` and geotorch ``SO(triv="cayley")``:
  ``B (I - S/2)^-1 (I + S/2) = B C(-S/2)``, S = tril(R) - tril(R)^H.
- peft BOFT, and OFT of square blocks (``oft_r``): ``(I - S) (I + S)^-1 = C(S)``, S = (R - R^T)/2.
- peft OFT: the same, R lists the entries of S above the diagonal.
- peft OFT with ``use_cayley_neumann`` (its default): ``I + 2 S + 2 S^2 + ...``, which is C(-S) in
  the limit; cut off after a few terms it is not orthogonal.

A base stands on the left there and on the right here: ``B C(A) = C(B A B^H) B``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import DtypeError, ShapeError
from stiefel.geometry.skew_coordinates import skew_from_coordinates, skew_to_coordinates
from stiefel.numerics import full_precision

__all__ = [
    "from_boft",
    "from_geotorch",
    "from_oft",
    "from_torch",
    "to_boft",
    "to_geotorch",
    "to_oft",
    "to_torch",
]


def _check_square(X: Tensor, what: str) -> None:
    if X.ndim < 2 or X.shape[-1] != X.shape[-2]:
        raise ShapeError(
            f"expected {what} of square matrices (..., n, n), got {tuple(X.shape)}: the Cayley "
            "chart covers square matrices only; for others carry the weight over, not the "
            "parameter, with stiefel.orthogonal(module, init='keep')"
        )


def _check_real(X: Tensor, library: str) -> None:
    if X.is_complex():
        raise DtypeError(f"{library} has real parameters only, got {X.dtype}")


@full_precision()
def _turned(A: Tensor, base: Tensor | None) -> Tensor:
    """B A B^H."""
    return A if base is None else base @ A @ base.mH


@torch.no_grad()
def from_torch(R: Tensor, base: Tensor | None = None) -> Tensor:
    """Coordinates from ``torch.nn.utils.parametrizations.orthogonal(orthogonal_map="cayley")``.

    Args:
        R: Its ``parametrizations.weight.original``, shape ``(..., n, n)``, real or complex.
        base: Its ``parametrizations.weight[0].base``, shape ``(..., n, n)``; None for
            ``use_trivialization=False``.

    Returns:
        Coordinates, shape ``(..., n, n)``: of `Cayley` without a base if `base` is None, else with
        that base (``Cayley(n, rebase_every=K)`` after ``set_base(base)``).

    Raises:
        ShapeError: If the parameter is not square.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import Cayley
        >>> from stiefel.parametrizations.conventions import from_torch
        >>> layer = torch.nn.Linear(4, 4, dtype=torch.float64)
        >>> layer = torch.nn.utils.parametrizations.orthogonal(layer, orthogonal_map="cayley")
        >>> theirs = layer.parametrizations.weight
        >>> chart = Cayley(4, rebase_every=100)
        >>> chart.set_base(theirs[0].base)
        >>> Q = chart(from_torch(theirs.original, theirs[0].base))
        >>> torch.allclose(Q, layer.weight)
        True
    """
    _check_square(R, "a parameter")
    S = R.tril() - R.tril().mH
    return skew_to_coordinates(_turned(-S / 2, base))


@torch.no_grad()
def to_torch(V: Tensor, base: Tensor | None = None) -> Tensor:
    """The parameter of torch's Cayley map from coordinates; the inverse of `from_torch`.

    Args:
        V: Coordinates, shape ``(..., n, n)``.
        base: Base of the chart, if it has one.

    Returns:
        A parameter with the same weight, shape ``(..., n, n)``, zero where torch ignores it.

    Raises:
        ShapeError: If the coordinates are not square.
    """
    _check_square(V, "coordinates")
    A = skew_from_coordinates(V)
    S = -2 * (A if base is None else _turned(A, base.mH))
    R = S.tril(-1)
    if S.is_complex():  # S_kk = R_kk - conj(R_kk)
        R.diagonal(dim1=-2, dim2=-1).copy_(S.diagonal(dim1=-2, dim2=-1) / 2)
    return R


@torch.no_grad()
def from_geotorch(R: Tensor, base: Tensor | None = None, *, lower: bool = True) -> Tensor:
    """Coordinates from geotorch's ``SO(triv="cayley")``.

    Args:
        R: Its raw parameter, shape ``(..., n, n)``.
        base: Its ``base``, shape ``(..., n, n)``; as in `from_torch`.
        lower: Its option of that name: whether the lower triangle counts.

    Returns:
        Coordinates, shape ``(..., n, n)``.

    Raises:
        ShapeError: If the parameter is not square.
        DtypeError: If it is complex.
    """
    _check_real(R, "geotorch's SO")
    return from_torch(R if lower else -R.triu(1).mT, base)


@torch.no_grad()
def to_geotorch(V: Tensor, base: Tensor | None = None, *, lower: bool = True) -> Tensor:
    """The raw parameter of geotorch's ``SO(triv="cayley")``; the inverse of `from_geotorch`.

    Args:
        V: Coordinates, shape ``(..., n, n)``.
        base: Base of the chart, if it has one.
        lower: geotorch's option of that name.

    Returns:
        A parameter with the same weight, shape ``(..., n, n)``.

    Raises:
        ShapeError: If the coordinates are not square.
        DtypeError: If they are complex.
    """
    _check_real(V, "geotorch's SO")
    R = to_torch(V, base)
    return R if lower else -R.mT


@torch.no_grad()
def from_boft(R: Tensor) -> Tensor:
    """Coordinates from peft's BOFT, and its OFT of square blocks: S = (R - R^T) / 2, C(S).

    Args:
        R: The blocks ``boft_R`` (OFT: ``oft_r``), shape ``(..., b, b)``.

    Returns:
        Coordinates of the blocks, shape ``(..., b, b)``.

    Raises:
        ShapeError: If the blocks are not square.
        DtypeError: If they are complex.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import conventions
        >>> R = torch.tensor([[0.0, 1.0], [-3.0, 0.0]])
        >>> X = conventions.from_boft(R)
        >>> conventions.to_boft(X)  # (R - R^T) / 2, which gives the same matrix
        tensor([[ 0.,  2.],
                [-2.,  0.]])
    """
    _check_real(R, "peft")
    _check_square(R, "blocks")
    return skew_to_coordinates((R - R.mT) / 2)


@torch.no_grad()
def to_boft(V: Tensor) -> Tensor:
    """Blocks of peft's BOFT, itself skew; the inverse of `from_boft`.

    Args:
        V: Coordinates, shape ``(..., b, b)``.

    Returns:
        Blocks R = S, shape ``(..., b, b)``.

    Raises:
        ShapeError: If the coordinates are not square.
        DtypeError: If they are complex.
    """
    _check_real(V, "peft")
    _check_square(V, "coordinates")
    return skew_from_coordinates(V)


@torch.no_grad()
def from_oft(R: Tensor, *, use_cayley_neumann: bool) -> Tensor:
    """Coordinates from peft's OFT, whose parameter lists the strict upper triangle row by row.

    Args:
        R: Its ``oft_R...weight``, shape ``(..., b (b - 1) / 2)``.
        use_cayley_neumann: peft's option of that name (true by default there). The series has the
            other sign, S for -S, and is orthogonal only in the limit of many terms.

    Returns:
        Coordinates of the blocks, shape ``(..., b, b)``.

    Raises:
        ShapeError: If the last dimension is no ``b (b - 1) / 2``.
        DtypeError: If the parameter is complex.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import conventions
        >>> conventions.from_oft(torch.tensor([1.0, 2.0, 3.0]), use_cayley_neumann=False)
        tensor([[0., 1., 2.],
                [0., 0., 3.],
                [0., 0., 0.]])
    """
    _check_real(R, "peft")
    entries = R.shape[-1] if R.ndim else -1
    b = round((1 + (1 + 8 * max(entries, 0)) ** 0.5) / 2)
    if b * (b - 1) // 2 != entries:
        raise ShapeError(
            f"expected a parameter of shape (..., b (b - 1) / 2), the strict upper triangle of "
            f"b x b blocks, got {tuple(R.shape)}; for blocks (..., b, b) use from_boft"
        )
    V = R.new_zeros(*R.shape[:-1], b, b)
    rows, columns = torch.triu_indices(b, b, 1, device=R.device)
    V[..., rows, columns] = -R if use_cayley_neumann else R
    return V


@torch.no_grad()
def to_oft(V: Tensor, *, use_cayley_neumann: bool) -> Tensor:
    """The parameter of peft's OFT; the inverse of `from_oft`.

    Args:
        V: Coordinates, shape ``(..., b, b)``.
        use_cayley_neumann: As in `from_oft`.

    Returns:
        The strict upper triangle of S, shape ``(..., b (b - 1) / 2)``.

    Raises:
        ShapeError: If the coordinates are not square.
        DtypeError: If they are complex.
    """
    _check_real(V, "peft")
    _check_square(V, "coordinates")
    rows, columns = torch.triu_indices(V.shape[-1], V.shape[-1], 1, device=V.device)
    R = V[..., rows, columns]
    return -R if use_cayley_neumann else R
