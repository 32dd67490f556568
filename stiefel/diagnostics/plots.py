"""Pictures of reports. Needs matplotlib, which the extra ``stiefel[experiments]`` brings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stiefel.errors import ConfigurationError

if TYPE_CHECKING:
    from stiefel.diagnostics.report import Curve, Report

__all__ = ["SMALLEST", "draw_curves", "new_figure"]

SMALLEST = 1e-18  # what a logarithmic axis shows for a zero


def draw_curves(report: Report, file: str | Path | None = None) -> Any:
    """Draws the curves of a report; see `stiefel.diagnostics.Report.draw`."""
    if not report.curves:
        raise ConfigurationError(f"{report.subject}: the report has no curves to draw")
    figure = new_figure(7, 5)
    axes = figure.subplots()
    for number, curve in enumerate(report.curves):
        _draw(axes, curve, f"C{number}")
    axes.set(xscale="log", yscale="log", xlabel="step length t", ylabel="error")
    axes.set_title(f"{report.subject}: {'ok' if report.ok else 'WRONG'}")
    axes.legend(fontsize="small")
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure`, in inches; `ConfigurationError` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError('pictures need matplotlib: pip install "stiefel[experiments]"')
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: Any, curve: Curve, color: str) -> None:
    """The curve, and a dashed line of the expected slope through its largest step."""
    t, errors = np.array(curve.steps), np.maximum(curve.errors, SMALLEST)
    axes.plot(t, errors, "o-", color=color, markersize=3, linewidth=1, label=curve.name)
    if curve.order is not None:
        largest = t.argmax()
        line = errors[largest] * (t / t[largest]) ** curve.order
        label = f"slope {curve.order:g}"
        axes.plot(t, np.maximum(line, SMALLEST), "--", color=color, linewidth=0.8, label=label)
