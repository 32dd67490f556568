"""Taylor expansions of a cost along curves: orders, slopes, and what a mismatch says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stiefel.diagnostics.checks.slopes import STEPS, order_finding
from stiefel.diagnostics.report import Curve, Finding

__all__ = ["Ray", "curvature_findings", "slope_findings"]


@dataclass(frozen=True)
class Ray:
    """A cost along one curve, f(R(t u)), and what is claimed of its derivatives at t = 0.

    Attributes:
        value: f at t.
        slope: The claimed first derivative, <grad, u>.
        curvature: The claimed second derivative, <Hess u, u>; 0 where none is claimed.
    """

    value: Callable[[float], float]
    slope: float
    curvature: float = 0.0


def noise_of(rays: Sequence[Ray], f: float, eps: float) -> float:
    """The rounding noise of f: second differences on a stretch too short for curvature.

    Args:
        rays: Curves.
        f: The cost at t = 0.
        eps: Rounding unit of its dtype.
    """
    h = eps**0.6
    bends = [abs(ray.value(2 * h) - 2 * ray.value(h) + f) for ray in rays]
    return max(bends, default=0.0) + 8 * eps * abs(f)


def model_findings(
    rays: Sequence[Ray], f: float, noise: float, order: int, model: str, why: str
) -> tuple[Finding, Curve]:
    """The order of ``max |f(R(t u)) - f - t slope - t^2/2 curvature|`` over the rays.

    Args:
        rays: Curves.
        f: The cost at t = 0.
        noise: Its rounding noise.
        order: The order that is expected.
        model: Name of the expansion.
        why: What a lower order means.
    """
    errors = [
        max(abs(r.value(t) - f - t * r.slope - t**2 / 2 * r.curvature) for r in rays) for t in STEPS
    ]
    floor = max(noise, 1e-300)
    finding = order_finding(f"order of the {model}", STEPS, errors, floor, order=order, meaning=why)
    return finding, Curve(f"error of the {model}", STEPS, tuple(errors), order)


def slope_findings(
    rays: Sequence[Ray], f: float, eps: float, scale: float, what: str, of: str
) -> tuple[list[Finding], list[Curve]]:
    """Whether the claimed slopes are those of the cost: by order, and by central differences.

    Args:
        rays: Curves along random directions of length one.
        f: The cost at t = 0.
        eps: Rounding unit of its dtype.
        scale: The size of the gradient before it was made tangent.
        what: What claims the slopes, such as ``"the gradient"``.
        of: Ends the names of the findings: empty, or a place.
    """
    rays = [Ray(ray.value, ray.slope) for ray in rays]
    noise, h = noise_of(rays, f, eps), eps**0.2
    measured = [_slope(ray.value, h) for ray in rays]
    claimed = [ray.slope for ray in rays]
    least = 1e-6 if eps < 1e-10 else 1e-3
    error, bound = _relative_error(measured, claimed, scale, 20 * noise / h, least)
    why = explain_mismatch(measured, claimed, f"{what} says")
    why_order = f"|f(R(tu)) - f - t <grad, u>| does not shrink like t^2. {why}"
    order, curve = model_findings(rays, f, noise, 2, f"first-order model{of}", why_order)
    return [order, Finding(f"error of the slope{of}", error, "<=", bound, why)], [curve]


def curvature_findings(
    rays: Sequence[Ray], f: float, eps: float, scale: float, hint: str
) -> tuple[list[Finding], list[Curve]]:
    """The same for the claimed curvatures.

    Args:
        rays: Curves that agree with geodesics to second order.
        f: The cost at t = 0.
        eps: Rounding unit of its dtype.
        scale: The largest norm of a Hessian-vector product.
        hint: Ends the meanings.
    """
    noise, h = noise_of(rays, f, eps), eps ** (1 / 6)
    measured = [_bend(ray.value, f, h) for ray in rays]
    claimed = [ray.curvature for ray in rays]
    least = 1e-5 if eps < 1e-10 else 1e-2
    error, bound = _relative_error(measured, claimed, scale, 20 * noise / h**2, least)
    why = f"{explain_mismatch(measured, claimed, 'the Hessian says')} {hint}"
    why_order = f"|f(R(tu)) - f - t <grad, u> - t^2/2 <Hess u, u>| does not shrink like t^3. {why}"
    order, curve = model_findings(rays, f, noise, 3, "second-order model", why_order)
    return [order, Finding("error of the curvature", error, "<=", bound, why)], [curve]


def _relative_error(
    measured: Sequence[float], claimed: Sequence[float], scale: float, rounding: float, least: float
) -> tuple[float, float]:
    """The largest error of what is claimed, and its bound: at least `least`, and the rounding.

    Both are shares of the largest derivative; all is rounding where that is no larger.
    """
    size = max([scale, *map(abs, measured)])
    if not size > rounding:
        return 0.0, least
    worst = max(abs(m - c) for m, c in zip(measured, claimed, strict=True))
    return worst / size, max(least, rounding / size)


def _slope(value: Callable[[float], float], h: float) -> float:
    """f'(0) by central differences, to O(h^4)."""
    return (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)


def _bend(value: Callable[[float], float], f: float, h: float) -> float:
    """f''(0) by central differences, to O(h^4)."""
    near, far = value(h) + value(-h), value(2 * h) + value(-2 * h)
    return (16 * near - far - 30 * f) / (12 * h**2)


def explain_mismatch(measured: Sequence[float], claimed: Sequence[float], says: str) -> str:
    """What the ratio of measured and claimed numbers tells: a factor, a sign, or a term.

    Args:
        measured: Derivatives by differences, one a direction.
        claimed: What they should be.
        says: Who claims them, such as ``"the gradient says"``.
    """
    pair = max(zip(measured, claimed, strict=True), key=lambda both: abs(both[0] - both[1]))
    seen = f"Along one direction it is {pair[0]:.6g} by differences, {says} {pair[1]:.6g}."
    total = math.hypot(*measured)
    unit = max([total, *map(abs, claimed)])
    if 0 < unit < math.inf:  # no square over- or underflows
        measured, claimed = [m / unit for m in measured], [c / unit for c in claimed]
        total = math.hypot(*measured)
    square = sum(c * c for c in claimed)
    if not math.isfinite(total):
        return f"{seen} The cost is not finite close to the point: choose another point."
    if math.sqrt(square) <= 1e-6 * total:
        return f"{seen} It says zero along every direction: a term was lost, or a graph was cut."
    factor = sum(m * c for m, c in zip(measured, claimed, strict=True)) / square
    rest = [m - factor * c for m, c in zip(measured, claimed, strict=True)]
    if math.sqrt(sum(r * r for r in rest)) > 1e-3 * total or len(measured) < 2:
        return (
            f"{seen} The ratio changes from direction to direction: a term is missing or wrong, "
            "or belongs to another metric. Compare with autograd, term by term."
        )
    if factor < 0:
        sign = "" if abs(factor + 1) < 1e-3 else f", and a factor {-factor:.4g} is missing"
        return f"{seen} It is minus that along every direction: the sign is wrong{sign}."
    return (
        f"{seen} Along every direction the cost changes {factor:.4g} times as fast: multiply by "
        "that factor (for complex points the gradient is dL/dRe + i dL/dIm)."
    )
