"""The problem that a solver sees: a function on a product of manifolds, and their geometry.

A solver is written against this interface alone:

    e = problem.evaluate(X)         f and, on demand, the gradients, at a point
    e.f, e.norm, e.gradient, e.G    value, |grad f|, Riemannian and ambient gradient
    problem.inner(X, u, v)          inner product of tangent vectors, a float
    problem.dot(X, u, v)            the same as a 0-d tensor, not read by the host
    problem.combine(a, u, b, v)     a u + b v
    problem.project(X, z)           tangent part of ambient vectors
    problem.curve(e, d)             the curve t -> R_X(t d): `at(t)` evaluates, `slope(e)` derives
    problem.retract(X, u)           R_X(u)
    problem.transport(X, u, Y, v)   v at X carried to Y = R_X(u)
    problem.difference(e, d, new)   (s, y), the changes of point and gradient to R_X(t d)
    problem.function(X)             f as torch computes it, for second derivatives

Points and vectors are tuples of tensors, one for each manifold; numbers are Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.optim.solvers.components import Component, Gradient
from stiefel.optim.solvers.curves import real_dot

__all__ = ["Evaluation", "Path", "Point", "Problem", "Tangent"]

Point = tuple[Tensor, ...]
Tangent = tuple[Tensor, ...]


class Evaluation:
    """f at a point; the gradients are computed when they are first asked for.

    Attributes:
        X: The point.
        f: The value, a float; NaN or infinite where f is.
        t: Where on its path it lies; 0 for a point that was not reached by one.
        states: What the path keeps of this point for `Path.slope`.
    """

    def __init__(self, problem: Problem, X: Point, t: float = 0.0, states: Any = None) -> None:
        self.problem, self.X, self.t, self.states = problem, X, t, states
        self._pending: Callable[[], Point] | None
        self.f, self._pending = problem._open(X)

    @cached_property
    def G(self) -> Point:
        """The ambient gradient, as torch gives it (dL/dRe + i dL/dIm for complex points)."""
        assert self._pending is not None
        G = self._pending()
        self._pending = None  # and with it the graph of f
        return G

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The Riemannian gradients with what was computed beside them."""
        triples = zip(self.problem.components, self.X, self.G, strict=True)
        return tuple(component.gradient(X, G) for component, X, G in triples)

    @property
    def gradient(self) -> Tangent:
        """The Riemannian gradient."""
        return tuple(gradient.vector for gradient in self.gradients)

    @cached_property
    def _norms(self) -> tuple[float, float]:
        squares = [gradient.squared for gradient in self.gradients]
        ambient = [real_dot(G, G) for G in self.G]
        square, scale = torch.stack([_total(squares), _total(ambient)]).tolist()
        return square, math.sqrt(scale) if scale >= 0 else math.nan

    @property
    def squared(self) -> float:
        """The squared norm of the Riemannian gradient; NaN where it is not finite."""
        square = self._norms[0]
        return max(square, 0.0) if math.isfinite(square) else math.nan

    @property
    def norm(self) -> float:
        """The norm of the Riemannian gradient in the metric of the product."""
        return math.sqrt(self.squared)

    @property
    def scale(self) -> float:
        """The Frobenius norm of the ambient gradient."""
        return self._norms[1]

    @property
    def finite(self) -> bool:
        """Whether f and its gradient are finite; computes the gradient if f is."""
        return all(map(math.isfinite, (self.f, self.squared, self.scale)))


class Path:
    """The curve t -> R_X(t d) of the product, with f and its slope along it."""

    def __init__(self, problem: Problem, start: Evaluation, curves: Sequence[Any]) -> None:
        self.problem, self.start, self.curves = problem, start, curves

    def at(self, t: float) -> Evaluation:
        """f at R_X(t d)."""
        moves = [curve.move(t) for curve in self.curves]
        X, states = tuple(move[0] for move in moves), [move[1] for move in moves]
        return Evaluation(self.problem, X, t, states)

    def slope(self, e: Evaluation) -> float:
        """``d/dt f(R_X(t d))`` at an evaluation that `at` gave."""
        parts = zip(self.curves, e.states, e.X, e.G, strict=True)
        return float(_total([curve.slope(e.t, state, X, G) for curve, state, X, G in parts]))


class Problem:
    """A real function of points, one for each component of a product of manifolds.

    Args:
        f: Takes one tensor for each component.
        components: The manifolds.
        gradient: None: torch's autograd. True: f returns ``(value, gradient)``. A function: it
            takes what f takes and returns the ambient gradient, or a sequence of them.

    Attributes:
        components: The manifolds.
        nfev: How often f has been called.
        ngev: How often its gradient has been computed.
        embedded: Whether every metric is that of the surrounding space.
        noise: What is known of the rounding errors of f, beyond a few units of its last place.
        eps: The rounding unit of the coarsest dtype, set by the first evaluation.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        components: Sequence[Component],
        gradient: bool | Callable[..., Any] | None = None,
    ) -> None:
        self._f, self._gradient = f, gradient
        self.components = tuple(components)
        self.embedded = all(component.embedded for component in components)
        self.nfev = self.ngev = 0
        self.noise = 0.0
        self.eps = 0.0

    # -- f --------------------------------------------------------------------------------------
    def function(self, X: Point) -> Tensor:
        """f at X as torch computes it: a real scalar tensor, with a graph if X asks for one."""
        value = self._f(*X)
        return _checked_value(value[0] if self._gradient is True else value)

    def evaluate(self, X: Point) -> Evaluation:
        """f at X; the gradients on demand. f gets copies: what it writes into them is lost."""
        return Evaluation(self, X)

    def slack(self, f: float) -> float:
        """How much two values near f may differ by rounding alone."""
        return max(10 * self.eps * abs(f), self.noise)

    def at_rounding(self, e: Evaluation) -> bool:
        """Whether f can no longer tell steps along the gradient apart."""
        return e.norm <= math.sqrt(self.eps) * e.scale or e.squared <= self.slack(e.f)

    def probe(self, e: Evaluation) -> float:
        """The noise of f: how far it is from a line on a stretch too short for curvature."""
        size = math.sqrt(sum(float(real_dot(x, x)) for x in e.X)) or 1.0
        path, t = self.descent(e), self.eps**0.75 * size / max(e.norm, 1e-300)
        return max(abs(path.at(k * t).f - e.f + k * t * e.squared) for k in (0.5, 1.0, 1.5, 2.0))

    def _open(self, X: Point) -> tuple[float, Callable[[], Point]]:
        """f at X, and a function that gives its ambient gradient."""
        if self.eps == 0.0:
            self.eps = max(torch.finfo(part.dtype).eps for part in X)
        self.nfev += 1
        if self._gradient is not None and self._gradient is not False:
            return self._open_given(X)
        with torch.enable_grad():
            leaves = tuple(part.detach().clone().requires_grad_() for part in X)
            value = self.function(leaves)
        if not value.requires_grad:
            raise ConfigurationError(
                "expected f to depend on the point through differentiable torch operations, got "
                "a value without a graph (detached, or made by numpy or a number). Write f in "
                "torch, or give gradient="
            )

        def gradient() -> Point:
            self.ngev += 1
            parts = torch.autograd.grad(value, leaves, allow_unused=True)
            pairs = zip(parts, X, strict=True)
            return tuple(torch.zeros_like(x) if part is None else part for part, x in pairs)

        return value.item(), gradient

    def _open_given(self, X: Point) -> tuple[float, Callable[[], Point]]:
        """The same with a user's own gradient."""
        with torch.no_grad():
            answer = self._f(*(part.clone() for part in X))
        if self._gradient is not True:
            user = self._gradient
            assert callable(user)

            def gradient() -> Point:
                self.ngev += 1
                with torch.no_grad():
                    return _checked_gradient(user(*(part.clone() for part in X)), X)

            return _checked_value(answer).item(), gradient
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise ConfigurationError(
                "with gradient=True f must return (value, gradient), got "
                f"{type(answer).__name__}. Without it autograd computes the gradient"
            )
        self.ngev += 1
        return _checked_value(answer[0]).item(), lambda: _checked_gradient(answer[1], X)

    # -- geometry -------------------------------------------------------------------------------
    def dot(self, X: Point, u: Tangent, v: Tangent) -> Tensor:
        """The inner product of tangent vectors at X, a real 0-d tensor."""
        parts = zip(self.components, X, u, v, strict=True)
        return _total([component.inner(x, a, b) for component, x, a, b in parts])

    def inner(self, X: Point, u: Tangent, v: Tangent) -> float:
        """The inner product of tangent vectors at X."""
        return float(self.dot(X, u, v))

    def norm(self, X: Point, u: Tangent) -> float:
        """The norm of a tangent vector at X."""
        return math.sqrt(max(self.inner(X, u, u), 0.0))

    def inners(self, X: Point, pairs: Sequence[tuple[Tangent, Tangent]]) -> list[float]:
        """Several inner products with one read by the host."""
        return torch.stack([self.dot(X, u, v) for u, v in pairs]).tolist()

    def combine(
        self, a: float, u: Tangent, b: float | Tensor = 0.0, v: Tangent | None = None
    ) -> Tangent:
        """``a u + b v``."""
        if v is None:
            return tuple(a * part for part in u)
        if isinstance(b, Tensor):  # one pass, nothing read
            pairs = zip(u, v, strict=True)
            return tuple(torch.addcmul(a * x if a != 1 else x, b.to(x), y) for x, y in pairs)
        if a == 1:
            return tuple(x.add(y, alpha=b) for x, y in zip(u, v, strict=True))
        return tuple((a * x).add_(y, alpha=b) for x, y in zip(u, v, strict=True))

    def project(self, X: Point, z: Tangent) -> Tangent:
        """The tangent part of ambient vectors."""
        return tuple(c.project(x, a) for c, x, a in zip(self.components, X, z, strict=True))

    def curve(self, e: Evaluation, d: Tangent) -> Path:
        """The curve along a tangent vector d, which must be tangent to rounding."""
        parts = zip(self.components, e.X, d, strict=True)
        squares = torch.stack([c.inner(x, u, u).to(torch.float64) for c, x, u in parts]).tolist()
        parts = zip(self.components, e.X, d, squares, strict=True)
        return Path(self, e, [c.curve(x, u, square) for c, x, u, square in parts])

    def descent(self, e: Evaluation) -> Path:
        """The curve along minus the gradient."""
        parts = zip(self.components, e.X, e.gradients, strict=True)
        return Path(self, e, [c.curve(x, -g.vector, e.squared) for c, x, g in parts])

    def retract(self, X: Point, u: Tangent) -> Point:
        """R_X(u) for vectors u that are tangent to rounding."""
        parts = zip(self.components, X, u, strict=True)
        return tuple(c.curve(x, a, math.inf).move(1.0)[0] for c, x, a in parts)

    def transport(self, X: Point, u: Tangent, Y: Point, v: Tangent) -> Tangent:
        """v at X carried to Y = R_X(u): by projection, or as the manifold says."""
        parts = zip(self.components, X, u, Y, v, strict=True)
        return tuple(c.transport(x, a, y, b) for c, x, a, y, b in parts)

    def difference(self, e: Evaluation, d: Tangent, new: Evaluation) -> tuple[Tangent, Tangent]:
        """``s, y``: the changes of point and gradient from e to ``new = R_X(t d)``.

        On embedded submanifolds the differences in the surrounding space (Wen and Yin 2013), whose
        inner products with tangent vectors at the new point are those of the projected
        differences; elsewhere the step and the old gradient carried to the new point (Iannazzo
        and Porcelli 2018).
        """
        s: list[Tensor] = []
        y: list[Tensor] = []
        rows = zip(self.components, e.X, d, e.gradient, new.X, new.gradient, strict=True)
        for component, X, direction, old, Y, gradient in rows:
            if component.embedded or component.manifold is None:
                s.append(Y - X)
                y.append(gradient - old)
            else:
                u = new.t * direction
                s.append(component.transport(X, u, Y, u))
                y.append(gradient - component.transport(X, u, Y, old))
        return tuple(s), tuple(y)

    # -- feasibility ----------------------------------------------------------------------------
    def feasibility(self, X: Point) -> float:
        """The largest residual of the components."""
        return max((c.residual(x) for c, x in zip(self.components, X, strict=True)), default=0.0)

    def polished(self, X: Point) -> Point | None:
        """X taken back to the manifolds; None where it is well within the bounds."""
        pairs = list(zip(self.components, X, strict=True))
        if all(c.residual(x) <= c.bound(x) / 4 for c, x in pairs):
            return None
        return tuple(c.polish(x) for c, x in pairs)


def _total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors in float64, on the first one's device."""
    total = parts[0].to(torch.float64)
    for part in parts[1:]:
        total = total + part.to(total)
    return total


def _checked_value(value: Any) -> Tensor:
    """`value` as a real scalar tensor, or an error that says what came."""
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"expected f to return a real scalar tensor, got {type(value).__name__}. For an f "
            "that returns (value, gradient) give gradient=True"
        )
    if value.numel() != 1:
        raise ShapeError(
            f"expected f to return one number, got a tensor of shape {tuple(value.shape)}: sum or "
            "average it, for a batch of independent problems too"
        )
    if value.is_complex():
        raise DtypeError(
            f"expected f to return a real number, got {value.dtype}: take .real, or the squared "
            "modulus, of a value that is meant to be real"
        )
    return value.reshape(())


def _checked_gradient(answer: Any, X: Point) -> Point:
    """A user's gradient as a tuple that fits the point."""
    parts = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
    if len(parts) != len(X):
        raise ConfigurationError(
            f"expected {len(X)} gradients, one for each point, got {len(parts)}"
        )
    for number, (part, x) in enumerate(zip(parts, X, strict=True)):
        if not isinstance(part, Tensor) or part.shape != x.shape:
            got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ShapeError(f"expected gradient {number} of shape {tuple(x.shape)}, got {got}")
        if part.dtype != x.dtype:
            raise DtypeError(f"expected gradient {number} of dtype {x.dtype}, got {part.dtype}")
    return tuple(part.detach() for part in parts)
