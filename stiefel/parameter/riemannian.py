"""The chart of a Riemannian weight: the point itself is the parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefel import geometry
from stiefel.errors import ConfigurationError
from stiefel.geometry import polish
from stiefel.manifolds import Manifold, Stiefel, tolerance_on
from stiefel.numerics import compute_dtype
from stiefel.operators import Dense, Operator
from stiefel.parametrizations import Parametrization

__all__ = ["Riemannian"]


class Riemannian(Parametrization):
    """The identity: the original is the point, a `stiefel.ManifoldParameter`.

    Args:
        n: Rows.
        p: Columns; n by default.
        batch: Leading dimensions.
        inner: Metric of the manifold, ``"canonical"`` or ``"euclidean"``.
        retraction: Retraction of the manifold; ``"auto"`` chooses by shape.
        tolerance: How far from orthonormal the point may be; see `stiefel.Stiefel`.
        manifold: A manifold that replaces `inner`, `retraction` and `tolerance`.
        device: Where the point lives, for ``retraction="auto"``.

    Attributes:
        made_for: The short form that named an optimizer beside the manifold, such as
            ``"landing"``; None otherwise.
    """

    made_for: str | None = None
    name = "riemannian"
    complex = True
    tall = True
    batched = True

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        inner: str = "canonical",
        retraction: str = "cayley",
        tolerance: float | None = None,
        manifold: Manifold | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(n, p, batch=batch)
        if manifold is not None and not isinstance(manifold, Manifold):
            raise ConfigurationError(
                f"expected manifold= to be a manifold of stiefel.manifolds, got {manifold!r}: "
                "leave it out for Stiefel(inner, retraction)"
            )
        self._manifold = (
            Stiefel(inner, retraction, sizes=(self.n, self.p), device=device, tolerance=tolerance)
            if manifold is None
            else manifold
        )

    @property
    def manifold(self) -> Manifold:
        """The manifold of the leaf."""
        return self._manifold

    def tolerance_for(self, dtype: torch.dtype) -> float:
        """The largest entry of |X^H X - I| at which X counts as a point."""
        return tolerance_on(self._manifold, dtype, self.n, self.p)

    def forward(self, *originals: Tensor) -> Tensor:
        """The point itself, in `weight_dtype` where that is set.

        A point in 16 bits carries their rounding, which is taken away for a wider weight.
        """
        (X,) = originals
        wanted = self.weight_dtype
        if wanted is None or wanted == X.dtype:
            return X
        if compute_dtype(X.dtype) != X.dtype and compute_dtype(wanted) == wanted:
            return polish(X.to(wanted), 3)
        return X.to(wanted)

    def right_inverse(self, X: Tensor) -> Tensor:
        """The point itself."""
        return X

    def operator(self, *originals: Tensor) -> Operator:
        """The dense operator of the point."""
        return Dense(self.forward(*originals))

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A Haar distributed point."""
        return geometry.haar(
            self.n, self.p, self.batch, dtype=dtype, device=device, generator=generator
        )

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """An uninitialised point."""
        return torch.empty(*self.batch, self.n, self.p, dtype=dtype, device=device)
