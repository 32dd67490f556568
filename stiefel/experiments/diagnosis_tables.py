"""What `stiefel diagnose` prints: the answers, and the tables of figures behind them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stiefel.diagnostics import ChartDifferential, Feasibility, Stationarity
from stiefel.experiments.diagnosis import Diagnosis, Flow, Weight
from stiefel.experiments.diagnosis_answers import answers, percent

__all__ = ["print_diagnosis", "rank_of", "write"]

_WIDTH = 97
_LETTERS = "X is the weight, G = dL/dX with the training loss L"


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints what was found, and then the figures that say so."""
    write(console, "\n".join(_head(diagnosis)) + "\n")
    lines = textwrap.TextWrapper(_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines.break_long_words = False
    for answer in answers(diagnosis):
        write(console, lines.fill(f"- {answer}"))
    write(console, f"\n{_LETTERS}\n" if diagnosis.weights else "")
    for path, weight in diagnosis.weights.items():
        title = f"{path}, {_shape(weight.feasibility)}, via {weight.feasibility.via}"
        _print_rows(console, title, _of_weight(weight))
    if diagnosis.flows:
        _print_rows(console, "along the sequence, first step to last", _of_flows(diagnosis.flows))


def write(console: Console, text: str) -> None:
    """Prints text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _head(diagnosis: Diagnosis) -> Iterator[str]:
    run, scores = diagnosis.run, diagnosis.scores
    options, method = run.options, run.method
    state = "finished" if run.finished else "unfinished"
    share = scores.loss / run.task.baseline
    yield f"{run.task.describe()}; method {method.name} ({method.summary})"
    yield f"step {run.step:,} of {options.iterations:,}, {state}; {run.checkpoint}"
    drawn = "of the training set" if run.population else "never trained on"
    yield (
        f"{diagnosis.batches} batches of {options.batch_size} sequences {drawn}, seed "
        f"{diagnosis.seed}: loss {scores.loss:.4g} ({share:.3g} of the baseline), accuracy "
        f"{percent(scores.accuracy)}"
    )


def _print_rows(console: Console, title: str, rows: Iterator[tuple[str, str, str]]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for column in range(3):
        table.add_column(justify="left", no_wrap=column < 2)
    for row in rows:
        table.add_row(*map(Text, row))
    write(console, title)
    console.print(table, highlight=False)
    console.print()


def _of_weight(weight: Weight) -> Iterator[tuple[str, str, str]]:
    yield from _of_feasibility(weight.feasibility)
    yield from _of_stationarity(weight.stationarity)
    found, estimate = weight.differential, weight.estimate
    if isinstance(found, ChartDifferential) and found.dimension:
        values = f"{found.smallest:.2g} to {found.largest:.2g}"
        yield "chart's differential", values, rank_of(found)
    if estimate is not None:
        interval = f"[{estimate.low:.2g}, {estimate.high:.2g}] with {percent(estimate.confidence)}"
        yield "|grad|^2 without noise", f"{estimate.value:.2g}", interval
        yield "|noise|^2 of a batch", f"{weight.batch_noise:.2g}", "expected, in its |grad|^2"


def _of_feasibility(found: Feasibility) -> Iterator[tuple[str, str, str]]:
    verdict = "ok" if found.ok else "OFF the manifold"
    bound = f"{verdict}: at most {found.tolerance:.1e}"
    yield "max |X^T X - I|", f"{found.max_residual:.1e}", bound
    yield "|X^T X - I|, Frobenius", f"{found.frobenius_residual:.1e}", ""
    least, most = (
        f"1 {'-' if value < 1 else '+'} {abs(value - 1):.1e}"
        for value in (found.smallest_singular_value, found.largest_singular_value)
    )
    yield "singular values", least, f"to {most}"
    if found.determinant is not None:
        yield "determinant", f"{found.determinant:+d}", ""


def _of_stationarity(found: Stationarity) -> Iterator[tuple[str, str, str]]:
    if found.missing is not None:
        yield "gradient", "none", found.missing
        return
    yield "|grad|, Euclidean", f"{found.euclidean_norm:.3g}", "|G - X sym(X^T G)|"
    yield "|grad|, canonical", f"{found.canonical_norm:.3g}", "G - X G^T X, in that metric"
    yield "KKT residual", f"{found.kkt_residual:.3g}", "|G - X G^T X|"
    yield "symmetry residual", f"{found.symmetry_residual:.3g}", "|skew(X^T G)|"
    yield "|grad| / |G|", f"{found.relative:.3g}", "0 stationary, 1 all of G is tangent"
    if found.coordinate_norm_squared is not None:
        yield (
            "coordinates",
            f"{found.coordinate_norm_squared:.3g}",
            "sum |dL/dv|^2, v the chart's",
        )
    if found.scale_free_coordinate_norm_squared is not None:
        value = f"{found.scale_free_coordinate_norm_squared:.3g}"
        yield "coordinates, scale-free", value, "sum |v|^2 |dL/dv|^2"


def _of_flows(flows: list[Flow]) -> Iterator[tuple[str, str, str]]:
    for flow in flows:
        letter = flow.name[0]
        yield f"|{letter}_t|", f"{flow.states[0]:.3g} to {flow.states[-1]:.3g}", flow.name
        if flow.ends is not None:
            (_, first), (_, last) = flow.ends
            yield f"|dC/d{letter}_t|", f"{first:.3g} to {last:.3g}", flow.name


def rank_of(found: ChartDifferential) -> str:
    """The rank of a differential, where it is known."""
    if found.rank is None:
        return f"bounds, dimension {found.dimension}"
    return f"rank {found.rank} of {found.dimension}"


def _shape(found: Feasibility) -> str:
    return " x ".join(map(str, found.shape))
