"""What the solvers ask of each manifold of a product, in one small interface.

Three kinds: free tensors, `stiefel.Stiefel` with the products that gradient, metric and curve have
in common computed once, and any manifold in geoopt's interface by its own methods.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, OffManifoldError, ShapeError
from stiefel.geometry import orthonormality_residual, polish, projection_transport
from stiefel.geometry.tangent import sym
from stiefel.manifolds import Manifold, Stiefel
from stiefel.numerics import tolerance
from stiefel.optim.solvers.curves import (
    CayleyCurve,
    Curve,
    DifferentiatedCurve,
    FactorCurve,
    Straight,
    real_dot,
)

__all__ = ["Component", "Gradient", "component_of"]


class Gradient(NamedTuple):
    """A Riemannian gradient and its squared norm (0-d)."""

    vector: Tensor
    squared: Tensor


class Component:
    """Free tensors: the Euclidean space, and the interface of the other kinds.

    `embedded` says that the metric is that of the surrounding space, so that vectors of several
    tangent spaces may be compared as they are.
    """

    embedded = True
    manifold: Any = None

    def check(self, X: Tensor, what: str) -> None:
        """Raises `ShapeError` or `OffManifoldError` unless X is a point."""

    def start(self, X: Tensor) -> Tensor:
        """The point to start from, for an X that `check` lets pass."""
        return X

    def gradient(self, X: Tensor, G: Tensor) -> Gradient:
        """The Riemannian gradient of the ambient gradient G."""
        return Gradient(G, real_dot(G, G))

    def inner(self, X: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The inner product of tangent vectors, summed over a batch, 0-d."""
        return real_dot(u, v)

    def project(self, X: Tensor, z: Tensor) -> Tensor:
        """The tangent part of z."""
        return z

    def curve(self, X: Tensor, d: Tensor, squared: float) -> Curve:
        """The curve R_X(t d); `squared` is |d|^2 in the metric."""
        return Straight(X, d)

    def transport(self, X: Tensor, u: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """The tangent vector v at X carried to Y = R_X(u)."""
        return v

    def residual(self, X: Tensor) -> float:
        """How far X is from the manifold: the largest entry of a residual."""
        return 0.0

    def bound(self, X: Tensor) -> float:
        """The residual that a point may have."""
        return float("inf")

    def polish(self, X: Tensor) -> Tensor:
        """X, nearly a point, taken to the manifold."""
        return X


class StiefelComponent(Component):
    """`stiefel.Stiefel` with any metric and retraction."""

    def __init__(self, manifold: Stiefel) -> None:
        self.manifold = manifold
        self.embedded = manifold.metric == "euclidean"

    def check(self, X: Tensor, what: str) -> None:
        """Raises `ShapeError` or `OffManifoldError` unless X is a point."""
        try:
            self.manifold.assert_check_point_on_manifold(X)
        except (ShapeError, OffManifoldError) as error:
            raise type(error)(f"{what}: {error}") from None

    def start(self, X: Tensor) -> Tensor:
        """X, or the nearest point where the tolerance of the manifold allows more than rounding."""
        return X if self.residual(X) <= self.bound(X) else self.manifold.projx(X)

    def gradient(self, X: Tensor, G: Tensor) -> Gradient:
        """``G - X sym(T)`` (Euclidean) or ``G - X T^H`` (canonical) with T = X^H G.

        <grad, grad> needs no further product, for X^H grad = T - T^H in the canonical metric.
        """
        T = X.mH @ G
        if self.embedded:
            vector = G - X @ sym(T)
            return Gradient(vector, real_dot(vector, vector))
        vector, inside = G - X @ T.mH, T - T.mH
        return Gradient(vector, real_dot(vector, vector) - real_dot(inside, inside) / 2)

    def inner(self, X: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The inner product of the manifold's metric."""
        if self.embedded:
            return real_dot(u, v)
        a = X.mH @ u
        return real_dot(u, v) - real_dot(a, a if v is u else X.mH @ v) / 2

    def project(self, X: Tensor, z: Tensor) -> Tensor:
        """The tangent part of z, in the Euclidean sense."""
        return z - X @ sym(X.mH @ z)

    def curve(self, X: Tensor, d: Tensor, squared: float) -> Curve:
        """By the manifold's retraction; |d|^2 is at most twice the canonical square."""
        name = self.manifold.retraction
        if name == "cayley":
            return CayleyCurve(X, d)
        if name in ("qr", "cholesky_qr"):
            bound = squared if self.embedded else 2 * squared
            return FactorCurve(X, d, bound, name == "cholesky_qr")
        return DifferentiatedCurve(self.manifold.retr, X, d)

    def transport(self, X: Tensor, u: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """By projection."""
        return projection_transport(Y, v)

    def residual(self, X: Tensor) -> float:
        """The largest entry of |X^H X - I|."""
        return float(orthonormality_residual(X).max()) if X.numel() else 0.0

    def bound(self, X: Tensor) -> float:
        """`stiefel.tolerance`."""
        return tolerance(X.dtype, *X.shape[-2:])

    def polish(self, X: Tensor) -> Tensor:
        """The nearest point, to rounding."""
        return polish(X, steps=2)


class GeooptComponent(Component):
    """Any manifold in geoopt's interface, by its own methods."""

    embedded = False

    def __init__(self, manifold: Manifold) -> None:
        self.manifold = manifold

    def check(self, X: Tensor, what: str) -> None:
        """Raises `OffManifoldError` unless X is a point."""
        ok, reason = self.manifold.check_point_on_manifold(X, explain=True)
        if not ok:
            raise OffManifoldError(
                f"{what}: expected a point of {self.manifold}, got a tensor of shape "
                f"{tuple(X.shape)} with {reason}. Project with manifold.projx(x)"
            )

    def gradient(self, X: Tensor, G: Tensor) -> Gradient:
        """``egrad2rgrad``."""
        vector = self.manifold.egrad2rgrad(X, G)
        return Gradient(vector, self.inner(X, vector, vector))

    def inner(self, X: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """``inner``, summed over the batch; without ``keepdim`` geoopt's balls mix up points."""
        return self.manifold.inner(X, u, v, keepdim=True).sum()

    def project(self, X: Tensor, z: Tensor) -> Tensor:
        """``proju``."""
        return self.manifold.proju(X, z)

    def curve(self, X: Tensor, d: Tensor, squared: float) -> Curve:
        """By ``retr``."""
        return DifferentiatedCurve(self.manifold.retr, X, d)

    def transport(self, X: Tensor, u: Tensor, Y: Tensor, v: Tensor) -> Tensor:
        """``transp``."""
        return self.manifold.transp(X, Y, v)

    def residual(self, X: Tensor) -> float:
        """The largest entry of |projx(X) - X|."""
        return float((self.manifold.projx(X) - X).abs().max()) if X.numel() else 0.0

    def bound(self, X: Tensor) -> float:
        """A few rounding errors of the largest entry."""
        size = float(X.abs().max()) if X.numel() else 0.0
        return 16 * torch.finfo(X.dtype).eps * max(1.0, size)

    def polish(self, X: Tensor) -> Tensor:
        """``projx``."""
        return self.manifold.projx(X)


def component_of(manifold: Manifold | str | None) -> Component:
    """The component of a manifold; ``"euclidean"`` or None is the free space.

    Raises:
        ConfigurationError: If it is neither a manifold nor ``"euclidean"``.
    """
    if manifold is None or (isinstance(manifold, str) and manifold == "euclidean"):
        return Component()
    if type(manifold) is Stiefel:
        return StiefelComponent(manifold)
    if isinstance(manifold, Manifold):
        return GeooptComponent(manifold)
    raise ConfigurationError(
        f"expected a manifold such as stiefel.Stiefel() or 'euclidean', got {manifold!r}"
    )
