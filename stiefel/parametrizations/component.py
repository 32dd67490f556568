"""Charts that cover one component of O(n): which one, a flip of the last row or the base says."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.determinant import determinant_sign
from stiefel.geometry.sampling import with_determinant
from stiefel.parametrizations.base import Parametrization

__all__ = ["OneComponent"]


class OneComponent(Parametrization):
    """A chart whose map has one determinant: F M(V), or a map around a base.

    Without a base the map M has the determinant `parity`, and F = diag(1, ..., 1, flip) reaches the
    other component. With one (`has_base`) the weight has the determinant of the base, which
    `set_determinant` moves by negating its last row. A chart whose options leave no choice says so
    by `fixed_determinant`. All of it counts for real square weights only.

    Subclasses call `keep_flip` at the end of their ``__init__``, after `has_base` and
    `fixed_determinant` are settled, and may extend `determinant_remedy`.

    Attributes:
        flip: int8, +1 or -1 of each matrix, shape ``(*batch)``; None for tall weights, with a base,
            and where the determinant is fixed.
        parity: Determinant of M, +1 or -1.
    """

    flip: Tensor | None
    base: Tensor
    parity: int

    def keep_flip(self, parity: int = 1) -> None:
        """Registers the buffer, +1, and notes the determinant of the map without it."""
        self.parity = parity
        flips = self.p == self.n and not self.has_base and self.fixed_determinant is None
        self.register_buffer("flip", torch.ones(self.batch, dtype=torch.int8) if flips else None)

    def flip_for(self, dtype: torch.dtype) -> Tensor | None:
        """The flips of a weight of that dtype; None where there is nothing to flip."""
        return None if dtype.is_complex else self.flip

    def flip_rows(self, X: Tensor) -> Tensor:
        """F X, out of place, for X of shape ``(*batch, n, k)``."""
        flip = self.flip_for(X.dtype)
        if flip is None:
            return X
        scale = flip.to(X)[..., None, None]
        return torch.cat([X[..., :-1, :], X[..., -1:, :] * scale], dim=-2)

    def determinants(self) -> Tensor | None:
        """Determinants of real weights as the buffers are, shape ``(*batch)``; None if tall."""
        if self.p < self.n:
            return None
        if self.fixed_determinant is not None:
            return torch.full(self.batch, self.fixed_determinant)
        if self.has_base:
            return determinant_sign(self.base.real if self.base.is_complex() else self.base)
        return None if self.flip is None else self.flip * self.parity

    def set_determinant(self, sign: Tensor) -> None:
        """Gives real square weights the determinants `sign`, shape ``(*batch)``, if it can."""
        if self.fixed_determinant is not None or self.p < self.n:
            return
        if not self.has_base:
            if self.flip is not None:
                self.flip.copy_((sign * self.parity).to(self.flip).expand(self.batch))
        elif not self.base.is_complex():
            self._store_base(with_determinant(self.base, sign.to(self.base).expand(self.batch)))

    def determinant_obstacle(self, X: Tensor) -> str | None:
        """The determinant of X, where it is not the one that this chart has now; or None."""
        ours = None if X.is_complex() else self.determinants()
        if ours is None:
            return None
        sign = determinant_sign(X)
        ours = ours.to(sign)
        if bool((sign * ours > 0).all()):
            return None
        return (
            f"{self.label} has determinant {ours.flatten().int().tolist()[:4]} now, the "
            f"matrix has {sign.flatten().int().tolist()[:4]}: {self.determinant_remedy()}"
        )

    def determinant_remedy(self) -> str:
        """What to do about a matrix of the other determinant."""
        if self.has_base:
            return (
                "assign the weight, which moves the base there, or give a matrix of the same "
                "determinant"
            )
        return "leave determinant= out or give the sign of the matrix"
