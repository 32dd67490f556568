"""The gradients that the leaves of a model's constrained weights get from its cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.diagnostics.checks.costs import repeated
from stiefel.diagnostics.checks.directions import length, moved, random_direction, reaches
from stiefel.diagnostics.checks.expansions import Ray, slope_findings
from stiefel.diagnostics.report import Curve, Finding, Report
from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.numerics import plain
from stiefel.optim.solvers import Problem
from stiefel.optim.solvers.components import component_of
from stiefel.parameter import Constraint, constraints

__all__ = ["check_model_gradient"]


def check_model_gradient(
    cost: Callable[[], Any],
    model: nn.Module,
    directions: int,
    generator: torch.Generator,
) -> Report:
    """The model's part of `stiefel.diagnostics.check_gradient`; the model is left as it was."""
    found = list(constraints(model))
    if not found:
        raise ConfigurationError(
            f"expected a model with constrained weights, got {type(model).__name__} without any: "
            "stiefel.orthogonal(module) makes one"
        )
    leaves = [leaf for constraint in found for leaf in constraint.leaves]
    dtype = _coarsest(model)
    if torch.finfo(dtype).bits < 32:
        raise DtypeError(
            f"expected a model in float32 or better, got {dtype}: slopes cannot be seen in it. "
            "Check a copy, copy.deepcopy(model).double()"
        )
    with _buffers_kept(model):
        return _checked(cost, model, found, leaves, dtype, directions, generator)


def _coarsest(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters that rounds most."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what forward passes write to buffers, such as the averages of batch norm."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.detach().copy_(before)


def _checked(
    cost: Callable[[], Any],
    model: nn.Module,
    found: list[Constraint],
    leaves: list[Tensor],
    dtype: torch.dtype,
    directions: int,
    generator: torch.Generator,
) -> Report:
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.enable_grad():
        loss = _scalar(cost())
        gradients = (
            torch.autograd.grad(loss, trained, allow_unused=True)
            if loss.requires_grad and trained
            else [None] * len(trained)
        )
    by_leaf = {id(leaf): g for leaf, g in zip(trained, gradients, strict=True)}
    eps = torch.finfo(loss.dtype).eps
    eps = max(eps, torch.finfo(dtype).eps)
    f = float(_scalar(cost()))
    repeated(float(loss), f, eps)
    findings: list[Finding] = []
    curves: list[Curve] = []
    skipped = []
    if eps > 1e-10:
        skipped.append(
            f"double precision: the model is in {dtype}. Errors of a thousandth are seen, smaller "
            "ones are not; call model.double() first"
        )
    for constraint in found:
        kept = [by_leaf.get(id(leaf)) for leaf in constraint.leaves]
        if all(gradient is None for gradient in kept):
            skipped.append(
                f"{constraint.path}: it gets no gradient; the cost does not depend on it, or it is "
                "frozen"
            )
            continue
        storage = None if constraint.is_riemannian else constraint.storage
        points = [plain(leaf) for leaf in constraint.leaves]
        reach = [1.0] * len(points) if storage is None else reaches(storage.chart, points)
        rays = [_ray(constraint, kept, reach, cost, generator) for _ in range(directions)]
        scale = length([r * g for r, g in zip(reach, kept, strict=True) if g is not None])
        new, drawn = slope_findings(
            rays, f, eps, scale, "backward()", f" of {constraint.path} ({constraint.via})"
        )
        findings += new
        curves += drawn
    return Report(
        f"gradients of {type(model).__name__}", tuple(findings), tuple(curves), tuple(skipped)
    )


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(
            f"expected cost() to return one real number, got {got}: with model= the cost takes no "
            "argument and returns the loss, as in check_gradient(lambda: loss(model(x), y), "
            "model=model)"
        )
    return value.reshape(())


def _ray(
    constraint: Constraint,
    gradients: list[Tensor | None],
    reach: list[float],
    cost: Callable[[], Any],
    generator: torch.Generator,
) -> Ray:
    """The cost along one random direction of the leaves of a weight."""
    leaves = constraint.leaves
    manifold = constraint.manifold if constraint.is_riemannian else None
    problem = Problem(lambda *_: 0.0, [component_of(manifold) for _ in leaves])
    start = tuple(plain(leaf).clone() for leaf in leaves)
    u = random_direction(problem, start, generator)
    u = tuple(r * part for r, part in zip(reach, u, strict=True))
    slope = sum(
        float((g.conj() * a).real.sum()) for g, a in zip(gradients, u, strict=True) if g is not None
    )

    def value(t: float) -> float:
        try:
            for leaf, new in zip(leaves, moved(problem, start, u, t), strict=True):
                leaf.detach().copy_(new)
            return float(_scalar(cost()))
        finally:
            for leaf, old in zip(leaves, start, strict=True):
                leaf.detach().copy_(old)

    return Ray(value, slope)
