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
from stiefel.experiments.cells import CELLS, penalty
from stiefel.experiments.methods import Method, method
from stiefel.experiments.options import TrainOptions
from stiefel.experiments.recipes import RECIPES
from stiefel.experiments.tasks import Batch, Task
from stiefel.geometry import orthonormality_residual
from stiefel.models import RecurrentLayer, SequenceModel
from stiefel.optim.build import OPTIMIZERS

__all__ = ["Evaluation", "Experiment", "StepStream", "build_model", "orthogonality_error"]

_EVALUATION_BATCH = 250


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats and share of right answers."""

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


def build_model(options: TrainOptions, task: Task) -> SequenceModel:
    """The recurrent network of a run, with its head, in the dtype of the run's precision.

    Args:
        options: Resolved options.
        task: The task, for its sizes.

    Returns:
        A model of (T, B, features) to logits, (T, B, classes) or (B, classes).
    """
    chosen, recipe = method(options.method), RECIPES[options.task]
    assert options.hidden is not None
    recurrent: dict[str, Any] = dict(chosen.options)
    init = chosen.initialiser or recipe.initialiser
    if options.reflections is not None:
        recurrent["reflections"] = options.reflections
        if options.reflections < options.hidden:
            init = None  # few reflections cannot hold that start: the chart's own
    dtype = torch.float64 if options.precision == "64" else torch.float32
    rnn = CELLS[chosen.cell](
        task.input_size, options.hidden, via=chosen.via, init=init, dtype=dtype, **recurrent
    )
    model = SequenceModel(
        rnn, task.output_size, head_init=recipe.head_initialiser, readout=task.readout
    )
    if not chosen.trained:
        for weight in _recurrent_weights(model):
            weight.requires_grad_(False)
    return model


def orthogonality_error(model: nn.Module) -> float:
    """Largest entry of |X^T X - I| over the recurrent weights, in float64.

    Over the constrained weights where there are any, over the plain recurrent weights otherwise;
    NaN for gates, which have neither.
    """
    points = [constraint.point for constraint in parameter.constraints(model)]
    points = points or _recurrent_weights(model)
    if not points:
        return math.nan
    with torch.no_grad():
        return max(float(orthonormality_residual(point.detach()).max()) for point in points)


class Experiment(LightningModule):
    """Trains a model on a task.

    Args:
        model: Maps (T, B, features) to logits.
        task: Where batches come from, and the loss.
        options: Resolved options.
    """

    def __init__(self, model: nn.Module, task: Task, options: TrainOptions) -> None:
        super().__init__()
        self.model, self.task, self.options = model, task, options
        self.method: Method = method(options.method)

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
            kind = OPTIMIZERS[self.method.optimizer]
            return kind([{"params": rest}, {"params": recurrent, "lr": rate}], lr=options.lr)  # pyright: ignore[reportCallIssue]
        return optim.build(
            self.model,
            lr=options.lr,
            lr_orthogonal=rate,
            lr_riemannian=rate,
            optimizer=self.method.optimizer,
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
            _EVALUATION_BATCH,
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
    return [part.recurrent.weight for part in model.modules() if isinstance(part, RecurrentLayer)]
