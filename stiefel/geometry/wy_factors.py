"""Factors of a product of reflections in compact WY form, by ordinary autograd.

With unit columns u_k and tau_k = 1 - e^(i phi_k) (tau = 2 for real reflections),

    H_k = I - tau_k u_k u_k^H,   N = striu(U^H U),   D = diag(tau),
    Yh = U (I + D N)^-1,   Y = Yh D,   H_1 H_2 ... H_L = I - Y U^H.

For real reflections this is Y = U S^-1 with S = I/2 + striu(U^T U) (Likhosherstov, Davis,
Choromanski, Weller, AISTATS 2021). The rightmost reflection acts first.

A reflection vector whose entries are below `smallest_norm` (about 1e-37 in float32, 2e-307 in
float64; the zero vector) is no direction: u is then 0, the factor H is the identity, the product
stays orthogonal to rounding and the vector receives a zero gradient. Such a factor does not
count in det = (-1)^L; `check_reflection_vectors` finds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import RepresentationError
from stiefel.numerics import full_precision, real_dtype

__all__ = [
    "check_reflection_vectors",
    "column_norms",
    "compact_wy_factors",
    "inverse_norms",
    "phase_factors",
    "smallest_norm",
    "unit_columns",
    "wy_diagonal",
    "wy_triangle",
]

#: Elements that are summed in float64 at once.
_DOUBLES = 2**16


def smallest_norm(dtype: torch.dtype) -> float:
    """Size below which the entries of a reflection vector count as zero.

    Args:
        dtype: Real or complex dtype of the vectors.

    Returns:
        Eight times the smallest normal number, whose inverse is still finite.
    """
    return 8 * torch.finfo(real_dtype(dtype)).tiny


def check_reflection_vectors(V: Tensor) -> None:
    """Checks that every reflection vector has a direction. Waits for the device.

    Args:
        V: Reflection vectors, shape ``(..., n, L)``, one a column.

    Raises:
        RepresentationError: If a column is zero (to within `smallest_norm`) or not finite.
    """
    largest = V.detach().abs().amax(-2)
    bad = ~(largest > smallest_norm(V.dtype)) | ~largest.isfinite()
    if bool(bad.any()):
        where = [tuple(i) if len(i) > 1 else i[0] for i in bad.nonzero()[:4].tolist()]
        raise RepresentationError(
            f"{int(bad.sum())} reflection vector(s) are zero or not finite, at (batch, column) "
            f"{where}: a reflection needs a direction. Such a column acts as the identity and gets "
            "no gradient; set it to any nonzero vector (its length does not matter), and exclude "
            "reflection vectors from weight decay"
        )


def _scaled(V: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v / m and its norm, m, and which columns count as zero; those have m = 1 and the norm 1.

    m is the largest real or imaginary part: |v|^2 itself overflows for entries above 1e19 in
    float32, and underflows below 1e-19, and its derivative does too.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        Real and imaginary parts of v / m, one above the other, ``(..., 2 n, L)``, for real V
        ``(..., n, L)``; the rest ``(..., 1, L)``.
    """
    parts = V
    if V.is_complex():
        parts = torch.view_as_real(V.resolve_conj()).movedim(-1, -3).flatten(-3, -2)
    largest = parts.detach().abs().amax(-2, keepdim=True)
    negligible = ~(largest > smallest_norm(V.dtype))
    scale = largest.masked_fill(negligible, 1)
    parts = parts / scale
    squares = parts.square().sum(-2, keepdim=True)
    return parts, squares.masked_fill(negligible, 1).sqrt(), scale, negligible


def _scaled_norms(V: Tensor) -> tuple[Tensor, Tensor]:
    """Norms |v| = m |v / m|, 1 where a column counts as zero, and which do; ``(..., 1, L)``."""
    _, norms, scale, negligible = _scaled(V)
    return scale * norms, negligible


def column_norms(V: Tensor) -> Tensor:
    """Norms of the columns, 1 for a column that counts as zero.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        Shape ``(..., 1, L)``, real.
    """
    return _scaled_norms(V)[0]


def inverse_norms(V: Tensor) -> Tensor:
    """Inverse norms of the columns, 0 for a column that counts as zero, never NaN.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        Shape ``(..., 1, L)``, real.
    """
    norms, negligible = _scaled_norms(V)
    return norms.reciprocal().masked_fill(negligible, 0)


def unit_columns(V: Tensor) -> Tensor:
    """The columns divided by their norms; zero where a column counts as zero.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        U, same shape.
    """
    parts, norms, _, negligible = _scaled(V)  # u = (v / m) / |v / m|: m has no derivative in it
    U = parts * norms.reciprocal().masked_fill(negligible, 0)
    if not V.is_complex():
        return U
    return torch.complex(*U.unflatten(-2, (2, V.shape[-2])).unbind(-3))


def phase_factors(phases: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """tau = 1 - e^(i phi) = -2i sin(phi/2) e^(i phi/2), without cancellation near phi = 0."""
    if phases is None:
        return None
    half = phases / 2
    size = 2 * torch.sin(half)
    return torch.complex(size * torch.sin(half), -size * torch.cos(half)).to(dtype)


def wy_diagonal(U: Tensor, tau: Tensor | None) -> Tensor:
    """The diagonal of S, |u|^2 / 2, or that of I + D N, 1 + tau (|u|^2 - 1) / 2; ``(..., L)``.

    These are 1/2 and 1 for unit columns. Columns that are rounded to float32 have norms that
    differ from one by 1e-7, alike where reflections are alike, and S + S^T = U^T U must hold to
    better than that: the squares are summed in float64. A zero column keeps 1/2 or 1.
    """
    U = U.detach()
    few = max(_DOUBLES * U.shape[-2] // max(U.numel(), 1), 1)  # rows at once
    excess = U.new_full((*U.shape[:-2], U.shape[-1]), -1, dtype=torch.float64)
    for rows in U.split(few, dim=-2):
        squares = rows.abs().square() if U.is_complex() else rows.square()
        excess += squares.sum(-2, dtype=torch.float64)
    half = excess.masked_fill(excess < -0.5, 0).to(real_dtype(U.dtype)) / 2
    return half + 0.5 if tau is None else 1 + tau * half


def wy_triangle(U: Tensor, tau: Tensor | None) -> Tensor:
    """S = diag(|u|^2)/2 + striu(U^T U), or its like for complex reflections, I + D N."""
    N = torch.triu(U.mH @ U, 1)
    N = N if tau is None else tau.unsqueeze(-1) * N
    return N + torch.diag_embed(wy_diagonal(U, tau))


@full_precision()
def compact_wy_factors(V: Tensor, phases: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The factors of ``H_1 ... H_L = I - Y U^H``, differentiable by ordinary autograd.

    Args:
        V: Reflection vectors, shape ``(..., n, L)``.
        phases: Real phases of complex reflections, shape ``(..., L)``; None for real ones.

    Returns:
        U and Y, both of shape ``(..., n, L)``.
    """
    tau = phase_factors(phases, V.dtype)
    U = unit_columns(V)
    Y = torch.linalg.solve_triangular(wy_triangle(U, tau), U, upper=True, left=False)
    return U, (Y if tau is None else Y * tau.unsqueeze(-2))
