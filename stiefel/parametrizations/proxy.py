"""Charts whose coordinates are any matrix, and whose weight is the nearest point to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefel.errors import RepresentationError
from stiefel.numerics import compute_dtype, full_precision
from stiefel.parametrizations.base import Move, Parametrization

__all__ = ["ProxyChart"]

#: State of an optimizer that is linear in the gradients.
_LINEAR = {"momentum_buffer", "exp_avg", "grad_avg", "prev"}


class ProxyChart(Parametrization):
    """W = Z (Z^H Z)^(-1/2), the polar factor of a proxy Z ``(*batch, n, p)``.

    Every proxy gives a point, and every point is its own proxy. Where columns of Z are linearly
    dependent the missing directions are those of a singular value decomposition, and the gradient
    along them is zero.

    Both signs of the determinant are covered: it is the sign of det Z, and training, which would
    have to cross a singular proxy, does not change it.
    """

    proxy = True

    @abstractmethod
    def factor(self, Z: Tensor) -> Tensor:
        """The weight from a proxy in float32 or better."""

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from the proxy ``(*batch, n, p)``."""
        (Z,) = originals
        return self.emit(self.factor(Z.to(compute_dtype(Z.dtype))), Z)

    def right_inverse(self, X: Tensor) -> Tensor:
        """The point itself.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If the columns of X are not orthonormal.
            RepresentationError: If the chart does not reach X.
        """
        point = self.check_point(X).to(X.dtype)
        reason = self.obstacle(point)
        if reason is not None:
            raise RepresentationError(reason)
        return point.clone(memory_format=torch.contiguous_format)

    def obstacle(self, X: Tensor) -> str | None:
        """Why the chart does not reach the point X, or None; `right_inverse` asks it."""
        return None

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """An uninitialised proxy ``(*batch, n, p)``."""
        return torch.empty(self.shape, dtype=dtype, device=device)

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The weight of a Gaussian proxy: uniform on the points that the chart reaches."""
        working = compute_dtype(dtype)
        Z = torch.randn(self.shape, dtype=working, device=device, generator=generator)
        with torch.no_grad():
            return self.factor(Z).to(dtype)

    @full_precision()
    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """The weight as its own proxy.

        Sums of gradients follow exactly: with ``Z = W P``, ``A = W^H g``, a gradient g at Z is
        ``W (A P + P A) / 2 + (g - W A) P`` at W. Sums of squares do not; they are reset.
        """
        (Z,) = originals
        lifted = Z.detach().to(compute_dtype(Z.dtype))
        with torch.no_grad():
            W = self.factor(lifted)
        P = W.mH @ lifted
        P = (P + P.mH) / 2

        def move(i: int, key: str, moment: Tensor) -> Tensor | None:
            if moment.shape != Z.shape:
                return moment
            if key not in _LINEAR:
                return None
            with full_precision():
                g = moment.to(W.dtype)
                A = W.mH @ g
                return (W @ ((A @ P + P @ A) / 2) + (g - W @ A) @ P).to(moment.dtype)

        return (W.to(Z.dtype),), move
