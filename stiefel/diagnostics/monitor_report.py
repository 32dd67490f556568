"""What the records of a monitor say: feasible, stationary, how sure that is, what is missing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stiefel.diagnostics import columns as names
from stiefel.diagnostics.columns import MODEL, STEP, column, is_column
from stiefel.diagnostics.feasibility import Feasibility
from stiefel.diagnostics.judgements import Judgement, Verdict
from stiefel.diagnostics.rates import judge_rate
from stiefel.diagnostics.report import Finding, Report
from stiefel.errors import ConfigurationError

__all__ = [
    "JUDGED",
    "MonitorReport",
    "default_figure",
    "figure_of",
    "is_measured",
    "judge_records",
    "write_report",
]

Records = Sequence[Mapping[str, Any]]

_SQUARED = "_squared"
#: What is judged of a model with constrained weights, and of one without.
JUDGED = column(MODEL, names.EUCLIDEAN_NORM) + _SQUARED
_OF_ORDINARY = column(MODEL, names.TOTAL_NORM) + _SQUARED
_STATIONARY = {
    Verdict.DECREASING: "not known to be yet, the gradient still falls",
    Verdict.NOISE_FLOOR: "as far as the noise of a batch lets it be seen",
    Verdict.DIVERGING: "no",
    Verdict.TOO_EARLY: "too early to say",
}


@dataclass(frozen=True)
class MonitorReport(Report):
    """A `Report` on a training run, with what it says in words.

    Attributes:
        judgement: The verdict on the gradient; None where there is no gradient to judge.
        notes: Sentences on feasibility, stationarity, and what to know beside them.
    """

    judgement: Judgement | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head, *rest = super().__str__().split("\n")
        notes = [
            textwrap.fill(note, 97, initial_indent="  ", subsequent_indent="    ")
            for note in self.notes
        ]
        return "\n".join([head, *notes, *rest])


def default_figure(records: Records) -> str:
    """What is judged where nothing else is asked for: of constrained weights if any was seen."""
    known = {name for row in records for name in row}
    constrained = {column(MODEL, name) for name in (names.EUCLIDEAN_NORM, names.MAX_RESIDUAL)}
    ordinary = column(MODEL, names.TOTAL_NORM) in known and not known & constrained
    return _OF_ORDINARY if ordinary else JUDGED


def is_measured(records: Records, *, constrained: bool) -> bool:
    """Whether there is a gradient to judge: of a point where there are any, else any gradient."""
    figures = {column(MODEL, names.GRADIENT_NORM)}
    if not constrained:
        figures.add(column(MODEL, names.TOTAL_NORM))
    return any(figures & row.keys() for row in records)


def figure_of(records: Records, figure: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure, where it was recorded.

    Args:
        records: Rows.
        figure: A key of a row, such as ``"model/canonical_norm"``; with ``_squared`` behind it the
            squares of it.

    Returns:
        Steps, and as many values.

    Raises:
        ConfigurationError: If no row has such a figure.
    """
    known = dict.fromkeys(name for row in records for name in row)
    power, key = 1, figure
    if key not in known and key.endswith(_SQUARED):
        power, key = 2, key.removesuffix(_SQUARED)
    rows = [row for row in records if isinstance(row.get(key), int | float)]
    if not rows or key == STEP:
        numbers = [name for name in known if name.startswith(column(MODEL, ""))]
        raise ConfigurationError(
            f"no record has the figure {figure!r}: there are {', '.join(numbers) or 'none yet'}, "
            "the same of every weight under its path, and squares with _squared behind them"
        )
    return [row[STEP] for row in rows], [float(row[key]) ** power for row in rows]


def judge_records(
    records: Records, figure: str, *, scaled: bool = False, **options: Any
) -> Judgement:
    """Judges how a figure of the records goes; see `StationarityMonitor.judge`.

    Args:
        records: Rows.
        figure: As in `figure_of`.
        scaled: Whether a scaler of the loss skips steps whose gradients are not finite: these are
            left out then, but not those at the end.
        **options: Those of `stiefel.diagnostics.judge_rate`.

    Returns:
        The judgement.
    """
    steps, values = figure_of(records, figure)
    if scaled:
        finite = [math.isfinite(value) for value in values]
        last = max((i for i, ok in enumerate(finite) if ok), default=-1)
        kept = [i for i, ok in enumerate(finite) if ok or i > last]
        steps, values = [steps[i] for i in kept], [values[i] for i in kept]
    # a NaN is no gap here, where gaps are no records: it is as bad as an infinity
    values = [math.inf if math.isnan(value) else value for value in values]
    return judge_rate(steps, values, **options)


def write_report(
    records: Records,
    step: int,
    weights: Mapping[str, Feasibility],
    judgement: Judgement | None,
    figure: str,
    side_conditions: Report | None,
) -> MonitorReport:
    """Puts the report together; see `StationarityMonitor.report`.

    Args:
        records: Rows.
        step: Training steps so far.
        weights: Last measurement of every weight.
        judgement: On the gradient.
        figure: What was judged.
        side_conditions: Their report.

    Returns:
        The report.
    """
    findings = [_feasible(found) for found in weights.values()]
    wrong = [found.path for found in weights.values() if not found.ok]
    feasible = "yes" if weights else "not measured, no constrained weight was seen"
    notes = [f"feasible: {'no, see ' + ', '.join(wrong) if wrong else feasible}"]
    steps = [column(MODEL, name) for name in (names.MAX_RESIDUAL, names.TOTAL_NORM)]
    last = next((row for row in reversed(records) if any(key in row for key in steps)), {})
    skipped = [f"{key}: {value}" for key, value in last.items() if is_column(key, names.MISSING)]
    if judgement is None:
        notes.append("stationary: not measured, there is no gradient with respect to a point")
    else:
        notes.append(f"stationary: {_stationary(judgement, records)}")
        verdict = judgement.verdict.value
        if judgement.verdict is not Verdict.TOO_EARLY:
            verdict += f", confidence {judgement.confidence:.0%}"
        notes.append(f"{figure}: {verdict}: {judgement.explanation}")
        if weights:
            share = last.get(column(MODEL, names.RELATIVE), math.nan)
            notes.append(f"share of the gradient to move along, at the last record: {share:.3g}")
        findings += _falls(judgement, figure)
    notes += _noise(records)
    warned = {key: row for row in records for key in row if is_column(key, names.WARNING)}
    notes += [f"step {row[STEP]}, {key}: {row[key]}" for key, row in warned.items()]
    known = {key for row in records for key in row}
    if weights and not any(is_column(key, names.DIFFERENTIAL_LARGEST) for key in known):
        skipped.append("singular values of the charts' differentials: differential_every= is None")
    if side_conditions is not None:
        findings += side_conditions.findings
        skipped += side_conditions.skipped
    subject = f"training up to step {step}, {len(records)} records"
    return MonitorReport(subject, tuple(findings), (), tuple(skipped), judgement, tuple(notes))


def _feasible(found: Feasibility) -> Finding:
    return Finding(
        f"largest residual of {found.path} ({found.via})",
        found.max_residual,
        "<=",
        found.tolerance,
        f"The weight is off its manifold: singular values from {found.smallest_singular_value:.3g} "
        f"to {found.largest_singular_value:.3g}. An optimizer that does not know the manifold may "
        "move it, or a NaN came in; stiefel.optim.build checks for the former.",
    )


def _falls(judgement: Judgement, figure: str) -> list[Finding]:
    """The finding of a verdict that is one: that the gradient falls, or that it does not."""
    if judgement.verdict not in (Verdict.DECREASING, Verdict.DIVERGING):
        return []
    slope = -math.inf if judgement.verdict is Verdict.DECREASING else math.nan  # ends in 0, or NaN
    slope = slope if judgement.fit is None else judgement.fit.slope
    return [Finding(f"slope of {figure}", slope, "<=", 0.0, judgement.explanation)]


def _stationary(judgement: Judgement, records: Records) -> str:
    """The verdict as an answer; a measurement of the noise at the end sees below its floor."""
    row = records[-1] if records else {}
    low = row.get(column(MODEL, names.SQUARED_GRADIENT_LOW), 0)
    if judgement.verdict is Verdict.NOISE_FLOOR and low > 0:
        return "no, without the noise of a batch the gradient is above zero"
    return _STATIONARY[judgement.verdict]


def _noise(records: Records) -> list[str]:
    """What the last measurement of the noise says."""
    square = column(MODEL, names.SQUARED_GRADIENT)
    row = next((row for row in reversed(records) if square in row), None)
    if row is None:
        return []
    ends = (names.SQUARED_GRADIENT_LOW, names.SQUARED_GRADIENT_HIGH, names.NOISE_FLOOR)
    value, (low, high, floor) = row[square], (row[column(MODEL, name)] for name in ends)
    zero = "not told from zero" if low <= 0 else "above zero"
    return [
        f"without the noise, at step {row[STEP]}: squared gradient {value:.3g}, from {low:.3g} "
        f"to {high:.3g}, {zero}; noise floor of a batch {floor:.3g}"
    ]
