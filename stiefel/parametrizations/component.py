"""Charts that cover one component of O(n), and reach the other by flipping the last row."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.determinant import determinant_sign
from stiefel.parametrizations.base import Parametrization

__all__ = ["OneComponent"]


class OneComponent(Parametrization):
    """F M(V), F = diag(1, ..., 1, flip): the map M has one determinant, `parity`.

    The buffer `flip`, int8 of shape ``(*batch)``, exists for square weights only, and counts for
    real ones only. Subclasses call `keep_flip` at the end of their ``__init__``.

    Attributes:
        flip: +1 or -1 of each matrix; None for tall weights.
        parity: Determinant of M, +1 or -1.
    """

    flip: Tensor | None
    parity: int

    def keep_flip(self, parity: int = 1) -> None:
        """Registers the buffer, +1, and notes the determinant of the map without it."""
        self.parity = parity
        square = self.p == self.n
        self.register_buffer("flip", torch.ones(self.batch, dtype=torch.int8) if square else None)

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

    def set_determinant(self, sign: Tensor) -> None:
        """Sets `flip` so that real square weights have determinants `sign`, shape ``(*batch)``."""
        if self.flip is not None:
            self.flip.copy_((sign * self.parity).to(self.flip).expand(self.batch))

    def determinant_obstacle(self, X: Tensor) -> str | None:
        """The determinant of X, where it is not the one that this chart has now; or None."""
        flip = self.flip_for(X.dtype)
        if flip is None:
            return None
        sign = determinant_sign(X)
        ours = flip * self.parity
        if bool((sign * ours > 0).all()):
            return None
        return (
            f"chart {self.name!r} with its flip as it is has determinant "
            f"{ours.flatten().tolist()[:4]}, the matrix has {sign.flatten().int().tolist()[:4]}: "
            "leave determinant= out or give the sign of the matrix"
        )
