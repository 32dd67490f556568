"""A user's cost and points, brought to double precision for a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stiefel.errors import ConfigurationError, NonFiniteError, ShapeError
from stiefel.numerics import in_double, plain
from stiefel.optim.solvers import Evaluation, Problem
from stiefel.optim.solvers.components import Component
from stiefel.optim.solvers.starts import components_of, unpack
from stiefel.parameter import Constraint

__all__ = ["Cost", "label", "prepare", "repeated"]


@dataclass(frozen=True)
class Cost:
    """A cost at a point, in the precision of the check.

    Attributes:
        problem: The cost on its manifolds.
        at: Its value and gradients at the point.
        eps: Rounding unit of the dtype.
        notes: What could not be done in double precision.
    """

    problem: Problem
    at: Evaluation
    eps: float
    notes: tuple[str, ...]

    def value(self, X: Sequence[Tensor]) -> float:
        """The cost at another point."""
        return self.problem.evaluate(tuple(X)).f


def prepare(cost: Callable[..., Any], X: Any, manifold: Any, gradient: Any) -> Cost:
    """Reads points as `stiefel.optim.minimize` does, and takes them to float64 or complex128.

    Raises:
        ConfigurationError: If the cost gives two values at one point.
        ShapeError: If a point has no entries.
        NonFiniteError: If the cost or its gradient is not finite there.
    """
    if not callable(cost):
        raise ConfigurationError(
            f"expected a cost, a function of the point that returns a real scalar tensor, got "
            f"{type(cost).__name__}"
        )
    if isinstance(X, Constraint):
        manifold, X = X.manifold if manifold is None else manifold, X.point
    starts, _ = unpack(X)
    components = components_of(starts, manifold)
    given = [plain(start) for start in starts]
    for number, (component, x) in enumerate(zip(components, given, strict=True)):
        if x.numel() == 0:
            raise ShapeError(
                f"{label(number, len(given), 'X')}: expected a point with entries, got shape "
                f"{tuple(x.shape)}, at which nothing can be checked"
            )
        component.check(x, label(number, len(given), "X"))
    double = [_on(c, in_double(x).clone()) for c, x in zip(components, given, strict=True)]
    problem, notes = Problem(cost, components, gradient), ()
    try:
        at = _evaluated(problem, tuple(double))
    except RuntimeError as error:
        if all(a.dtype == b.dtype for a, b in zip(double, given, strict=True)):
            raise
        reason = str(error).strip().splitlines()[0]
        notes = (
            f"double precision: the cost takes {given[0].dtype} only ({reason}). Errors of a "
            "thousandth are seen, smaller ones are not; convert the tensors that it uses to "
            "float64",
        )
        problem = Problem(cost, components, gradient)
        at = _evaluated(problem, tuple(given))
    return Cost(problem, at, problem.eps, notes)


def _on(component: Component, X: Tensor) -> Tensor:
    """X on its manifold within the rounding of its dtype."""
    if component.manifold is None or component.residual(X) <= component.bound(X):
        return X
    return component.manifold.projx(X)


def _evaluated(problem: Problem, X: tuple[Tensor, ...]) -> Evaluation:
    e = problem.evaluate(X)
    if not e.finite:
        raise NonFiniteError(
            f"expected a finite cost with a finite gradient at the point, got f = {e.f}: choose "
            "another point, or look for the operation with torch.autograd.detect_anomaly()"
        )
    repeated(e.f, problem.evaluate(X).f, problem.eps)
    return e


def repeated(first: float, second: float, eps: float) -> None:
    """Raises an error where two evaluations at one point differ by more than rounding.

    Args:
        first: One value.
        second: The other.
        eps: Rounding unit of their dtype.

    Raises:
        NonFiniteError: If one is not finite.
        ConfigurationError: If they differ.
    """
    if not (math.isfinite(first) and math.isfinite(second)):
        raise NonFiniteError(
            f"expected a finite cost, got {first!r} and {second!r}: look for the operation with "
            "torch.autograd.detect_anomaly()"
        )
    if not abs(first - second) <= 100 * eps * max(abs(first), abs(second)):
        raise ConfigurationError(
            f"expected one value at one point, got {first!r} and {second!r}: the cost draws "
            "random numbers (dropout, a batch, a seed). Fix them, or call model.eval()"
        )


def label(number: int, count: int, name: str) -> str:
    """``"X"``, or ``"X[1]"`` where there are several."""
    return name if count == 1 else f"{name}[{number}]"
