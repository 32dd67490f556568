"""Whether a chart can move its weight in every direction: singular values of its differential."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel.diagnostics.feasibility import refuse_meta
from stiefel.errors import ConfigurationError
from stiefel.geometry import manifold_dimension, tangent_projection
from stiefel.manifolds import is_stiefel
from stiefel.numerics import full_precision, in_double
from stiefel.parameter import Constraint
from stiefel.parametrizations import Parametrization

__all__ = ["ChartDifferential", "chart_differential"]

#: Singular values above this share of the largest one count for the rank.
RANK_THRESHOLD = 1e-8

#: Step of the central differences, times the size of the coordinates: eps^(1/3).
_STEP = 6e-6


@dataclass(frozen=True)
class ChartDifferential:
    """Singular values of the differential J of a chart, from its coordinates to the tangent space.

    The gradient of the coordinates is J^T grad: it is at least `smallest` and at most `largest`
    times as long as the Riemannian gradient in the Euclidean metric. Where `smallest` is zero,
    a coordinate gradient of zero does not mean a stationary point. Coordinates are measured in the
    Euclidean norm (complex ones by real and imaginary part), tangent vectors in the Euclidean
    metric. Of a batch, the worst matrix.

    Attributes:
        smallest: The singular value number `dimension`, counted from the largest; 0 for fewer
            coordinates than that. An upper bound of it where `exact` is False.
        largest: The largest singular value. A lower bound of it where `exact` is False.
        dimension: Dimension of the tangent space, n p - p (p + 1) / 2, complex 2 n p - p^2.
        rank: How many singular values are above 1e-8 times the largest: in how many directions the
            chart can move the weight. None where `exact` is False.
        exact: Whether all singular values were computed, in float64.

    Both are NaN where there is nothing to measure: for a weight that is not finite, and for a
    single real number, +1 or -1, which has no tangent vectors.
    """

    smallest: float
    largest: float
    dimension: int
    rank: int | None
    exact: bool


@torch.inference_mode(False)
@full_precision()
def chart_differential(
    constraint: Constraint,
    *,
    exact_below: int = 600,
    iterations: int = 60,
    generator: torch.Generator | None = None,
) -> ChartDifferential:
    """Measures in how many directions, and how fast, a chart moves its weight where it is now.

    Computed in float64 on a copy of the chart; the model is not touched. Up to a dimension of
    `exact_below`, J^T is formed: a backward pass for each of an orthonormal basis of tangent
    vectors. Beyond that, `iterations` steps of the Lanczos method on J J^T, one forward and one
    backward pass each and two more forward passes: J^T is a backward pass, J a central difference
    (the kernels have no second derivative). The values are then |J^T u| of two unit tangent
    vectors u, so that they are bounds whatever the differences lose.

    Args:
        constraint: A constrained weight, from `stiefel.constraints`.
        exact_below: Largest dimension of which all singular values are computed.
        iterations: Steps of the estimate beyond it.
        generator: Source of randomness of the estimate, on the device of the weight; the same
            numbers each time by default, so that training draws what it would without.

    Returns:
        The singular values; both are one for a point that is its own coordinates.

    Raises:
        ConfigurationError: If the estimate has less than two steps, or the weight is a point of
            another manifold of geoopt, or is on the meta device.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import chart_differential
        >>> layer = stiefel.orthogonal(torch.nn.Linear(5, 5), via="matrix_exp")
        >>> (constraint,) = stiefel.constraints(layer)
        >>> found = chart_differential(constraint)
        >>> found.rank, found.dimension, found.exact
        (10, 10, True)
    """
    if iterations < 2:
        raise ConfigurationError(f"expected at least two iterations, got {iterations}")
    if not is_stiefel(constraint.manifold):
        raise ConfigurationError(
            f"{constraint.path}: expected a weight on the Stiefel manifold, got a point of "
            f"{constraint.manifold}, which has no chart here: leave it out"
        )
    refuse_meta(constraint)
    storage, (n, p) = constraint.storage, constraint.point.shape[-2:]
    dimension = manifold_dimension(n, p, constraint.point.is_complex())
    if dimension == 0:  # one real number, +1 or -1
        return ChartDifferential(math.nan, math.nan, 0, 0, True)
    if constraint.is_riemannian or storage is None:
        return ChartDifferential(1.0, 1.0, dimension, dimension, True)
    if not bool(constraint.point.isfinite().all()):
        return ChartDifferential(math.nan, math.nan, dimension, None, False)
    lifted = _Lifted(storage.chart, storage.originals)
    if dimension > exact_below:
        if generator is None:
            generator = torch.Generator(lifted.X.device).manual_seed(0)
        smallest, largest = _extremes(lifted, iterations, generator)
        return ChartDifferential(smallest, largest, dimension, None, False)
    return lifted.singular_values()


@full_precision()
def exact_differential(chart: Parametrization, originals: Sequence[Tensor]) -> ChartDifferential:
    """The same for a chart at given coordinates, with all singular values.

    Args:
        chart: The chart, not changed.
        originals: Its coordinates.

    Returns:
        The singular values; NaN, and no rank, where a derivative is not finite.
    """
    return _Lifted(chart, originals).singular_values()


class _Lifted:
    """A chart at its coordinates v, copied to float64, over real numbers.

    Coordinates are `(B, m)`, tangent vectors u `(B, n, p)`.
    """

    def __init__(self, chart: Parametrization, originals: Sequence[Tensor]) -> None:
        self.chart = copy.deepcopy(chart)._apply(_to_double)
        self.chart.weight_dtype = None
        self.leaves = [in_double(leaf).clone().requires_grad_() for leaf in originals]
        with torch.enable_grad():
            self.graph = self.chart(*self.leaves)
        self.X = self.graph.detach().reshape(-1, chart.n, chart.p)
        self.batch = len(self.X)
        self.dimension = manifold_dimension(chart.n, chart.p, self.X.is_complex())
        self.coordinates = sum(_real(leaf.detach(), self.batch).shape[-1] for leaf in self.leaves)

    def pull(self, u: Tensor) -> Tensor:
        """J^T u `(B, m)`, by a backward pass."""
        if not self.graph.requires_grad:  # a constant
            return torch.zeros(self.batch, self.coordinates, dtype=torch.float64).to(u.device)
        found = torch.autograd.grad(
            self.graph,
            self.leaves,
            u.reshape(self.graph.shape),
            retain_graph=True,
            materialize_grads=True,
        )
        return torch.cat([_real(g, self.batch) for g in found], dim=-1)

    @torch.no_grad()
    def push(self, w: Tensor, step: float) -> Tensor:
        """J w, by a central difference over `step` in the coordinates."""
        h = step / w.norm()
        ahead, behind = (self._moved(sign * h * w) for sign in (1, -1))
        return tangent_projection(self.X, (ahead - behind) / (2 * h))

    def _moved(self, w: Tensor) -> Tensor:
        """The weight `(B, n, p)` of the coordinates v + w."""
        moved, start = [], 0
        for leaf in self.leaves:
            flat = _real(leaf, self.batch)
            flat = flat + w[:, start : start + flat.shape[-1]]
            start += flat.shape[-1]
            if leaf.is_complex():
                flat = _complex(flat)
            moved.append(flat.reshape(leaf.shape))
        return self.chart(*moved).reshape(self.X.shape)

    def singular_values(self) -> ChartDifferential:
        """All of J, from J^T; of a batch the worst."""
        d, J = self.dimension, self.transposed()
        if not bool(J.isfinite().all()):
            return ChartDifferential(math.nan, math.nan, d, None, True)
        sigma = torch.linalg.svdvals(J)  # (batch, min(d, coordinates))
        smallest = float(sigma[:, d - 1].min()) if sigma.shape[-1] >= d else 0.0
        rank = int((sigma > RANK_THRESHOLD * sigma[:, :1]).sum(-1).min())
        return ChartDifferential(smallest, float(sigma.max()), d, rank, True)

    def transposed(self) -> Tensor:
        """J^T as rows `(B, d, m)`: one for each tangent vector of an orthonormal basis.

        The basis is u = X A + N C, with N an orthonormal complement of X, A skew-Hermitian and C
        any matrix: |u|^2 = |A|^2 + |C|^2.
        """
        N = torch.linalg.qr(self.X, mode="complete").Q[..., self.chart.p :]
        eye = torch.eye(self.dimension, dtype=torch.float64, device=self.X.device)
        return torch.stack([self.pull(self._tangent(c, N)) for c in eye], dim=1)

    def _tangent(self, c: Tensor, N: Tensor) -> Tensor:
        """u `(B, n, p)` of coordinates c `(d,)` in the basis."""
        p = self.X.shape[-1]
        i, j = torch.triu_indices(p, p, 1, device=self.X.device)
        A = self.X.new_zeros(p, p)
        if self.X.is_complex():
            above, diagonal, rest = c.split([2 * len(i), p, self.dimension - p * p])
            above, rest = _complex(above), _complex(rest)
            A.diagonal().copy_(1j * diagonal)
        else:
            above, rest = c.split([len(i), self.dimension - len(i)])
        A[i, j] = above / math.sqrt(2)
        A[j, i] = -above.conj() / math.sqrt(2)
        return self.X @ A + N @ rest.reshape(-1, p)


def _extremes(
    lifted: _Lifted, iterations: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """The smallest and largest |J^T u| over unit tangent vectors u in a Krylov space of J J^T.

    The space is that of the Lanczos method, kept orthonormal; the values come from J^T on it, which
    is exact. Tangent vectors are kept as the matrices they are: a basis would take n x n.
    """
    X = lifted.X
    u = _tangent_start(X, generator)
    basis, images, step = [], [], 0.0
    for _ in range(min(iterations, lifted.batch * lifted.dimension)):
        w = lifted.pull(u)
        basis.append(_real(u, 1).flatten())
        images.append(w.flatten())
        size_of_w = float(w.norm())
        if size_of_w == 0:
            break
        step = step or _STEP / size_of_w  # moves the weight by about _STEP, whatever the scale of v
        u, Q = lifted.push(w, step), torch.stack(basis)
        before = float(u.norm())
        for _ in range(2):  # once is not enough to be orthogonal to rounding
            flat = _real(u, 1).flatten()
            flat = flat - (flat @ Q.mT) @ Q
            u = tangent_projection(X, (_complex(flat) if X.is_complex() else flat).view(X.shape))
        if float(u.norm()) < 1e-8 * before:  # the space is invariant
            break
        u = u / u.norm()
    sigma = torch.linalg.svdvals(torch.stack(images))
    enough = lifted.coordinates >= lifted.dimension
    return (float(sigma[-1]) if enough else 0.0), float(sigma[0])


def _tangent_start(X: Tensor, generator: torch.Generator | None) -> Tensor:
    """A random unit tangent vector.

    X may come from the very numbers that are drawn here, as their polar factor: they are X S with S
    symmetric then, without a tangent part but rounding, and others are drawn.
    """
    Z, u = X, torch.zeros_like(X)
    while not float(u.norm()) > 1e-6 * float(Z.norm()):
        Z = torch.randn(X.shape, dtype=X.dtype, device=X.device, generator=generator)
        u = tangent_projection(X, Z)
    return tangent_projection(X, u / u.norm())


def _to_double(A: Tensor) -> Tensor:
    """Numbers of a chart in float64 or complex128; integers as they are."""
    return in_double(A) if A.is_floating_point() or A.is_complex() else A


def _real(A: Tensor, batch: int) -> Tensor:
    """Real numbers `(B, m)` of a tensor `(*batch, ...)`."""
    A = torch.view_as_real(A.resolve_conj()) if A.is_complex() else A
    return A.reshape(batch, -1)


def _complex(A: Tensor) -> Tensor:
    """Complex numbers `(..., k)` of real ones `(..., 2 k)`, as `_real` lays them out."""
    return torch.complex(A[..., ::2], A[..., 1::2])
