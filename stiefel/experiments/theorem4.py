"""Theorem 4 of the CWY paper, seen: SGD on reflection vectors goes to a stationary point.

``min over k' < k of E sum_l |grad_(v_l) f|^2 = o(k^(-1/2 + eps))`` for plain SGD with the step
k^(-1/2), from any nonzero v_l, for CWY and T-CWY (Likhosherstov, Davis, Choromanski, Weller,
AISTATS 2021). Run with it are three controls that break its conditions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stiefel.diagnostics import RateFit, Report, SideConditions, fit_rate
from stiefel.errors import ConfigurationError
from stiefel.geometry import euclidean_gradient
from stiefel.numerics import full_precision
from stiefel.parametrizations import CWY, TCWY

__all__ = ["PROBLEMS", "Control", "Theorem4", "Trajectory", "theorem4"]

#: The two costs, in the order of the leading dimension of every batch.
PROBLEMS = ("quadratic", "procrustes")

_REQUIRED = -0.45  # -1/2 + eps
_PER_DECADE = 64
_CONTROLS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("constant step", {"rate": lambda k: 0.1}, ("step identity",)),
    ("momentum", {"momentum": 0.9}, ("step identity", "orthogonal steps")),
    (
        "weight decay",
        {"weight_decay": 0.1},
        ("step identity", "orthogonal steps", "non-decreasing norms"),
    ),
)


def _theorem_rate(k: int) -> float:
    return k**-0.5


@dataclass(frozen=True)
class Trajectory:
    """One problem in one chart: means over the seeds at the recorded steps, before the step.

    Attributes:
        chart: ``"cwy"`` or ``"tcwy"``.
        problem: One of `PROBLEMS`.
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


# ------------------------------------------------------------------------------- the problems


@dataclass(frozen=True)
class _Costs:
    """f = tr(R X^T M X) - 2 tr(C^T X) + const: both problems, in the leading dimension.

    Quadratic tr(B X^T A X): M = A, R = B, C = 0. Procrustes |A X - B|^2: M = A^T A, R = I,
    C = A^T B. A and B have spectral norm 1, and M, R are symmetric.
    """

    M: Tensor
    R: Tensor
    C: Tensor

    @classmethod
    def draw(cls, n: int, p: int, generator: torch.Generator) -> _Costs:
        def matrix(rows: int, columns: int, symmetric: bool = False) -> Tensor:
            Z = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            Z = (Z + Z.mT) / 2 if symmetric else Z
            return Z / torch.linalg.matrix_norm(Z, 2)

        A, B = matrix(n, n, symmetric=True), matrix(p, p, symmetric=True)
        Z, Y = matrix(n, n), matrix(n, p)
        M = torch.stack([A, Z.mT @ Z])
        R = torch.stack([B, torch.eye(p, dtype=torch.float64)])
        C = torch.stack([torch.zeros(n, p, dtype=torch.float64), Z.mT @ Y])
        return cls(M[:, None], R[:, None], C[:, None])

    def gradient(self, X: Tensor) -> Tensor:
        """df/dX of points ``(2, seeds, n, p)``."""
        return 2 * (self.M @ X @ self.R - self.C)


@dataclass(frozen=True)
class _Records:
    squares: Tensor  # s_k of every step, (steps, 2, seeds)
    point: Tensor  # at the recorded steps, (records, 2, seeds)
    ratios: Tensor  # at the recorded steps, (records, 2)
    conditions: Report


def _train(
    name: str,
    size: tuple[int, int, int],
    steps: int,
    *,
    noise: float,
    seed: int,
    rate: Callable[[int], float] = _theorem_rate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> _Records:
    """SGD on V, both problems and all seeds as one batch; size is (seeds, n, p).

    The seeds differ in their gradient noise; the problem and the first V are the same, for the
    theorem takes the mean over the noise only.
    """
    seeds, n, p = size
    draws = torch.Generator().manual_seed(seed)
    costs = _Costs.draw(n, p, draws)
    batch = (len(PROBLEMS), seeds)
    chart = CWY(n, p, batch=batch) if name == "cwy" else TCWY(n, p, batch=batch)
    V = torch.randn(n, p, generator=draws, dtype=torch.float64)
    V = (V / V.norm(dim=0)).expand(*batch, n, p).clone().requires_grad_()
    first = V.detach().norm(dim=-2)
    optimizer = torch.optim.SGD([V], lr=1.0, momentum=momentum, weight_decay=weight_decay)
    conditions = SideConditions()
    recorded = set(_recorded(steps))
    squares = torch.empty(steps, *batch, dtype=torch.float64)
    point, ratios = [], []
    for k in range(1, steps + 1):
        X = chart(V)
        G = costs.gradient(X.detach())
        noisy = G + noise * torch.randn(X.shape, generator=draws, dtype=torch.float64)
        (true,) = torch.autograd.grad(X, V, G, retain_graph=True)
        (V.grad,) = torch.autograd.grad(X, V, noisy)
        before = V.detach().clone()
        squares[k - 1] = true.square().sum((-2, -1))
        if k in recorded:
            point.append(euclidean_gradient(X.detach(), G).square().sum((-2, -1)))
            ratios.append((before.norm(dim=-2) / first).amin((-2, -1)))
        optimizer.param_groups[0]["lr"] = rate(k)
        optimizer.step()
        conditions.note(k, [before], [V.grad], [V.detach()])
    return _Records(squares, torch.stack(point), torch.stack(ratios), conditions.report())


def _recorded(steps: int) -> list[int]:
    """Steps evenly spaced in log k, 64 a decade where there are as many, the last included."""
    count = int(_PER_DECADE * np.log10(steps)) + 1
    return sorted({*np.geomspace(1, steps, count).round().astype(int).tolist(), steps})


def _trajectory(name: str, index: int, records: _Records) -> Trajectory:
    """Means over seeds first, then the minimum and the windows."""
    s = records.squares[:, index].mean(-1).numpy()
    k = np.arange(1, len(s) + 1)
    picked = np.array(_recorded(len(s)))
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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are small: a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    with full_precision(), _one_thread():
        for name, columns in (("cwy", n), ("tcwy", p)):
            records = _train(name, (seeds, n, columns), steps, noise=noise, seed=seed)
            trajectories += [_trajectory(name, i, records) for i in range(len(PROBLEMS))]
        for name, options, expected in _CONTROLS:
            length = min(control_steps, steps)
            run = _train("cwy", (seeds, n, n), length, noise=noise, seed=seed, **options)
            controls.append(Control(name, expected, run.conditions))
    seconds = time.perf_counter() - begin
    return Theorem4(tuple(trajectories), tuple(controls), steps, seeds, seconds)
