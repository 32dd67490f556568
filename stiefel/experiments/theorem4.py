"""Theorem 4 of the CWY paper, seen: SGD on reflection vectors goes to a stationary point.

``min over k' < k of E sum_l |grad_(v_l) f|^2 = o(k^(-1/2 + eps))`` for plain SGD with the step
k^(-1/2), from any nonzero v_l, for CWY and T-CWY (Likhosherstov, Davis, Choromanski, Weller,
AISTATS 2021). Run with it are three controls that break its conditions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stiefel.diagnostics import RateFit, Report, fit_rate
from stiefel.errors import ConfigurationError
from stiefel.experiments.theorem4_runs import (
    PROBLEMS,
    Records,
    one_thread,
    recorded_steps,
    run_sgd,
)
from stiefel.numerics import full_precision

__all__ = ["Control", "Theorem4", "Trajectory", "theorem4"]

_REQUIRED = -0.45  # -1/2 + eps
_CONTROLS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("constant step", {"rate": lambda k: 0.1}, ("step identity",)),
    ("momentum", {"momentum": 0.9}, ("step identity", "orthogonal steps")),
    (
        "weight decay",
        {"weight_decay": 0.1},
        ("step identity", "orthogonal steps", "non-decreasing norms"),
    ),
)


@dataclass(frozen=True)
class Trajectory:
    """One problem in one chart: means over the seeds at the recorded steps, before the step.

    Attributes:
        chart: ``"cwy"`` or ``"tcwy"``.
        problem: ``"quadratic"`` or ``"procrustes"``.
        steps: Recorded steps k, evenly spaced in log k.
        coordinate: Mean of s_k = sum_l |grad_(v_l) f|^2, of the true gradient.
        minimum: Minimum of that mean over all steps up to k.
        windowed: Average of that mean over [k/2, k], weighted with the steps k^(-1/2).
        point: Mean of |G - X sym(X^T G)|^2, the gradient with respect to the point.
        norm_ratio: Smallest |v_k| / |v_0| of all vectors and seeds.
        minimum_fit: Slope of `minimum` over the last two decades.
        windowed_fit: Slope of `windowed` over the last two decades.
        conditions: The side conditions, checked at every step of this chart.
    """

    chart: str
    problem: str
    steps: tuple[int, ...]
    coordinate: tuple[float, ...]
    minimum: tuple[float, ...]
    windowed: tuple[float, ...]
    point: tuple[float, ...]
    norm_ratio: tuple[float, ...]
    minimum_fit: RateFit
    windowed_fit: RateFit
    conditions: Report

    @property
    def ok(self) -> bool:
        """Whether both slopes are at most -0.45, the conditions hold, and no v is shorter."""
        slopes = (self.minimum_fit.slope, self.windowed_fit.slope)
        return max(slopes) <= _REQUIRED and self.conditions.ok and min(self.norm_ratio) >= 1


@dataclass(frozen=True)
class Control:
    """A run that breaks conditions of the theorem, and what was found.

    Attributes:
        name: What was done.
        expected: The conditions that it breaks.
        report: The side conditions against the step k^(-1/2).
    """

    name: str
    expected: tuple[str, ...]
    report: Report

    @property
    def broken(self) -> tuple[str, ...]:
        """The conditions that were found broken."""
        return tuple(finding.name for finding in self.report.failures)

    @property
    def ok(self) -> bool:
        """Whether exactly the expected conditions were found broken."""
        return self.broken == self.expected


@dataclass(frozen=True)
class Theorem4:
    """What `theorem4` found. Print it to read it; `stiefel.experiments.theorem4_page` draws it."""

    trajectories: tuple[Trajectory, ...]
    controls: tuple[Control, ...]
    steps: int
    seeds: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the theorem was seen in all four runs and all controls were named."""
        return all(run.ok for run in (*self.trajectories, *self.controls))

    def table(self) -> list[dict[str, Any]]:
        """One row a trajectory."""
        return [
            {
                "chart": run.chart,
                "problem": run.problem,
                "slope of the minimum": round(run.minimum_fit.slope, 3),
                "slope over [k/2, k]": round(run.windowed_fit.slope, 3),
                "minimum of s_k": run.minimum[-1],
                "|grad|^2 at the point": run.point[-1],
                "least |v_k|/|v_0|": round(min(run.norm_ratio), 3),
                "last |v_k|/|v_0|": round(run.norm_ratio[-1], 3),
                "ok": run.ok,
            }
            for run in self.trajectories
        ]

    def control_table(self) -> list[dict[str, Any]]:
        """One row a control."""
        return [
            {"control": run.name, "breaks": ", ".join(run.broken) or "nothing", "ok": run.ok}
            for run in self.controls
        ]

    def summary(self) -> dict[str, Any]:
        """Everything but the curves, ready for JSON."""
        return {
            "ok": self.ok,
            "steps": self.steps,
            "seeds": self.seeds,
            "seconds": self.seconds,
            "trajectories": self.table(),
            "controls": self.control_table(),
        }

    def __str__(self) -> str:
        verdict = "as the theorem says" if self.ok else "NOT as the theorem says"
        head = f"theorem 4: {self.steps} steps, {self.seeds} seeds, {self.seconds:.0f} s: {verdict}"
        return "\n".join([head, "", *_text(self.table()), "", *_text(self.control_table())])


def _text(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as lines of aligned columns."""
    shown = [[_shown(value) for value in row.values()] for row in rows]
    cells = [list(rows[0]), *shown]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if abs(value) < 0.01 else f"{value:.3f}"


def _trajectory(name: str, index: int, records: Records) -> Trajectory:
    """Means over seeds first, then the minimum and the windows."""
    s = records.squares[:, index].mean(-1).numpy()
    k = np.arange(1, len(s) + 1)
    picked = np.array(recorded_steps(len(s)))
    least = np.minimum.accumulate(s)
    weights = k**-0.5
    weighted = np.concatenate([[0.0], np.cumsum(weights * s)])
    total = np.concatenate([[0.0], np.cumsum(weights)])
    start = (picked - 1) // 2  # the window is start + 1, ..., k
    windowed = (weighted[picked] - weighted[start]) / (total[picked] - total[start])
    window = (len(s) / 100, len(s))
    return Trajectory(
        name, PROBLEMS[index], tuple(picked.tolist()), tuple(s[picked - 1].tolist()),
        tuple(least[picked - 1].tolist()), tuple(windowed.tolist()),
        tuple(records.point[:, index].mean(-1).tolist()),
        tuple(records.ratios[:, index].tolist()),
        fit_rate(picked.tolist(), least[picked - 1].tolist(), window=window),
        fit_rate(picked.tolist(), windowed.tolist(), window=window),
        records.conditions,
    )  # fmt: skip


def theorem4(
    steps: int = 20_000,
    seeds: int = 5,
    *,
    n: int = 10,
    p: int = 4,
    noise: float = 0.2,
    seed: int = 0,
    control_steps: int = 2_000,
) -> Theorem4:
    """Runs SGD on f(X) = tr(B X^T A X) and |A X - B|^2 in the charts CWY and T-CWY.

    Gaussian noise is added to df/dX; the step is k^(-1/2), without momentum or weight decay;
    everything is float64. The record is the true gradient, not the noisy one. Step-weighted
    averages over [1, k] would fall like k^(-1/2) whatever happens, so windows [k/2, k] are used.
    The coordinate gradient shrinks as |v| grows: the gradient with respect to the point stands
    beside it. Slopes are fitted over the last two decades of steps.

    Args:
        steps: Steps of each run, at least 400.
        seeds: Draws of the noise, whose mean is taken first.
        n: Rows; CWY trains n x n.
        p: Columns of T-CWY, less than n.
        noise: Standard deviation of each entry of the gradient noise.
        seed: Of the problems, the start and the noise.
        control_steps: Steps of the controls, at most `steps`: constant step 0.1, momentum 0.9,
            weight decay 0.1.

    Returns:
        Trajectories and controls; `ok` says whether all is as the theorem says.

    Raises:
        ConfigurationError: If there are fewer than 400 steps or no seeds, or p >= n.

    Example:
        >>> from stiefel.experiments.theorem4 import theorem4
        >>> result = theorem4(steps=400, seeds=2, n=4, p=2, control_steps=100)
        >>> [control.broken[-1] for control in result.controls]
        ['step identity', 'orthogonal steps', 'non-decreasing norms']
    """
    if steps < 400 or seeds < 1 or control_steps < 1 or not 1 <= p < n:
        raise ConfigurationError(
            "expected steps >= 400 (slopes are fitted over two decades), seeds >= 1, control_steps"
            f" >= 1 and 1 <= p < n; got steps={steps}, seeds={seeds}, "
            f"control_steps={control_steps}, n={n}, p={p}"
        )
    begin = time.perf_counter()
    trajectories, controls = [], []
    with torch.inference_mode(False), full_precision(), one_thread():
        for name, columns in (("cwy", n), ("tcwy", p)):
            records = run_sgd(name, (seeds, n, columns), steps, noise=noise, seed=seed)
            trajectories += [_trajectory(name, i, records) for i in range(len(PROBLEMS))]
        for name, options, expected in _CONTROLS:
            length = min(control_steps, steps)
            run = run_sgd("cwy", (seeds, n, n), length, noise=noise, seed=seed, **options)
            controls.append(Control(name, expected, run.conditions))
    seconds = time.perf_counter() - begin
    return Theorem4(tuple(trajectories), tuple(controls), steps, seeds, seconds)
