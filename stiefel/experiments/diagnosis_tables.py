"""The words of `stiefel diagnose`: what was measured of a run, and what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stiefel.diagnostics import ChartDifferential, Feasibility, Stationarity
from stiefel.experiments.diagnosis import Diagnosis, Flow, Weight

__all__ = ["distinguishable", "percent", "print_diagnosis", "rank_of", "remarks", "write"]

_FLAT = 1e-6  # of the largest singular value: a differential as flat as this has lost a direction


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Prints the tables, and then what they say."""
    write(console, "\n".join(_head(diagnosis)) + "\n")
    for path, weight in diagnosis.weights.items():
        title = f"{path}, {_shape(weight.feasibility)}, via {weight.feasibility.via}"
        _print_rows(console, title, _of_weight(weight))
    if diagnosis.flows:
        _print_rows(console, "along the sequence, first step to last", _of_flows(diagnosis.flows))
    for remark in remarks(diagnosis):
        write(console, f"- {remark}")


def write(console: Console, text: str) -> None:
    """Prints text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def remarks(diagnosis: Diagnosis) -> list[str]:
    """What the figures say, a sentence or two each."""
    said = []
    if diagnosis.diverged:
        said.append(
            f"training has diverged: the loss was {diagnosis.first_loss:.4g} at the start and is "
            f"{diagnosis.scores.loss:.4g}; train again with a lower --lr or --lr-orthogonal"
        )
    if not diagnosis.weights:
        said.append(
            f"no constrained weight: method {diagnosis.run.options.method} trains no weight on a "
            "manifold, so there is no residual and no Riemannian gradient to measure"
        )
        said.extend(
            f"{path} is a plain matrix, singular values from {values[-1]:.4g} to {values[0]:.4g}"
            for path, values in diagnosis.singular_values.items()
        )
    for path, weight in diagnosis.weights.items():
        said.extend(_on_manifold(diagnosis, path, weight))
        said.extend(_of_differential(path, weight.differential))
    if diagnosis.weights:
        said.append(distinguishable(diagnosis))
    said.extend(_of_flow(flow) for flow in diagnosis.flows)
    if diagnosis.history is not None:
        said.append(f"recorded while training: {diagnosis.history.said}")
    elif diagnosis.weights:
        said.append(
            "no record of the way here: train with --monitor-every STEPS, and the slope of the "
            "gradient norm and its verdict stand here"
        )
    return said


def distinguishable(diagnosis: Diagnosis) -> str:
    """Whether the gradient over all constrained weights can be told from zero."""
    estimate = diagnosis.estimate
    if estimate is None or not math.isfinite(estimate.value):
        return "the gradient is not finite, so there is nothing to compare with zero"
    share = percent(estimate.confidence)
    if estimate.low == estimate.high == 0:
        return (
            "the gradient is exactly zero on every batch, so the loss does not see the weights at "
            "all: look at the hidden states, which may all be zero"
        )
    if not estimate.is_noise:
        return (
            f"the gradient is not zero: |grad|^2 is at least {estimate.low:.2g} with {share} "
            "confidence, so the weights are at no stationary point of the training loss"
        )
    return (
        f"the gradient cannot be told from zero: |grad|^2 is at most {estimate.high:.2g} with "
        f"{share} confidence; the noise in that of one batch is {diagnosis.batch_noise:.2g}. More "
        "--samples see further"
    )


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
    if isinstance(found, ChartDifferential):
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
        yield "coordinates", f"{found.coordinate_norm_squared:.3g}", "sum |dL/dv|^2"
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


def _on_manifold(diagnosis: Diagnosis, path: str, weight: Weight) -> Iterator[str]:
    found, method = weight.feasibility, diagnosis.run.method
    if not found.ok:
        yield (
            f"{path} is off the manifold by {found.max_residual:.1e}, and {found.tolerance:.1e} is "
            "what is allowed"
        )
    elif method.near:
        yield f"{path}: method {method.name} keeps it near the manifold, not on it"


def _of_differential(path: str, found: ChartDifferential | str | None) -> Iterator[str]:
    if isinstance(found, str):
        yield f"{path}: the chart's differential was not measured ({found})"
    elif found is not None and is_deficient(found):
        yield (
            f"{path}: the chart is rank-deficient here (singular values of its differential "
            f"{found.smallest:.1e} to {found.largest:.1e}), so a small coordinate gradient proves "
            "nothing: read the gradient with respect to the point"
        )
    elif found is not None and found.exact and found.dimension:
        yield (
            f"{path}: the chart has full rank here (smallest singular value of its differential "
            f"{found.smallest:.2g}); where it has not, a small coordinate gradient proves nothing"
        )
    elif found is not None and found.dimension:
        yield (
            f"{path}: no direction is seen that the chart has lost (smallest singular value of its "
            f"differential at most {found.smallest:.2g}); where one is lost, a small coordinate "
            "gradient proves nothing"
        )


def is_deficient(found: ChartDifferential) -> bool:
    """Whether some tangent directions are out of reach of the coordinates, or nearly so."""
    short = found.rank is not None and found.rank < found.dimension
    return short or found.smallest <= _FLAT * found.largest


def rank_of(found: ChartDifferential) -> str:
    """The rank of a differential, where it is known."""
    if found.rank is None:
        return f"bounds, dimension {found.dimension}"
    return f"rank {found.rank} of {found.dimension}"


def _of_flow(flow: Flow) -> str:
    if flow.ends is None:
        return f"{flow.name}: gradients through time are not finite"
    (s, first), (t, last) = flow.ends
    return (
        f"{flow.name}: |dC/d{flow.name[0]}_t| is {last:.2g} at step {t} of the sequence and "
        f"{first:.2g} at step {s}, a factor of {flow.growth:.4g} a step back in time"
    )


def percent(share: float) -> str:
    """A share in per cent, such as ``95 %``."""
    return f"{100 * share:.3g} %"


def _shape(found: Feasibility) -> str:
    return " x ".join(map(str, found.shape))
