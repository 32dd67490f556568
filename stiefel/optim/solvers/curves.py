"""Curves t -> R_X(t d) on one manifold: a point for each t, and how f falls along it.

What does not depend on t is computed once, so that a second trial of a line search is cheap. The
slope of f along a curve is ``Re <G, d/dt R_X(t d)>`` with the ambient gradient G at the point
reached; d/dt R is the exact derivative of the retraction, never a transport: in closed form for
the Cayley, QR and Cholesky-QR retractions, by torch's reverse mode through the retraction for all
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from stiefel.geometry.linear import inverse
from stiefel.geometry.tangent import skew

__all__ = ["CayleyCurve", "Curve", "DifferentiatedCurve", "FactorCurve", "Straight", "real_dot"]

#: One Cholesky pass is enough while |t d|^2 is at most this: the condition number of the Gram
#: matrix I + t^2 d^H d is then at most 1 + 100, and two decimal digits are lost of sixteen.
_ONE_PASS = 100.0


def real_dot(U: Tensor, V: Tensor) -> Tensor:
    """``Re sum conj(U) V`` over all entries, a real 0-d tensor, without a temporary."""
    product = torch.vdot(U.reshape(-1), V.reshape(-1))
    return product.real if product.is_complex() else product


class Curve(Protocol):
    """One curve; `move` gives the point at t and a state, from which `slope` goes on."""

    def move(self, t: float) -> tuple[Tensor, Any]:
        """The point R_X(t d), and what `slope` needs."""
        ...

    def slope(self, t: float, state: Any, Y: Tensor, G: Tensor) -> Tensor:
        """``Re <G, d/dt R_X(t d)>``, a 0-d tensor, at ``Y = R_X(t d)`` with gradient G there."""
        ...


class Straight:
    """The straight line X + t d of free tensors."""

    def __init__(self, X: Tensor, d: Tensor) -> None:
        self.X, self.d = X, d

    def move(self, t: float) -> tuple[Tensor, None]:
        """X + t d."""
        return self.X.add(self.d, alpha=t), None

    def slope(self, t: float, state: None, Y: Tensor, G: Tensor) -> Tensor:
        """Re <G, d>."""
        return real_dot(G, self.d)


class DifferentiatedCurve:
    """A curve by any differentiable retraction; the slope by reverse mode through it."""

    def __init__(self, retract: Callable[[Tensor, Tensor], Tensor], X: Tensor, d: Tensor) -> None:
        self.retract, self.X, self.d = retract, X, d

    def move(self, t: float) -> tuple[Tensor, None]:
        """R_X(t d)."""
        return self.retract(self.X, t * self.d), None

    def slope(self, t: float, state: None, Y: Tensor, G: Tensor) -> Tensor:
        """The derivative of ``t -> Re <G, R_X(t d)>`` with G held."""
        with torch.enable_grad():
            time = torch.tensor(
                t, dtype=G.real.dtype if G.is_complex() else G.dtype, device=G.device
            ).requires_grad_()
            moved = self.retract(self.X, time * self.d)
            (derivative,) = torch.autograd.grad(moved, time, G)
        return derivative


class CayleyCurve:
    """The Cayley retraction in its p x p form, `stiefel.geometry.cayley_retraction`, at t d.

    With S = X^H d, A = skew(S), B = d - X S, C = B^H B and M = I - t A/2 + t^2 C/4:
    ``Y = X + D M^-1``, ``D = t B + X (t A - t^2 C/2)``; with M' = -A/2 + t C/2 its derivative is
    ``dY/dt = (B + X (A - t C) - (Y - X) M') M^-1``. On square matrices B = 0 and C = 0.
    """

    def __init__(self, X: Tensor, d: Tensor) -> None:
        self.X, self.square = X, X.shape[-2] == X.shape[-1]
        S = X.mH @ d  # as it is: skew(X^H G), equal on paper, would let X drift exponentially
        self.A = skew(S)
        if not self.square:
            self.B = d - X @ S
            self.C = self.B.mH @ self.B
        self.eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)

    def move(self, t: float) -> tuple[Tensor, Tensor]:
        """The point, and M^-1."""
        A = t * self.A
        if self.square:
            inverted = inverse(self.eye - A / 2)
            return self.X + self.X @ (A @ inverted), inverted
        B, C = t * self.B, t * t * self.C
        inverted = inverse(self.eye - A / 2 + C / 4)  # its Hermitian part is at least I
        return self.X + (B + self.X @ (A - C / 2)) @ inverted, inverted

    def slope(self, t: float, state: Tensor, Y: Tensor, G: Tensor) -> Tensor:
        """Re <G, dY/dt>."""
        if self.square:
            return real_dot(G, (self.X + (Y - self.X) / 2) @ (self.A @ state))
        change = t * self.C / 2 - self.A / 2
        velocity = self.B + self.X @ (self.A - t * self.C) - (Y - self.X) @ change
        return real_dot(G, velocity @ state)


class FactorCurve:
    """The QR retraction, ``X + t d = Q R`` with a positive diagonal of R.

    With V = d R^-1 and K = Q^H V: ``dQ/dt = V - Q K + Q rho(K)``, rho(K) the skew-Hermitian matrix
    with the strictly lower part of K and the imaginary part of its diagonal (differentiate
    Q R = X + t d and use that dR R^-1 is upper triangular with a real diagonal).

    Args:
        X: Points, shape ``(..., n, p)``.
        d: Tangent vectors, same shape.
        squared: An upper bound on |d|^2.
        cholesky: Whether R comes from the Cholesky factor of the Gram matrix (one pass while X +
            t d is well conditioned, two beyond) instead of Householder's QR.
    """

    def __init__(self, X: Tensor, d: Tensor, squared: float, cholesky: bool) -> None:
        self.X, self.d, self.squared, self.cholesky = X, d, squared, cholesky

    def move(self, t: float) -> tuple[Tensor, Tensor]:
        """The point Q, and R."""
        Z = self.X.add(self.d, alpha=t)
        if not self.cholesky:
            Q, R = torch.linalg.qr(Z)
            diagonal = R.diagonal(dim1=-2, dim2=-1)
            phase = torch.where(diagonal == 0, torch.ones_like(diagonal), torch.sgn(diagonal))
            return Q * phase.unsqueeze(-2), phase.conj().unsqueeze(-1) * R
        Q, R = _cholesky_pass(Z)
        if not t * t * self.squared <= _ONE_PASS:
            Q, again = _cholesky_pass(Q)
            R = again @ R
        return Q, R

    def slope(self, t: float, state: Tensor, Y: Tensor, G: Tensor) -> Tensor:
        """Re <G, dQ/dt>."""
        V = torch.linalg.solve_triangular(state, self.d, upper=True, left=False)
        K = Y.mH @ V
        lower = K.tril(-1)
        rho = lower - lower.mH
        if K.is_complex():
            rho = rho + torch.diag_embed(1j * K.diagonal(dim1=-2, dim2=-1).imag)
        return real_dot(G, V) + real_dot(Y.mH @ G, rho - K)


def _cholesky_pass(Z: Tensor) -> tuple[Tensor, Tensor]:
    """``Z = Q R`` by the Cholesky factor of Z^H Z; NaN where Z is not finite."""
    factor = torch.linalg.cholesky_ex(Z.mH @ Z)
    failed = (factor.info != 0)[..., None, None]
    R = torch.where(failed, torch.nan, factor.L).mH
    return torch.linalg.solve_triangular(R, Z, upper=True, left=False), R
