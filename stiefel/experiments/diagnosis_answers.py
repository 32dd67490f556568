"""The answers of `stiefel diagnose`: what the figures say of a run, in a sentence or two each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stiefel.diagnostics import ChartDifferential
from stiefel.experiments.diagnosis import Diagnosis, Flow
from stiefel.experiments.history import History

__all__ = ["answers", "is_deficient", "percent", "stationary"]

_FLAT = 1e-6  # of the largest singular value: a differential as flat as this has lost a direction
_LOST = 1e3  # a gradient that grows or shrinks by more than this along the sequence


def answers(diagnosis: Diagnosis) -> list[str]:
    """What the figures say.

    Args:
        diagnosis: What was measured.

    Returns:
        Sentences that begin with what they are about: whether the run diverged, is on the
        manifold and stationary, how it went there, and what gradients do along the sequence.
    """
    said = []
    if diagnosis.diverged:
        said.append(
            f"training has diverged: the loss was {diagnosis.first_loss:.4g} at the start and is "
            f"{diagnosis.scores.loss:.4g}; train again with a lower --lr or --lr-orthogonal"
        )
    if diagnosis.weights:
        said.extend(_on_the_manifold(diagnosis))
        said.append(f"stationary: {stationary(diagnosis)}")
    else:
        said.extend(_plain(diagnosis))
    said.append(f"while training: {_while_training(diagnosis.history)}")
    said.extend(f"gradients through time: {_through_time(flow)}" for flow in diagnosis.flows)
    for path, weight in diagnosis.weights.items():
        said.extend(f"chart: {words}" for words in _of_differential(path, weight.differential))
    return said


def stationary(diagnosis: Diagnosis) -> str:
    """Whether the gradient over all constrained weights can be told from zero."""
    estimate = diagnosis.estimate
    if estimate is None or not math.isfinite(estimate.value):
        return "no answer, the gradient is not finite"
    share = percent(estimate.confidence)
    if estimate.low == estimate.high == 0:
        if diagnosis.model is not None and diagnosis.model.gradient_norm > 0:
            return "yes, exactly: on no batch is there a direction along the manifold to go"
        return (
            "no answer, the gradient is exactly zero on every batch: the loss does not see the "
            "weights at all. Look at the hidden states, which may all be zero"
        )
    noise = f"the noise of one batch adds {diagnosis.batch_noise:.2g} to it"
    if math.isnan(diagnosis.batch_noise):
        noise = "these batches are the whole training set"
    if estimate.is_noise:
        return (
            f"as far as these batches show. |grad|^2 may be zero, and is at most "
            f"{estimate.high:.2g} with {share} confidence; {noise}. More --samples see further"
        )
    return (
        f"no. |grad|^2 is above zero, {estimate.value:.2g}, with {share} confidence from "
        f"{estimate.low:.2g} to {estimate.high:.2g}; {noise}"
    )


def _on_the_manifold(diagnosis: Diagnosis) -> Iterator[str]:
    found = {path: weight.feasibility for path, weight in diagnosis.weights.items()}
    off = {path: figures for path, figures in found.items() if not figures.ok}
    for path, figures in off.items():
        yield (
            f"on the manifold: no, {path} is off by {figures.max_residual:.1e}, and "
            f"{figures.tolerance:.1e} is what rounding explains"
        )
    if not off:
        method = diagnosis.run.method
        worst = max(found.values(), key=lambda figures: figures.max_residual / figures.tolerance)
        how = f"near it, as method {method.name} does" if method.near else "yes, to rounding"
        yield (
            f"on the manifold: {how}. max |X^T X - I| is {worst.max_residual:.1e}, and "
            f"{worst.tolerance:.1e} is allowed"
        )


def _while_training(history: History | None) -> str:
    if history is None:
        return (
            "not recorded. stiefel train --monitor-every STEPS writes what is needed to say "
            "whether the gradient still falls"
        )
    went = ""
    if len(history.steps) > 1:
        ends = (0, -1)
        a, b = (f"{history.values[i]:.2g} at step {history.steps[i]:,}" for i in ends)
        whose = "" if history.constrained else " of all that is trained"
        went = f". Of single batches |grad|^2{whose} was {a} and {b}"
    return history.said + went


def _plain(diagnosis: Diagnosis) -> Iterator[str]:
    yield (
        f"no constrained weight: method {diagnosis.run.options.method} trains no weight on a "
        "manifold, so there is no residual and no Riemannian gradient to measure"
    )
    for path, values in diagnosis.singular_values.items():
        yield (
            f"{path} is a plain matrix, singular values from {values[-1]:.4g} to {values[0]:.4g}"
        )


def _through_time(flow: Flow) -> str:
    if flow.ends is None:
        return f"{flow.name}, not finite"
    (s, first), (t, last) = flow.ends
    if first == last == 0:
        return f"{flow.name}, none: |dC/d{flow.name[0]}_t| is zero at both ends"
    ratio = first / last if last > 0 else math.inf
    verdict = "vanish" if ratio < 1 / _LOST else "explode" if ratio > _LOST else "survive"
    return (
        f"{flow.name}, {verdict}. Back from step {t} to step {s} of the sequence "
        f"|dC/d{flow.name[0]}_t| goes from {last:.2g} to {first:.2g}, a factor of "
        f"{flow.growth:.4g} a step"
    )


def _of_differential(path: str, found: ChartDifferential | str | None) -> Iterator[str]:
    if isinstance(found, str):
        yield f"{path}, its differential was not measured ({found})"
    elif found is not None and is_deficient(found):
        yield (
            f"{path} is at a point where its chart is rank-deficient (singular values of the "
            f"differential {found.smallest:.1e} to {found.largest:.1e}): the coordinates cannot "
            "move it along every direction, and a small coordinate gradient proves nothing. Read "
            "|grad|, which is that of the weight itself"
        )


def is_deficient(found: ChartDifferential) -> bool:
    """Whether some tangent directions are out of reach of the coordinates, or nearly so."""
    short = found.rank is not None and found.rank < found.dimension
    return short or found.smallest <= _FLAT * found.largest


def percent(share: float) -> str:
    """A share in per cent, such as ``95 %``."""
    return f"{100 * share:.3g} %"
