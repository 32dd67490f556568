"""Random directions, their lengths, and the curves along which a check follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError
from stiefel.geometry import RETRACTIONS, tangency_residual
from stiefel.manifolds import Stiefel, is_stiefel
from stiefel.optim.solvers import Problem
from stiefel.optim.solvers.components import Component

__all__ = ["bent", "length", "moved", "random_direction", "reaches", "seeded", "tangency"]


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator; the same numbers each time where there is none.

    Raises:
        ConfigurationError: If it is no generator of numbers on the CPU.
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise ConfigurationError(
            "expected generator=torch.Generator().manual_seed(seed), a torch.Generator on the CPU, "
            f"got {generator!r}"
        )
    return generator


def length(u: Sequence[Tensor]) -> float:
    """The Frobenius norm of a vector of several tensors; no square over- or underflows."""
    largest = [float(part.abs().max()) for part in u if part.numel()]
    unit = max(largest, default=0.0)
    if not 0 < unit < math.inf or any(map(math.isnan, largest)):
        return sum(largest)
    return unit * math.sqrt(sum(float((part / unit).abs().square().sum()) for part in u))


def reaches(forward: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[float]:
    """How long a step in each coordinate tensor v of a chart has to be to be seen.

    Args:
        forward: The chart.
        leaves: Its coordinates.

    Returns:
        The root mean square of v where the weight depends on the direction of v only (that of 2v
        is the same): a step of length one is long for reflection vectors of length 1e-4. Else 1.
    """
    X, found = forward(*leaves), []
    for k, v in enumerate(leaves):
        twice = forward(*(2 * part if i == k else part for i, part in enumerate(leaves)))
        size = length([v]) / math.sqrt(max(v.numel(), 1))
        change = float((twice - X).abs().max()) if X.numel() else 0.0
        free = change <= 100 * torch.finfo(X.dtype).eps and 0 < size < math.inf
        found.append(size if free else 1.0)
    return found


def random_direction(
    problem: Problem,
    X: tuple[Tensor, ...],
    generator: torch.Generator,
    only: int | None = None,
) -> tuple[Tensor, ...]:
    """A tangent vector of Frobenius norm one; zero at all components but `only`, if given."""
    z = tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device) for x in X)
    if only is not None:
        z = tuple(a if k == only else torch.zeros_like(a) for k, a in enumerate(z))
    u = problem.project(X, z)
    size = length(u)
    return tuple(part / size if size > 0 else part for part in u)


def moved(problem: Problem, X: tuple[Tensor, ...], u: Sequence[Tensor], t: float) -> list[Tensor]:
    """Points on a curve whose velocity at t = 0 is u, made without the manifold's retraction.

    The nearest point to ``X + t u``: a wrong retraction is then not taken for a wrong gradient.
    """
    points = []
    for component, x, a in zip(problem.components, X, u, strict=True):
        if component.manifold is None:
            points.append(x + t * a)
        elif is_stiefel(component.manifold):
            points.append(RETRACTIONS["polar"](x, t * a))
        else:
            points.append(component.manifold.projx(x + t * a))
    return points


def bent(problem: Problem, X: tuple[Tensor, ...], u: Sequence[Tensor], t: float) -> list[Tensor]:
    """Points on a curve that agrees with the geodesic of the metric along u to second order."""
    points = []
    for component, x, a in zip(problem.components, X, u, strict=True):
        manifold = component.manifold
        if manifold is None:
            points.append(x + t * a)
        elif isinstance(manifold, Stiefel):
            name = "cayley" if manifold.metric == "canonical" else "polar"
            points.append(RETRACTIONS[name](x, t * a))
        else:
            points.append(manifold.expmap(x, t * a))
    return points


def tangency(component: Component, X: Tensor, u: Tensor) -> float:
    """How far u is from the tangent space at X, relative to its largest entry; 0 for zeros."""
    size = float(u.abs().max()) if u.numel() else 0.0
    if component.manifold is None or size == 0.0:
        return 0.0
    if is_stiefel(component.manifold):
        return float(tangency_residual(X, u).max()) / size
    return float((component.manifold.proju(X, u) - u).abs().max()) / size
