"""Random starts: uniform, near the identity, permutations; and the nearest to what is there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, NonFiniteError
from stiefel.geometry import haar, with_determinant
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.determinant import determinant_sign
from stiefel.geometry.sampling import check_determinant
from stiefel.init.tensors import fill, sizes
from stiefel.numerics import compute_dtype, full_precision, real_dtype

__all__ = ["haar_", "identity_", "orthogonalize_", "permutation_"]


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
    batch, n, p = sizes(tensor)
    X = haar(n, p, batch, dtype=tensor.dtype, device=tensor.device, generator=generator)
    if determinant is not None:
        X = with_determinant(X, determinant)
    return fill(tensor, X)


def identity_(
    tensor: Tensor,
    *,
    noise: float = 1e-2,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills with matrices near the identity: products of pairs of nearly equal reflections.

    ``H(u_1) H(u_1 + noise w_1) H(u_2) ...`` with random unit vectors u and w, each pair a small
    rotation of a random plane; complex matrices are products of random reflections whose phases
    are ``noise`` times a normal number. ``|W - I|_F`` is about ``2 noise sqrt(n)``, of complex
    ones ``noise sqrt(n)``.

    Why not the identity itself: a chart made of reflections cannot leave it in every direction.
    It writes I as equal pairs, H(v) H(v) = I wherever v points, and the derivative of the weight
    has rank 51 of 66 there (`cwy`, n = 12; 5 of 25 for complex weights, n = 5); at this start it
    is full in every chart, its smallest singular value in proportion to the noise: less than 1e-2
    slows the first steps. No eigenvalue is exactly 1, but for the one that every rotation of an
    odd number of coordinates has.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex; a tall one gets the first p columns.
        noise: Distance between the two unit vectors of a pair.
        generator: Source of randomness.
        determinant: +1 (what rotations have) or -1 (the last row is negated, so the matrix is near
            diag(1, ..., 1, -1)), real square matrices only.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        ConfigurationError: If the noise is not a positive number, or a determinant is asked of a
            matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.

    Example:
        >>> import torch
        >>> from stiefel.init import identity_
        >>> W = identity_(torch.empty(64, 64))
        >>> bool((W - torch.eye(64)).abs().max() < 0.1)
        True
    """
    batch, n, p = sizes(tensor)
    if not 0 < noise < math.inf:
        raise ConfigurationError(
            f"expected a positive noise, got {noise!r}: at the identity itself a chart made of "
            "reflections has directions in which it cannot move"
        )
    dtype, device = compute_dtype(tensor.dtype), tensor.device

    def unit_vectors(count: int) -> Tensor:
        V = torch.randn(*batch, n, count, dtype=dtype, device=device, generator=generator)
        return V / torch.linalg.vector_norm(V, dim=-2, keepdim=True)

    if dtype.is_complex:
        phases = torch.randn(*batch, p, dtype=real_dtype(dtype), device=device, generator=generator)
        X = compact_wy(unit_vectors(p), noise * phases, columns=p)
    elif n == 1:
        X = torch.ones(*batch, 1, 1, dtype=dtype, device=device)
    else:
        pairs = n // 2 if p == n else (p + 1) // 2
        U = unit_vectors(pairs)
        V = torch.stack([U, U + noise * unit_vectors(pairs)], dim=-1).flatten(-2)
        X = compact_wy(V, columns=p)
    if determinant is not None:
        X = with_determinant(X, determinant)
    return fill(tensor, X)


def permutation_(
    tensor: Tensor,
    *,
    cyclic: bool = False,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Fills with random permutation matrices, all equally likely.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex; a tall one gets the first p columns.
        cyclic: Whether the permutation is one cycle through all n coordinates.
        generator: Source of randomness.
        determinant: +1 for even permutations, -1 for odd ones: the first two rows of a matrix of
            the other kind change places. Real square matrices only.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        ConfigurationError: If a determinant is asked of a matrix that is not square, or there is
            no such permutation: a cycle of n has (-1)^(n-1), a single coordinate +1.
        DtypeError: If a determinant is asked of a complex matrix.

    Example:
        >>> import torch
        >>> from stiefel.init import permutation_
        >>> P = permutation_(torch.empty(5, 5), cyclic=True)
        >>> bool((torch.linalg.matrix_power(P, 5) == torch.eye(5)).all())
        True
    """
    batch, n, p = sizes(tensor)
    dtype, device = compute_dtype(tensor.dtype), tensor.device
    if determinant is not None:
        check_determinant(torch.Size((*batch, n, p)), dtype, determinant)
    order = torch.rand(*batch, n, dtype=torch.float64, device=device, generator=generator)
    image = order.argsort(dim=-1)
    if cyclic:  # image[i] -> image[i + 1]
        image = torch.zeros_like(image).scatter_(-1, image, image.roll(-1, dims=-1))
    X = torch.zeros(*batch, n, p, dtype=dtype, device=device)
    X.scatter_(-2, image[..., :p].unsqueeze(-2), 1)
    if determinant is not None and X.numel():
        wrong = determinant_sign(X) * determinant < 0
        if (n == 1 or cyclic) and bool(wrong.any()):
            parity = (-1) ** (n - 1)
            raise ConfigurationError(
                f"a {'cycle' if cyclic else 'permutation'} of {n} has determinant {parity:+d}, got "
                f"determinant={-parity:+d}: leave it out{', or cyclic=' if n > 1 else ''}"
            )
        if n > 1:
            swapped = torch.cat([X[..., 1:2, :], X[..., :1, :], X[..., 2:, :]], dim=-2)
            X = torch.where(wrong[..., None, None], swapped, X)
    return fill(tensor, X)


@full_precision()
@torch.no_grad()
def orthogonalize_(
    tensor: Tensor,
    *,
    generator: torch.Generator | None = None,
    determinant: int | Tensor | None = None,
) -> Tensor:
    """Replaces matrices by the nearest with orthonormal columns (wide: rows).

    Z = U diag(s) V^H becomes U V^H, the nearest in the Frobenius norm; the nearest of the other
    determinant turns the singular direction of the smallest s around, U diag(1, ..., 1, -1) V^H.

    Args:
        tensor: Shape ``(..., n, p)``, real or complex, with the matrices. Where one has not full
            rank, several are equally near and one of them is taken.
        generator: Not used.
        determinant: +1 or -1 for real square matrices.

    Returns:
        The tensor.

    Raises:
        ShapeError: If the tensor has fewer than two dimensions.
        NonFiniteError: If it has a NaN or an infinity.
        ConfigurationError: If a determinant is asked of a matrix that is not square.
        DtypeError: If a determinant is asked of a complex matrix.

    Example:
        >>> import torch
        >>> from stiefel.init import orthogonalize_
        >>> Z = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
        >>> orthogonalize_(Z.clone()).round(decimals=5) + 0.0
        tensor([[1., 0.],
                [0., 1.]])
        >>> orthogonalize_(Z.clone(), determinant=-1).round(decimals=5) + 0.0
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    batch, n, p = sizes(tensor)
    Z = tensor.detach().to(compute_dtype(tensor.dtype))
    Z = Z.mT if tensor.shape[-2] < tensor.shape[-1] else Z
    if determinant is not None:
        check_determinant(torch.Size((*batch, n, p)), Z.dtype, determinant)
    if not bool(torch.isfinite(Z).all()):
        raise NonFiniteError(
            f"expected finite entries, got a NaN or an infinity in a tensor of shape "
            f"{tuple(tensor.shape)}: orthogonalize_ keeps what is there, so fill the tensor first"
        )
    U, _, Vh = torch.linalg.svd(Z, full_matrices=False)
    if determinant is not None and Z.numel():
        wrong = (determinant_sign(U @ Vh) * determinant < 0)[..., None, None]
        U = torch.cat([U[..., :-1], torch.where(wrong, -U[..., -1:], U[..., -1:])], dim=-1)
    return fill(tensor, U @ Vh)
