"""The three conditions under which the convergence theorem of CWY speaks, checked step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel.diagnostics.report import Finding, Report
from stiefel.errors import ConfigurationError, ShapeError
from stiefel.numerics import compute_dtype, in_double, real_dtype

__all__ = ["SideConditions"]

_MEANINGS = {
    "step identity": (
        "v_k+1 - v_k is not -rate(k) grad: the optimizer is not plain SGD with this step. A "
        "constant or otherwise scheduled step breaks this condition alone; momentum, weight decay, "
        "clipping or Adam break it too. The theorem speaks of the step k^(-1/2) only; pass rate= "
        "for the schedule that you meant."
    ),
    "orthogonal steps": (
        "<v_k, v_k+1 - v_k> is not zero: the step has a part along v. The loss does not depend on "
        "|v|, so the gradient has none; momentum adds old gradients, which are orthogonal to old "
        "v's, and weight decay adds v itself."
    ),
    "non-decreasing norms": (
        "some |v| became shorter: steps orthogonal to v cannot do that. Weight decay, rebasing or "
        "an edit of the vectors does; exclude them from weight decay. The bound below which the "
        "gradient is smooth rests on |v_k| >= |v_0|."
    ),
}


@dataclass(frozen=True)
class _Bounds:
    """Bounds of the three conditions, and how often a step is over them."""

    identity: float
    orthogonal: float
    norms: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Bounds:
        """1e-10, 1e-10 and 1e-12 in float64; what rounding of the step leaves in less."""
        eps = torch.finfo(real_dtype(dtype)).eps
        relative = 1e-10 if eps < 1e-12 else 64 * eps
        return cls(relative, relative, max(1e-12, eps))


def _theorem_rate(k: int) -> float:
    return k**-0.5


class SideConditions:
    """Checks three conditions of the theorem on the reflection vectors v_l at every noted step.

    (a) the step identity v_(k+1) - v_k = -rate(k) grad_(v_k); (b) orthogonal steps
    <v_k, v_(k+1) - v_k> = 0; (c) non-decreasing norms |v_(k+1)| >= |v_k|. Under them the squared
    coordinate gradient goes to zero like k^(-1/2 + eps), for weights in the charts ``cwy``,
    ``tcwy`` and ``householder``. A constant step breaks (a), momentum (a) and (b), weight decay
    all three.

    The residuals are relative: (a) to the longer of both sides, (b) to |v_k| |v_(k+1) - v_k|, (c)
    to |v_k|. Storing v_(k+1) rounds it by up to eps |v| / 2, which is taken off (a) and (b) before
    they are divided, for a small step is itself of that size. Bounds: 1e-10, 1e-10, 1e-12 in
    float64; 64 eps, 64 eps, eps in less. All sums are in float64.

    Args:
        rate: The step length of step k = 1, 2, ..., a function of k.

    Raises:
        ConfigurationError: If `rate` is no function; by `note`, for a step number or rate that is
            not positive.

    Example:
        >>> import torch
        >>> from stiefel.diagnostics import SideConditions
        >>> from stiefel.parametrizations import CWY
        >>> V, chart, conditions = torch.randn(4, 4, dtype=torch.float64), CWY(4), SideConditions()
        >>> for k in range(1, 4):
        ...     (g,) = torch.autograd.grad(chart(V.requires_grad_()).diagonal().sum(), V)
        ...     new = V.detach() - 0.1 * g  # a constant step
        ...     conditions.note(k, [V], [g], [new])
        ...     V = new
        >>> [finding.name for finding in conditions.report().failures]
        ['step identity']
    """

    def __init__(self, rate: Callable[[int], float] = _theorem_rate) -> None:
        if not callable(rate):
            raise ConfigurationError(
                f"expected a function of the step number k, got {rate!r}: for a constant step "
                f"pass rate=lambda k: {rate!r}"
            )
        self.rate = rate
        self.steps = 0
        self._bounds: _Bounds | None = None
        self._worst: Tensor | None = None  # worst residual of each condition
        self._when: Tensor | None = None  # the step of each
        self._broken: Tensor | None = None  # steps at which each is broken

    @torch.no_grad()
    def note(
        self,
        step: int,
        before: Sequence[Tensor],
        gradients: Sequence[Tensor],
        after: Sequence[Tensor],
    ) -> None:
        """Notes one step of the optimizer.

        Args:
            step: k = 1, 2, ...; noted steps need not follow each other.
            before: Matrices ``(..., n, L)`` whose columns are the v_l, before the step.
            gradients: The gradients that the step was made from, same shapes.
            after: The matrices after the step. They must be copies, not the same storage.

        Raises:
            ShapeError: If the three lists do not match, or a matrix is empty.
            DtypeError: If a matrix has no floating point or complex dtype.
            ConfigurationError: If the step number or its rate is not positive, or nothing came.
        """
        rho = float(self.rate(step)) if step >= 1 else 0.0
        if not rho > 0:
            raise ConfigurationError(
                f"expected steps k = 1, 2, ... with a positive rate, got step {step}, rate {rho}"
            )
        if not before or not len(before) == len(gradients) == len(after):
            raise ShapeError(
                "expected as many matrices before and after the step as gradients, at least one; "
                f"got {len(before)}, {len(after)} and {len(gradients)}"
            )
        residuals = []
        for v, g, w in zip(before, gradients, after, strict=True):
            compute_dtype(v.dtype)
            if not v.shape == g.shape == w.shape or v.ndim < 2 or v.numel() == 0:
                raise ShapeError(
                    "expected matrices (..., n, L) of one shape and not empty, got "
                    f"{tuple(v.shape)}, {tuple(g.shape)} and {tuple(w.shape)}"
                )
            bounds = _Bounds.of(v.dtype)
            if self._bounds is None or bounds.identity > self._bounds.identity:
                self._bounds = bounds
            residuals.append(_residuals(v, g, w, rho).cpu())
        self._keep(step, torch.stack(residuals).amax(0))

    def _keep(self, step: int, worst: Tensor) -> None:
        bounds = self._bounds
        assert bounds is not None
        limits = torch.tensor([bounds.identity, bounds.orthogonal, bounds.norms]).to(worst)
        broken = ~(worst <= limits)  # NaN breaks
        if self._worst is None or self._when is None or self._broken is None:
            self._worst, self._when = worst, torch.full((3,), step)
            self._broken = torch.zeros(3, dtype=torch.long)
        more = ~(worst <= self._worst) & ~self._worst.isnan()
        self._worst = torch.where(more, worst, self._worst)
        self._when = torch.where(more, torch.full_like(self._when, step), self._when)
        self._broken += broken
        self.steps += 1

    def report(self) -> Report:
        """What was seen so far.

        Returns:
            A report with the findings "step identity", "orthogonal steps" and "non-decreasing
            norms": the worst relative residual of each, and in its meaning when and how often the
            bound was broken. Before any step was noted it has no findings and is not ok.
        """
        subject = f"side conditions of the convergence theorem, {self.steps} steps"
        if self._worst is None or self._when is None or self._broken is None:
            return Report(subject, (), skipped=("no step was noted: call note(...)",))
        assert self._bounds is not None
        limits = (self._bounds.identity, self._bounds.orthogonal, self._bounds.norms)
        findings = []
        for i, (name, meaning) in enumerate(_MEANINGS.items()):
            when = f" Broken at {int(self._broken[i])} of {self.steps} steps, worst at step "
            text = f"{meaning}{when}{int(self._when[i])}."
            findings.append(Finding(name, float(self._worst[i]), "<=", limits[i], text))
        return Report(subject, tuple(findings))


def _residuals(v: Tensor, g: Tensor, w: Tensor, rho: float) -> Tensor:
    """Worst relative residuals (a), (b), (c) over all columns, float64, shape (3,)."""
    eps = torch.finfo(real_dtype(v.dtype)).eps
    v, g, w = (in_double(A) for A in (v, g, w))
    # all three are relative, so that columns may be scaled: no square over- or underflows
    v, g, w = _divided(v, g, w)
    delta, step = w - v, -rho * g
    size, new_size = _norms(v), _norms(w)
    moved, meant = _norms(delta), _norms(step)
    rounding = eps * torch.maximum(size, new_size)
    tiny = torch.finfo(torch.float64).tiny

    identity = (_norms(delta - step) - rounding).clamp_min(0)
    identity = identity / torch.maximum(moved, meant).clamp_min(tiny)
    product = (v.conj() * delta).sum(-2)
    product = (product.real if product.is_complex() else product).abs()
    orthogonal = (product - rounding * size).clamp_min(0) / (size * moved).clamp_min(tiny)
    shorter = ((size - new_size) / size.clamp_min(tiny)).clamp_min(0)
    return torch.stack([identity.amax(), orthogonal.amax(), shorter.amax()])


def _divided(*matrices: Tensor) -> tuple[Tensor, ...]:
    """Columns over the power of two at the largest entry of any of them: exact."""
    largest = torch.stack([A.abs().amax(-2, keepdim=True) for A in matrices]).amax(0)
    usable = largest.isfinite() & (largest > 0)
    largest = torch.where(usable, largest, torch.ones_like(largest))
    power = largest / (2 * torch.frexp(largest).mantissa)
    return tuple(A / power for A in matrices)


def _norms(A: Tensor) -> Tensor:
    """Norms of the columns, shape ``(..., L)``."""
    return torch.linalg.vector_norm(A, dim=-2)
