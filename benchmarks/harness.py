"""Fair timings: perturbed inputs, interleaved repeats, medians, and ratios within one run.

A benchmark is a list of `Study` objects. A study times its cases in rounds: every round times each
case once, so that the noise of a shared machine falls on all of them alike, and the ratio of two
cases is the median over the rounds that both took part in. Before anything is timed, every case
is checked; a wrong result is never timed.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = [
    "Absent",
    "Case",
    "Goal",
    "IncorrectError",
    "Row",
    "Section",
    "Settings",
    "Study",
    "Verdict",
    "installed",
    "judge",
    "measure",
    "require",
]

#: A case that takes less than this is called once, untimed, before each timed call.
_SHORT = 0.05


class IncorrectError(AssertionError):
    """A case does not compute what it should, so it must not be timed."""


@dataclass(frozen=True)
class Settings:
    """How to run: where, how often, and how large.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        repeats: Timed calls of every case.
        budget: Seconds after which a slow case sits out the remaining rounds (never before it
            was timed three times, or `repeats` times when that is fewer).
        quick: Tiny sizes, to see that everything runs; goals are not judged.
        clock: ``"wall"``, or ``"process"`` for the CPU time of this process: on a crowded machine
            the only steady one. It counts waiting threads, so it is for one thread.
        picture: File for the curves of a benchmark that has some.
    """

    device: str = "cpu"
    repeats: int = 15
    budget: float = 10.0
    quick: bool = False
    clock: str = "wall"
    picture: Path | None = None


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        name: Unique in its study.
        run: The timed call.
        refresh: Called before each `run`, untimed: perturbs the input, drops old gradients.
        check: Called before any timing: raises `IncorrectError`, or returns a number that is
            shown beside the time (the constraint residual), or None.
    """

    name: str
    run: Callable[[], object]
    refresh: Callable[[], object] = lambda: None
    check: Callable[[], float | None] = lambda: None


@dataclass(frozen=True)
class Absent:
    """A case whose package is not installed: its row says so."""

    name: str
    package: str


@dataclass(frozen=True)
class Goal:
    """A bound on the ratio of two cases of a study.

    With `at_least` the ratio is ``time(reference) / time(case)``: how many times faster the case
    is. With `at_most` it is ``time(case) / time(reference)``: the share of the reference's time.

    Attributes:
        text: The sentence to print.
        case: Name of the case.
        reference: Name of the case that it is compared with.
        at_least: Lower bound of the speed-up.
        at_most: Upper bound of the share.
        device: The device for which the goal was set; on others it is not judged.
    """

    text: str
    case: str
    reference: str
    at_least: float | None = None
    at_most: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuses a goal with no bound or with two."""
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"goal {self.text!r} needs either at_least or at_most")


@dataclass(frozen=True)
class Study:
    """Cases that are timed together, and what is asked of them.

    Attributes:
        title: What is timed, with its sizes.
        cases: In the order of the table.
        reference: The case whose time the last column divides by.
        goals: Bounds on ratios.
    """

    title: str
    cases: Sequence[Case | Absent]
    reference: str
    goals: Sequence[Goal] = ()


@dataclass(frozen=True)
class Row:
    """A line of a result table; `values` maps column names to numbers, words or None."""

    name: str
    values: Mapping[str, float | str | None]
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A goal with its outcome; `met` is None when it was not judged, and `note` says why."""

    text: str
    value: float | None
    bound: float
    met: bool | None
    note: str = ""


@dataclass(frozen=True)
class Section:
    """The result of one study: a table and the goals."""

    title: str
    rows: list[Row]
    goals: list[Verdict] = field(default_factory=list)


def installed(package: str) -> bool:
    """Whether a peer's package can be imported (without importing it)."""
    return importlib.util.find_spec(package) is not None


def require(name: str, error: float, bound: float) -> None:
    """Raises `IncorrectError` unless ``error <= bound`` (a NaN never is).

    Args:
        name: What was checked.
        error: What came.
        bound: What was allowed.
    """
    if not error <= bound:
        raise IncorrectError(f"{name}: expected an error of at most {bound:.1e}, got {error:.1e}")


def judge(
    text: str, value: float | None, bound: float, met: bool, settings: Settings, device: str = "cpu"
) -> Verdict:
    """Builds the verdict on a goal, which is open in quick mode and on another device.

    Args:
        text: The goal.
        value: The number that was measured, None when a case is absent.
        bound: The number that was asked for.
        met: Whether `value` is within `bound`.
        settings: Of this run.
        device: The device for which the goal was set.

    Returns:
        The verdict.
    """
    if value is None:
        return Verdict(text, None, bound, None, "a case is not installed")
    if settings.quick:
        return Verdict(text, value, bound, None, "quick sizes")
    if settings.device != device:
        return Verdict(text, value, bound, None, f"set for {device}")
    return Verdict(text, value, bound, met)


def _clock(settings: Settings) -> Callable[[Callable[[], object]], float]:
    """Returns a function that times one call, in seconds."""
    if settings.device != "cuda":
        now = time.process_time if settings.clock == "process" else time.perf_counter

        def on_cpu(run: Callable[[], object]) -> float:
            start = now()
            run()
            return now() - start

        return on_cpu

    def on_cuda(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return on_cuda


def _check(cases: Iterable[Case], title: str) -> dict[str, float | None]:
    """Checks every case on a fresh input and returns the numbers to show."""
    shown: dict[str, float | None] = {}
    for case in cases:
        case.refresh()
        try:
            shown[case.name] = case.check()
        except IncorrectError as error:
            raise IncorrectError(f"{title}: {case.name}: {error}") from None
    return shown


def _rounds(cases: Sequence[Case], settings: Settings) -> dict[str, list[float]]:
    """Times every case `repeats` times, round-robin, after a warm-up.

    The round starts at another case each time, so that no case always follows the same one. A
    short case is called once untimed before each timed call: after a long peer its code, data
    and threads are cold.

    Returns:
        Seconds of every case, the k-th number from the k-th round.
    """
    clock = _clock(settings)
    warm: dict[str, float] = {}
    for case in cases:
        case.refresh()
        warm[case.name] = clock(case.run)
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    least = min(3, settings.repeats)
    for round_ in range(settings.repeats):
        shift = round_ % len(cases)
        for case in [*cases[shift:], *cases[:shift]]:
            spent = times[case.name]
            if len(spent) >= least and sum(spent) + warm[case.name] > settings.budget:
                continue
            if warm[case.name] < _SHORT:
                case.refresh()
                clock(case.run)
            case.refresh()
            spent.append(clock(case.run))
    return times


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the quotients of the rounds that both cases took part in."""
    pairs = zip(numerator, denominator, strict=False)
    return statistics.median(a / b for a, b in pairs)


def _verdict(goal: Goal, times: dict[str, list[float]], settings: Settings) -> Verdict:
    """Compares a goal with the times of its two cases."""
    bound = goal.at_least if goal.at_least is not None else goal.at_most
    assert bound is not None
    mine, other = times.get(goal.case), times.get(goal.reference)
    value = None
    met = False
    if mine and other and goal.at_least is not None:
        value = ratio(other, mine)
        met = value >= bound
    elif mine and other:
        value = ratio(mine, other)
        met = value <= bound
    return judge(goal.text, value, bound, met, settings, goal.device)


def measure(study: Study, settings: Settings) -> Section:
    """Checks and times the cases of a study.

    Args:
        study: Cases, reference and goals.
        settings: Device, repeats, budget.

    Returns:
        A table with the columns ``median ms``, ``min ms``, ``repeats``, ``residual`` and
        ``x reference`` (the time divided by the reference's), and the verdicts.

    Raises:
        IncorrectError: If a case fails its check.
        ValueError: If a goal or the reference names a case that the study does not have.
    """
    names = {case.name for case in study.cases}
    for name in [study.reference, *(n for g in study.goals for n in (g.case, g.reference))]:
        if name not in names:
            raise ValueError(f"{study.title}: no case named {name!r}: expected one of {names}")
    present = [case for case in study.cases if isinstance(case, Case)]
    residuals = _check(present, study.title)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        times = _rounds(present, settings)
    finally:
        if collecting:
            gc.enable()
    reference = times.get(study.reference)
    rows = [
        Row(case.name, {}, f"not installed: pip install '.[benchmarks]' ({case.package})")
        if isinstance(case, Absent)
        else Row(
            case.name,
            {
                "median ms": 1e3 * statistics.median(times[case.name]),
                "min ms": 1e3 * min(times[case.name]),
                "repeats": len(times[case.name]),
                "residual": residuals[case.name],
                "x reference": ratio(times[case.name], reference) if reference else None,
            },
        )
        for case in study.cases
    ]
    goals = [_verdict(goal, times, settings) for goal in study.goals]
    return Section(f"{study.title} (reference: {study.reference})", rows, goals)
