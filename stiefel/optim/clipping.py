"""Clipping gradients by their norm on the manifolds."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stiefel.errors import ConfigurationError, NonFiniteError, unknown
from stiefel.manifolds import Manifold
from stiefel.numerics import compute_dtype, full_precision
from stiefel.optim.batches import Joint, point_ndim
from stiefel.optim.groups import manifold_of
from stiefel.parameter import constraints

__all__ = ["clip_grad_norm_"]

_NORMS = ("riemannian", "euclidean")


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm: str = "riemannian",
    error_if_nonfinite: bool = False,
) -> Tensor:
    r"""Scales all gradients by one factor, so that their total norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, but a parameter on a manifold counts with the norm of
    its Riemannian gradient in its own metric: the total is
    :math:`(\sum_i |\mathrm{grad} f(X_i)|_{X_i}^2 + \sum_j |G_j|^2)^{1/2}`, over the points
    :math:`X_i` and over the gradients :math:`G_j` of ordinary parameters and of the coordinates
    of charts. The part of a gradient that is normal to the manifold moves nothing, and does not
    count.

    Every gradient is multiplied by ``min(1, max_norm / (total + 1e-6))``, torch's factor c. The
    Riemannian gradient is linear in the Euclidean one, so that :math:`c\,G` has the Riemannian
    gradient :math:`c\,\mathrm{grad} f`: the direction is kept, and its norm is multiplied by c.
    This writes into ``p.grad``, as torch's function does; no optimizer here ever does.

    Matrices of equal shape are batched, a thousand of them cost a handful of products, and the
    host reads nothing unless `error_if_nonfinite` asks it to.

    Args:
        parameters: A model, a parameter, or parameters. Those without a gradient are left out.
        max_norm: The largest total norm.
        norm: ``"riemannian"`` as above, or ``"euclidean"``, torch's norm of all ``p.grad``.
        error_if_nonfinite: Whether a total that is NaN or infinite is an error; otherwise the
            gradients become NaN or zero, and the next step of an optimizer here says which.

    Returns:
        The total norm before clipping, a 0-d tensor.

    Raises:
        UnknownNameError: If `norm` is none of the names above.
        ConfigurationError: If a point has a sparse gradient, or `max_norm` is negative or NaN.
        NonFiniteError: If `error_if_nonfinite` and the total is not finite; nothing is changed.
        LostManifoldError: If a Riemannian weight of a model has lost its manifold.

    Example:
        >>> import torch, stiefel
        >>> X = stiefel.ManifoldParameter(torch.eye(3, 2))
        >>> X.grad = torch.tensor([[5.0, 0.0], [0.0, 5.0], [3.0, 4.0]])
        >>> stiefel.optim.clip_grad_norm_([X], 1.0)  # the upper block is normal to the manifold
        tensor(5.)
        >>> X.grad[2]
        tensor([0.6000, 0.8000])
    """
    if norm not in _NORMS:
        raise unknown("norm", norm, _NORMS)
    if not max_norm >= 0:
        raise ConfigurationError(f"expected max_norm >= 0, got {max_norm}")
    with_gradients = [p for p in _listed(parameters) if p.grad is not None]
    if norm == "euclidean":
        total = get_total_norm([p.grad for p in with_gradients if p.grad is not None])
    else:
        total = _riemannian_norm(with_gradients)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteError(
            f"expected a finite total norm of the gradients, got {float(total)}: nothing was "
            "clipped. Look for the operation with torch.autograd.detect_anomaly(), or lower the "
            "learning rate"
        )
    clip_grads_with_norm_(with_gradients, max_norm, total)
    return total


def _listed(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        for constraint in constraints(parameters):
            constraint.check()
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _riemannian_norm(leaves: list[Tensor]) -> Tensor:
    """The total norm, points in the metrics of their manifolds; all leaves have gradients."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    ordinary = []
    for leaf in leaves:
        manifold = manifold_of(leaf)
        if manifold is None:
            ordinary.append(leaf.grad)
            continue
        sizes = leaf.shape[leaf.ndim - point_ndim(manifold) :]
        alike.setdefault((manifold, sizes, leaf.dtype, leaf.device), []).append(leaf)
    norms = [get_total_norm(ordinary)] if ordinary else []
    for points in alike.values():
        manifold = manifold_of(points[0])
        assert manifold is not None
        norms.append(_norm_on(manifold, points))
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in norms])
    return torch.linalg.vector_norm(torch.stack([x.to(norms[0].device, dtype) for x in norms]))


def _norm_on(manifold: Manifold, leaves: list[Tensor]) -> Tensor:
    """The norm of the Riemannian gradients of points on one manifold, joined into one batch."""
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"expected a dense gradient of a point of shape {tuple(leaf.shape)}, got one of "
                f"layout {gradient.layout}: use sparse=False in the layer that produces it"
            )
    joint = Joint(leaves, point_ndim(manifold))
    dtype = compute_dtype(leaves[0].dtype)
    X, G = (joint.join(tensors).to(dtype) for tensors in (leaves, gradients))
    if X.numel() == 0:
        return torch.zeros((), dtype=dtype.to_real(), device=X.device)
    scale = G.abs().amax()  # squares of large gradients overflow, and they are what is clipped
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    with full_precision():
        gradient = manifold.egrad2rgrad(X, G / scale)
        square = manifold.inner(X, gradient, gradient, keepdim=True).sum()
    square = square.real if square.is_complex() else square
    return scale * square.clamp_min(0).sqrt()
