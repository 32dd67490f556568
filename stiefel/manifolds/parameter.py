"""A parameter that knows its manifold, and keeps it through copies and conversions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stiefel.manifolds.base import GeooptManifoldParameter, Manifold
from stiefel.manifolds.stiefel import Stiefel
from stiefel.numerics import plain

__all__ = ["ManifoldParameter", "restore_manifold"]


class ManifoldParameter(GeooptManifoldParameter):
    """A `geoopt.ManifoldParameter` whose data must lie on its manifold when it is made.

    Args:
        data: A point, shape ``(..., n, p)``; shared, not copied, as `torch.nn.Parameter` does.
        manifold: Its manifold; ``stiefel.Stiefel()`` by default.
        requires_grad: Whether it is trained.
        check: Whether to check that `data` is on the manifold, within `stiefel.tolerance`.

    Raises:
        ShapeError: If n < p.
        OffManifoldError: If `data` is not a point of the manifold.

    Example:
        >>> import torch, stiefel
        >>> X = stiefel.ManifoldParameter(torch.eye(4, 2))
        >>> X.manifold
        Stiefel(inner='canonical', retraction='cayley') manifold
    """

    manifold: Manifold

    def __new__(
        cls,
        data: Tensor,
        manifold: Manifold | None = None,
        requires_grad: bool = True,
        *,
        check: bool = True,
    ) -> ManifoldParameter:
        """Checks `data` and wraps it without a copy."""
        manifold = Stiefel() if manifold is None else manifold
        point = plain(data)
        if check and not point.is_meta:
            manifold.assert_check_point_on_manifold(point)
        instance = torch.Tensor._make_subclass(cls, point, requires_grad)
        instance.manifold = manifold
        return instance

    def __deepcopy__(self, memo: dict[int, Any]) -> ManifoldParameter:
        """Copies the data; the manifold, being immutable, is shared."""
        if id(self) not in memo:
            copy = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = type(self)(copy, self.manifold, self.requires_grad, check=False)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickles as a plain tensor and a manifold."""
        return _rebuild, (plain(self), self.manifold, self.requires_grad)


def _rebuild(data: Tensor, manifold: Manifold, requires_grad: bool) -> ManifoldParameter:
    return ManifoldParameter(data, manifold, requires_grad, check=False)


def restore_manifold(leaf: Tensor, manifold: Manifold) -> ManifoldParameter:
    """Gives a leaf that has become a plain parameter its manifold back, in place.

    ``.to("meta")``, ``load_state_dict(assign=True)`` and torch's conversion flags replace or swap
    parameters without their attributes. The identity of the leaf is kept, so an optimizer that
    holds it need not be told.

    Args:
        leaf: The parameter.
        manifold: The manifold it belongs to.

    Returns:
        The same object, a `ManifoldParameter`.
    """
    if not isinstance(leaf, GeooptManifoldParameter):
        leaf.__class__ = ManifoldParameter
    leaf.manifold = manifold  # pyright: ignore[reportAttributeAccessIssue]
    return leaf  # pyright: ignore[reportReturnType]
