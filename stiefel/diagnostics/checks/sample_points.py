"""Points to check at, with tangent spaces that do not trust the projection that is checked."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.diagnostics.checks.directions import seeded
from stiefel.diagnostics.checks.report_builder import ReportBuilder, in_a_line
from stiefel.errors import ConfigurationError, DtypeError, OffManifoldError, ShapeError
from stiefel.manifolds import Manifold, Stiefel
from stiefel.numerics import in_double, plain, real_dtype

__all__ = ["ATOL", "SamplePoint", "default_manifold", "name_of", "require_manifold"]

#: Bound on laws of algebra, relative, in float64.
ATOL = 1e-9

#: Weights of f(kh) - f(-kh), k = 1 ... 4, in h f'(0): an error of order h^8.
_CENTRAL = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
_H = (1e-2, 1e-4, 1e-6)

#: Shapes of random points by the number of dimensions of one point; those refused are left out.
_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((4,), (2, 3)),
    1: ((5,), (2, 3, 4)),
    2: ((7, 3), (4, 4), (5, 1), (2, 5, 2)),
}


class SamplePoint:
    """A point, its tangent space, and a source of random vectors there.

    The tangent space is read off `projx`, not off the `proju` that may be wrong: where projx keeps
    the points of the manifold and returns only points, D projx(x) is a projection onto the tangent
    space at x. It is taken by central differences, good to about 1e-13. Where projx is missing or
    fails that test, `source` says that `proju` stands in.

    Args:
        manifold: The manifold.
        x: A point in double precision, shape of `manifold.random`.
        generator: Source of randomness.
        source: ``"projx"`` or ``"proju"``; found out by default.

    Attributes:
        item: The number of dimensions of one point; those before are a batch.
        where: The shape, in words.
    """

    def __init__(
        self, manifold: Manifold, x: Tensor, generator: torch.Generator, source: str | None = None
    ) -> None:
        self.manifold, self.x, self.generator = manifold, x, generator
        self.item = int(manifold.ndim)
        self.where = f"shape {tuple(x.shape)}"
        self._h = _H[0]
        self.source = source or ("projx" if self._projx_is_one() else "proju")

    def at(self, y: Tensor) -> SamplePoint:
        """Another point of the same manifold, with the same randomness."""
        return SamplePoint(
            self.manifold, y, self.generator, "proju" if self.source == "proju" else None
        )

    def _projx_is_one(self) -> bool:
        """Whether projx keeps points, gives points, and D projx(x) is a projection."""
        x = self.x
        try:
            y = plain(self.manifold.projx(x + _H[0] * self.vector()))
            kept = torch.stack([self.distance(self.manifold.projx(z), z) for z in (x, y)])
            return bool((kept < ATOL).all()) and self._find_step()
        except Exception:
            return False

    def _find_step(self) -> bool:
        """Sets the longest difference at which D D z = D z: close to an edge it must be short."""
        z = self.vector()
        self.source = "projx"
        for self._h in _H:
            once = self.project(z)
            if float(self.distance(self.project(once), once)) < ATOL / 4:
                return True
        return False

    # -- measures -------------------------------------------------------------------------------
    def dot(self, u: Tensor, v: Tensor) -> Tensor:
        """Re sum conj(u) v over the dimensions of one point, shape of the batch."""
        product = (u.conj() * v).real if u.is_complex() else u * v
        return product.sum(tuple(range(-self.item, 0))) if self.item else product

    def norm(self, u: Tensor) -> Tensor:
        """Root of the sum of squares over the dimensions of one point, shape of the batch."""
        return self.dot(u, u).clamp_min(0).sqrt()

    def distance(self, u: Any, v: Tensor) -> Tensor:
        """The largest of |u - v| over the batch; infinite where the shapes differ."""
        u = plain(u)
        if u.shape != v.shape:
            return torch.tensor(torch.inf, dtype=torch.float64)
        difference = self.norm(u - v)
        return difference.max().double() if difference.numel() else torch.zeros(()).double()

    def off_manifold(self, y: Tensor) -> float:
        """The largest distance of `y` to ``projx(y)``; infinite if the manifold refuses `y`."""
        if y.shape != self.x.shape:
            return math.inf
        if not self.manifold.check_point_on_manifold(y, atol=ATOL, rtol=ATOL):
            return math.inf
        return float(self.distance(self.manifold.projx(y), y)) if self.source == "projx" else 0.0

    def off_tangent(self, w: Tensor) -> float:
        """How far `w` is from the tangent space: the largest |D w - w| over the batch.

        Divided by |w| where that is more than one. Close to an edge of the manifold's domain a
        long difference misjudges a vector, so shorter ones are asked before it is refused.
        """
        least, size = math.inf, self.norm(w).clamp_min(1)
        for h in (self._h, *(h for h in _H if h < self._h)):
            defect = self.norm(self.project(w, h) - w) / size
            least = min(least, float(defect.max()) if defect.numel() else 0.0)
            if least <= ATOL:
                break
        return least

    # -- vectors --------------------------------------------------------------------------------
    def vector(self) -> Tensor:
        """A random ambient vector of norm one for each point of the batch."""
        z = torch.randn(self.x.shape, dtype=self.x.dtype, generator=self.generator)
        z = z.to(self.x.device)
        return z / self.spread(self.norm(z))

    def tangent(self) -> Tensor:
        """A random tangent vector of norm one; zero where the tangent space is a point."""
        u = self.project(self.vector())
        size = self.norm(u)
        scale = torch.where(size > 1e-8, 1 / size.clamp_min(1e-300), torch.zeros_like(size))
        return self.spread(scale) * u

    def project(self, z: Tensor, h: float | None = None) -> Tensor:
        """D projx(x) z by differences of length `h`, or ``proju(x, z)`` without a usable projx."""
        h = self._h if h is None else h
        if self.source == "proju":
            return plain(self.manifold.proju(self.x, z))
        size = self.spread(self.norm(z))
        direction = z / torch.where(size > 0, size, torch.ones_like(size))
        total = torch.zeros_like(z)
        for k, weight in enumerate(_CENTRAL, start=1):
            step = k * h * direction
            there, back = self.manifold.projx(self.x + step), self.manifold.projx(self.x - step)
            total = total + weight * (plain(there) - plain(back))
        return size * total / h

    def inner(self, u: Tensor, v: Tensor, x: Tensor | None = None) -> Tensor:
        """The real part of the manifold's <u, v>_x, shape of the batch; `x` in place of the point.

        Raises:
            ShapeError: If the manifold does not give one number for each point.
        """
        value = plain(self.manifold.inner(self.x if x is None else x, u, v))
        batch = self.x.shape[: self.x.ndim - self.item]
        if value.numel() != batch.numel():
            raise ShapeError(
                f"expected inner(x, u, v) of shape {tuple(batch)}, one number for each point, got "
                f"{tuple(value.shape)} at x of shape {tuple(self.x.shape)}"
            )
        return (value.real if value.is_complex() else value).reshape(batch)

    def short(self, v: Tensor, length: float) -> Tensor:
        """`v` scaled down until neither |v| nor |v|_x is more than `length`."""
        size = torch.maximum(self.norm(v), self.inner(v, v).clamp_min(0).sqrt())
        return self.spread(length / size.clamp_min(length)) * v

    def spread(self, value: Tensor) -> Tensor:
        """A number for each point of the batch, in a shape that multiplies points."""
        return value[(..., *[None] * self.item)]


def require_manifold(manifold: object) -> Manifold:
    """Checks that something is a manifold.

    Returns:
        A copy whose own numbers, a curvature for instance, are in double precision.

    Raises:
        ConfigurationError: If it is not.
    """
    if isinstance(manifold, type) and issubclass(manifold, Manifold):
        raise ConfigurationError(
            f"expected a manifold, got the class {manifold.__name__}: make one of it, "
            f"{manifold.__name__}(...)"
        )
    if not isinstance(manifold, Manifold):
        raise ConfigurationError(
            f"expected a manifold, got {type(manifold).__name__}: derive it from geoopt.Manifold, "
            "or take stiefel.Stiefel()"
        )
    try:
        return copy.deepcopy(manifold).double()
    except Exception:  # it cannot be copied
        return manifold


def default_manifold(X: Tensor | None) -> Manifold:
    """The manifold of a parameter that has one, else `stiefel.Stiefel`.

    Raises:
        OffManifoldError: If `X` is not a matrix with orthonormal columns.
    """
    if isinstance(named := getattr(X, "manifold", None), Manifold):
        return require_manifold(named)
    manifold = Stiefel()
    if X is not None:
        ok, reason = manifold.check_point_on_manifold(plain(X), explain=True)
        if not ok:
            raise OffManifoldError(
                f"X has not orthonormal columns, and no manifold was named ({reason}): say which "
                "manifold it is on with manifold="
            )
    return manifold


def name_of(manifold: Manifold) -> str:
    """The manifold in words."""
    return str(manifold).removesuffix(" manifold")


def sample_points(
    builder: ReportBuilder,
    manifold: Manifold,
    X: Tensor | None,
    shapes: Sequence[Sequence[int]] | None,
    *,
    points: int,
    dtype: torch.dtype | None,
    generator: torch.Generator | None,
) -> list[SamplePoint]:
    """The points to check at.

    Args:
        builder: Is told what had to be left out or assumed.
        manifold: The manifold.
        X: A point to check at, in place of random ones.
        shapes: Shapes of random points; by default a few that the manifold accepts.
        points: How many random points of each shape.
        dtype: Dtype of random points; float64 by default.
        generator: Source of randomness; the same numbers each time by default.

    Raises:
        ConfigurationError: If both `X` and `shapes` are given, or no shape is accepted.
        ShapeError: If a shape that was asked for is refused.
        DtypeError: If `dtype` is not float64 or complex128, or `X` has no such form.
        OffManifoldError: If `X` is not on the manifold.
    """
    generator = seeded(generator)
    if X is not None:
        if shapes is not None:
            raise ConfigurationError("expected points X or shapes of random ones, got both")
        found = [SamplePoint(manifold, _given(manifold, X), generator)]
    else:
        found = _random_points(builder, manifold, shapes, points, dtype, generator)
    if any(point.source == "proju" for point in found):
        builder.skip("projx is missing or moves points: tangent vectors are those of proju")
    return found


def _random_points(
    builder: ReportBuilder,
    manifold: Manifold,
    shapes: Sequence[Sequence[int]] | None,
    points: int,
    dtype: torch.dtype | None,
    generator: torch.Generator,
) -> list[SamplePoint]:
    dtype = torch.float64 if dtype is None else dtype
    if dtype not in (torch.float64, torch.complex128):
        raise DtypeError(f"checks compute in float64 or complex128, got dtype={dtype}")
    if not isinstance(points, int) or points < 1:
        raise ConfigurationError(f"expected one random point or more, got points={points}")
    if shapes is not None:
        _check_shapes(shapes)
    found: list[SamplePoint] = []
    refused = []
    for shape in _default_shapes(manifold) if shapes is None else shapes:
        try:
            drawn = [random_point(manifold, shape, dtype, generator) for _ in range(points)]
        except NotImplementedError as error:
            raise ConfigurationError(
                f"{name_of(manifold)} implements no random(*size): write one, or pass points X="
            ) from error
        except Exception as error:
            refused.append(f"random{tuple(shape)} is refused ({in_a_line(error)})")
            if shapes is not None:
                raise ShapeError(f"{name_of(manifold)}: {refused[-1]}") from error
            continue
        found.extend(SamplePoint(manifold, x, generator) for x in drawn)
    if not found:
        raise ConfigurationError(
            f"{name_of(manifold)} gave no random point: {'; '.join(refused)}. Name shapes= that it "
            "takes, or give a point X="
        )
    for reason in refused:
        builder.skip(reason)
    return found


def _check_shapes(shapes: Sequence[Sequence[int]]) -> None:
    if not shapes or any(isinstance(shape, int) for shape in shapes):
        raise ConfigurationError(
            f"expected a list of shapes, such as shapes=[(7, 3), (4, 4)], got {shapes!r}"
        )
    for shape in shapes:
        if not all(size > 0 for size in shape):
            raise ShapeError(f"expected shapes with entries, got {tuple(shape)}")


def _default_shapes(manifold: Any) -> Iterator[tuple[int, ...]]:
    if hasattr(manifold, "n_elements"):  # a product in one flat vector
        yield from ((manifold.n_elements,), (2, manifold.n_elements))
        return
    ndim = int(manifold.ndim)
    yield from _SHAPES.get(ndim, tuple((*(2,) * ndim, *s) for s in _SHAPES[0]))


def random_point(
    manifold: Manifold, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A random point; torch's own generator is seeded for it and left as it was."""
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        x = _drawn(manifold, tuple(shape), dtype)
    if real_dtype(x.dtype) != torch.float64:
        return plain(manifold.projx(in_double(x)))
    return x


def _drawn(manifold: Manifold, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of `dtype`; complex where the manifold takes nothing else; of its own where it has one."""
    refusal: Exception | None = None
    for options in ({"dtype": dtype}, {"dtype": torch.complex128}, {}):
        try:
            return plain(manifold.random(*shape, **options))
        except (TypeError, ValueError) as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _given(manifold: Manifold, X: Tensor) -> Tensor:
    if not isinstance(X, Tensor) or not (X.is_floating_point() or X.is_complex()):
        got = X.dtype if isinstance(X, Tensor) else type(X).__name__
        raise DtypeError(f"expected X, a tensor of floating point or complex numbers, got {got}")
    if X.is_meta or X.numel() == 0:
        raise ShapeError(
            f"expected a point with entries, got shape {tuple(X.shape)} on {X.device}, at which "
            "nothing can be checked"
        )
    if X.ndim < manifold.ndim:
        raise ShapeError(
            f"expected a point of {name_of(manifold)} with {manifold.ndim} dimensions or more, got "
            f"shape {tuple(X.shape)}"
        )
    x = in_double(X)
    if X.dtype == x.dtype:
        ok, reason = manifold.check_point_on_manifold(x, explain=True)
    else:  # a rounded point: move it onto the manifold in double precision
        given, x = x, plain(manifold.projx(x))
        moved, bound = float((x - given).abs().max()), 16 * torch.finfo(X.dtype).eps
        ok = moved <= bound * max(1.0, float(x.abs().max()))
        reason = f"projx moves it by {moved:.2e}, more than the rounding of {X.dtype}"
    if not ok:
        raise OffManifoldError(f"X is not on {name_of(manifold)}: {reason}")
    return x
