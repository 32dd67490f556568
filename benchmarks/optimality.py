"""How fast do the methods come down to a minimum that is known?

Four float64 problems with a known minimum: principal components, Procrustes over O(n), Brockett's
function and planted joint diagonalisation. Every method starts at the same point and is given the
same value, gradient and Hessian-vector product in closed form; methods with a rate are tuned, by
short runs over a few rates (a tenth of the time each). The gap is ``(f - min)/|min|``, measured
while the clock stands still; a point off the manifold is first moved to the nearest one, and its
row says so. `minimize` and pymanopt end by their own rules at a gradient of 1e-8 of the ambient
gradient, and every run at a gap of 1e-14.

T is the time at which the first of our methods had a gap of 1e-10. The methods of `minimize` have
30 times ``--budget`` seconds, the peers 1.2 T (three times the budget where T is not known), our
optimizers with a rate that much too, but at most five times the budget.
``--picture FILE`` draws all curves.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, contestants, present
from benchmarks.harness import Row, Section, Settings, Verdict, judge
from benchmarks.problems import KnownMinimum, problems
from benchmarks.traces import Finished, Trace
from stiefel.errors import StiefelError

__all__ = ["draw", "sections"]

_LEVELS = (1e-2, 1e-6, 1e-10)
_GOAL = 1e-10
#: A gap below this is rounding, and counts as this.
_ROUNDING = 1e-15

Result = tuple[str, Trace]


def _trace(runner: Any, problem: KnownMinimum, settings: Settings, limit: float) -> Trace:
    """One run, however it ends."""
    trace = Trace(problem, settings, limit)
    try:
        runner(problem, trace)
    except Finished:
        pass
    except (StiefelError, ArithmeticError, ValueError) as error:
        trace.note = f"failed, {type(error).__name__}"
    return trace


def _tuned(
    contestant: Contestant, problem: KnownMinimum, settings: Settings, limit: float
) -> Result:
    """The run of the candidate that got farthest in a tenth of the time, and its label."""
    candidates = contestant.candidates(problem)
    label = next(iter(candidates))
    if len(candidates) > 1:
        short = {
            name: _trace(runner, problem, settings, limit / 10).best
            for name, runner in candidates.items()
        }
        label = min(short, key=lambda name: short[name])
    return label, _trace(candidates[label], problem, settings, limit)


def _row(name: str, label: str, trace: Trace, common: float) -> Row:
    values: dict[str, float | str | None] = {
        f"s to {level:g}": trace.reached(level) for level in _LEVELS
    }
    at = trace.at(common)
    values |= {
        "final gap": trace.best if math.isfinite(trace.best) else None,
        "gap at T": at if math.isfinite(at) else None,
        "iterations": trace.iterations,
        "residual": trace.residual,
    }
    words = [label, trace.note, f"{trace.moved} points moved" if trace.moved else ""]
    values["remarks"] = "; ".join(word for word in words if word)
    return Row(name, values)


def _ahead(results: dict[str, Result], ours: set[str], level: float) -> tuple[float, float | None]:
    """When ours first have a gap of at most `level`, and the peers' least gap then by `level`.

    Above 1 no peer was there before. Without peers there is no quotient; if ours are never there
    it is 0.
    """
    when = min(
        (t for name in ours if (t := results[name][1].reached(level)) is not None),
        default=math.inf,
    )
    others = [results[name][1] for name in results if name not in ours]
    if not others:
        return when, None
    return when, min(trace.at(when) for trace in others) / level if when < math.inf else 0.0


def _verdicts(
    problem: KnownMinimum, results: dict[str, Result], ours: set[str], settings: Settings
) -> list[Verdict]:
    best = min((c.name for c in contestants() if c.solver), key=lambda name: results[name][1].best)
    final = results[best][1].best
    text = f"{problem.name}: {best} reaches a relative gap of 1e-10"
    verdicts = [judge(text, final, _GOAL, final <= _GOAL, settings)]
    for level in (1e-6, 1e-10):
        _, factor = _ahead(results, ours, level)
        text = f"{problem.name}: least gap of a peer over ours, when ours first have {level:g}"
        met = factor is not None and factor > 1
        verdicts.append(judge(text, factor, 1, met, settings))
    return verdicts


def _section(problem: KnownMinimum, settings: Settings) -> tuple[Section, dict[str, Result]]:
    field = contestants()
    if settings.device != "cpu":
        field = [c for c in field if c.package != "pymanopt"]  # numpy
    ours = {contestant.name for contestant in field if contestant.ours}
    results: dict[str, Result] = {}
    limit = 0.02 if settings.quick else 30 * settings.budget
    for contestant in sorted(field, key=lambda c: not c.solver):  # solvers first
        if not present(contestant):
            continue
        if not contestant.solver and not settings.quick:
            when, _ = _ahead(results, ours & set(results), _GOAL)
            limit = 1.2 * when if when < math.inf else 3 * settings.budget
            if contestant.ours:
                limit = min(limit, 5 * settings.budget)
        results[contestant.name] = _tuned(contestant, problem, settings, limit)
    when, _ = _ahead(results, ours, _GOAL)
    common = when if when < math.inf else 3 * settings.budget
    rows = [
        _row(c.name, *results[c.name], common)
        if c.name in results
        else Row(c.name, {}, f"not installed: pip install '.[benchmarks]' ({c.package})")
        for c in field
    ]
    title = f"{problem.title}; T = {common:.3g} s"
    return Section(title, rows, _verdicts(problem, results, ours, settings)), results


def draw(curves: dict[str, dict[str, Result]], file: Path) -> None:
    """Draws gap against time, one panel a problem.

    Args:
        curves: Results by problem and method.
        file: A picture file of any kind that matplotlib writes.
    """
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(13, 9), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    ours = {contestant.name for contestant in contestants() if contestant.ours}
    for panel, (title, results) in zip(panels, curves.items(), strict=False):
        for number, (name, (_, trace)) in enumerate(results.items()):
            gaps = [max(gap, _ROUNDING) for gap in trace.gaps]
            style = "-" if name in ours else "--"
            panel.plot(trace.seconds, gaps, style, color=f"C{number % 10}", label=name, lw=1.4)
        panel.set(title=title, yscale="log", xscale="log", xlabel="seconds", ylabel="relative gap")
        panel.grid(visible=True, alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file, dpi=120)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields a table for each problem.

    Args:
        settings: Device, clock, budget (a thirtieth of a solver's time), the picture's file.
    """
    curves = {}
    for problem in problems(settings.quick, settings.device):
        section, results = _section(problem, settings)
        curves[problem.title] = results
        yield section
    if settings.picture is not None:
        draw(curves, settings.picture)
