"""Products of reflections in compact WY form, with analytic derivatives.

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

from stiefel.errors import DtypeError, RepresentationError, ShapeError
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.numerics import full_precision, real_dtype

__all__ = [
    "check_reflection_vectors",
    "compact_wy",
    "compact_wy_factors",
    "smallest_norm",
    "unit_columns",
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


def _inverse_norms(V: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the columns and their inverses, 0 where the column counts as zero."""
    norms = torch.linalg.vector_norm(V, dim=-2, keepdim=True)
    usable = norms > smallest_norm(V.dtype)
    safe = torch.where(usable, norms, torch.ones_like(norms))
    return norms, torch.where(usable, safe.reciprocal(), torch.zeros_like(norms))


def unit_columns(V: Tensor) -> Tensor:
    """The columns divided by their norms; zero where a column counts as zero, never NaN.

    Args:
        V: Shape ``(..., n, L)``.

    Returns:
        U, same shape.
    """
    return V * _inverse_norms(V)[1]


def _phase_factors(phases: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """tau = 1 - e^(i phi) = -2i sin(phi/2) e^(i phi/2), without cancellation near phi = 0."""
    if phases is None:
        return None
    half = phases / 2
    size = 2 * torch.sin(half)
    return torch.complex(size * torch.sin(half), -size * torch.cos(half)).to(dtype)


def _triangle(U: Tensor, tau: Tensor | None) -> Tensor:
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
    tau = _phase_factors(phases, V.dtype)
    U = unit_columns(V)
    Y = torch.linalg.solve_triangular(_triangle(U, tau), U, upper=True, left=False)
    return U, (Y if tau is None else Y * tau.unsqueeze(-2))


# ------------------------------------------------------------------- shared by both kernels


def _project(dU: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """dv = (du - u <u, du>) / |v| with the full complex inner product; overwrites dU."""
    inner = (U.conj() * dU).sum(-2, keepdim=True)
    return dU.addcmul_(U, inner, value=-1).mul_(_inverse_norms(V)[1])


def _scale_last_row_(A: Tensor, flip: Tensor | None) -> Tensor:
    """F A in place, F = diag(1, ..., 1, flip)."""
    if flip is not None:
        A[..., -1, :].mul_(flip.to(A.dtype).unsqueeze(-1))
    return A


def _gradients(dV: Tensor, phases: Tensor | None, dphi: Tensor | None) -> list[Tensor]:
    if phases is None or dphi is None:
        return [dV]
    return [dV, dphi.contiguous()]


def _gradients_fake(V: Tensor, phases: Tensor | None) -> list[Tensor]:
    dV = torch.empty_like(V, memory_format=torch.contiguous_format)
    return [dV] if phases is None else [dV, phases.new_empty(phases.shape)]


# ----------------------------------------------------- square, 2L >= n: the matrix is kept


def _square_fake(V: Tensor, phases: Tensor | None, flip: Tensor | None) -> tuple[Tensor, ...]:
    n = V.shape[-2]
    return V.new_empty(*V.shape[:-1], n), V.new_empty(V.shape), V.new_empty(V.shape)


@kernel_op(
    "compact_wy_square",
    "(Tensor V, Tensor? phases, Tensor? flip) -> (Tensor, Tensor, Tensor)",
    fake=_square_fake,
)
def _square_forward(V: Tensor, phases: Tensor | None, flip: Tensor | None) -> tuple[Tensor, ...]:
    """Q = F (I - Y U^H); keeps U and Yh (real: Y)."""
    tau = _phase_factors(phases, V.dtype)
    U = unit_columns(V).contiguous()
    Yh = torch.linalg.solve_triangular(_triangle(U, tau), U, upper=True, left=False).contiguous()
    Y = Yh if tau is None else Yh * tau.unsqueeze(-2)
    Q = (Y @ U.mH).neg_()
    Q.diagonal(dim1=-2, dim2=-1).add_(1)
    return _scale_last_row_(Q, flip), U, Yh


def _square_backward_fake(G, Q, U, Yh, V, phases, flip) -> list[Tensor]:
    return _gradients_fake(V, phases)


@kernel_op(
    "compact_wy_square_backward",
    "(Tensor G, Tensor Q, Tensor U, Tensor Yh, Tensor V, Tensor? phases, Tensor? flip) -> Tensor[]",
    fake=_square_backward_fake,
)
def _square_backward(
    G: Tensor,
    Q: Tensor,
    U: Tensor,
    Yh: Tensor,
    V: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
) -> list[Tensor]:
    """K = G Q^H - Q G^H, dU = K Y - U striu(Y^H K Y), dphi = Im diag(Yh^H K Yh) / 2."""
    M = G @ Q.mH
    K = M - M.mH
    _scale_last_row_(K, flip)
    _scale_last_row_(K.mT, flip)
    dU = K @ Yh
    Z = Yh.mH @ dU
    dphi = None
    tau = _phase_factors(phases, V.dtype)
    if tau is not None:
        dphi = Z.diagonal(dim1=-2, dim2=-1).imag / 2
        dU = dU * tau.unsqueeze(-2)
        Z = tau.conj().unsqueeze(-1) * Z * tau.unsqueeze(-2)
    dU -= U @ torch.triu(Z, 1)
    return _gradients(_project(dU, U, V), phases, dphi)


_square = differentiable(
    _square_forward, _square_backward, name="compact_wy", inputs=2, keep_result=True
)


# ------------------------------------------- thin (2L < n) or truncated to p columns


def _thin_fake(
    V: Tensor, phases: Tensor | None, flip: Tensor | None, columns: int
) -> tuple[Tensor, ...]:
    *batch, n, L = V.shape
    return (
        V.new_empty(*batch, n, columns),
        V.new_empty(*batch, n, L),
        V.new_empty(*batch, L, L),
        V.new_empty(*batch, L, columns),
    )


@kernel_op(
    "compact_wy_thin",
    "(Tensor V, Tensor? phases, Tensor? flip, int columns) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_thin_fake,
)
def _thin_forward(
    V: Tensor, phases: Tensor | None, flip: Tensor | None, columns: int
) -> tuple[Tensor, ...]:
    """X = D Xh = (I + D N)^-1 D U_1^H, Q_p = F (I_{n,p} - U X); keeps U, T and Xh (real: X).

    T = (I + D N)^-1, for real reflections S^-1. Its entries are at most 2 in size: T_ij is
    -tau_i u_i^H H_{i+1} ... H_{j-1} u_j.
    """
    tau = _phase_factors(phases, V.dtype)
    U = unit_columns(V).contiguous()
    eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
    T = torch.linalg.solve_triangular(
        _triangle(U, tau), eye.expand(*U.shape[:-2], *eye.shape), upper=True
    ).contiguous()
    top = U[..., :columns, :].mH
    if tau is None:
        X = kept = T @ top
    else:
        X = T @ (tau.unsqueeze(-1) * top)
        kept = top - torch.triu(U.mH @ U, 1) @ X
    Q = (U @ X).neg_()
    Q.diagonal(dim1=-2, dim2=-1).add_(1)
    return _scale_last_row_(Q, flip), U, T, kept


def _thin_backward_fake(G, U, T, Xh, V, phases, flip, columns) -> list[Tensor]:
    return _gradients_fake(V, phases)


@kernel_op(
    "compact_wy_thin_backward",
    "(Tensor G, Tensor U, Tensor T, Tensor Xh, Tensor V, Tensor? phases, Tensor? flip,"
    " int columns) -> Tensor[]",
    fake=_thin_backward_fake,
)
def _thin_backward(
    G: Tensor,
    U: Tensor,
    T: Tensor,
    Xh: Tensor,
    V: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
    columns: int,
) -> list[Tensor]:
    """A2 = (Y^H G)^H, Kt = striu(A2^H X^H), dU = U (Kt + Kt^H) - G X^H; rows 1..p lose A2.

    dphi_k = -Im(e^(i phi_k) (Xh G^H Yh)_kk).
    """
    tau = _phase_factors(phases, V.dtype)
    A2 = (G.mH @ (U if flip is None else _scale_last_row_(U.clone(), flip))) @ T
    dphi, X = None, Xh
    if phases is not None and tau is not None:
        inner = (Xh * A2.mT).sum(-1)
        dphi = -(torch.polar(torch.ones_like(phases), phases) * inner).imag
        A2 = A2 * tau.unsqueeze(-2)
        X = tau.unsqueeze(-1) * Xh
    Kt = torch.triu((X @ A2).mH, 1)
    dU = _scale_last_row_(G @ X.mH, flip).neg_()
    dU += U @ (Kt + Kt.mH)
    dU[..., :columns, :] -= A2
    return _gradients(_project(dU, U, V), phases, dphi)


_thin = differentiable(_thin_forward, _thin_backward, name="compact_wy", inputs=2)


# ------------------------------------------------------------------------------- the map


def _check(V: Tensor, phases: Tensor | None, columns: int, flip: Tensor | None) -> None:
    if V.ndim < 2 or not 1 <= V.shape[-1] <= V.shape[-2]:
        raise ShapeError(
            f"expected reflection vectors of shape (..., n, L) with 1 <= L <= n, got "
            f"{tuple(V.shape)}: n reflections are enough for every orthogonal matrix"
        )
    *batch, n, L = V.shape
    if not 1 <= columns <= n:
        raise ShapeError(f"expected 1 <= columns <= n = {n}, got {columns}")
    if V.is_complex() != (phases is not None):
        raise DtypeError(
            f"complex reflection vectors need real phases and real ones take none, got V of "
            f"{V.dtype} and phases {None if phases is None else phases.dtype}"
        )
    if phases is not None and (phases.dtype != real_dtype(V.dtype) or phases.shape != (*batch, L)):
        raise ShapeError(
            f"expected phases of shape {(*batch, L)} and dtype {real_dtype(V.dtype)}, got "
            f"{tuple(phases.shape)} and {phases.dtype}"
        )
    if flip is not None and (columns != n or flip.shape != tuple(batch)):
        raise ShapeError(
            f"expected flip of shape {tuple(batch)} for square matrices, got {tuple(flip.shape)} "
            f"for {n} x {columns}: frames with fewer columns than rows need no flip"
        )


def compact_wy(
    V: Tensor,
    phases: Tensor | None = None,
    *,
    columns: int | None = None,
    flip: Tensor | None = None,
) -> Tensor:
    """The first columns of ``F H_1 H_2 ... H_L``, F = diag(1, ..., 1, flip).

    CWY for square matrices, T-CWY where columns are left out (A1, A2 of the paper named above);
    derivatives by closed formulae, without a triangular solve in the backward pass. With
    dL = Re tr(G^H dQ) and K = G Q^H - Q G^H,

        dU = K Y - U striu(Y^H K Y),   dv = (du - u <u, du>) / |v|.

    Args:
        V: Reflection vectors, shape ``(..., n, L)``, L <= n; their lengths do not matter.
        phases: Real phases, shape ``(..., L)``, for complex V; pi is a reflection. None if real.
        columns: How many columns to compute, at most n; n by default.
        flip: +1 or -1 of each matrix, shape ``(...)``: the factor of the last row; square only.

    Returns:
        Matrices with orthonormal columns, shape ``(..., n, columns)``.

    Raises:
        ShapeError: If sizes disagree or there are more reflections than rows.
        DtypeError: If V is complex and there are no phases, or the reverse.
        DoubleBackwardError: In a second derivative.
    """
    n, L = V.shape[-2:] if V.ndim >= 2 else (0, 0)
    columns = n if columns is None else columns
    _check(V, phases, columns, flip)
    if columns == n and n <= 2 * L:
        return _square(V, phases, flip)
    return _thin(V, phases, flip, columns)
