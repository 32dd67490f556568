"""How many directions the manifold has."""

from __future__ import annotations

__all__ = ["manifold_dimension"]


def manifold_dimension(n: int, p: int, is_complex: bool = False) -> int:
    """Dimension of St(n, p): n p - p (p + 1) / 2, complex 2 n p - p^2.

    Args:
        n: Rows.
        p: Columns, at most n.
        is_complex: Whether the matrices are complex.

    Returns:
        The dimension as a real manifold; n (n - 1) / 2 for O(n), n^2 for U(n).

    Example:
        >>> from stiefel.geometry import manifold_dimension
        >>> manifold_dimension(4, 4), manifold_dimension(4, 2), manifold_dimension(4, 4, True)
        (6, 5, 16)
    """
    return 2 * n * p - p * p if is_complex else n * p - p * (p + 1) // 2
