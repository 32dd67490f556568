"""The logarithm of the Euclidean metric: shooting along its exponential by Gauss-Newton steps.

The geodesic from B to X stays in the span of both, so all is done on St(p + r, p),
r = min(p, n - p), at the base E = [I; 0], in float64 and one matrix at a time.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from stiefel.geometry.exponentials import euclidean_exponential
from stiefel.geometry.logarithms import canonical_frame, frame_basis, logarithm, refuse
from stiefel.numerics import full_precision

__all__ = ["euclidean_logarithm"]

#: Gauss-Newton steps, inner steps of each, and the miss (largest entry) at which they end.
_STEPS, _INNER, _ARRIVED = 60, 200, 1e-13
#: Shortest step of the backtracking.
_SHORTEST = 2.0**-12


class _Skew:
    """exp(M) of a skew matrix M = U diag(i theta) U^H, its derivative L and the adjoint of L.

    ``L(E) = U (F o (U^H E U)) U^H``, ``F_jk = e^(i (theta_j + theta_k)/2) sinc((theta_j -
    theta_k)/2)``, the divided differences of the exponential.
    """

    def __init__(self, M: Tensor) -> None:
        theta, self.U = torch.linalg.eigh(-1j * M)
        self.real = not M.is_complex()
        half = theta / 2
        difference, total = half[:, None] - half, half[:, None] + half
        self.F = torch.exp(1j * total) * torch.sinc(difference / math.pi)
        self.exp = self._back((self.U * torch.exp(1j * theta)) @ self.U.mH)

    def _back(self, Z: Tensor) -> Tensor:
        return Z.real if self.real else Z

    def derivative(self, E: Tensor) -> Tensor:
        """L(E)."""
        return self._back(self.U @ (self.F * (self.U.mH @ E.to(self.U.dtype) @ self.U)) @ self.U.mH)

    def adjoint(self, G: Tensor) -> Tensor:
        """The G* with ``<L(E), G> = <E, G*>``."""
        inner = self.F.conj() * (self.U.mH @ G.to(self.U.dtype) @ self.U)
        return self._back(self.U @ inner @ self.U.mH)


class _Geodesic:
    """The Euclidean exponential at E = [I; 0], ``exp_E(u) = e^W E e^(-A)``, and its derivative J.

    u = [A; R] with A skew, so W = u E^H - E u^H = [[2A, -R^H], [R, 0]] (Edelman, Arias, Smith,
    section 2.2.2).
    """

    def __init__(self, u: Tensor) -> None:
        self.p = u.shape[-1]
        self.first, self.second = _Skew(self._generator(u)), _Skew(-u[: self.p])
        self.end = self.first.exp[:, : self.p] @ self.second.exp

    def _generator(self, u: Tensor) -> Tensor:
        A, R = u[: self.p], u[self.p :]
        zero = u.new_zeros(len(R), len(R))
        return torch.cat([torch.cat([2 * A, -R.mH], -1), torch.cat([R, zero], -1)])

    def derivative(self, v: Tensor) -> Tensor:
        """J v."""
        head = self.first.derivative(self._generator(v))[:, : self.p] @ self.second.exp
        return head - self.first.exp[:, : self.p] @ self.second.derivative(v[: self.p])

    def adjoint(self, G: Tensor) -> Tensor:
        """The tangent vector ``J^* G``."""
        p = self.p
        wide = torch.nn.functional.pad(G @ self.second.exp.mH, (0, len(G) - p))
        M = self.first.adjoint(wide)
        a = 2 * M[:p, :p] - self.second.adjoint(self.first.exp[:, :p].mH @ G)
        return _tangent(torch.cat([a, M[p:, :p] - M[:p, p:].mH]))


def _tangent(w: Tensor) -> Tensor:
    """The tangent part at E of a matrix: its first block made skew."""
    p = w.shape[-1]
    return torch.cat([(w[:p] - w[:p].mH) / 2, w[p:]])


def _dot(u: Tensor, v: Tensor) -> float:
    return float((u.conj() * v).real.sum())


def _direction(geodesic: _Geodesic, gradient: Tensor, forcing: float) -> Tensor:
    """Conjugate gradients on the normal equations ``J^* J d = J^* F``.

    Args:
        geodesic: Gives J.
        gradient: ``J^* F``, F the miss.
        forcing: Relative size of the residual at which to stop.
    """
    d, r = torch.zeros_like(gradient), gradient
    q, size = r, _dot(r, r)
    enough = forcing**2 * size
    for _ in range(_INNER):
        if size <= enough:
            break
        Jq = geodesic.derivative(q)
        a = size / _dot(Jq, Jq)
        d, r = d + a * q, r - a * geodesic.adjoint(Jq)
        before, size = size, _dot(r, r)
        q = r + (size / before) * q
    return d


def _shoot(target: Tensor, u: Tensor) -> Tensor:
    """Solves exp_E(u) = target from a first guess, as far as it goes."""
    geodesic = _Geodesic(u)
    for _ in range(_STEPS):
        miss = target - geodesic.end
        size = _dot(miss, miss)
        if float(miss.abs().amax()) <= _ARRIVED:
            break
        d = _direction(geodesic, geodesic.adjoint(miss), min(0.1, math.sqrt(size)))
        t = 1.0
        while t >= _SHORTEST:
            geodesic = _Geodesic(u + t * d)
            new = target - geodesic.end
            if _dot(new, new) <= (1 - 1e-4 * t) * size:
                break
            t /= 2
        else:
            break  # no descent: at rounding level, or at a stationary point that misses
        u = u + t * d
    return u


def _one_frame(B: Tensor, X: Tensor) -> tuple[Tensor, float]:
    p = B.shape[-1]
    V = torch.cat([B, frame_basis(B, X)], dim=-1)
    target = V.mH @ X
    E = torch.eye(V.shape[-1], p, dtype=X.dtype)
    guess, _ = canonical_frame(E, target)
    u = _shoot(target, _tangent(guess))
    residual = float((V @ euclidean_exponential(E, u) - X).abs().amax())
    refuse(X.shape[-2], p, residual)
    return V @ u, residual


@overload
def euclidean_logarithm(
    B: Tensor, X: Tensor, *, return_residual: Literal[False] = False
) -> Tensor: ...
@overload
def euclidean_logarithm(
    B: Tensor, X: Tensor, *, return_residual: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@torch.no_grad()
@full_precision()
def euclidean_logarithm(
    B: Tensor, X: Tensor, *, return_residual: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The inverse of `euclidean_exponential`: a tangent vector u at B with exp_B(u) = X.

    Shooting: Gauss-Newton steps on ``|exp_B(u) - X|^2`` from the canonical logarithm, each by
    conjugate gradients with exact derivatives of the exponential, on St(2p, p) (the reduction of
    Zimmermann and Hueper, SIAM J. Matrix Anal. Appl. 43 (2022)); quadratic at the end. Square
    matrices: ``B log(B^H X)``, as in the canonical metric. Far from B there may be several
    geodesics to X; the one found is that near the canonical one.

    Args:
        B: Points, shape ``(..., n, p)``.
        X: Points of the same shape.
        return_residual: Also return the residual, the largest entry of ``exp_B(u) - X``.

    Returns:
        Tangent vectors at B, same shape, in float32 or better; computed in float64, without a
        gradient. With `return_residual` also the residuals in float64, shape ``(...)``.

    Raises:
        ShapeError: If the shapes differ or n < p.
        RepresentationError: If the iteration does not converge: X is too far from B. The message
            states the residual.

    Example:
        >>> import torch
        >>> from stiefel.geometry import euclidean_exponential, euclidean_logarithm, haar
        >>> B, X = torch.eye(7, 3, dtype=torch.float64), haar(7, 3, dtype=torch.float64)
        >>> u, residual = euclidean_logarithm(B, X, return_residual=True)
        >>> torch.allclose(euclidean_exponential(B, u), X)
        True
        >>> bool(residual < 1e-9)
        True
    """
    u, residual = logarithm(_one_frame, B, X)
    return (u, residual) if return_residual else u
