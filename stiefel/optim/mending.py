"""Points that a long step has taken off their manifold, and how they are brought back."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry import cholesky_qr_factor, polish

__all__ = ["forgotten_where_longer", "onto_manifold"]

#: Newton steps towards the nearest point; an error of the size 0.3 is 1e-6 after so many.
_STEPS = 3
#: Squared singular values up to which they converge.
_CONVERGES = 2.5


def onto_manifold(Z: Tensor) -> Tensor:
    """Matrices with orthonormal columns near any Z of full rank, by a fixed number of products.

    Nothing is read by the host. Three Newton steps take Z towards the nearest point W, so that
    the QR factor, by `stiefel.geometry.cholesky_qr_factor`, is W to rounding for a Z that is near
    the manifold, ``|Z^H Z - I|_2 < 0.3``. Of any other Z it is some orthonormal basis of its
    columns. Matrices whose singular values may be beyond the reach of the Newton steps, sqrt(3),
    are divided by a bound on the largest first.

    Args:
        Z: Matrices, shape ``(..., n, p)``, n >= p.

    Returns:
        Same shape; not orthonormal, or NaN, where Z has no full rank in its precision.
    """
    most = (Z.mH @ Z).abs().sum(-1).amax(-1)[..., None, None]  # |Z|_2^2 is at most that
    Z = Z / torch.where(most > _CONVERGES, most.sqrt(), 1)
    return cholesky_qr_factor(polish(Z, _STEPS))


def forgotten_where_longer(state: Tensor, old: Tensor | None, G: Tensor, off: Tensor) -> Tensor:
    """A state that was carried to a point that floating point has lost: zero where that shows.

    An average m of gradients G is no longer than ``|m_old| + 2 |G|`` after a step, for a Riemannian
    gradient is at most twice as long as G and carrying lengthens nothing. Carried to a matrix Z
    that is far off the manifold it is longer, by up to ``|Z|^2``.

    Args:
        state: The state after the step, shape ``(..., n, p)``.
        old: Before it; None for zero.
        G: The ambient gradient, same shape.
        off: Which points the step took off the manifold, shape ``(...)``.

    Returns:
        The state, zero for those that are longer.
    """
    bound = 2 * _norm(G) if old is None else 2 * _norm(G) + _norm(old)
    spoilt = off[..., None, None] & ~(_norm(state) <= 1.01 * bound)
    return torch.where(spoilt, torch.zeros_like(state), state)


def _norm(A: Tensor) -> Tensor:
    return torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
