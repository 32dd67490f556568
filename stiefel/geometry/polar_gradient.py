"""The derivative of the polar factor, in terms of singular values and vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.linear import adjoint
from stiefel.geometry.lyapunov import definite_inverse, lyapunov_near_identity, squared_smith
from stiefel.geometry.proxy_scale import gradient_over_scale, scaled
from stiefel.numerics import real_dtype

__all__ = [
    "gradient_by_products",
    "keeps_left",
    "near_identity",
    "pairs_fake",
    "polar_gradient",
    "prefers_products",
]

#: Batches of at least so many matrices of at most so many columns: products are faster than
#: eigenvalues of each, whatever the condition numbers.
_MANY, _SMALL = 32, 40


def polar_gradient(G: Tensor, W: Tensor, U: Tensor, s: Tensor, V: Tensor) -> Tensor:
    """Pulls a gradient back through ``Z = U diag(s) V^H -> W = U V^H``.

    ``dW = W Omega + (I - W W^H) dZ P^-1`` with ``P = V diag(s) V^H`` and
    ``P Omega + Omega P = W^H dZ - dZ^H W``. Its adjoint, with ``E = U^H G V`` and
    ``M_ij = (E_ij - conj(E_ji)) / (s_i + s_j)``, is ``dZ = (U M + (G V - U E) diag(1/s)) V^H``.
    The sums ``s_i + s_j`` stand where differences of eigenvalues would in the derivative of an
    eigenvalue decomposition, so that repeated singular values do no harm. It is the derivative of
    ``Z (Z^H Z)^(-1/2)`` with ``Kd_ij = -1 / (sqrt(l_i) sqrt(l_j) (sqrt(l_i) + sqrt(l_j)))``,
    l = s^2, with the common factors cancelled (Huang et al., AAAI 2018).

    Where ``s_i + s_j`` is zero to rounding, W is not determined by Z and the gradient there is
    taken to be zero.

    Args:
        G: Gradient with respect to W, shape ``(..., n, p)``.
        W: The result, shape ``(..., n, p)``.
        U: Left singular vectors W V, shape ``(..., n, p)``; of no rows, ``(..., 0, p)``, where
            they were not kept (see `keeps_left`).
        s: Singular values in any order, shape ``(..., p)``.
        V: Right singular vectors, shape ``(..., p, p)``.

    Returns:
        Gradient with respect to Z, shape ``(..., n, p)``.
    """
    limits = torch.finfo(s.dtype)
    zero = (limits.eps * s.amax(-1, keepdim=True)).clamp_min(limits.tiny / limits.eps)
    sums = s.unsqueeze(-1) + s.unsqueeze(-2)
    r = _reciprocal(s, zero).unsqueeze(-2)
    kept = U.shape[-2] == W.shape[-2]
    GV = G @ V if kept else G
    E = U.mH @ GV if kept else V.mH @ (W.mH @ G) @ V
    M = (E - E.mH.resolve_conj()) * _reciprocal(sums, zero.unsqueeze(-1))
    if not kept:
        return W @ (V @ (M - E * r) @ V.mH) + G @ ((V * r) @ V.mH)
    if W.shape[-2] == W.shape[-1]:
        return U @ M @ V.mH
    return (U @ (M - E * r) + GV * r) @ V.mH


def gradient_by_products(G: Tensor, W: Tensor, Z: Tensor) -> Tensor:
    """The same derivative from W and Z alone, without singular values where products are faster.

    With ``P = W^H Z`` and ``A = W^H G``: ``dZ = W F + (G - W A) P^-1``, ``P F + F P = A - A^H``. F
    is a series of products for Z near multiples of orthonormal matrices, and a squared Smith
    iteration for many small matrices; see `stiefel.geometry.lyapunov`. The rest, and what is too
    ill-conditioned for those, takes the eigenvalues of P.

    Args:
        G: Gradient with respect to W, shape ``(..., n, p)``.
        W: The polar factor of Z, shape ``(..., n, p)``.
        Z: Matrices of any scale, shape ``(..., n, p)``.

    Returns:
        Gradient with respect to Z, shape ``(..., n, p)``.
    """
    shape = Z.shape
    G, W, Z = (X.reshape(-1, *shape[-2:]).contiguous() for X in (G, W, Z))
    Z, scale, bad = scaled(Z)
    P = W.mH @ Z
    P = P.add_(adjoint(P)).div_(2)
    if bad is not None:
        P = torch.where(bad, 0, P)
    all_near = bool(near_identity(P).all())
    if not (all_near or prefers_products(P)):
        return gradient_over_scale(_gradient_by_eigenvalues(G, W, P), scale).reshape(shape)
    A = W.mH @ G
    K = A - adjoint(A)
    F, solved = lyapunov_near_identity(P, K) if all_near else squared_smith(P, K)
    if shape[-2] == shape[-1]:
        dZ = W @ F
    else:
        inverse = definite_inverse(P)
        dZ = W @ (F - A @ inverse) + G @ inverse
    if not bool(solved.all()):
        rest = ~solved
        dZ[rest] = _gradient_by_eigenvalues(G[rest], W[rest], P[rest])
    return gradient_over_scale(dZ, scale).reshape(shape)


def _gradient_by_eigenvalues(G: Tensor, W: Tensor, P: Tensor) -> Tensor:
    """`polar_gradient` with the eigenvalues s of P = W^H Z, the singular values of Z."""
    s, V = torch.linalg.eigh(P)
    U = W @ V if keeps_left(*W.shape[-2:]) else V.new_empty(*V.shape[:-2], 0, V.shape[-1])
    return polar_gradient(G, W, U, s.clamp_min(0), V)


def prefers_products(Z: Tensor) -> bool:
    """Whether products are faster than eigenvalues for Z (..., n, p) of any condition number."""
    return Z.shape[-1] <= _SMALL and Z.shape[:-2].numel() >= _MANY


def near_identity(S: Tensor) -> Tensor:
    """Which of the Hermitian S (..., p, p) have |S / c - I|_F < 1/2, c the mean eigenvalue."""
    trace = S.diagonal(dim1=-2, dim2=-1).real.sum(-1)
    ratio = torch.linalg.vector_norm(S, dim=(-2, -1)) / trace
    return S.shape[-1] * (S.shape[-1] * ratio.square() - 1) < 0.25


def keeps_left(n: int, p: int) -> bool:
    """Whether U is worth keeping beside W = U V^H: not where n x p products cost the most."""
    return n <= 4 * p


def pairs_fake(Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of W, U, s and V; U has no rows where `keeps_left` says so."""
    n, p = Z.shape[-2:]
    rows = n if keeps_left(n, p) else 0
    values = Z.new_empty(*Z.shape[:-2], p, dtype=real_dtype(Z.dtype))
    U, V = Z.new_empty(*Z.shape[:-2], rows, p), Z.new_empty(*Z.shape[:-2], p, p)
    return Z.new_empty(Z.shape), U, values, V


def _reciprocal(a: Tensor, zero: Tensor) -> Tensor:
    """1/a, and 0 where a is zero to rounding."""
    return torch.where(a > zero, a.clamp_min(torch.finfo(a.dtype).tiny).reciprocal(), 0)
