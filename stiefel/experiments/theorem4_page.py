"""A page of figures of `stiefel.experiments.theorem4`. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stiefel.diagnostics.plots import SMALLEST, new_figure
from stiefel.experiments.theorem4 import Theorem4

__all__ = ["draw"]


def draw(result: Theorem4, file: str | Path | None = None) -> Any:
    """Draws gradients, averages and norms of all runs, and what the controls break.

    Args:
        result: What `stiefel.experiments.theorem4.theorem4` returned.
        file: Where to write the page, a PNG or what its name ends in; None writes none.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ConfigurationError: If matplotlib is missing.
    """
    figure = new_figure(11, 12)
    axes = figure.subplots(3, 2)
    panels = (
        ("minimum", "$s = \\sum_l |\\nabla_{v_l} f|^2$, mean over seeds: least so far"),
        ("windowed", "$s$, average over [k/2, k]"),
        ("coordinate", "$s$ at every recorded step"),
        ("point", "squared gradient with respect to the point"),
        ("norm_ratio", "least $|v_k| / |v_0|$"),
    )
    for ax, (name, title) in zip(axes.flat, panels, strict=False):
        _draw_runs(ax, result, name)
        ax.set(title=title, xlabel="step k")
    _draw_controls(axes[2, 1], result)
    axes[0, 0].legend(fontsize="small")
    verdict = "as the theorem says" if result.ok else "NOT as the theorem says"
    figure.suptitle(f"Theorem 4: {result.steps} steps, {result.seeds} seeds: {verdict}")
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure


def _draw_runs(ax: Any, result: Theorem4, name: str) -> None:
    """A curve for each trajectory; a dashed line of slope -1/2 beside gradients."""
    fits = {"minimum": "minimum_fit", "windowed": "windowed_fit"}
    for run in result.trajectories:
        label = f"{run.chart}, {run.problem}"
        if name in fits:
            label += f": slope {getattr(run, fits[name]).slope:.2f}"
        ax.loglog(run.steps, getattr(run, name), linewidth=1, label=label)
    if name == "norm_ratio":  # a small range, which decades do not resolve
        ax.set_yscale("linear")
    if name != "norm_ratio":
        run = result.trajectories[0]
        k = np.array(run.steps, dtype=float)
        top = max(getattr(run, name)[len(k) // 2] for run in result.trajectories)
        ax.loglog(
            k, 2 * top * (k / k[len(k) // 2]) ** -0.5, "k--", linewidth=0.8, label="slope -1/2"
        )
    if name == "windowed":
        ax.legend(fontsize="small")


def _draw_controls(ax: Any, result: Theorem4) -> None:
    """Residuals of the side conditions as bars, over one where a bound is broken."""
    names = [finding.name for finding in result.controls[0].report.findings]
    reports = [("theorem", result.trajectories[0].conditions)]
    reports += [(control.name, control.report) for control in result.controls]
    width = 0.8 / len(reports)
    for i, (label, report) in enumerate(reports):
        heights = [max(report[name].measured / report[name].bound, SMALLEST) for name in names]
        ax.bar(np.arange(len(names)) + (i - 1.5) * width, heights, width, label=label)
    ax.axhline(1, color="k", linewidth=0.8, linestyle="--")
    ax.set(yscale="log", ylim=(1e-4, 1e20), title="worst residual / bound of the side conditions")
    ax.set_xticks(range(len(names)), names)
    ax.legend(fontsize="small")
