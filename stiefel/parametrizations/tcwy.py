"""T-CWY: matrices with orthonormal columns, fewer columns than rows."""

from __future__ import annotations

from collections.abc import Sequence

from stiefel.errors import ConfigurationError
from stiefel.parametrizations.cwy import CWY

__all__ = ["TCWY"]


class TCWY(CWY):
    """The first p columns of p reflections: ``[I; 0] - U S^-1 U_1^T``, onto St(n, p) for p < n.

    Theorem 3 of the CWY paper: every n x p matrix with orthonormal columns is reached when
    p < n. At n = p the determinant (-1)^p stands in the way, so the square case belongs to `CWY`.

    Args:
        n: Rows.
        p: Columns, less than n.
        batch: Leading dimensions.

    Raises:
        ConfigurationError: If n = p.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import TCWY
        >>> chart = TCWY(6, 2)
        >>> X = chart(torch.randn(6, 2, dtype=torch.float64))
        >>> torch.allclose(chart(chart.right_inverse(X)), X)
        True
    """

    name = "tcwy"

    def __init__(self, n: int, p: int | None = None, *, batch: Sequence[int] = ()) -> None:
        if p is None or p == n:
            raise ConfigurationError(
                f"{self.label} covers n x p matrices with p < n, got {n} x {n if p is None else p}:"
                " p reflections reach one component of the square matrices only. Use via='cwy'"
            )
        super().__init__(n, p, batch=batch)
