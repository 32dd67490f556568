"""HR: the weight as a product of reflections, applied one after another."""

from __future__ import annotations

from torch import Tensor

from stiefel.geometry.householder import householder_product
from stiefel.operators import Dense, Operator
from stiefel.parametrizations.cwy import CWY

__all__ = ["HouseholderProduct"]


class HouseholderProduct(CWY):
    """Q = F H(v_1) ... H(v_L) by L rank-one updates: the values of `CWY`, the reference for it.

    X <- X - 2 u_k (u_k^T X), k = L, ..., 1, from the first p columns of I (Mhammedi, Hellicar,
    Rahman, Bailey, ICML 2017; A1 and A3 of the CWY paper call it HR). Coordinates, options, `flip`
    and the treatment of zero vectors are those of `CWY`, and state dicts are interchangeable. It
    takes as many operations, in L dependent steps: use `CWY` to train, this one to compare with.

    Its operator is the dense weight.

    Args:
        n: Rows.
        p: Columns; n by default.
        batch: Leading dimensions.
        reflections: L; n for square weights and p for tall ones by default, at most n. Fewer
            cover the matrices with rank(Q - I) <= L only.

    Raises:
        ShapeError: If n < p.
        ConfigurationError: If there are more reflections than rows, or none.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import CWY, HouseholderProduct
        >>> V = torch.randn(6, 6, dtype=torch.float64)
        >>> torch.allclose(HouseholderProduct(6)(V), CWY(6)(V))
        True
    """

    name = "householder"

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from V ``(*batch, n, L)`` and, for complex V, phases ``(*batch, L)``."""
        lifted = self._lift(originals)
        X = householder_product(*lifted, columns=self.p, flip=self.flip_for(lifted[0].dtype))
        return self.emit(X, originals[0])

    def operator(self, *originals: Tensor) -> Operator:
        """The dense weight."""
        return Dense(self(*originals))
