"""Factors of a product of reflections in compact WY form, by ordinary autograd.

With unit columns u_k and tau_k = 1 - e^(i phi_k) (tau = 2 for real reflections),

    H_k = I - tau_k u_k u_k^H,   N = striu(U^H U),   D = diag(tau),
    Yh = U (I + D N)^-1,   Y = Yh D,   H_1 H_2 ... H_L = I - Y U^H.

For real reflections this is Y = U S^-1 with S = I/2 + striu(U^T U) (Likhosherstov, Davis,
Choromanski, Weller, AISTATS 2021). The rightmost reflection acts first.

A reflection vector whose norm is below `smallest_norm` (about 1e-18 in float32, 1e-153 in
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
    "wy_triangle",
]


def smallest_norm(dtype: torch.dtype) -> float:
    """Norm below which a reflection vector counts as zero: below it |v|^2 is not a normal number.

    Args:
        dtype: Real or complex dtype of the vectors.

    Returns:
        ``8 sqrt(smallest normal number)``.
    """
    return 8 * torch.finfo(real_dtype(dtype)).tiny ** 0.5


def check_reflection_vectors(V: Tensor) -> None:
    """Checks that every reflection vector has a direction. Waits for the device.

    Args:
        V: Reflection vectors, shape ``(..., n, L)``, one a column.

    Raises:
        RepresentationError: If a column is zero (to within `smallest_norm`) or not finite.
    """
    norms = torch.linalg.vector_norm(V.detach(), dim=-2)
    bad = ~(norms > smallest_norm(V.dtype)) | ~norms.isfinite()
    if bool(bad.any()):
        where = [tuple(i) if len(i) > 1 else i[0] for i in bad.nonzero()[:4].tolist()]
        raise RepresentationError(
            f"{int(bad.sum())} reflection vector(s) are zero or not finite, at (batch, column) "
            f"{where}: a reflection needs a direction. Such a column acts as the identity and gets "
            "no gradient; set it to any nonzero vector (its length does not matter), and exclude "
            "reflection vectors from weight decay"
        )


def _squares(V: Tensor) -> tuple[Tensor, Tensor]:
    """|v|^2 of the columns, 1 where one counts as zero, and which do; ``(..., 1, L)``."""
    if V.is_complex():
        squares = torch.view_as_real(V.resolve_conj()).square().sum((-3, -1)).unsqueeze(-2)
    else:
        squares = V.square().sum(-2, keepdim=True)
    negligible = squares <= smallest_norm(V.dtype) ** 2
    return squares.masked_fill(negligible, 1), negligible


def column_norms(V: Tensor) -> Tensor:
    """Norms of the columns, 1 for a column that counts as zero.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        Shape ``(..., 1, L)``, real.
    """
    return _squares(V)[0].sqrt()


def inverse_norms(V: Tensor) -> Tensor:
    """Inverse norms of the columns, 0 for a column that counts as zero, never NaN.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        Shape ``(..., 1, L)``, real.
    """
    squares, negligible = _squares(V)
    return squares.rsqrt().masked_fill(negligible, 0)


def unit_columns(V: Tensor) -> Tensor:
    """The columns divided by their norms; zero where a column counts as zero.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        U, same shape.
    """
    return V * inverse_norms(V)


def phase_factors(phases: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """tau = 1 - e^(i phi) = -2i sin(phi/2) e^(i phi/2), without cancellation near phi = 0."""
    if phases is None:
        return None
    half = phases / 2
    size = 2 * torch.sin(half)
    return torch.complex(size * torch.sin(half), -size * torch.cos(half)).to(dtype)


def wy_triangle(U: Tensor, tau: Tensor | None) -> Tensor:
    """S = I/2 + striu(U^T U), or I + D N for complex reflections."""
    N = torch.triu(U.mH @ U, 1)
    eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
    return N + eye / 2 if tau is None else eye + tau.unsqueeze(-1) * N


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
