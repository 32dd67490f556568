"""The polar factor of a proxy, by Newton-Schulz steps or by a singular value decomposition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stiefel.errors import unknown
from stiefel.geometry.factors import polar_factor
from stiefel.geometry.newton_schulz import newton_schulz_factor
from stiefel.parametrizations.proxy import ProxyChart

__all__ = ["Polar"]

_METHODS = {"newton-schulz": newton_schulz_factor, "exact": polar_factor}


class Polar(ProxyChart):
    """W nearest to the proxy Z in the Frobenius norm: the polar factor, Z = W P. Covers St(n, p).

    ``method="newton-schulz"`` iterates ``X <- X (3 I - X^H X) / 2``, the convergent cubic of Björck
    and Bowie (SIAM J. Numer. Anal. 8 (1971)), scaled, until it is at rounding, see
    `stiefel.geometry.newton_schulz_factor`; ``"exact"`` takes a singular value decomposition. The
    weights and gradients are the same, those of an uncentred `OWN` too: only the cost differs.
    The gradient is the derivative of the polar factor itself, not of the iteration.

    Dependent columns, Z = 0 included, still give orthonormal columns of W, and a zero or bounded
    gradient in the directions that Z does not determine. The determinant of a square weight has
    the sign of det Z, and training does not change it.

    Args:
        n: Rows.
        p: Columns; n by default.
        batch: Leading dimensions.
        method: ``"newton-schulz"`` or ``"exact"``.

    Raises:
        ShapeError: If n < p.
        UnknownNameError: If the method is none of the two.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import OWN, Polar
        >>> Z = torch.randn(6, 3, dtype=torch.float64)
        >>> torch.allclose(Polar(6, 3)(Z), OWN(6, 3)(Z))
        True
    """

    name = "polar"

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        method: str = "newton-schulz",
    ) -> None:
        super().__init__(n, p, batch=batch)
        if not isinstance(method, str) or method not in _METHODS:
            raise unknown("method", method, list(_METHODS))
        self.method = method

    def factor(self, Z: Tensor) -> Tensor:
        """The weight from a proxy in float32 or better."""
        return _METHODS[self.method](Z)

    def extra_repr(self) -> str:
        """Sizes and the method."""
        return f"{super().extra_repr()}, method={self.method!r}"
