"""Riemannian Hessian-vector products of a problem, by autograd, by differences, or by a user."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, unknown
from stiefel.geometry.tangent import sym
from stiefel.optim.solvers.components import Component, StiefelComponent
from stiefel.optim.solvers.problem import Evaluation, Point, Problem, Tangent

__all__ = ["DERIVATIVES", "Hessian"]

#: How the derivative of the ambient gradient along a vector is computed, by name.
DERIVATIVES = ("autograd", "forward", "differences")


class Hessian:
    """The Riemannian Hessian of a problem at a point: ``Hessian(problem, e)(u)`` is Hess f(X)[u].

    The derivative D of the ambient gradient along u goes through each manifold's
    ``ehess2rhess(X, G, D, u)``; in the Euclidean metric ``Proj(D - u sym(X^H G))`` with the
    Hermitian part computed once.

    Args:
        problem: The problem.
        e: f at the point.
        how: ``"autograd"``: the gradient is computed once with its graph, and every product is one
            backward pass through it (double backward; the Hessian is symmetric, so this holds for a
            gradient that the user wrote in torch too). ``"forward"``: forward over reverse, by
            `torch.func.jvp` of the gradient; it keeps no graph. ``"differences"``: central
            differences of gradients at R_X(h u) and R_X(-h u), exact to about eps^(2/3); nothing
            but gradients is needed, and it takes manifolds without ``ehess2rhess`` by differences
            of transported Riemannian gradients. A function ``hessian(*X, *u)``: it returns D, or a
            sequence of them.
    """

    def __init__(self, problem: Problem, e: Evaluation, how: str | Callable[..., Any]) -> None:
        if isinstance(how, str) and how not in DERIVATIVES:
            raise unknown("hessian", how, DERIVATIVES)
        self.problem, self.e, self.how = problem, e, how
        if how != "differences":
            for component in problem.components:
                _check_component(component)
        self._graph: tuple[Point, Point] | None = None
        self._S: list[Tensor | None] | None = None

    def __call__(self, u: Tangent) -> Tangent:
        """The Riemannian Hessian applied to a tangent vector."""
        if self.how == "differences":
            return self._differences(u)
        D = self._ambient(u)
        rows = zip(self.problem.components, self.e.X, self.e.G, D, u, self._bends(), strict=True)
        return tuple(
            _riemannian(c, X, G, d, a) if S is None else c.project(X, d - a @ S)
            for c, X, G, d, a, S in rows
        )

    def _bends(self) -> list[Tensor | None]:
        """sym(X^H G) for the components of `euclidean_hessian`: the same for every u."""
        if self._S is None:
            rows = zip(self.problem.components, self.e.X, self.e.G, strict=True)
            self._S = [
                sym(X.mH @ G) if isinstance(c, StiefelComponent) and c.embedded else None
                for c, X, G in rows
            ]
        return self._S

    # -- the derivative of the ambient gradient ---------------------------------------------------
    def _ambient(self, u: Tangent) -> Tangent:
        if callable(self.how):
            answer = self.how(*(X.clone() for X in self.e.X), *u)
            return tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if self.how == "forward":
            return self._forward(u)
        if self._graph is None:
            self._graph = self._gradient_with_graph()
        leaves, G = self._graph
        kept = [(g, a) for g, a in zip(G, u, strict=True) if g.requires_grad]
        if not kept:  # f is linear
            return tuple(torch.zeros_like(a) for a in u)
        parts = torch.autograd.grad(
            [g for g, _ in kept],
            leaves,
            grad_outputs=[a for _, a in kept],
            retain_graph=True,
            allow_unused=True,
        )
        pairs = zip(parts, u, strict=True)
        return tuple(torch.zeros_like(a) if part is None else part for part, a in pairs)

    def _gradient_with_graph(self) -> tuple[Point, Point]:
        """Leaves, and the ambient gradient as a function of them."""
        with torch.enable_grad():
            leaves = tuple(X.detach().clone().requires_grad_() for X in self.e.X)
            user = self._user_gradient()
            if user is not None:
                G = user(leaves)
                if not any(g.requires_grad for g in G) and not _is_zero(G):
                    raise ConfigurationError(
                        "expected gradient= to be written in differentiable torch operations, "
                        "got a gradient without a graph: give the Hessian too "
                        "(hessian=function of (X, u)), or take hessian='differences'"
                    )
                return leaves, G
            value = self.problem.function(leaves)
            G = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        pairs = zip(G, leaves, strict=True)
        return leaves, tuple(torch.zeros_like(x) if g is None else g for g, x in pairs)

    def _user_gradient(self) -> Callable[[Point], Point] | None:
        """The gradient that the user gave, as a function of a tuple; None without one."""
        given = self.problem._gradient
        if given is None or given is False:
            return None

        def gradient(X: Point) -> Point:
            answer = self.problem._f(*X)[1] if given is True else given(*X)  # pyright: ignore
            return tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)

        return gradient

    def _forward(self, u: Tangent) -> Tangent:
        """Forward over reverse."""
        gradient = self._user_gradient() or torch.func.grad(self.problem.function)
        with torch.enable_grad():
            return torch.func.jvp(gradient, (tuple(X.clone() for X in self.e.X),), (u,))[1]

    def _differences(self, u: Tangent) -> Tangent:
        """Central differences along the retraction."""
        problem, X = self.problem, self.e.X
        length = math.sqrt(sum(float(a.abs().square().sum()) for a in u))
        if length == 0:
            return u
        size = math.sqrt(sum(float(x.abs().square().sum()) for x in X))
        h = problem.eps ** (1 / 3) * max(size, 1.0) / length
        ends = [problem.evaluate(problem.retract(X, problem.combine(t, u))) for t in (h, -h)]
        products = []
        for k, component in enumerate(problem.components):
            if _known(component):
                D = (ends[0].G[k] - ends[1].G[k]) / (2 * h)
                products.append(_riemannian(component, X[k], self.e.G[k], D, u[k]))
                continue
            plus, minus = (
                component.transport(end.X[k], -u[k], X[k], end.gradient[k]) for end in ends
            )
            products.append(component.project(X[k], (plus - minus) / (2 * h)))
        return tuple(products)


def _known(component: Component) -> bool:
    return component.manifold is None or hasattr(component.manifold, "ehess2rhess")


def _check_component(component: Component) -> None:
    if not _known(component):
        raise ConfigurationError(
            f"expected a manifold with a method ehess2rhess(x, egrad, ehess, u), got "
            f"{component.manifold}: take hessian='differences', which needs gradients only"
        )


def _riemannian(component: Component, X: Tensor, G: Tensor, D: Tensor, u: Tensor) -> Tensor:
    return D if component.manifold is None else component.manifold.ehess2rhess(X, G, D, u)


def _is_zero(G: Point) -> bool:
    return all(float(g.abs().sum()) == 0 for g in G)
