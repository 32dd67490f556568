"""`check_gradient`: is the gradient of a cost, or of a whole model, the slope of that cost?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.diagnostics.checks.costs import Cost, label, prepare
from stiefel.diagnostics.checks.directions import length, moved, random_direction, seeded, tangency
from stiefel.diagnostics.checks.expansions import Ray, slope_findings
from stiefel.diagnostics.checks.model_gradient import check_model_gradient
from stiefel.diagnostics.report import Curve, Finding, Report
from stiefel.errors import ConfigurationError, ShapeError
from stiefel.numerics import full_precision

__all__ = ["check_gradient", "user_vectors"]


@torch.inference_mode(False)
@torch.no_grad()
@full_precision()
def check_gradient(
    cost: Callable[..., Any],
    X: Any = None,
    *,
    manifold: Any = None,
    gradient: bool | Callable[..., Any] | None = None,
    riemannian_gradient: Callable[..., Any] | None = None,
    model: nn.Module | None = None,
    directions: int = 5,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks the gradient of a cost against the slopes of the cost itself.

    Along random tangent vectors u of length one, and a curve R(t u) that does not use the
    manifold's retraction, ``|f(R(t u)) - f(X) - t <grad f, u>_X|`` must shrink like t^2; a wrong
    gradient leaves t. Central differences give the same slopes to about ten digits, and tell a
    wrong factor from a wrong sign or a missing term. Computed in float64 or complex128.

    Args:
        cost: As for `stiefel.optim.minimize`: takes the point, or one tensor for each of several,
            and returns a real scalar tensor. With `model`, takes nothing.
        X: A point ``(..., n, p)``: a tensor, a `stiefel.ManifoldParameter`, a
            `stiefel.Constraint`, or a list or tuple of the first two for a product of manifolds.
        manifold: As for `stiefel.optim.minimize`.
        gradient: The ambient gradient: None takes autograd's; True if the cost returns ``(value,
            gradient)``; or a function of what the cost takes.
        riemannian_gradient: Your own Riemannian gradient instead, in the manifold's metric: a
            function of what the cost takes that returns a tangent vector for each point.
        model: Checks the gradients that the leaves of the model's constrained weights get from
            ``cost().backward()``, coordinates or points, one weight after the other. In the
            model's own dtype: call ``model.double()`` first.
        directions: Random directions, for each point or weight.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report with the findings ``"order of the first-order model"``, ``"error of the slope"``
        and ``"tangency of the gradient"``; of several points or weights each has its own, which end
        in ``" of X[1]"`` or ``" of layers.0.weight"``.

    Raises:
        ConfigurationError: If the arguments do not go together, or the cost is random.
        ShapeError: If the cost is no scalar, or a gradient has the wrong shape.
        OffManifoldError: If X is not on its manifold.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import check_gradient
        >>> A = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
        >>> X = stiefel.geometry.haar(6, 2, dtype=torch.float64)
        >>> f = lambda X: (X.mT @ A @ X).trace()
        >>> check_gradient(f, X, gradient=lambda X: 2 * A @ X).ok
        True
        >>> [finding.name for finding in check_gradient(f, X, gradient=lambda X: A @ X).failures]
        ['order of the first-order model', 'error of the slope']
    """
    of_a_point = {
        "manifold": manifold,
        "gradient": gradient,
        "riemannian_gradient": riemannian_gradient,
    }
    _check_arguments(X, model, directions, of_a_point)
    if model is not None:
        return check_model_gradient(cost, model, directions, seeded(generator))
    at = prepare(cost, X, manifold, gradient)
    vectors = at.at.gradient
    if riemannian_gradient is not None:
        vectors = user_vectors(riemannian_gradient(*(x.clone() for x in at.at.X)), at.at.X)
    return _report(at, vectors, directions, seeded(generator))


def _check_arguments(
    X: Any, model: nn.Module | None, directions: int, of_a_point: dict[str, Any]
) -> None:
    """Raises `ConfigurationError` for arguments that do not go together."""
    if not isinstance(directions, int) or directions < 1:
        raise ConfigurationError(f"expected directions >= 1, an int, got {directions}")
    if (X is None) == (model is None):
        raise ConfigurationError(
            "expected a point, check_gradient(cost, X), or a model, check_gradient(cost, "
            "model=model), and not both"
        )
    given = [name for name, value in of_a_point.items() if value is not None]
    if model is not None and given:
        raise ConfigurationError(
            f"{', '.join(given)}: these belong to a cost of a point; the weights of a model know "
            "their manifolds, and backward() gives their gradients"
        )
    if {"gradient", "riemannian_gradient"} <= set(given):
        raise ConfigurationError("expected gradient= or riemannian_gradient=, got both")


def _report(
    at: Cost, vectors: Sequence[Tensor], directions: int, generator: torch.Generator
) -> Report:
    findings: list[Finding] = []
    curves: list[Curve] = []
    problem, X, count = at.problem, at.at.X, len(at.at.X)
    for k, component in enumerate(problem.components):
        of = "" if count == 1 else f" of {label(k, count, 'X')}"
        rays = []
        for _ in range(directions):
            u = random_direction(problem, X, generator, only=k)
            rays.append(
                Ray(
                    lambda t, u=u: at.value(moved(problem, X, u, t)),
                    float(component.inner(X[k], vectors[k], u[k])),
                )
            )
        scale = max(length([at.at.G[k]]), length([vectors[k]]))
        found, drawn = slope_findings(rays, at.at.f, at.eps, scale, "the gradient", of)
        findings += found
        curves += drawn
        residual = tangency(component, X[k], vectors[k])
        largest = float(vectors[k].abs().max())
        floor = scale / largest if largest > 0 else 0.0
        findings.append(
            Finding(
                f"tangency of the gradient{of}",
                residual,
                "<=",
                100 * at.eps * max(1.0, floor),
                "the Riemannian gradient has a part normal to the manifold, along which no step "
                "may go: project it with manifold.proju, or return the ambient gradient by "
                "gradient= and leave the conversion to manifold.egrad2rgrad.",
            )
        )
    names = ", ".join(str(c.manifold or "free tensors") for c in problem.components)
    return Report(f"gradient of the cost on {names}", tuple(findings), tuple(curves), at.notes)


def user_vectors(answer: Any, X: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a user's function returned, as one vector for each point.

    Raises:
        ShapeError: If there are too few or too many, or one has another shape than its point.
    """
    parts = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
    shapes = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
    if shapes != [tuple(x.shape) for x in X]:
        raise ShapeError(
            f"expected vectors of the shapes {[tuple(x.shape) for x in X]} of the points, got "
            f"{shapes}"
        )
    return tuple(p.detach().to(x.dtype) for p, x in zip(parts, X, strict=True))
