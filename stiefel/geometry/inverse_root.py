"""``Z (Z^H Z)^(-1/2)`` from eigenvalues of the Gram matrix, or by products if faster."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from stiefel.geometry.guard import guarded
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.newton_schulz import newton_schulz, newton_schulz_factor
from stiefel.geometry.polar_gradient import (
    gradient_by_products,
    keeps_left,
    near_identity,
    pairs_fake,
    polar_gradient,
    prefers_products,
)
from stiefel.geometry.proxy_scale import double, scaled, svd_pairs
from stiefel.numerics import real_dtype

__all__ = ["gram_polar_factor"]

#: Singular values below this multiple of the largest: eigenvalues of the Gram matrix, which squares
#: them, are too coarse there.
_SMALL = {torch.float32: 0.04, torch.float64: 0.1}
#: And below this one the Gram matrix, even in float64, says nothing: the matrix goes to the SVD.
_NULL = {torch.float32: 1e-6, torch.float64: 1e-12}
#: The same for float32 matrices whose Gram matrix is in float64.
_SMALL_LIFTED = 1e-4
#: Singular values from this multiple of the largest on: the Gram matrix is all that is needed.
_LARGE = 0.2
#: Float32 matrices of at most so many columns, and twice the rows, are computed in float64, which
#: costs next to nothing.
_NARROW = 64
#: Of so few entries that calls cost more than arithmetic: eigenvalues take fewer of them.
_FEW = 5000

_Pairs = tuple[Tensor, Tensor, Tensor]


def _toward_polar(U: Tensor, s: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """One Newton step of the first `columns` of U, and how far they were from orthonormal.

    With unit columns U = Z V / s and C = U^H U - I small, Z^H Z is nearly diagonal in the basis V
    and its inverse root is, to first order, ``(Z^H Z)^(-1/2) = diag(1/s) (I - K)``,
    ``K_ij = C_ij s_i / (s_i + s_j)``: U <- U (I - K) is the polar factor of Z V to second order.
    (The step ``U (3 I - U^H U) / 2``, with 1/2 for s_i / (s_i + s_j), is the polar factor of U,
    orthonormal to second order too but near that of Z V to first order only.)
    """
    C = U.mH @ U[..., :columns]
    C.diagonal(dim1=-2, dim2=-1).sub_(1)
    off = C.abs().amax((-2, -1))
    share = s.unsqueeze(-1) / (s.unsqueeze(-1) + s[..., None, :columns])
    moved = U[..., :columns] - U @ (C * share)
    return moved, off


def _small_block(Z: Tensor, V: Tensor) -> _Pairs:
    """Singular values and vectors of Z on the span of a few columns V, in float64."""
    Y = double(Z) @ double(V)
    if real_dtype(Z.dtype) == torch.float64:
        U, s, Qh = torch.linalg.svd(Y, full_matrices=False)
        return U, s, V @ Qh.mH
    _, Q = torch.linalg.eigh(Y.mH @ Y)
    Y = Y @ Q
    s = torch.linalg.vector_norm(Y, dim=-2)
    U = Y / s.clamp_min(torch.finfo(s.dtype).tiny).unsqueeze(-2)
    return U.to(Z.dtype), s.to(real_dtype(Z.dtype)), (double(V) @ Q).to(V.dtype)


def gram_pairs(Z: Tensor, S: Tensor) -> _Pairs:
    """U with orthonormal columns, s and V with ``Z = U diag(s) V^H`` to rounding, by eigenvalues.

    ``Z^H Z = V diag(l) V^H`` first. Rounding of the Gram matrix, eps |Z|^2, spoils the directions
    of small singular values: those are separated again by the Gram matrix of Z V on their span,
    in float64 (of float64 matrices by a thin SVD). Then Newton steps, see `_toward_polar`.

    Args:
        Z: Matrices with entries of order one, shape ``(..., n, p)``, finite.
        S: Their Gram matrices Z^H Z, shape ``(..., p, p)``.

    Returns:
        U ``(..., n, p)``, s ``(..., p)`` and V ``(..., p, p)``.
    """
    real = real_dtype(Z.dtype)
    narrow = Z.shape[-1] <= _NARROW and Z.shape[-2] <= 2 * _NARROW
    lifted = double(Z) if narrow else Z
    small = _SMALL[real]
    if lifted is not Z:
        S, small = lifted.mH @ lifted, _SMALL_LIFTED
    try:
        U, s, V = _eigen_pairs(lifted, S, small)
    except LinAlgError:
        return svd_pairs(Z)
    null = ~(s.amin(-1) > _NULL[real] * s.amax(-1)) if s.numel() else s.new_zeros(0).bool()
    U, s, V = U.to(Z.dtype), s.to(real), V.to(Z.dtype)
    if bool(null.any()):
        exact = svd_pairs(Z[null])
        for whole, part in zip((U, s, V), exact, strict=True):
            whole[null] = part
    return U, s, V


def _eigen_pairs(Z: Tensor, S: Tensor, small: float) -> _Pairs:
    real = real_dtype(Z.dtype)
    _, V = torch.linalg.eigh(S)
    U = Z @ V
    s = torch.linalg.vector_norm(U, dim=-2)
    few = s < small * s.amax(-1, keepdim=True)
    # ascending order: the small ones come first, up to the last of any matrix of the batch
    last = few.flatten(0, -2).any(0).nonzero() if few.ndim > 1 else few.nonzero()
    k = int(last[-1]) + 1 if last.numel() else 0
    U = U / s.clamp_min(torch.finfo(real).tiny).unsqueeze(-2)
    if k:
        u, sigma, v = _small_block(Z, V[..., :k])
        U[..., :k], s[..., :k], V[..., :k] = u, sigma, v
    U, _ = _toward_polar(U, s, U.shape[-1])
    goal = 4 * torch.finfo(real).eps * Z.shape[-2] ** 0.5
    for _ in range(4 if k else 0):
        U[..., :k], off = _toward_polar(U, s, k)
        if not bool((off > goal**0.5 / 4).any()):  # what is left is the square
            break
    return U, s, V


def _tall_polar(Z: Tensor, S: Tensor) -> _Pairs | None:
    """W, s and V by four n x p products, if every singular value is large; else None."""
    try:
        squares, V = torch.linalg.eigh(S)
    except LinAlgError:
        return None
    s = squares.clamp_min(0).sqrt()
    if not bool((s.amin(-1) > _LARGE * s.amax(-1)).all()):
        return None
    W = Z @ ((V / s.unsqueeze(-2)) @ V.mH)
    C = W.mH @ W  # I to a few roundings
    return W @ (1.5 * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device) - C / 2), s, V


def _fake(Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    W, U, s, V = pairs_fake(Z)
    return W, Z.new_empty(Z.shape[:-2], dtype=torch.bool), U, s, V


@kernel_op("gram_polar", "(Tensor Z) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", fake=_fake)
def _gram_polar(Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """W, and for the backward pass whether there are pairs, and U, s and V if so."""
    Z, scale, bad = scaled(Z)
    left = keeps_left(*Z.shape[-2:])
    S = Z.mH @ Z
    if left and Z.numel() > _FEW and bool(near_identity(S).all()):
        W = newton_schulz(Z)
        _, kept, s, V = pairs_fake(Z)
        paired = torch.zeros(Z.shape[:-2], dtype=torch.bool, device=Z.device)
    else:
        W, U, s, V = _by_eigenvalues(Z, S, left)
        kept = U if left else U.new_empty(*U.shape[:-2], 0, U.shape[-1])
        s = s if scale is None else s * scale.squeeze(-1)
        paired = torch.ones(Z.shape[:-2], dtype=torch.bool, device=Z.device)
    if bad is not None:
        W = torch.where(bad, torch.nan, W)
    return W, paired, kept, s, V


def _by_eigenvalues(Z: Tensor, S: Tensor, left: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tall = None if left else _tall_polar(Z, S)
    if tall is None:
        U, s, V = gram_pairs(Z, S)
        return U @ V.mH, U, s, V
    W, s, V = tall
    return W, W, s, V


@kernel_op(
    "gram_polar_backward",
    "(Tensor grad, Tensor W, Tensor paired, Tensor U, Tensor s, Tensor V, Tensor Z) -> Tensor[]",
    fake=lambda grad, W, paired, U, s, V, Z: [Z.new_empty(Z.shape)],
)
def _gram_polar_backward(
    grad: Tensor, W: Tensor, paired: Tensor, U: Tensor, s: Tensor, V: Tensor, Z: Tensor
) -> list[Tensor]:
    if bool(paired.all()):
        return [polar_gradient(grad, W, U, s, V)]
    return [gradient_by_products(grad, W, Z)]


_gram_polar_factor = differentiable(
    _gram_polar, _gram_polar_backward, name="gram_polar_factor", keep_result=True
)


@guarded
def gram_polar_factor(Z: Tensor) -> Tensor:
    """``Z (Z^H Z)^(-1/2)``, the polar factor of `Z`, the fastest way on a CPU.

    Source: Huang et al., Orthogonal Weight Normalization, AAAI 2018. The same map as
    `polar_factor`, without a singular value decomposition of Z, and faster. Large Z near multiples
    of orthonormal matrices, and many small matrices (32 or more, of at most 40 columns), take the
    products of `newton_schulz_factor` instead of eigenvalues. Every Z gives
    orthonormal columns: where columns of Z are linearly dependent (Z = 0 included) the missing
    directions are those of a singular value decomposition, a deterministic choice, and the
    gradient along them is zero.

    Args:
        Z: Matrices of any scale, shape ``(..., n, p)``, n >= p.

    Returns:
        W, shape ``(..., n, p)``, orthonormal columns; NaN where Z is not finite.

    Raises:
        ShapeError: If n < p.
        DoubleBackwardError: In a second derivative.

    Example:
        >>> import torch
        >>> from stiefel.geometry import gram_polar_factor
        >>> Z = torch.tensor([[3.0, 0.0], [0.0, -2.0], [0.0, 0.0]])
        >>> gram_polar_factor(Z).round(decimals=5) + 0.0
        tensor([[ 1.,  0.],
                [ 0., -1.],
                [ 0.,  0.]])
    """
    if keeps_left(*Z.shape[-2:]) and prefers_products(Z):
        return newton_schulz_factor(Z)
    return _gram_polar_factor(Z)
