"""The page of figures of `stiefel diagnose`."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stiefel.diagnostics import ChartDifferential
from stiefel.experiments.diagnosis import MODEL, Diagnosis
from stiefel.experiments.diagnosis_answers import percent, stationary
from stiefel.experiments.diagnosis_tables import rank_of
from stiefel.experiments.folder import atomic_path

__all__ = ["draw_diagnosis", "save"]

_SMALLEST = 1e-18  # what a logarithmic axis shows for a zero


def draw_diagnosis(diagnosis: Diagnosis) -> Figure:
    """Draws six panels: gradient, slope, feasibility, singular values, states, adjoints.

    Args:
        diagnosis: What was measured.

    Returns:
        The page. A panel without anything to show says why.
    """
    run = diagnosis.run
    figure = Figure(figsize=(15, 9))
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.06, top=0.9, wspace=0.18, hspace=0.45)
    panels = figure.subplots(2, 3).flatten()
    for axes, draw in zip(
        panels, (_gradient, _slope, _feasibility, _singular_values, _states, _adjoints), strict=True
    ):
        draw(axes, diagnosis)
    figure.suptitle(
        f"{run.task.describe()}; method {run.options.method}; step {run.step:,} of "
        f"{run.options.iterations:,}; loss {diagnosis.scores.loss:.4g}, baseline "
        f"{run.task.baseline:.4g}"
    )
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a page as a PNG that is whole or absent."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.getvalue())


def say(axes: Any, text: str) -> None:
    """Writes words where there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, textwrap.fill(text, 42), ha="center", va="center")


def _gradient(axes: Any, diagnosis: Diagnosis) -> None:
    """The squared norm of every weight and of the model, with interval and noise floor."""
    named = [(path, w.estimate, w.batch_noise) for path, w in diagnosis.weights.items()]
    named.append((MODEL, diagnosis.estimate, diagnosis.batch_noise))
    found = [
        (name, estimate, noise)
        for name, estimate, noise in named
        if estimate is not None and math.isfinite(estimate.value)
    ]
    axes.set_title("squared gradient norm, |grad|^2")
    if not found or diagnosis.estimate is None:
        return say(axes, "no Riemannian gradient: no constrained weight, or it is not finite")
    for place, (_, estimate, noise) in enumerate(found):
        low, high = max(estimate.low, _SMALLEST), max(estimate.high, _SMALLEST)
        middle = max(estimate.value, low)
        reach = [[middle - low], [max(high - middle, 0)]]
        axes.errorbar([place], [middle], reach, fmt="o", color="C0", capsize=6)
        floor = [max(noise, _SMALLEST)] * 2  # a NaN draws nothing
        axes.plot([place - 0.3, place + 0.3], floor, ":", color="C3")
    _log(axes, [v for _, e, noise in found for v in (e.value, e.low, e.high, noise)])
    axes.plot(
        [], [], "o", color="C0", label=f"|grad|^2, {percent(found[0][1].confidence)} interval"
    )
    axes.plot([], [], ":", color="C3", label="noise of a batch in |grad|^2")
    axes.set_xlim(-0.6, len(found) - 0.4)
    _name(axes, [name for name, *_ in found])
    axes.set_xlabel(textwrap.fill(f"stationary: {stationary(diagnosis)}", 66), fontsize="small")
    axes.legend(fontsize="small")


def _slope(axes: Any, diagnosis: Diagnosis) -> None:
    """Recorded gradient norms against steps in logarithmic axes, with the fitted line."""
    history = diagnosis.history
    axes.set_title("squared gradient norm while training")
    if history is None:
        return say(axes, "no record: train with --monitor-every STEPS")
    values = [max(value, _SMALLEST) for value in history.values]
    label = "|grad|^2 of batches" + ("" if history.constrained else ", all that is trained")
    axes.plot(history.steps, values, ".-", color="C0", linewidth=0.8, label=label)
    draw_fit(axes, history.judgement.fit, history.steps, values)
    if history.noise_floor is not None:
        axes.axhline(history.noise_floor, color="C3", linestyle=":", label="noise of a batch")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(
        f"training step\n{textwrap.fill(history.said, 70, max_lines=4, placeholder=' ...')}",
        fontsize="small",
    )
    axes.legend(fontsize="small")


def draw_fit(axes: Any, fit: Any, steps: Sequence[float], values: Sequence[float]) -> None:
    """Draws the line of a fitted slope through the middle of its window."""
    if fit is None or not math.isfinite(fit.slope):
        return
    first, last = fit.window
    inside = [
        (math.log(k), math.log(v))
        for k, v in zip(steps, values, strict=True)
        if first <= k <= last and v > 0
    ]
    if not inside:
        return
    x, y = (sum(column) / len(column) for column in zip(*inside, strict=True))
    ends = (max(first, 1), last)
    line = [math.exp(y + fit.slope * (math.log(k) - x)) for k in ends]
    label = f"slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}]"
    axes.plot(ends, line, "--", color="C1", label=label)


def _feasibility(axes: Any, diagnosis: Diagnosis) -> None:
    """The largest residual of every weight beside what rounding explains."""
    axes.set_title("distance to the manifold, max |X^T X - I|")
    found = [(path, weight.feasibility) for path, weight in diagnosis.weights.items()]
    if not found:
        return say(axes, "no constrained weight")
    for place, (_, figures) in enumerate(found):
        axes.bar([place], [max(figures.max_residual, _SMALLEST)], 0.4, color="C2")
        axes.plot([place - 0.3, place + 0.3], [figures.tolerance] * 2, color="black")
    axes.plot([], [], color="black", label="what rounding explains")
    _log(axes, [v for _, figures in found for v in (figures.max_residual, figures.tolerance)])
    axes.set_xlim(-0.6, len(found) - 0.4)
    _name(axes, [path for path, _ in found])
    axes.legend(fontsize="small")


def _singular_values(axes: Any, diagnosis: Diagnosis) -> None:
    """Of the weights; the ends of those of the charts' differentials stand in the legend."""
    axes.set_title("singular values")
    if not diagnosis.singular_values:
        return say(axes, "no recurrent weight with finite entries")
    names = _short(list(diagnosis.singular_values))
    for label, (path, values) in zip(names, diagnosis.singular_values.items(), strict=True):
        weight = diagnosis.weights.get(path)
        if weight is not None and isinstance(weight.differential, ChartDifferential):
            found = weight.differential
            label += f"; its chart: {found.smallest:.2g} to {found.largest:.2g}, {rank_of(found)}"
        axes.plot(range(1, len(values) + 1), values, ".-", linewidth=0.8, label=label)
    every = [value for values in diagnosis.singular_values.values() for value in values]
    if max(every) - min(every) < 0.05:
        axes.set_ylim(min(0.9, min(every)), max(1.1, max(every)))
    axes.set_xlabel("number")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small", loc="lower left")


def _states(axes: Any, diagnosis: Diagnosis) -> None:
    axes.set_title("hidden states, |h_t|")
    _through_time(axes, [(flow.name, flow.states) for flow in diagnosis.flows])


def _adjoints(axes: Any, diagnosis: Diagnosis) -> None:
    axes.set_title("hidden gradients, |dC/dh_t|")
    _through_time(axes, [(flow.name, flow.adjoints) for flow in diagnosis.flows])


def _through_time(axes: Any, curves: list[tuple[str, tuple[float, ...]]]) -> None:
    curves = [(name, norms) for name, norms in curves if any(map(math.isfinite, norms))]
    if not curves:
        return say(axes, "no recurrent network, or its norms are not finite")
    if not any(any(norms) for _, norms in curves):
        return say(axes, "zero at every step of the sequence")
    for name, norms in curves:
        shown = [max(norm, _SMALLEST) for norm in norms]
        axes.plot(range(1, len(norms) + 1), shown, linewidth=1, label=name)
    _log(axes, [norm for _, norms in curves for norm in norms])
    axes.set_xlabel("step t of the sequence")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _log(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis that shows what is positive; a decade below it stands for the rest."""
    positive = [value for value in values if value > _SMALLEST and math.isfinite(value)]
    axes.set_yscale("log")
    if positive:
        axes.set_ylim(min(positive) / 10, max(positive) * 10)


def _name(axes: Any, paths: Sequence[str]) -> None:
    """Names the places 0, 1, ... of an axis; aslant where the names are too long to stand."""
    names = _short(paths)
    long = sum(map(len, names)) > 60
    axes.set_xticks(range(len(names)), names)
    if long:
        axes.tick_params("x", rotation=20, labelsize="small")


def _short(paths: Sequence[str]) -> list[str]:
    """Names without the end that they share, `MODEL` aside; the end of one that is still long."""
    parts = [path.split(".") for path in paths if path != MODEL]
    shared = 0
    if len(parts) > 1:
        least = min(map(len, parts)) - 1  # something is left of each
        while shared < least and len({part[-1 - shared] for part in parts}) == 1:
            shared += 1
    names = [
        path if path == MODEL else ".".join(path.split(".")[: -shared or None]) for path in paths
    ]
    return [name if len(name) <= 32 else "..." + name[-29:] for name in names]
