"""What a run leaves to look at: the table, the summary, and the picture of its loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from stiefel.experiments.folder import SUMMARY_KEYS, atomic_path
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.tasks import TASKS

__all__ = ["DIVERGED", "SUMMARY_KEYS", "plot_loss", "print_table", "warn_if_diverged"]

_SMALLEST = 1e-9  # what a logarithmic axis shows for a zero
DIVERGED = 2.0  #: a loss that has grown by this factor is no result


def print_table(console: Console, summary: dict[str, Any]) -> None:
    """Prints loss, baseline, accuracy, orthogonality error and seconds."""
    share, error = summary["loss"] / summary["baseline"], summary["orthogonality_error"]
    times = f"{share:.2%} of" if share < 10 else f"{share:.3g} times"
    word = TASKS[summary["task"]].loss_word
    title = f"{summary['task']}, {summary['method']}: {word} is {times} the baseline"
    table = Table(title=title, title_justify="left")
    cells = {
        "loss": f"{summary['loss']:.4g}",
        "baseline": f"{summary['baseline']:.4g}",
        "accuracy": f"{summary['accuracy']:.2%}",
        "orthogonality error": "none" if error is None else f"{error:.1e}",
        "seconds": f"{summary['seconds']:.1f}",
    }
    for heading in cells:
        table.add_column(heading, justify="right")
    table.add_row(*cells.values())
    console.print(table)


def warn_if_diverged(console: Console, summary: dict[str, Any], metrics: Path) -> None:
    """Says so where training has made the loss larger than it was at the start.

    Args:
        console: Where to write.
        summary: What the run ended with.
        metrics: The ``metrics.csv`` of the run, whose first row has the loss at the start.
    """
    first = next((row["loss"] for row in read_metrics(metrics) if "loss" in row), None)
    if first is not None and summary["loss"] > DIVERGED * first:
        console.print(
            f"training diverged: the loss rose from {first:.4g} to {summary['loss']:.4g}; lower "
            "--lr or --lr-orthogonal",
            highlight=False,
            soft_wrap=True,
        )


def plot_loss(
    metrics: Path, plot: Path, *, baseline: float, title: str, measure: str = "cross-entropy, nats"
) -> None:
    """Draws loss against the baseline, with the orthogonality error on a second axis.

    A model without weights to measure has no second axis.

    Args:
        metrics: The ``metrics.csv`` of the run.
        plot: The PNG to write.
        baseline: The task's baseline.
        title: Above the picture.
        measure: What the loss measures, and its unit.
    """
    rows = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    axes = [left]
    loss = _column(rows, "loss")
    left.plot(*loss, color="C0", linewidth=1, label="training loss")
    left.plot(*_column(rows, "evaluation_loss"), "o", color="C1", label="evaluation loss")
    left.axhline(baseline, color="black", linestyle="--", label=f"baseline {baseline:.4g}")
    error = _column(rows, "orthogonality_error")
    if error[0]:
        right = left.twinx()
        right.plot(*error, color="C2", linewidth=1, linestyle=":", label="orthogonality error")
        right.set_ylabel("orthogonality error, max |X^T X - I|")
        axes.append(right)
    for axis in axes:
        axis.set_yscale("log")
    left.set_xlabel("training step")
    left.set_ylabel(measure)
    left.set_title(title)
    lines = [line for axis in axes for line in axis.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="best", fontsize="small")
    with atomic_path(plot) as path:
        figure.savefig(path, format="png", dpi=120)


def _column(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [
        (row["step"], max(row[name], _SMALLEST))
        for row in rows
        if not math.isnan(row.get(name, math.nan))
    ]
    return [step for step, _ in found], [value for _, value in found]
