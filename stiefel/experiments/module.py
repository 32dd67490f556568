"""The model of a run, and the Lightning module that trains and evaluates it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from stiefel import optim, parameter
from stiefel.experiments.blocks import video_predictor
from stiefel.experiments.cells import CELLS, penalty
from stiefel.experiments.methods import Method, method
from stiefel.experiments.options import TrainOptions
from stiefel.experiments.recipes import RECIPES
from stiefel.experiments.tasks import Batch, MovingDigits, Task
from stiefel.geometry import orthonormality_residual
from stiefel.models import RecurrentLayer, SequenceModel
from stiefel.models.conv_neru import ConvNERULayer
from stiefel.optim.build import OPTIMIZERS

__all__ = [
    "Evaluation",
    "Experiment",
    "StepStream",
    "build_model",
    "orthogonality_error",
    "plain_points",
]

_LAYERS = (RecurrentLayer, ConvNERULayer)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean loss, of what `Task.measure` says, and share of right answers."""

    loss: float
    accuracy: float


class StepStream:
    """Training batches without end, from the step that the trainer has come to.

    Args:
        batch_of: The batch of a step.
        start: The step to begin with, asked when iteration begins: a resumed run goes on where
            it stopped.
    """

    def __init__(self, batch_of: Callable[[int], Batch], start: Callable[[], int]) -> None:
        self._batch_of, self._start = batch_of, start

    def __iter__(self) -> Iterator[Batch]:
        step = self._start()
        while True:
            yield self._batch_of(step)
            step += 1


def build_model(options: TrainOptions, task: Task) -> nn.Module:
    """The network of a run, in the dtype of the run's precision.

    Args:
        options: Resolved options.
        task: The task, for its sizes.

    Returns:
        A model of (T, B, features) to logits, (T, B, classes) or (B, classes); for frames, of
        (T, B, 1, S, S) to predictions of the same shape.
    """
    chosen = method(options.method)
    assert options.hidden is not None
    init = chosen.initialiser or RECIPES[options.task].initialiser
    given: dict[str, Any] = {
        "via": chosen.via,
        "init": init,
        "dtype": torch.float64 if options.precision == "64" else torch.float32,
        **chosen.options,
    }
    if isinstance(task, MovingDigits):
        assert chosen.block is not None
        model = video_predictor(chosen.block, options.hidden, task.frame_size, **given)
    else:
        model = _sequence_model(chosen, options, task, given)
    if not chosen.trained:
        for weight in _recurrent_weights(model):
            weight.requires_grad_(False)
    return model


def _sequence_model(
    chosen: Method, options: TrainOptions, task: Task, given: dict[str, Any]
) -> SequenceModel:
    """The recurrent network of a method, with the task's head."""
    assert options.hidden is not None
    assert chosen.cell is not None
    if options.reflections is not None:
        given["reflections"] = options.reflections
        if options.reflections < options.hidden:
            given["init"] = None  # few reflections cannot hold that start: the chart's own
    rnn = CELLS[chosen.cell](task.input_size, options.hidden, **given)
    head_init = RECIPES[options.task].head_initialiser
    return SequenceModel(rnn, task.output_size, head_init=head_init, readout=task.readout)


def orthogonality_error(model: nn.Module) -> float:
    """Largest entry of |X^T X - I| over the recurrent weights, in float64.

    Over the constrained weights where there are any, over the plain recurrent weights otherwise;
    NaN for gates, which have neither, and for blocks without a recurrent kernel. A convolution
    kernel is measured as its point, sqrt(kh kw) Khat.
    """
    points = [constraint.point for constraint in parameter.constraints(model)]
    points = points or list(plain_points(model).values())
    if not points:
        return math.nan
    with torch.no_grad():
        return max(float(orthonormality_residual(point.detach()).max()) for point in points)


def plain_points(model: nn.Module) -> dict[str, Tensor]:
    """The recurrent weights by name, (n, n), or (kh kw n, n) for sqrt(kh kw) times a kernel."""
    return {
        f"{name}.recurrent.weight": _as_point(part.recurrent.weight).detach()
        for name, part in model.named_modules()
        if isinstance(part, _LAYERS) and part.recurrent is not None
    }


class Experiment(LightningModule):
    """Trains a model on a task.

    Args:
        model: Maps the inputs of a batch to logits, or to predicted frames.
        task: Where batches come from, and the loss.
        options: Resolved options.
    """

    def __init__(self, model: nn.Module, task: Task, options: TrainOptions) -> None:
        super().__init__()
        self.model, self.task, self.options = model, task, options
        self.method: Method = method(options.method)
        self.optimizer = RECIPES[options.task].optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss of a batch, and its logits for whoever records them."""
        logits = self.model(batch.inputs)
        loss = self.task.loss(logits, batch, world=self.trainer.world_size)
        loss = loss + penalty(self.model, self.options.task)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over everything, with the rates of the method."""
        rate, options = self.options.lr_orthogonal, self.options
        assert options.lr is not None
        if self.method.rate == "plain":  # no constraint: torch's own, with a rate of its own
            recurrent = _recurrent_weights(self.model)
            own = {id(weight) for weight in recurrent}
            rest = [weight for weight in self.model.parameters() if id(weight) not in own]
            kind = OPTIMIZERS[self.optimizer]
            return kind([{"params": rest}, {"params": recurrent, "lr": rate}], lr=options.lr)  # pyright: ignore[reportCallIssue]
        return optim.build(
            self.model,
            lr=options.lr,
            lr_orthogonal=rate,
            lr_riemannian=rate,
            optimizer=self.optimizer,
            riemannian=self.method.riemannian,
            riemannian_options=self.method.riemannian_options(rate),
        )

    def train_dataloader(self) -> StepStream:
        """This process's rows of the batches to come."""
        task, options, trainer = self.task, self.options, self.trainer
        assert options.batch_size is not None
        size, rank, world = options.batch_size, trainer.global_rank, trainer.world_size

        def batch_of(step: int) -> Batch:
            return task.train_batch(step, size, seed=options.seed, rank=rank, world=world)

        return StepStream(batch_of, start=lambda: trainer.global_step)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Loss and accuracy on the sequences that are never trained on, over all processes."""
        trainer, training = self.trainer, self.training
        self.eval()
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        for batch in self.task.evaluation_batches(
            self.task.evaluation_batch,
            seed=self.options.seed,
            rank=trainer.global_rank,
            world=trainer.world_size,
        ):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(batch)
            with trainer.precision_plugin.forward_context():
                logits = self.model(batch.inputs)
            totals += self._sums(logits, batch)
        self.train(training)
        return self._over_processes(totals)

    @torch.no_grad()
    def scores_of(self, logits: Tensor, batch: Batch) -> Evaluation:
        """Loss and accuracy of a batch, over all processes."""
        return self._over_processes(self._sums(logits, batch))

    def _sums(self, logits: Tensor, batch: Batch) -> Tensor:
        parts = [torch.as_tensor(part) for part in self.task.scores(logits, batch.targets)]
        return torch.stack([part.to(self.device, torch.float64) for part in parts])

    def _over_processes(self, totals: Tensor) -> Evaluation:
        summed = self.trainer.strategy.reduce(totals, reduce_op="sum")
        assert isinstance(summed, Tensor)
        loss, count, correct, answers = summed.tolist()
        return Evaluation(loss / count, correct / answers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the state of torch's generator, for models that draw while they train."""
        checkpoint["rng_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the state of torch's generator back."""
        torch.set_rng_state(checkpoint["rng_state"].cpu())


def _recurrent_weights(model: nn.Module) -> list[Tensor]:
    layers = [part for part in model.modules() if isinstance(part, _LAYERS)]
    return [layer.recurrent.weight for layer in layers if layer.recurrent is not None]


def _as_point(weight: Tensor) -> Tensor:
    """The matrix whose columns a method keeps orthonormal: a square weight, or q Khat of a kernel.

    Rows of Khat are ordered by tap and then by input channel; the order changes no residual.
    """
    if weight.ndim == 2:
        return weight
    taps = weight.shape[-2] * weight.shape[-1]
    return weight.flatten(1).mT * math.sqrt(taps)
