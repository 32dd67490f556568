"""Products of reflections in compact WY form, with analytic derivatives.

``F H_1 ... H_L E``, in the letters of `stiefel.geometry.wy_factors`: CWY for square matrices,
T-CWY for their first p columns (Likhosherstov, Davis, Choromanski, Weller, AISTATS 2021). Two
kernels: one keeps the square matrix Q for its backward pass and needs no triangular solve there;
the other, for few reflections or few columns, keeps thin matrices only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.errors import DtypeError, ShapeError
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.linear import add_product_, adjoint, divide_by_triangle
from stiefel.geometry.wy_factors import (
    inverse_norms,
    phase_factors,
    wy_diagonal,
    wy_triangle,
)
from stiefel.numerics import real_dtype

__all__ = ["check_reflections", "compact_wy", "quick_inverse_norms", "scale_last_row_"]

#: Squared norms of reflection vectors that are far from both ends of float32.
_TAME = (1e-30, 1e30)


# ------------------------------------------------------------------- shared by both kernels


def quick_inverse_norms(V: Tensor, work: Tensor | None = None) -> Tensor:
    """`inverse_norms`, on the CPU from plain squares where nothing over- or underflows.

    Squares and sums: `torch.linalg.vector_norm` along columns is ten times slower on the CPU.

    Args:
        V: Columns, shape ``(..., n, L)``.
        work: Memory like V to work in.

    Returns:
        Shape ``(..., 1, L)``, real.
    """
    if V.device.type == "cpu" and V.numel() > 0:
        if V.is_complex():
            squares = torch.view_as_real(V.resolve_conj()).square().sum(-1)
        else:
            squares = torch.mul(V, V, out=work)
        squares = squares.sum(-2, keepdim=True)
        least, most = squares.aminmax()
        if bool(least > _TAME[0]) and bool(most < _TAME[1]):
            return squares.rsqrt_()
    return inverse_norms(V)


def _unit_columns(V: Tensor, work: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """U and 1 / |v|, ``(..., 1, L)``; `work` is memory like V to work in."""
    inverse = quick_inverse_norms(V, work)
    return V * inverse, inverse


def _project(dU: Tensor, U: Tensor, inverse: Tensor, work: Tensor | None = None) -> Tensor:
    """dv = (du - u <u, du>) / |v| with the full complex inner product; overwrites dU and work."""
    inner = torch.mul(U.conj_physical(), dU, out=work).sum(-2, keepdim=True)
    return dU.addcmul_(U, inner, value=-1).mul_(inverse)


def _inverse_fake(V: Tensor) -> Tensor:
    return V.new_empty(*V.shape[:-2], 1, V.shape[-1], dtype=real_dtype(V.dtype))


def _block_columns(count: int) -> list[tuple[int, int]]:
    """Block columns of a triangular product: only what is above the diagonal is computed.

    With quarters a triangular product costs 5/8 of the full one; below 512 columns the products
    are too small for that to pay.
    """
    width = -(-count // 4) if count >= 512 else count
    return [(start, min(start + width, count)) for start in range(0, count, width)]


def _upper_gram(U: Tensor, out: Tensor | None = None) -> Tensor:
    """U^H U in and above the diagonal blocks of `_block_columns`; what is below is undefined."""
    blocks = _block_columns(U.shape[-1])
    if len(blocks) == 1:
        return torch.matmul(U.mH, U, out=out)
    gram = U.new_empty(*U.shape[:-2], U.shape[-1], U.shape[-1]) if out is None else out
    for start, stop in blocks:
        left, right = U[..., :stop].mH, U[..., start:stop]
        if U.ndim == 2:
            torch.mm(left, right, out=gram[:stop, start:stop])
        else:
            gram[..., :stop, start:stop] = left @ right
    return gram


def scale_last_row_(A: Tensor, flip: Tensor | None) -> Tensor:
    """F A in place, F = diag(1, ..., 1, flip); F = I where flip is None."""
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
# New memory costs as much as a pass over it: what is no longer needed takes the next result.


def _square_fake(V: Tensor, phases: Tensor | None, flip: Tensor | None) -> tuple[Tensor, ...]:
    *batch, n, _ = V.shape
    Q, U, Yh = V.new_empty(*batch, n, n), V.new_empty(V.shape), V.new_empty(V.shape)
    return Q, U, Yh, _inverse_fake(V)


@kernel_op(
    "compact_wy_square",
    "(Tensor V, Tensor? phases, Tensor? flip) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_square_fake,
)
def _square_forward(V: Tensor, phases: Tensor | None, flip: Tensor | None) -> tuple[Tensor, ...]:
    """Q = F (I - Y U^H); keeps U, Yh (real: Y) and 1 / |v|."""
    tau = phase_factors(phases, V.dtype)
    work = torch.empty_like(V, memory_format=torch.contiguous_format)
    U, inverse = _unit_columns(V, work)
    S = _upper_gram(
        U, work if V.shape[-2] == V.shape[-1] else None
    )  # solve_triangular reads the upper triangle only
    if tau is not None:
        S.mul_(tau.unsqueeze(-1))
    S.diagonal(dim1=-2, dim2=-1).copy_(wy_diagonal(U, tau))
    Yh = divide_by_triangle(U, S)
    Y = Yh if tau is None else Yh * tau.unsqueeze(-2)
    if S.shape[-1] == U.shape[-2] and S.ndim <= 3:
        Q = add_product_(S, Y, U.mH, beta=0, alpha=-1)
    else:
        Q = (Y @ U.mH).neg_()
    Q.diagonal(dim1=-2, dim2=-1).add_(1)
    return scale_last_row_(Q, flip), U, Yh, inverse


def _square_backward_fake(G, Q, U, Yh, inverse, V, phases, flip) -> list[Tensor]:
    return _gradients_fake(V, phases)


@kernel_op(
    "compact_wy_square_backward",
    "(Tensor G, Tensor Q, Tensor U, Tensor Yh, Tensor inverse, Tensor V, Tensor? phases,"
    " Tensor? flip) -> Tensor[]",
    fake=_square_backward_fake,
)
def _square_backward(
    G: Tensor,
    Q: Tensor,
    U: Tensor,
    Yh: Tensor,
    inverse: Tensor,
    V: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
) -> list[Tensor]:
    """K = G Q^H - Q G^H, dU = K Y - U striu(Y^H K Y), dphi = Im diag(Yh^H K Yh) / 2."""
    tau = phase_factors(phases, V.dtype)
    M = G @ Q.mH
    adjoint_of_M = adjoint(M)
    K = M.sub_(adjoint_of_M)
    scale_last_row_(K, flip)
    scale_last_row_(K.mT, flip)
    dU = torch.matmul(K, Yh, out=adjoint_of_M if Yh.shape == K.shape else None)
    dphi = None if tau is None else torch.empty_like(tau.real)
    for start, stop in _block_columns(U.shape[-1]):
        block = dU[..., start:stop]
        Z = Yh[..., :stop].mH @ block
        if tau is not None and dphi is not None:
            dphi[..., start:stop] = Z.diagonal(-start, -2, -1).imag / 2
            block.mul_(tau[..., None, start:stop])
            Z = Z * tau[..., None, start:stop] * tau[..., :stop, None].conj_physical()
        add_product_(block, U[..., :stop], Z.triu_(1 - start), alpha=-1)
    return _gradients(_project(dU, U, inverse, K[..., : U.shape[-1]]), phases, dphi)


_square = differentiable(_square_forward, _square_backward, name="compact_wy", keep_result=True)


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
        _inverse_fake(V),
    )


@kernel_op(
    "compact_wy_thin",
    "(Tensor V, Tensor? phases, Tensor? flip, int columns)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_thin_fake,
)
def _thin_forward(
    V: Tensor, phases: Tensor | None, flip: Tensor | None, columns: int
) -> tuple[Tensor, ...]:
    """X = D Xh = (I + D N)^-1 D U_1^H, Q_p = F (I_{n,p} - U X); keeps U, T, Xh (real: X), 1 / |v|.

    T = (I + D N)^-1, for real reflections S^-1. Its entries are at most 2 in size: T_ij is
    -tau_i u_i^H H_{i+1} ... H_{j-1} u_j.
    """
    tau = phase_factors(phases, V.dtype)
    U, inverse = _unit_columns(V)
    eye = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
    T = torch.linalg.solve_triangular(
        wy_triangle(U, tau), eye.expand(*U.shape[:-2], *eye.shape), upper=True
    ).contiguous()
    top = U[..., :columns, :].mH.resolve_conj()
    if tau is None:
        X = kept = T @ top
    else:
        X = T @ (tau.unsqueeze(-1) * top)
        kept = top - torch.triu(U.mH @ U, 1) @ X
    Q = (U @ X).neg_()
    Q.diagonal(dim1=-2, dim2=-1).add_(1)
    return scale_last_row_(Q, flip), U, T, kept, inverse


def _thin_backward_fake(G, U, T, Xh, inverse, V, phases, flip, columns) -> list[Tensor]:
    return _gradients_fake(V, phases)


@kernel_op(
    "compact_wy_thin_backward",
    "(Tensor G, Tensor U, Tensor T, Tensor Xh, Tensor inverse, Tensor V, Tensor? phases,"
    " Tensor? flip, int columns) -> Tensor[]",
    fake=_thin_backward_fake,
)
def _thin_backward(
    G: Tensor,
    U: Tensor,
    T: Tensor,
    Xh: Tensor,
    inverse: Tensor,
    V: Tensor,
    phases: Tensor | None,
    flip: Tensor | None,
    columns: int,
) -> list[Tensor]:
    """A2 = (Y^H G)^H, Kt = striu(A2^H X^H), dU = U (Kt + Kt^H) - G X^H; rows 1..p lose A2.

    dphi_k = -Im(e^(i phi_k) (Xh G^H Yh)_kk).
    """
    tau = phase_factors(phases, V.dtype)
    A2 = (G.mH @ (U if flip is None else scale_last_row_(U.clone(), flip))) @ T
    dphi, X = None, Xh
    if phases is not None and tau is not None:
        inner = (Xh * A2.mT).sum(-1)
        dphi = -(torch.polar(torch.ones_like(phases), phases) * inner).imag
        A2 = A2 * tau.unsqueeze(-2)
        X = tau.unsqueeze(-1) * Xh
    Kt = torch.triu((X @ A2).mH.resolve_conj(), 1)
    dU = scale_last_row_(G @ X.mH, flip).neg_()
    dU += U @ (Kt + Kt.mH.resolve_conj())
    dU[..., :columns, :] -= A2
    return _gradients(_project(dU, U, inverse), phases, dphi)


_thin = differentiable(_thin_forward, _thin_backward, name="compact_wy")


# ------------------------------------------------------------------------------- the map


def check_reflections(
    V: Tensor, phases: Tensor | None, columns: int | None, flip: Tensor | None
) -> int:
    """Checks the arguments of `compact_wy`.

    Returns:
        The number of columns, n by default.

    Raises:
        ShapeError: If sizes disagree or there are more reflections than rows.
        DtypeError: If V is complex and there are no phases, or the reverse.
    """
    if V.ndim < 2 or not 1 <= V.shape[-1] <= V.shape[-2]:
        raise ShapeError(
            f"expected reflection vectors of shape (..., n, L) with 1 <= L <= n, got "
            f"{tuple(V.shape)}: n reflections are enough for every orthogonal matrix"
        )
    *batch, n, L = V.shape
    columns = n if columns is None else columns
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
    return columns


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
        ForwardModeError: In forward mode.
    """
    columns = check_reflections(V, phases, columns, flip)
    n, L = V.shape[-2:]
    if columns == n and n <= 2 * L:
        return _square(V, phases, flip)
    return _thin(V, phases, flip, columns)
