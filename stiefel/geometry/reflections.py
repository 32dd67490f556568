"""Stable factorisation of matrices with orthonormal columns into reflections.

`householder_vectors` inverts `stiefel.geometry.compact_wy.compact_wy`: it finds V (and, for
complex matrices, phases) with ``H_1 ... H_L E = X``, where E is the first p columns of I. Columns
are eliminated one by one without cancellation, in panels whose reflections reach the rest of the
matrix as one compact-WY product.

Source: LAPACK's blocked QR, with the sign that LAPACK avoids: the factor must map x to +e_1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stiefel.errors import RepresentationError, ShapeError
from stiefel.geometry.guard import check_point_shape
from stiefel.geometry.wy_factors import compact_wy_factors
from stiefel.numerics import compute_dtype, double_dtype, full_precision, real_dtype, tolerance

__all__ = ["Reflections", "householder_vectors"]

_PANEL = 32


class Reflections(NamedTuple):
    """Unit reflection vectors ``(..., n, L)`` and real phases ``(..., L)``, None when real."""

    vectors: Tensor
    phases: Tensor | None


def _stable_head(head: Tensor, tail2: Tensor) -> Tensor:
    """The entry of w = x - e at the one of e, from that entry of x and |tail|^2; |x| = 1.

    For Re x_1 > 0: w_1 = -(|tail|^2 + Im^2 x_1) / (1 + Re x_1) + i Im x_1.
    """
    if not head.is_complex():
        return torch.where(head > 0, -tail2 / (1 + head), head - 1)
    re, im = head.real, head.imag
    return torch.complex(torch.where(re > 0, -(tail2 + im.square()) / (1 + re), re - 1), im)


def _reflector(
    tail: Tensor, head: Tensor, place: Tensor | int, negligible: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The map A = I - t u u^H along w = x - e with A x = e.

    t = |w|^2 / (w^H x), u = w / |w|; real x: t = 2. The factor of X is H = A^-1 with
    tau = conj t, so phi = arg(1 - conj t).

    Args:
        tail: The columns x ``(..., m)``, their entry at `place` replaced by 0.
        head: That entry, ``(...)``.
        place: Index of the one of e, an int or a tensor ``(...)``.
        negligible: Size of w up to which x counts as e.

    Returns:
        u ``(..., m)``, t ``(...)``, phi ``(...)`` and which columns are trivial, where u = 0 and
        A = I.
    """
    tail2 = tail.abs().square().sum(-1)
    first = _stable_head(head, tail2)
    size2 = tail2 + first.abs().square()
    trivial = size2 <= negligible**2
    size = torch.where(trivial, torch.ones_like(size2), size2).sqrt()
    index = torch.as_tensor(place, device=tail.device).expand(head.shape).unsqueeze(-1)
    u = tail.scatter(-1, index, first.unsqueeze(-1)) / size.unsqueeze(-1)
    u = torch.where(trivial.unsqueeze(-1), 0, u)
    if not tail.is_complex():
        return u, torch.full_like(size2, 2.0), torch.full_like(size2, torch.pi), trivial
    # 1 - conj t has modulus one: only its angle is kept.
    inner = torch.where(trivial, 1, first.conj() * head + tail2)
    phi = torch.where(trivial, 0, torch.angle(1 - (size2 / inner).conj()))
    return u, 1 - torch.polar(torch.ones_like(phi), -phi), phi, trivial


def _eliminate(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Column by column, in panels: U ``(..., n, p)``, phases and trivial masks ``(..., p)``."""
    *batch, _, p = X.shape
    negligible = 4 * torch.finfo(X.dtype).eps
    work = X.clone()
    U = torch.zeros_like(X)
    phases = torch.zeros(*batch, p, dtype=real_dtype(X.dtype), device=X.device)
    trivial = torch.zeros(*batch, p, dtype=torch.bool, device=X.device)
    for start in range(0, p, _PANEL):
        stop = min(start + _PANEL, p)
        panel = work[..., start:, start:stop].clone()
        for j in range(stop - start):
            tail = panel[..., j:, j].clone()
            head = tail[..., 0].clone()
            tail[..., 0] = 0
            u, t, phases[..., start + j], trivial[..., start + j] = _reflector(
                tail, head, 0, negligible
            )
            U[..., start + j :, start + j] = u
            if j + 1 < stop - start:
                rest = panel[..., j:, j + 1 :]
                u = u.unsqueeze(-1)
                rest -= u @ (t[..., None, None] * (u.mH @ rest))
        if stop < p:  # A_b ... A_1 = (H_1 ... H_b)^H = I - U Y^H
            block = U[..., start:, start:stop]
            angles = phases[..., start:stop] if X.is_complex() else None
            Y = compact_wy_factors(block, angles)[1]
            rest = work[..., start:, stop:]
            rest -= block @ (Y.mH @ rest)
    return U, phases, trivial


def _eliminate_largest(
    X: Tensor, reflections: int, negligible: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At most `reflections` steps, each on the column that is farthest from its e_k.

    Every step lowers rank(X - E) by one: with R = X - E and w the chosen column of R, the null
    space of R stays and gains e_k, for w^H E z = 0 whenever R z = 0. So rank(X - E) reflections
    are enough, and no fewer are. Columns of R up to `negligible` in size are rounding: a
    reflection along one of them would be noise and raise the rank again.

    Returns:
        U, phases, trivial as `_eliminate`, and the largest column of R that is left, ``(...)``.
    """
    *batch, n, p = X.shape
    E = torch.eye(n, p, dtype=X.dtype, device=X.device)
    R = X - E
    U = X.new_zeros(*batch, n, reflections)
    phases = torch.zeros(*batch, reflections, dtype=real_dtype(X.dtype), device=X.device)
    trivial = torch.ones(*batch, reflections, dtype=torch.bool, device=X.device)
    left = torch.linalg.vector_norm(R, dim=-2)
    for step in range(reflections):
        k = left.argmax(-1)
        index = k[..., None, None].expand(*batch, n, 1)
        tail = R.gather(-1, index).squeeze(-1)
        head = tail.gather(-1, k.unsqueeze(-1)).squeeze(-1) + 1
        tail = tail.scatter(-1, k.unsqueeze(-1), 0)
        u, t, phases[..., step], trivial[..., step] = _reflector(tail, head, k, negligible)
        U[..., step] = u
        row = u[..., None, :].conj() @ R + u[..., None, :p].conj()  # u^H (R + E)
        R -= u[..., None] * (t[..., None, None] * row)
        left = torch.linalg.vector_norm(R, dim=-2)
        if bool(trivial[..., step].all()):
            break
    return U, phases, trivial, left.amax(-1)


def _fixed_directions(n: int, count: int, like: Tensor) -> Tensor:
    """Unit columns ``(n, count)`` in general position, the same ones at every call."""
    generator = torch.Generator().manual_seed(n)
    Z = torch.randn(n, count, dtype=torch.float64, generator=generator).to(like)
    return Z / torch.linalg.vector_norm(Z, dim=-2, keepdim=True)


def _fill(
    U: Tensor, phases: Tensor, trivial: Tensor, reflections: int, p: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers the true reflections in front and fills the rest with what multiplies to I.

    Real reflections come in equal pairs, H(v) H(v) = I; for p < n an odd one may be left, which
    is orthogonal to e_1 ... e_p. Complex ones have phase 0. Directions are in general position:
    equal pairs keep more directions of motion open than one vector repeated would.

    Returns:
        V ``(..., n, reflections)``, phases, and which matrices have an odd one out and no room
        for it (square, real), ``(...)``.
    """
    *batch, n, found = U.shape
    extra = reflections - found
    U = torch.nn.functional.pad(U, (0, extra))
    phases = torch.nn.functional.pad(phases, (0, extra))
    trivial = torch.nn.functional.pad(trivial, (0, extra), value=True)
    order = trivial.to(torch.uint8).argsort(dim=-1, stable=True)
    U = U.gather(-1, order.unsqueeze(-2).expand_as(U))
    phases = phases.gather(-1, order)
    count = reflections - trivial.sum(-1, keepdim=True)  # true reflections of each matrix
    place = torch.arange(reflections, device=U.device)
    if U.is_complex():
        filler = _fixed_directions(n, reflections, U)
        odd = torch.zeros(batch, dtype=torch.bool, device=U.device)
        return torch.where((place < count).unsqueeze(-2), U, filler), phases, odd
    pair = ((place - count).clamp_min(0) // 2).expand(*batch, reflections)
    filler = _fixed_directions(n, reflections // 2 + 1, U)[:, pair.flatten()]
    filler = filler.unflatten(-1, (*batch, reflections)).movedim(0, -2)
    odd = (reflections - count) % 2 == 1
    if p < n:
        single = torch.zeros(n, dtype=U.dtype, device=U.device)
        single[p:] = (n - p) ** -0.5
        last = odd & (place == reflections - 1)
        filler = torch.where(last.unsqueeze(-2), single.unsqueeze(-1), filler)
        odd = torch.zeros_like(odd)
    return torch.where((place < count).unsqueeze(-2), U, filler), phases, odd.squeeze(-1)


def _which(bad: Tensor) -> str:
    if bad.ndim == 0:
        return ""
    places = [tuple(i) if len(i) > 1 else i[0] for i in bad.nonzero()[:4].tolist()]
    return f" (matrices {places} of the batch)"


def _check_rank(X: Tensor, left: Tensor, bound: float, reflections: int) -> None:
    bad = left > bound
    if not bool(bad.any()):
        return
    *_, n, p = X.shape
    E = torch.eye(n, p, dtype=X.dtype, device=X.device)
    ranks = torch.linalg.matrix_rank(X - E, atol=bound, rtol=0.0)
    raise RepresentationError(
        f"a product of {reflections} reflection(s) differs from the identity by a matrix of rank "
        f"{reflections} or less, but here rank(X - I) is {int(ranks[bad].max())} for a {n} x {p} "
        f"matrix{_which(bad)}; what is left over has size {float(left.max()):.2g}, the bound is "
        f"{bound:.2g}. Use more reflections (reflections={n if p == n else p} reaches every "
        "matrix), try the other determinant=, or start elsewhere (init=...)"
    )


def _check_parity(odd: Tensor, n: int, reflections: int) -> None:
    if bool(odd.any()):
        sign = (-1) ** reflections
        raise RepresentationError(
            f"a product of {reflections} real reflection(s) has determinant (-1)^{reflections} = "
            f"{sign:+d}, but this {n} x {n} matrix has determinant {-sign:+d}{_which(odd)}: negate "
            f"its last row (determinant={-sign:+d} of a chart records that flip), choose another "
            "start (init=...), or an odd number of reflections more or fewer"
        )


@full_precision()
@torch.no_grad()
def householder_vectors(
    X: Tensor, reflections: int | None = None, *, bound: float | None = None
) -> Reflections:
    """Reflections whose product has the first columns X: ``H_1 ... H_L E = X``.

    For k = 1 .. p, with x the k-th working column below row k: w = x - e_1, for Re x_1 > 0
    stably w_1 = -(|tail|^2 + Im^2 x_1) / (1 + Re x_1) + i Im x_1; t = |w|^2 / (w^H x);
    u = w / |w|; phi = arg(1 - conj t); apply I - t u u^H. Trivial columns (w = 0) cost no
    reflection: spare ones are filled with equal pairs (complex: phase 0). With fewer reflections
    than columns the column farthest from its unit vector goes first, and each step lowers
    rank(X - I) by one.

    Args:
        X: Matrices with orthonormal columns, shape ``(..., n, p)``, n >= p, real or complex;
            not checked.
        reflections: L; p by default, at most n.
        bound: Rounding of the columns of X, for L < p: a column that differs from its unit
            vector by less costs no reflection; `tolerance` of the dtype of X by default.

    Returns:
        Unit vectors ``(..., n, L)`` and phases ``(..., L)`` (None for real X), in float32 or
        better.

    Raises:
        ShapeError: If n < p or there are more reflections than rows.
        RepresentationError: If X is square and real and its determinant is not (-1)^L, or if
            rank(X - I) > L.
    """
    check_point_shape(X)
    n, p = X.shape[-2:]
    L = p if reflections is None else reflections
    if not 1 <= L <= n:
        raise ShapeError(f"expected 1 <= reflections <= n = {n}, got {L}")
    given, working = X.dtype, compute_dtype(X.dtype)
    X = X.to(working)
    if p > L:
        wide = X.to(double_dtype(X.dtype))
        bound = tolerance(given, n, p) if bound is None else bound
        U, phases, trivial, left = _eliminate_largest(wide, L, bound)
        _check_rank(wide, left, 4 * bound, L)
    else:
        U, phases, trivial = _eliminate(X)
    V, phases, odd = _fill(U, phases, trivial, L, p)
    _check_parity(odd, n, L)
    return Reflections(V.to(working), phases.to(real_dtype(working)) if X.is_complex() else None)
