"""What `stiefel diagnose` measures of a run.

Two copies of the model are measured. Feasibility is that of the weights as they are, in the run's
own precision. Gradients are those of a copy in float64, so that what is reported is the gradient
and not its rounding.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stiefel import parameter
from stiefel.diagnostics import (
    ChartDifferential,
    Feasibility,
    NormEstimate,
    Stationarity,
    chart_differential,
    feasibility,
    gradient_noise,
    point_gradients,
    stationarity,
    total_stationarity,
)
from stiefel.diagnostics.columns import MODEL
from stiefel.errors import NonFiniteError, StiefelError
from stiefel.experiments.cells import penalty
from stiefel.experiments.history import History
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.module import Evaluation, plain_points
from stiefel.experiments.report import DIVERGED
from stiefel.experiments.saved import SavedRun
from stiefel.experiments.tasks import Batch
from stiefel.models import gradient_flow
from stiefel.numerics import double_dtype, full_precision

__all__ = ["MODEL", "Diagnosis", "Flow", "Weight", "json_value", "measure"]

_FLOW_SEQUENCES = 32  # a walk under plain autograd keeps every step of each


@dataclasses.dataclass(frozen=True)
class Weight:
    """One constrained weight.

    Attributes:
        feasibility: How far it is from its manifold, in the run's precision.
        stationarity: Riemannian gradient norms of the mean loss over the batches, in float64.
        estimate: The squared gradient norm without the noise of the batches, Euclidean metric.
        batch_noise: Expected |noise|^2 of the gradient of one batch.
        differential: The singular values of the chart's differential; None for a point that is
            its own coordinate, or the reason why there are none.
    """

    feasibility: Feasibility
    stationarity: Stationarity
    estimate: NormEstimate | None
    batch_noise: float
    differential: ChartDifferential | str | None


@dataclasses.dataclass(frozen=True)
class Flow:
    """Mean norms along the sequence, of one layer and direction.

    Attributes:
        name: Part of the state, network where there are several, layer and direction.
        states: |h_t|, one a step.
        adjoints: |dC/dh_t| of the loss C of a sequence, one a step; NaN at steps that the loss
            does not read, such as the last cells of an LSTM.
    """

    name: str
    states: tuple[float, ...]
    adjoints: tuple[float, ...]

    @property
    def ends(self) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """(t, |dC/dh_t|) of the first and the last step that has one; None without two."""
        known = [(t, norm) for t, norm in enumerate(self.adjoints, 1) if math.isfinite(norm)]
        return (known[0], known[-1]) if len(known) > 1 else None

    @property
    def growth(self) -> float:
        """The factor of |dC/dh_t| a step back in time, geometric mean; NaN where there is none."""
        if self.ends is None:
            return math.nan
        (s, first), (t, last) = self.ends
        return (first / last) ** (1 / (t - s)) if last > 0 else math.nan


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All that was measured of a run.

    Attributes:
        run: The run.
        batches: Number of batches.
        seed: Their seed.
        scores: Loss and accuracy over the batches.
        first_loss: The loss at the start of training; NaN where it was not recorded.
        weights: The constrained weights by name.
        model: Stationarity of all constrained weights together; None where there is none.
        estimate: The squared gradient norm over all constrained weights; None where there is none.
        batch_noise: Expected |noise|^2 of the gradient of one batch, over all constrained weights.
        singular_values: Of every constrained weight, and of the plain recurrent ones, descending.
        flows: Norms through time.
        history: What was recorded while training; None where nothing was.
    """

    run: SavedRun
    batches: int
    seed: int
    scores: Evaluation
    first_loss: float
    weights: dict[str, Weight]
    model: Stationarity | None
    estimate: NormEstimate | None
    batch_noise: float
    singular_values: dict[str, tuple[float, ...]]
    flows: list[Flow]
    history: History | None

    @property
    def diverged(self) -> bool:
        """Whether the loss is not finite, or larger than it was at the start of training."""
        loss = self.scores.loss
        return not math.isfinite(loss) or loss > DIVERGED * self.first_loss

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``diagnosis.json``; null for what is not finite."""
        options = self.run.options
        return json_value(
            {
                "run": str(self.run.folder.path),
                "checkpoint": self.run.checkpoint.name,
                "task": options.task,
                "method": options.method,
                "step": self.run.step,
                "iterations": options.iterations,
                "finished": self.run.finished,
                "batches": self.batches,
                "batch_size": options.batch_size,
                "seed": self.seed,
                "loss": self.scores.loss,
                "first_loss": self.first_loss,
                "diverged": self.diverged,
                "baseline": self.run.task.baseline,
                "accuracy": self.scores.accuracy,
                "weights": self.weights,
                "model": {
                    "stationarity": self.model,
                    "estimate": self.estimate,
                    "batch_noise": self.batch_noise,
                },
                "singular_values": self.singular_values,
                "flows": self.flows,
                "history": self.history,
            }
        )


def measure(run: SavedRun, *, samples: int, seed: int | None, confidence: float) -> Diagnosis:
    """Measures a run.

    Args:
        run: The run.
        samples: Batches that the gradient is estimated from.
        seed: Seed of these; the run's if None.
        confidence: Confidence of intervals.

    Returns:
        What was measured.

    Raises:
        ConfigurationError: If there are not so many batches.
        DataError: If the metrics or the stationarity record are damaged.
    """
    batches = run.batches(samples, seed=seed)
    own, model = run.model(), run.model("64")
    losses = [functools.partial(_loss, run, model, batch) for batch in batches]
    with full_precision():
        found, scores = _gradients(run, model, batches)
        estimates = _estimates(run, model, losses, confidence)
        flows = _flows(run, model, batches[0])
        differentials = {c.path: _differential(c) for c in parameter.constraints(model)}
    weights = {
        path: Weight(
            figures,
            found[path],
            estimates.get(path),
            _batch_noise(run, estimates.get(path)),
            differentials[path],
        )
        for path, figures in feasibility(own).items()
    }
    estimate = estimates.get(MODEL)
    noise = _batch_noise(run, estimate)
    return Diagnosis(
        run,
        samples,
        run.options.seed if seed is None else seed,
        scores,
        next((row["loss"] for row in read_metrics(run.folder.metrics) if "loss" in row), math.nan),
        weights,
        total_stationarity(found) if found else None,
        estimate,
        noise,
        _singular_values(own),
        flows,
        History.read(run.folder.stationarity, noise, confidence, run.options.iterations),
    )


def _loss(run: SavedRun, model: nn.Module, batch: Batch) -> Tensor:
    """What training minimizes, of a batch."""
    return run.task.loss(model(batch.inputs), batch) + penalty(model, run.options.task)


def _gradients(
    run: SavedRun, model: nn.Module, batches: list[Batch]
) -> tuple[dict[str, Stationarity], Evaluation]:
    """Stationarity of the mean loss over all batches, and the scores."""
    sums = torch.zeros(4, dtype=torch.float64)
    with point_gradients(model) as gradients:
        for batch in batches:
            logits = model(batch.inputs)
            loss = run.task.loss(logits, batch) + penalty(model, run.options.task)
            (loss / len(batches)).backward()
            scores = run.task.scores(logits.detach(), batch.targets)
            sums += torch.stack([torch.as_tensor(part, dtype=torch.float64) for part in scores])
        found = stationarity(model, gradients)
    model.zero_grad(set_to_none=True)
    loss, count, correct, answers = sums.tolist()
    return found, Evaluation(loss / count, correct / answers)


def _estimates(
    run: SavedRun, model: nn.Module, losses: list[Callable[[], Tensor]], confidence: float
) -> Mapping[str, NormEstimate]:
    """Squared gradient norms without the noise of the batches.

    None without constraints, and where gradients are not finite.
    """
    if next(parameter.constraints(model), None) is None:
        return {}
    try:
        return gradient_noise(
            model,
            losses,
            population=run.population,
            batch_size=None if run.population is None else run.options.batch_size,
            confidence=confidence,
        )
    except NonFiniteError:
        return {}


def _batch_noise(run: SavedRun, estimate: NormEstimate | None) -> float:
    """E |noise|^2 of the gradient of one batch, from that of the mean over m batches of b.

    The mean of m b samples out of N has (1 - m b / N) / m of the variance of one batch out of many,
    a batch out of N has 1 - b / N of it.
    """
    if estimate is None or estimate.count == 0:
        return math.nan
    m, N, b = estimate.count, run.population, run.options.batch_size
    if N is None or b is None:
        return m * estimate.noise_floor
    if m * b >= N:
        return math.nan
    return m * estimate.noise_floor * (1 - b / N) / (1 - m * b / N)


def _differential(constraint: parameter.Constraint) -> ChartDifferential | str | None:
    if constraint.is_riemannian:
        return None
    try:
        return chart_differential(constraint, generator=torch.Generator().manual_seed(0))
    except StiefelError as error:
        return " ".join(str(error).split())


def _flows(run: SavedRun, model: nn.Module, batch: Batch) -> list[Flow]:
    """Norms through time over the first sequences of a batch, means over these."""
    targets = batch.targets.split(_FLOW_SEQUENCES, dim=min(1, batch.targets.ndim - 1))[0]
    inputs = batch.inputs[:, :_FLOW_SEQUENCES].contiguous()
    rows = inputs.shape[1]
    part = Batch(inputs, targets.contiguous(), rows)
    with gradient_flow(model) as layers:
        (run.task.loss(model(part.inputs), part) * rows).backward()  # the sum over sequences
    model.zero_grad(set_to_none=True)
    several = len({layer.network for layer in layers}) > 1
    return [
        Flow(
            f"{layer.part}, "
            + (f"{layer.network}, " if several else "")
            + f"layer {layer.layer}"
            + (", backwards" if layer.direction else ""),
            tuple(layer.states.nanmean(1).tolist()),
            tuple(layer.adjoints.nanmean(1).tolist()),
        )
        for layer in layers
    ]


@torch.no_grad()
def _singular_values(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Of constrained weights, or of the plain recurrent ones where there are none; descending."""
    points = {constraint.path: constraint.point for constraint in parameter.constraints(model)}
    points, found = points or plain_points(model), {}
    for path, X in points.items():
        if bool(torch.isfinite(X).all()):
            values = torch.linalg.svdvals(X.to(double_dtype(X.dtype))).flatten()
            found[path] = tuple(values.sort(descending=True).values.tolist())
    return found


def json_value(value: Any) -> Any:
    """What JSON can hold: dictionaries, lists, words and finite numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: json_value(getattr(value, name)) for name in names if name[0] != "_"}
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | torch.Size):
        return [json_value(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
