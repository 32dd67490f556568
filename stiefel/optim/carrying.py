"""How the optimizers with a ``transport`` option move a point, and carry momentum with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.geometry import (
    cholesky_qr_factor,
    gram_polar_factor,
    projection_transport,
    qr_factor,
)
from stiefel.manifolds import Manifold, Stiefel

__all__ = ["check_transport", "check_transport_on", "move_and_carry"]

_TRANSPORTS = ("projection", "cayley")
#: Retractions of the form ``factor(X + u)``. The direction is tangent: it is not projected again.
_FACTORS = {"qr": qr_factor, "cholesky_qr": cholesky_qr_factor, "polar": gram_polar_factor}


def check_transport(group: Mapping[str, Any]) -> None:
    """Raises `UnknownNameError` unless the transport of a group has a known name."""
    if group["transport"] not in _TRANSPORTS:
        raise unknown("transport", group["transport"], _TRANSPORTS)


def check_transport_on(manifold: Manifold, group: Mapping[str, Any], what: str) -> None:
    """Raises unless momentum can be carried on a manifold as a group asks.

    Args:
        manifold: The manifold of a leaf.
        group: Its group.
        what: How errors call the leaf.
    """
    cayley = isinstance(manifold, Stiefel) and manifold.retraction == "cayley"
    if group["transport"] == "cayley" and not cayley:
        raise ConfigurationError(
            "transport='cayley' follows the Cayley retraction: expected a parameter on "
            f"stiefel.Stiefel(retraction='cayley'), got {what} on {manifold}. Use "
            "transport='projection'"
        )


def move_and_carry(
    manifold: Manifold, X: Tensor, u: Tensor, z: Tensor, transport: str
) -> tuple[Tensor, Tensor]:
    """The new point R_X(u), and the tangent vector z carried there.

    Args:
        manifold: The manifold.
        X: Points, shape ``(..., n, p)``.
        u: Tangent vectors, tangent to rounding, same shape.
        z: Tangent vectors, same shape.
        transport: ``"projection"``; ``"cayley"``. Manifolds of other libraries carry by their own
            ``retr_transp``.

    Returns:
        Points, and tangent vectors there, both of that shape.
    """
    if transport == "cayley" or not isinstance(manifold, Stiefel):
        return manifold.retr_transp(X, u, z)
    factor = _FACTORS.get(manifold.retraction) if type(manifold) is Stiefel else None
    Y = manifold.retr(X, u) if factor is None else factor(X + u)
    return Y, projection_transport(Y, z)
