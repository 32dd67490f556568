"""The real twin of a complex matrix: twice the size, the same products."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import DtypeError, ShapeError

__all__ = ["realify", "realify_vector"]


def _check_complex(tensor: Tensor, dimensions: int) -> None:
    if tensor.ndim < dimensions:
        raise ShapeError(
            f"expected a tensor with {dimensions} dimension(s) or more, got shape "
            f"{tuple(tensor.shape)}"
        )
    if not tensor.is_complex():
        raise DtypeError(
            f"expected a complex tensor, got {tensor.dtype}: a real one is its own real form"
        )


def realify(W: Tensor) -> Tensor:
    """The real matrix ``[[Re W, -Im W], [Im W, Re W]]``.

    It acts on `realify_vector` as W acts on vectors, so it respects sums and products, and the
    transpose of the twin is the twin of the conjugate transpose. It maps U(n) into O(2n) (into
    SO(2n), for its determinant is |det W|^2) and complex St(n, p) into St(2n, 2p).

    Args:
        W: Complex matrices, shape ``(..., n, p)``.

    Returns:
        Real matrices, shape ``(..., 2n, 2p)``.

    Raises:
        ShapeError: If W has fewer than two dimensions.
        DtypeError: If W is real.

    Example:
        >>> import torch
        >>> from stiefel.geometry import realify
        >>> realify(torch.tensor([[1j]]))
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    _check_complex(W, 2)
    top = torch.cat([W.real, -W.imag], dim=-1)
    return torch.cat([top, torch.cat([W.imag, W.real], dim=-1)], dim=-2)


def realify_vector(z: Tensor) -> Tensor:
    """The real vector ``[Re z, Im z]``.

    ``realify(W) @ realify_vector(z)`` is ``realify_vector(W @ z)``; rows ``h`` multiply as
    ``realify_vector(h) @ realify(W).mT``, the twin of ``h @ W.mT``.

    Args:
        z: Complex vectors, shape ``(..., n)``.

    Returns:
        Real vectors, shape ``(..., 2n)``.

    Raises:
        ShapeError: If z has no dimension.
        DtypeError: If z is real.

    Example:
        >>> import torch
        >>> from stiefel.geometry import realify_vector
        >>> realify_vector(torch.tensor([1 + 2j, 3 + 4j]))
        tensor([1., 3., 2., 4.])
    """
    _check_complex(z, 1)
    return torch.cat([z.real, z.imag], dim=-1)
