"""`check_optimizer`: does an optimizer step along the manifold, and mean what torch means?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stiefel.diagnostics.checks.directions import seeded, tangency
from stiefel.diagnostics.checks.optimizer_trial import Trial, states_of
from stiefel.diagnostics.checks.ordinary_parameters import TORCH_OPTIMIZERS, note_ordinary
from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.diagnostics.checks.slopes import STEPS, order_finding
from stiefel.diagnostics.report import Curve, Report
from stiefel.errors import ConfigurationError, unknown
from stiefel.manifolds import Manifold, Stiefel, is_stiefel
from stiefel.numerics import full_precision, plain
from stiefel.optim.solvers.components import component_of

__all__ = ["check_optimizer"]


@torch.inference_mode(False)
@full_precision()
def check_optimizer(
    optimizer: Callable[..., Any],
    manifold: Manifold | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    shape: Sequence[int] = (7, 3),
    lr: float = 0.1,
    steps: int = 200,
    ordinary: str | None = None,
    ambient_state: bool | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    r"""Checks an optimizer of manifold parameters on small random problems.

    The first step from X with gradient G has, in the learning rate, the derivative ``-c grad`` with
    c > 0 and grad the Riemannian gradient: the distance from ``X - c lr grad`` must shrink like
    lr^2. Optimizers whose step does not grow with the gradient (Adam, Muon) must descend. Points
    stay on the manifold through `steps` steps with gradients N(0, 1), in float64 and float32.

    Args:
        optimizer: A class, or a function, called as ``optimizer(parameters, lr=..., **options)``.
        manifold: Where the points are: ``stiefel.Stiefel()`` by default, or a geoopt manifold.
        options: Options of the optimizer. Momentum is checked where they switch it on.
        shape: Shape of the points, ``(..., n, p)``.
        lr: Learning rate of the noisy steps.
        steps: Their number.
        ordinary: ``"sgd"`` or ``"adam"`` if the optimizer claims to step ordinary parameters as
            torch's optimizer does. Those with the argument ``euclidean=`` of
            `stiefel.optim.RiemannianOptimizer` claim both.
        ambient_state: Whether averages of gradients are kept in the surrounding space by design,
            and need not be tangent. By default what an attribute of this name of the optimizer
            says (True for `stiefel.optim.RGDAdam`, `POGO` and `Landing`), else False.
        generator: Source of randomness; the same numbers each time by default.

    Returns:
        A report. Findings (some only where the optimizer has what they measure): ``"constraint"``,
        ``"order of the first step"``, ``"error of the first step"``, ``"tangency of the first
        step"``, ``"descent of the first step"``, ``"points stay on the manifold (float64)"`` and
        ``"(float32)"``, ``"momentum is tangent"``, ``"a zero gradient moves nothing"``, ``"state
        does not grow"``, ``"gradients are not written to"``, ``"maximize ascends"``, ``"ordinary
        parameters (sgd)"`` and ``"(adam)"``.

    Raises:
        ConfigurationError: If `optimizer` is no class or function, or options do not go together.
        UnknownNameError: If `ordinary` is another name.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import check_optimizer
        >>> check_optimizer(stiefel.optim.RGD, options={"momentum": 0.9}).ok
        True
        >>> check_optimizer(torch.optim.SGD)["constraint"].ok
        False
    """
    trial = _trial(optimizer, manifold, options, shape, steps, ordinary, seeded(generator))
    builder = ReportBuilder(f"{trial.name} on {trial.manifold}")
    if builder.call("the first step", trial.first_step, 1e-3) is None:
        return builder.report()
    call = builder.call
    call("a step", _check_constraint, builder, trial, lr)
    call("the first step", _check_first_step, builder, trial)
    for dtype in (torch.float64, torch.float32):
        call(f"noisy steps in {dtype}", _check_noise, builder, trial, lr, steps, dtype)
    call("momentum", _check_state, builder, trial, lr, ambient_state)
    call("a zero gradient", _check_zero, builder, trial, lr)
    call("weight decay", _check_gradients_kept, builder, trial, lr)
    call("maximize", _check_maximize, builder, trial)
    for claim in [ordinary] if ordinary is not None else list(TORCH_OPTIMIZERS):
        call("ordinary parameters", note_ordinary, builder, trial, lr, claim, ordinary is not None)
    return builder.report()


def _trial(
    optimizer: Callable[..., Any],
    manifold: Manifold | None,
    options: Mapping[str, Any] | None,
    shape: Sequence[int],
    steps: int,
    ordinary: str | None,
    generator: torch.Generator,
) -> Trial:
    """The arguments, checked."""
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise ConfigurationError(
            "expected a class of optimizers, or a function that makes one from parameters and "
            f"lr=, got {type(optimizer).__name__}: give the class, and its options by options="
        )
    manifold = Stiefel() if manifold is None else manifold
    if not isinstance(manifold, Manifold):
        raise ConfigurationError(
            f"expected a manifold such as stiefel.Stiefel(), got {type(manifold).__name__}"
        )
    if ordinary is not None and ordinary not in TORCH_OPTIMIZERS:
        raise unknown("optimizer of ordinary parameters", ordinary, TORCH_OPTIMIZERS)
    if options and "lr" in options:
        raise ConfigurationError("the check tries many learning rates: leave lr out of options")
    shape = tuple(shape)
    if is_stiefel(manifold) and (len(shape) < 2 or not shape[-2] > shape[-1] - 1):
        raise ConfigurationError(f"expected a shape (..., n, p) with n >= p, got {shape}")
    if steps < 1 or not all(size > 0 for size in shape):
        raise ConfigurationError(
            f"expected steps >= 1 and a shape without zeros, got steps={steps} and {shape}: "
            "nothing could be measured"
        )
    return Trial(optimizer, options or {}, manifold, shape, generator)


def _check_constraint(builder: ReportBuilder, trial: Trial, lr: float) -> None:
    leaf = trial.leaf()
    optimizer = trial.make([leaf], lr)
    leaf.grad = trial.G.clone()
    optimizer.step()
    builder.note(
        "constraint",
        trial.off(leaf),
        "<=",
        max(1e-3, trial.allowed(torch.float64)),
        "one step took the point off its manifold, or the leaf is no manifold parameter any more: "
        "the constraint is lost. An ordinary optimizer sees an ordinary parameter; give the "
        "weight to a Riemannian one (stiefel.optim.build does), or train it through a chart.",
    )


def _check_first_step(builder: ReportBuilder, trial: Trial) -> None:
    """The derivative of the first step in the learning rate."""
    X, G, component = trial.X, trial.G, component_of(trial.manifold)
    w, w10 = trial.velocity(), trial.velocity(10.0, h=1e-6)
    size = float(w.norm())
    if trial.is_fixed:
        meaning = "the manifold has no tangent vectors here, and the step moved the point."
        builder.note("tangency of the first step", size, "<=", 1e-5, meaning)
        builder.skip("order and descent of the first step: the gradient is zero at every point")
        return
    builder.note(
        "descent of the first step",
        float((G * w).sum()) / max(float(G.norm()) * size, 1e-300) if size > 0 else math.nan,
        "<=",
        -1e-6,
        "the cosine between gradient and first step: the step does not go down.",
    )
    builder.note(
        "tangency of the first step",
        tangency(component, X, w),
        "<=",
        1e-5,
        "the first step leaves X along a direction that is not tangent. The gradient was not "
        "projected (manifold.egrad2rgrad), or momentum started from the raw gradient, or the "
        "retraction is none (see check_retraction).",
    )
    if not float((w10 - 10 * w).norm()) <= 1e-3 * float(w10.norm()):
        builder.skip(
            "order of the first step: it does not grow with the gradient, so it has to descend only"
        )
        return
    gradient = plain(trial.manifold.egrad2rgrad(X, G.clone()))
    c = -float((w * gradient).sum()) / max(float(gradient.square().sum()), 1e-300)
    why = (
        "the first step is not -c grad, c > 0, to first order, with the gradient in the metric of "
        "the manifold. " + _cause(trial, w)
    )
    error = float((w + c * gradient).norm()) / max(size, 1e-300)
    builder.note("error of the first step", error if c > 0 else math.inf, "<=", 1e-6, why)
    rates = [rate for rate in STEPS if rate * size <= 0.05]  # long steps may be cut
    errors = [float((trial.first_step(rate) + c * rate * gradient).norm()) for rate in rates]
    floor = max(4e-16 * max(1.0, float(X.norm())), 1e-10 * rates[0])  # of X, and of w
    builder.add(
        order_finding("order of the first step", rates, errors, floor, order=2, meaning=why)
    )
    builder.curve(Curve("|X(lr) - X + c lr grad|, t = lr", tuple(rates), tuple(errors), 2))


def _cause(trial: Trial, w: torch.Tensor) -> str:
    """What the first step goes along instead of the gradient."""
    X, G, size = trial.X, trial.G, float(w.norm())
    candidates = {"the raw gradient: convert it with manifold.egrad2rgrad": G}
    if is_stiefel(trial.manifold):
        for inner in ("canonical", "euclidean"):
            other = Stiefel(inner).egrad2rgrad(X, G)
            candidates[f"the gradient in the {inner} metric, which is not the manifold's"] = other
    for words, direction in candidates.items():
        cosine = float((w * direction).sum()) / max(size * float(direction.norm()), 1e-300)
        if cosine < -1 + 1e-6:
            return f"It goes along {words}."
        if cosine > 1 - 1e-6:
            return f"It goes up, along plus {words}."
    return (
        "It goes along no gradient: momentum that starts from the raw gradient, or a retraction "
        "that is none (see check_retraction), look like this."
    )


def _check_noise(
    builder: ReportBuilder, trial: Trial, lr: float, steps: int, dtype: torch.dtype
) -> None:
    """Many steps with random gradients."""
    leaf = trial.leaf(dtype)
    optimizer = trial.make([leaf], lr)
    worst, written = 0.0, 0.0
    for _ in range(steps):
        leaf.grad = trial.noise(dtype)
        before = leaf.grad.clone()
        optimizer.step()
        if leaf.grad is not None:
            written = max(written, float((leaf.grad - before).abs().max()))
        worst = max(worst, trial.off(leaf))
        if math.isinf(worst):
            break
    builder.note(
        f"points stay on the manifold ({str(dtype).removeprefix('torch.')})",
        worst,
        "<=",
        trial.allowed(dtype),
        f"the largest residual in {steps} noisy steps. Retract tangent vectors only, write the "
        "retraction in its additive form, or bring points back; an optimizer that stays near the "
        "manifold by design belongs to stiefel.Stiefel(tolerance=...).",
    )
    _note_written(builder, written)


def _note_written(builder: ReportBuilder, written: float, where: str = "") -> None:
    builder.note(
        "gradients are not written to",
        written,
        "<=",
        0.0,
        "the step changed p.grad, which loggers, clipping and accumulation read: use grad.add, "
        "not grad.add_.",
        where,
    )


def _check_state(builder: ReportBuilder, trial: Trial, lr: float, ambient: bool | None) -> None:
    """Averages of gradients are tangent, and fade when gradients are zero."""
    leaf, component = trial.leaf(), component_of(trial.manifold)
    optimizer = trial.make([leaf], lr)
    worst, culprit = 0.0, ""
    for _ in range(5):
        leaf.grad = trial.noise(torch.float64)
        optimizer.step()
        for name, value in states_of(optimizer, leaf).items():
            residual = tangency(component, plain(leaf), plain(value))
            if not residual <= worst:
                worst, culprit = residual, name
    states = states_of(optimizer, leaf)
    if not states:
        builder.skip("momentum: the optimizer keeps none with these options")
        return
    if ambient is None:
        ambient = bool(getattr(optimizer, "ambient_state", False))
    if ambient:
        builder.skip(
            "momentum is tangent: the averages are kept in the surrounding space by design"
        )
    else:
        builder.note(
            "momentum is tangent",
            worst,
            "<=",
            1e-10,
            f"the state {culprit or next(iter(states))!r} is not tangent at the point it belongs "
            "to, relative to its largest entry: start it from the Riemannian gradient, and "
            "transport it with the point (manifold.retr_transp). A retraction that is fed its "
            "normal part moves the point elsewhere.",
        )
    sizes = {name: float(plain(value).norm()) for name, value in states.items()}
    growth = 0.0
    for _ in range(20):
        leaf.grad = torch.zeros_like(trial.X)
        optimizer.step()
        for name, value in states_of(optimizer, leaf).items():
            growth = max(growth, float(plain(value).norm()) / max(sizes.get(name, 0.0), 1e-300))
    builder.note(
        "state does not grow",
        growth,
        "<=",
        1 + 1e-6,
        "momentum grew while 20 gradients were zero: it is multiplied by more than one on its way, "
        "by a projection that is no projection (applied twice it must be itself) most often.",
    )


def _check_zero(builder: ReportBuilder, trial: Trial, lr: float) -> None:
    leaf = trial.leaf()
    optimizer = trial.make([leaf], lr)
    for _ in range(5):
        leaf.grad = torch.zeros_like(trial.X)
        optimizer.step()
    builder.note(
        "a zero gradient moves nothing",
        float((plain(leaf) - trial.X).abs().max()),
        "<=",
        1e-12,
        "five steps with zero gradients moved a point that has no momentum.",
    )


def _check_gradients_kept(builder: ReportBuilder, trial: Trial, lr: float) -> None:
    """Weight decay, where it is accepted at all, is not added into p.grad."""
    leaf = trial.leaf()
    try:
        optimizer = trial.make([leaf], lr, weight_decay=0.1)
        leaf.grad = trial.G.clone()
        optimizer.step()
    except (TypeError, ValueError) as error:
        reason = str(error).split(": ")[0]
        builder.skip(f"weight decay: the optimizer refuses it for points ({reason})")
        return
    written = float((leaf.grad - trial.G).abs().max())
    _note_written(builder, written, "weight_decay=0.1")


def _check_maximize(builder: ReportBuilder, trial: Trial) -> None:
    if trial.options.get("maximize") or trial.is_fixed:
        return
    try:
        w = trial.velocity(maximize=True)
    except TypeError:
        builder.skip("maximize: the optimizer has no such argument")
        return
    size = max(float(trial.G.norm()) * float(w.norm()), 1e-300)
    builder.note(
        "maximize ascends",
        float((trial.G * w).sum()) / size,
        ">=",
        1e-6,
        "the cosine between gradient and first step with maximize=True: the argument is accepted "
        "and ignored.",
    )
