"""The Lyapunov equation of the polar factor, by products of matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["definite_inverse", "lyapunov_near_identity", "squared_smith"]

#: The series is given up where its terms do not fall by this factor.
_RATE = 0.25
#: Doublings: enough for condition numbers up to about 1e4.
_DOUBLINGS = 10


def lyapunov_near_identity(P: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """F with ``P F + F P = K``, for P Hermitian near a multiple of I and K skew-Hermitian.

    With ``P = c (I + E)``, c the mean eigenvalue: ``F = D_0 + D_1 + ...``, ``D_0 = K / (2 c)``,
    ``D_k+1 = -(E D_k + D_k E) / 2``, one product each since ``D E = -(E D)^H``. It gives up where
    terms do not fall fast.

    Args:
        P: Hermitian, shape ``(B, p, p)``.
        K: Skew-Hermitian, shape ``(B, p, p)``; overwritten.

    Returns:
        F ``(B, p, p)``, and which of them are accurate to rounding, ``(B,)``.
    """
    eps = torch.finfo(P.dtype).eps
    c = P.diagonal(dim1=-2, dim2=-1).real.mean(-1)[:, None, None]
    share = 0.5 / c
    half = P * -share  # -(I + E) / 2
    half.diagonal(dim1=-2, dim2=-1).add_(0.5)
    D = K.mul_(share)
    F, T = D.clone(), torch.empty_like(D)
    solved = torch.zeros_like(c[:, 0, 0], dtype=torch.bool)
    size = goal = torch.linalg.vector_norm(D, dim=(-2, -1))
    for _ in range(math.ceil(math.log(eps, _RATE))):
        torch.bmm(half, D, out=T)
        torch.sub(T, T.mH.resolve_conj(), out=D)
        F += D
        last, size = size, torch.linalg.vector_norm(D, dim=(-2, -1))
        solved = size * size <= eps / 2 * goal * last  # about the term to come
        if bool((solved | (size > _RATE * last)).all()):
            break
    return F, solved


def squared_smith(P: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """F with ``P F + F P = K``, P Hermitian positive definite, by the squared Smith iteration.

    With ``R = (P + t I)^-1`` and ``A = (P - t I) R = I - 2 t R`` the equation is
    ``F = A F A + 2 t R K R``, so that F is the sum of ``A^j (2 t R K R) A^j``. The iteration
    doubles the number of terms, ``F <- F + A F A, A <- A^2`` (Smith, SIAM J. Appl. Math. 16
    (1968)). The eigenvalues of A are (s - t) / (s + t), least for t = sqrt(s_min s_max), which is
    taken from pivots of P = L L^H.

    Args:
        P: Hermitian, shape ``(B, p, p)``.
        K: Right-hand sides, shape ``(B, p, p)``.

    Returns:
        F ``(B, p, p)``, and which of them are accurate to rounding, ``(B,)``: where P is singular
        or its condition number exceeds about 1e4 they are not.
    """
    eps = torch.finfo(P.dtype).eps
    L, info = torch.linalg.cholesky_ex(P)
    pivot = L.diagonal(dim1=-2, dim2=-1).real.amin(-1)  # a root
    t = (pivot * P.diagonal(dim1=-2, dim2=-1).real.amax(-1).sqrt())[:, None, None]
    R = P.clone()
    R.diagonal(dim1=-2, dim2=-1).add_(t[..., 0])
    R = definite_inverse(R)
    T = R @ K
    F = T @ R
    F *= 2 * t
    A = R.mul_(-2 * t)
    A.diagonal(dim1=-2, dim2=-1).add_(1)
    result, done = torch.zeros_like(P), torch.zeros_like(info, dtype=torch.bool)
    index = torch.arange(len(P), device=P.device)
    for step in range(_DOUBLINGS):
        if step:
            A, T = torch.bmm(A, A, out=T), A
        torch.bmm(A, F, out=T)
        F.baddbmm_(T, A)
        # what is left is A^2 F A^2 and smaller terms
        solved = torch.linalg.vector_norm(A, dim=(-2, -1)) < eps**0.25
        if 2 * int(solved.sum()) > len(A):
            result[index[solved]], done[index[solved]] = F[solved], True
            A, F, index = A[~solved], F[~solved], index[~solved]
            T = torch.empty_like(A)
        if len(A) == 0:
            break
    return result, done & (info == 0)


def definite_inverse(P: Tensor) -> Tensor:
    """Inverses of Hermitian positive definite matrices ``(B, p, p)``; I where P is singular."""
    L, info = torch.linalg.cholesky_ex(P)
    failed = (info != 0)[:, None, None]
    if bool(failed.any()):
        L = torch.where(failed, torch.eye(P.shape[-1], dtype=P.dtype, device=P.device), L)
    return torch.cholesky_inverse(L).contiguous()
