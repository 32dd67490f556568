"""The derivative of the polar factor, in terms of singular values and vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.numerics import real_dtype

__all__ = ["keeps_left", "pairs_fake", "polar_gradient"]


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
