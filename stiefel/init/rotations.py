"""Starts that are block diagonal rotations: a maximal torus of O(n) or U(n)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel.errors import ShapeError
from stiefel.geometry import with_determinant
from stiefel.geometry.sampling import block_rotations
from stiefel.init.tensors import fill, sizes
from stiefel.numerics import compute_dtype, real_dtype

__all__ = ["cayley_", "henaff_", "torus_"]


def _uniform(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers on [0, 1), one for each block, shape ``(..., n // 2)``."""
    batch, n, _ = sizes(tensor)
    dtype = real_dtype(compute_dtype(tensor.dtype))
    return torch.rand(*batch, n // 2, dtype=dtype, device=tensor.device, generator=generator)


def _block_rotations(tensor: Tensor, angles: Tensor, determinant: int | Tensor | None) -> Tensor:
    """Fills with `block_rotations`.

    Args:
        tensor: The tensor to fill.
        angles: The angles, shape ``(..., n // 2)``.
        determinant: As in `haar_`; the rotations have +1, -1 negates the last row.
    """
    _, n, p = sizes(tensor)
    X = block_rotations(angles, n, p).to(compute_dtype(tensor.dtype))
    if determinant is not None:
        X = with_determinant(X, determinant)
    return fill(tensor, X)


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

    Example:
        >>> import torch
        >>> from stiefel.init import henaff_
        >>> W = henaff_(torch.empty(5, 5, dtype=torch.float64))
        >>> torch.allclose(W.mT @ W, torch.eye(5, dtype=torch.float64))
        True
        >>> W[4, 4]  # the last coordinate of an odd number is fixed
        tensor(1., dtype=torch.float64)
    """
    uniform = _uniform(tensor, generator)
    return _block_rotations(tensor, math.pi * (2 * uniform - 1), determinant)


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

    Example:
        >>> import torch
        >>> from stiefel.init import cayley_
        >>> W = cayley_(torch.empty(4, 4))
        >>> bool((W.diagonal() >= torch.cos(torch.tensor(1.0)) - 1e-6).all())  # angles in (-1, 0]
        True
        >>> cayley_(torch.empty(4, 4), determinant=-1).det().round()
        tensor(-1.)
    """
    uniform = _uniform(tensor, generator)
    return _block_rotations(tensor, -torch.tan(math.pi / 4 * uniform), determinant)


def torus_(
    tensor: Tensor,
    *,
    angles: Tensor | None = None,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills with an element of the standard maximal torus: rotations by chosen angles.

    Real matrices are exp(A), A block diagonal with blocks [[0, a], [-a, 0]] (the last coordinate
    of an odd number is fixed), whose eigenvalues are e^(+-i a); complex ones are diag(e^(i a)).
    Without `angles` the eigenvalues are spread evenly over the circle, in random order:
    ``a_k = pi (k + 1/2) / m`` for m = n // 2 blocks, ``a_k = -pi + 2 pi (k + 1/2) / n`` for n
    complex entries. `henaff_` draws the angles of the blocks independently instead.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex; a tall one gets the first p columns.
        angles: The angles, shape ``(n // 2,)``, complex ``(n,)``, or with the batch dimensions of
            the tensor in front.
        generator: Source of the random order.
        determinant: +1 (what exp has) or -1 (the last row is negated), real square matrices only.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions, or there are too many or too few
            angles.
        ConfigurationError: If a determinant is asked of a matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.

    Example:
        >>> import torch
        >>> from stiefel.init import torus_
        >>> torus_(torch.empty(2, 2), angles=torch.tensor([torch.pi / 2])).round()
        tensor([[-0.,  1.],
                [-1., -0.]])
    """
    batch, n, p = sizes(tensor)
    dtype = compute_dtype(tensor.dtype)
    count = n if dtype.is_complex else n // 2
    if angles is None:
        order = torch.rand(
            *batch, count, dtype=torch.float64, device=tensor.device, generator=generator
        )
        share = (order.argsort(dim=-1) + 0.5) / max(count, 1)
        angles = math.pi * (2 * share - 1 if dtype.is_complex else share)
    elif angles.ndim == 0 or angles.shape[-1] != count or angles.ndim > 1 + len(batch):
        raise ShapeError(
            f"expected angles of shape ({count},) or {(*batch, count)} for matrices of {n} "
            f"{'complex' if dtype.is_complex else 'real'} rows, got {tuple(angles.shape)}"
        )
    angles = angles.detach().to(tensor.device, real_dtype(dtype)).expand(*batch, count)
    if not dtype.is_complex:
        return _block_rotations(tensor, angles, determinant)
    X = torch.zeros(*batch, n, p, dtype=dtype, device=tensor.device)
    phases = torch.polar(torch.ones_like(angles), angles)
    X.diagonal(dim1=-2, dim2=-1).copy_(phases[..., :p])
    if determinant is not None:
        X = with_determinant(X, determinant)
    return fill(tensor, X)
