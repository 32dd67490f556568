"""Random points, uniform in the sense of the Haar measure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.geometry.determinant import determinant_sign
from stiefel.geometry.factors import qr_factor
from stiefel.numerics import compute_dtype

__all__ = ["block_rotations", "check_determinant", "haar", "with_determinant"]


def haar(
    n: int,
    p: int | None = None,
    batch: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    determinant: int | None = None,
) -> Tensor:
    """Draws matrices with orthonormal columns from the Haar (rotation invariant) measure.

    The phase-fixed Q factor of a Gaussian matrix (Mezzadri, Notices AMS 54 (2007)).

    Args:
        n: Rows.
        p: Columns, at most n; n by default.
        batch: Leading dimensions.
        dtype: Real or complex dtype; torch's default dtype by default.
        device: Device.
        generator: Source of randomness.
        determinant: +1 or -1 draws from one component of O(n); real square matrices only.

    Returns:
        Tensor of shape ``(*batch, n, p)``.

    Raises:
        ShapeError: If p > n or a size is negative.
        ConfigurationError: If `determinant` does not apply.

    Example:
        >>> import torch
        >>> from stiefel.geometry import haar
        >>> X = haar(4, dtype=torch.float64, determinant=-1)
        >>> round(float(torch.linalg.det(X)), 10)
        -1.0
    """
    p = n if p is None else p
    if not 0 <= p <= n:
        raise ShapeError(f"expected sizes 0 <= p <= n, got n = {n}, p = {p}: swap or transpose")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    working = compute_dtype(dtype)
    Z = torch.randn(*batch, n, p, dtype=working, device=device, generator=generator)
    X = qr_factor(Z)
    if determinant is not None:
        X = with_determinant(X, determinant)
    return X.to(dtype)


def block_rotations(angles: Tensor, n: int, p: int | None = None) -> Tensor:
    """The first p columns of exp(A), A = diag([[0, a], [-a, 0]], ...).

    exp of a block is [[cos a, sin a], [-sin a, cos a]]; for odd n the last entry of A is 0. The
    Cayley map C of `stiefel.geometry.cayley_map` takes blocks of tan(a / 2) to those of -a.

    Args:
        angles: The angles a, shape ``(..., n // 2)``, real.
        n: Rows.
        p: Columns; n by default.

    Returns:
        Shape ``(..., n, p)``, in the dtype of the angles.
    """
    p = n if p is None else p
    X = angles.new_zeros(*angles.shape[:-1], n, p)
    column = torch.arange(min(p, 2 * (n // 2)), device=angles.device)
    a = angles[..., column // 2]
    other = torch.where(column % 2 == 0, column + 1, column - 1)
    X[..., column, column] = a.cos()
    X[..., other, column] = torch.where(column % 2 == 0, -a.sin(), a.sin())
    if n % 2 and p == n:
        X[..., -1, -1] = 1
    return X


def check_determinant(shape: torch.Size, dtype: torch.dtype, determinant: int | Tensor) -> None:
    """Checks that a determinant can be asked of matrices of that shape and dtype.

    Raises:
        ConfigurationError: If the matrices are not square or `determinant` is not +1 or -1.
        DtypeError: If they are complex.
    """
    if shape[-2] != shape[-1]:
        raise ConfigurationError(
            f"determinant= needs square matrices, got shape {tuple(shape)}: leave it out, "
            "St(n, p) with p < n is connected"
        )
    if dtype.is_complex:
        raise DtypeError(
            f"determinant= needs real matrices, got {dtype}: leave it out, U(n) is connected"
        )
    if not isinstance(determinant, Tensor) and determinant not in (-1, 1):
        raise ConfigurationError(f"expected determinant +1 or -1, got {determinant!r}")


def with_determinant(X: Tensor, determinant: int | Tensor) -> Tensor:
    """Moves real orthogonal matrices into one component of O(n) by negating the last row.

    Args:
        X: Orthogonal matrices, shape ``(..., n, n)``, real.
        determinant: +1 or -1, or a tensor of them of shape ``(...)``.

    Returns:
        Matrices of that determinant, same shape; unchanged where they have it already.

    Raises:
        ConfigurationError: If the matrices are not square or `determinant` is not +1 or -1.
        DtypeError: If they are complex.

    Example:
        >>> import torch
        >>> from stiefel.geometry import with_determinant
        >>> with_determinant(torch.eye(2), -1) + 0.0
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    check_determinant(X.shape, X.dtype, determinant)
    if X.shape[-1] == 0:
        return X
    wrong = determinant_sign(X) * determinant < 0
    last = torch.where(wrong[..., None, None], -X[..., -1:, :], X[..., -1:, :])
    return torch.cat([X[..., :-1, :], last], dim=-2)
