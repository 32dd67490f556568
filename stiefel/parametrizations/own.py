"""OWN, orthogonal weight normalization: the inverse root of the Gram matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.geometry.inverse_root import gram_polar_factor
from stiefel.numerics import compute_dtype, tolerance
from stiefel.parametrizations.proxy import ProxyChart

__all__ = ["OWN"]

#: Where the entries of a proxy exceed this they are multiplied by a power of two.
_HUGE, _SHRINK = 1e30, 2.0**-64


class OWN(ProxyChart):
    """W = Z (Z^H Z)^(-1/2) of a proxy V; centred, Z = V - (1/n) 1 1^T V.

    Source: Huang, Liu, Lang, Yu, Wang, Li, Orthogonal Weight Normalization, AAAI 2018. Uncentred it
    is the polar factor of the proxy V and covers St(n, p). Centred, as in that paper, the columns
    of W sum to zero: it covers {W : 1^T W = 0}, a copy of St(n - 1, p), and needs p <= n - 1.
    Neither a learned scale nor a shift of Z^H Z is part of it.

    The root is taken from the eigenvalues of Z^H Z, or by products where that is faster, see
    `stiefel.geometry.gram_polar_factor`.

    The backward pass is in closed form, finite at repeated eigenvalues. Dependent columns, V = 0
    included, still give orthonormal columns of W, and a zero gradient in the directions that V
    does not determine. The determinant of a square weight has the sign of det V, and training
    does not change it.

    Args:
        n: Rows.
        p: Columns; n by default, at most n - 1 if centred.
        batch: Leading dimensions.
        center: Whether the mean is subtracted from each column of the proxy.

    Raises:
        ShapeError: If n < p.
        ConfigurationError: If centred and p = n, or `center` is neither True nor False.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import OWN
        >>> chart = OWN(6, 3, center=True)
        >>> W = chart(torch.randn(6, 3, dtype=torch.float64))
        >>> torch.allclose(W.mT @ W, torch.eye(3, dtype=torch.float64))
        True
        >>> bool(W.sum(0).abs().max() < 1e-14)
        True
    """

    name = "own"

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        center: bool = False,
    ) -> None:
        super().__init__(n, p, batch=batch)
        if center not in (True, False):
            raise ConfigurationError(
                f"{self.label}: expected center= to be True or False, got {center!r}"
            )
        if center and self.p == n:
            raise ConfigurationError(
                f"{self.label} with center=True: expected p <= n - 1, got {n} x {self.p}. Centred "
                f"columns live in {n - 1} dimensions, where {self.p} cannot be orthonormal; take "
                "center=False"
            )
        self.center = center

    def factor(self, Z: Tensor) -> Tensor:
        """The weight from a proxy in float32 or better."""
        if not self.center:
            return gram_polar_factor(Z)
        return _lengthened(gram_polar_factor(_shortened(Z)))

    def meaning(self) -> dict[str, Any]:
        """Whether the proxy is centred first."""
        return {**super().meaning(), "center": bool(self.center)}

    def obstacle(self, X: Tensor) -> str | None:
        """Columns that do not sum to zero, where the chart is centred."""
        if not self.center or X.numel() == 0:
            return None
        sums = X.to(compute_dtype(X.dtype)).sum(-2).abs().amax() / math.sqrt(self.n)
        bound = tolerance(X.dtype, self.n, self.p)
        if float(sums) <= bound:
            return None
        return (
            f"{self.label} with center=True reaches matrices whose columns sum to zero; here a sum "
            f"over sqrt(n) is {float(sums):.2g}, the tolerance for {X.dtype} is {bound:.2g}: take "
            "center=False, via='polar', or a value with centred columns"
        )

    def extra_repr(self) -> str:
        """Sizes, and whether it is centred."""
        return f"{super().extra_repr()}, center={self.center}"


def _shortened(V: Tensor) -> Tensor:
    """Coordinates ``(..., n - 1, p)`` of the centred columns of V in a basis of {x : 1^T x = 0}.

    The basis is columns 2 ... n of the reflection H that exchanges 1 / sqrt(n) and e_1. The first
    row of H V is the one that centring removes; row k of the others is
    ``Z_k + Z_1 / (sqrt(n) - 1)``, Z = V - (1/n) 1 1^T V. So W = H [0; polar factor], and centred
    columns that are linearly dependent are completed by centred ones.

    Huge columns, whose sums would overflow, are first scaled down: W is the same.
    """
    largest = V.detach().abs().amax((-2, -1), keepdim=True)
    V = V * torch.where(largest > _HUGE, _SHRINK, torch.ones_like(largest))
    Z = V - V.mean(-2, keepdim=True)
    return Z[..., 1:, :] + Z[..., :1, :] / (math.sqrt(V.shape[-2]) - 1)


def _lengthened(Y: Tensor) -> Tensor:
    """``H [0; Y]``: columns of length n that sum to zero, from their coordinates."""
    n = Y.shape[-2] + 1
    total = Y.sum(-2, keepdim=True)
    return torch.cat([total / math.sqrt(n), Y - total / (n - math.sqrt(n))], dim=-2)
