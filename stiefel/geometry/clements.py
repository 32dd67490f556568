"""Angles of a given matrix: Clements' rectangular decomposition, real and complex.

Clements, Humphreys, Metcalf, Kolthammer, Walmsley, Optica 3 (2016): the entries below the diagonal
are nulled along anti-diagonals from the lower left corner, in turn by rotations of columns and of
rows, until a diagonal D is left, ``T_m ... T_1 W R_1^H ... R_m'^H = D``. The rotations of rows are
then moved through D, ``T^H D = D' F``, which leaves n layers of disjoint neighbours in the order of
`stiefel.geometry.rotations.layer_steps`. Each rotation waits for the one before it, so this is a
loop over n (n - 1) / 2 rotations, in float64 on the CPU, over all matrices of a batch at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stiefel.geometry.rotations import layer_steps
from stiefel.numerics import double_dtype

__all__ = ["clements_angles"]

_Array = np.ndarray


def _cosine_sine(near: _Array, far: _Array) -> tuple[_Array, _Array]:
    """``near / r, far / r`` with r = hypot(near, far); 1, 0 where both are zero."""
    r = np.hypot(near, far)
    zero = r == 0
    if zero.any():
        near, r = np.where(zero, 1.0, near), np.where(zero, 1.0, r)
    return near / r, far / r


def _phase(z: _Array) -> _Array:
    """``z / |z|``, 1 where z is zero."""
    size = np.abs(z)
    return np.where(size == 0, 1.0, z) / np.where(size == 0, 1.0, size)


def _turn(a: _Array, b: _Array, c: _Array, s: _Array, e: _Array | None) -> None:
    """``(a, b) <- (c a - s e b, s a + c e b)`` in place."""
    turned = b if e is None else b * e
    first = c * a - s * turned
    b[...] = s * a + c * turned
    a[...] = first


class _Nulled:
    """W ``(n, n, lanes)`` brought to its diagonal; angles by layer and row, ``(n, n, lanes)``.

    `theta` and `phi` are those of the layers for the rotations of columns, and for those of rows
    the angle and the phase of ``T^H = diag(1, e^(-i phi)) Rot(theta)``.
    """

    def __init__(self, W: _Array) -> None:
        self.W = W
        self.n = W.shape[0]
        self.phased = np.iscomplexobj(W)
        self.theta = np.zeros(W.shape)
        self.phi = np.zeros(W.shape)
        for d in range(1, self.n):
            for j in range(d):
                if d % 2:
                    self._null_by_columns(j, d - 1 - j)
                else:
                    self._null_by_rows(j, self.n - 1 - d + j)

    def _null_by_columns(self, layer: int, i: int) -> None:
        """``(x, y) F^H = (0, r)`` for the entries of columns i, i + 1 in row n - 1 - layer."""
        row = self.n - 1 - layer
        x, y = self.W[row, i], self.W[row, i + 1]
        e = None
        if self.phased:
            e = _phase(x) * _phase(y).conj()  # e^(-i phi)
            self.phi[layer, i] = -np.angle(e)
            x, y = np.abs(x), np.abs(y)
        c, s = _cosine_sine(y, x)
        self.theta[layer, i] = np.arctan2(s, c)
        _turn(self.W[: row + 1, i], self.W[: row + 1, i + 1], c, s, e)

    def _null_by_rows(self, column: int, i: int) -> None:
        """``T (p; q) = (r; 0)``, T = Rot(-th) diag(1, e^(i phi)), for entries of rows i, i + 1."""
        layer = self.n - 1 - column
        p, q = self.W[i, column], self.W[i + 1, column]
        e = None
        if self.phased:
            e = _phase(p) * _phase(q).conj()
            self.phi[layer, i] = np.angle(e)
            p, q = np.abs(p), np.abs(q)
        c, s = _cosine_sine(p, q)
        self.theta[layer, i] = np.arctan2(s, c)
        _turn(self.W[i, column:], self.W[i + 1, column:], c, -s, e)

    def move_rows_through_the_diagonal(self) -> _Array:
        """Turns every T^H into a rotation of its layer; returns D ``(n, lanes)`` in front of all.

        ``Rot(th) diag(d1, d2) = d1 Rot(th) diag(1, d2 / d1)``, or for signs
        ``diag(d1, d2) Rot(d1 d2 th)``.
        """
        D = _phase(self.W[range(self.n), range(self.n)])
        for layer in range(1, self.n):
            first = self.n - 1 - layer
            at = np.arange(first + (first + layer) % 2, self.n - 1, 2)
            d1, d2 = D[at], D[at + 1]
            if self.phased:
                D[at + 1] = d1 * np.exp(-1j * self.phi[layer, at])
                self.phi[layer, at] = np.angle(d2 * d1.conj())
            else:
                self.theta[layer, at] *= d1 * d2
        return D

    def absorb_signs(self, D: _Array) -> None:
        """Puts signs with product 1 into the last two layers: -1 at rows i, i + 1 is a half turn.

        Row by row the pair (i, i + 1) turns by pi where the signs of rows 0 to i multiply to -1.
        The half turns of the last but one pass the last, whose angles they negate where they meet
        one row of a pair.
        """
        turned = np.cumprod(D[:-1], axis=0) < 0
        last = np.arange((self.n - 1) % 2, self.n - 1, 2)
        before = np.arange(self.n % 2, self.n - 1, 2)
        passing = np.ones_like(D)
        passing[before] *= np.where(turned[before], -1, 1)
        passing[before + 1] *= np.where(turned[before], -1, 1)
        if self.n > 1:
            self.theta[-1, last] *= passing[last] * passing[last + 1]
            for layer, at in ((-1, last), (-2, before)):
                angle = self.theta[layer, at]
                half = np.where(angle > 0, -np.pi, np.pi)
                self.theta[layer, at] = np.where(turned[at], angle + half, angle)


def clements_angles(W: Tensor) -> tuple[Tensor, ...]:
    """The angles of n tunable layers whose product is W.

    Args:
        W: Orthogonal matrices of determinant 1, or unitary matrices, shape ``(..., n, n)``.

    Returns:
        ``(theta,)``, shape ``(..., n (n - 1) / 2)`` in float64, for real matrices; ``(theta, phi,
        omega)``, the last of shape ``(..., n)``, for complex ones.
    """
    *batch, n, _ = W.shape
    double = double_dtype(W.dtype)
    flat = W.detach().resolve_conj().to("cpu", double).reshape(-1, n, n)
    nulled = _Nulled(flat.permute(1, 2, 0).numpy().copy(order="C"))
    D = nulled.move_rows_through_the_diagonal()
    if not W.is_complex():
        nulled.absorb_signs(D)
    steps = layer_steps(n, n, "tunable")
    layer = [k for k, step in enumerate(steps) for _ in range(step.pairs)]
    row = [step.first + 2 * r for step in steps for r in range(step.pairs)]
    angles = [nulled.theta[layer, row]]
    if W.is_complex():
        angles += [nulled.phi[layer, row], np.angle(D)]
    return tuple(
        torch.from_numpy(a.reshape(-1, flat.shape[0]).T.copy()).reshape(*batch, -1).to(W.device)
        if flat.shape[0]
        else torch.zeros(*batch, len(a), dtype=torch.float64, device=W.device)
        for a in angles
    )
