"""Watches training: on every K-th step, whether the weights are feasible and stationary."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stiefel.diagnostics import columns as names
from stiefel.diagnostics.columns import MODEL, STEP, column
from stiefel.diagnostics.feasibility import Feasibility
from stiefel.diagnostics.gradient_noise import NormEstimate, gradient_noise
from stiefel.diagnostics.judgements import Judgement
from stiefel.diagnostics.loggers.dictionary import Logger
from stiefel.diagnostics.monitor_report import (
    JUDGED,
    MonitorReport,
    default_figure,
    is_measured,
    judge_records,
    write_report,
)
from stiefel.diagnostics.monitor_rows import (
    Seen,
    differential_figures,
    feasibility_figures,
    noise_figures,
    reflections,
    stationarity_figures,
    total_figures,
)
from stiefel.diagnostics.ordinary_gradients import OrdinaryGradients
from stiefel.diagnostics.point_gradients import PointGradient, PointGradients, point_gradients
from stiefel.diagnostics.side_conditions import SideConditions
from stiefel.diagnostics.skeleton import skeleton
from stiefel.errors import ConfigurationError
from stiefel.parameter import constraints

__all__ = ["StationarityMonitor"]

_FIGURE = column(MODEL, names.MAX_RESIDUAL)  # in every row of a step


@dataclass
class _Block:
    """A monitored step: what was there before it, and what comes to light in it."""

    frozen: nn.Module
    leaves: dict[str, list[Tensor]]
    scale: float
    gradients: PointGradients
    ordinary: OrdinaryGradients
    stack: contextlib.ExitStack
    stepped: dict[int, Tensor] = field(default_factory=dict)

    def note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keeps the gradients that an optimizer has just used."""
        wanted = {id(leaf) for leaves in self.leaves.values() for leaf in leaves}
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                if id(leaf) in wanted and leaf.grad is not None:
                    self.stepped[id(leaf)] = leaf.grad.detach().clone()

    def used(self, leaf: Tensor) -> Tensor | None:
        """The gradient that an optimizer used, else what is there now without its scale."""
        if id(leaf) in self.stepped:
            return self.stepped[id(leaf)]
        return None if leaf.grad is None else leaf.grad.detach() / self.scale


class StationarityMonitor:
    """Measures, on the first and on every K-th training step, where training stands.

    ``with monitor:`` goes around one whole training step: all its forward and backward passes
    (several with gradient accumulation) and the step of the optimizer; ``zero_grad`` may stand
    anywhere. On all other steps it compares two integers. On a monitored step it copies the
    constrained weights, takes dL/dX of every weight X from the step's own backward passes
    (`point_gradients`), and appends a row to `records`: of every weight, under ``"<path>/"``, and
    of the model, under ``"model/"``, the fields of `Feasibility` and `Stationarity`, and

    - ``drift_per_step``: growth of the residual since the last record;
    - ``differential_smallest``, ``_largest``, ``_rank``, ``_dimension``: of the chart, where asked;
    - ``total_norm``, of the model: of the gradient with respect to all that is trained, Riemannian
      (Euclidean metric) for constrained weights, plain for all other parameters;
    - ``missing``, ``warning``: words, where a figure is not there, or proves nothing.

    All figures of a row belong to the weights at which the gradient was taken, before the step.
    The gradient is that of this step's batch in this process, before clipping. Gradients that are
    not finite are recorded as they are. Where processes train together each keeps its own records
    and rank 0 writes to the loggers.

    An exception inside the block goes on its way: nothing is recorded or left on the model, and
    the step does not count. Weights may be added, frozen, converted or released between steps. A
    copy of the monitor together with its model (`copy.deepcopy`) watches the copy; a pickled one
    comes back with its records and without its model. For checkpoints there are `state_dict` and
    `load_state_dict`. One thread at a time.

    Args:
        model: Model with constrained weights; a `DistributedDataParallel` around it is looked
            through.
        every: K.
        loggers: Each gets every row by ``log(row)``; see `CSVLogger`, `TensorBoardLogger`,
            `DictLogger`.
        side_conditions: Told of every monitored step of the charts of reflections, to check the
            conditions of the convergence theorem.
        differential_every: On every so many records the singular values of the charts'
            differentials are measured as well; None for never.
        scale: What the loss is multiplied by: a `torch.amp.GradScaler`, or a number.
        unconstrained: Whether a model without a constrained weight is watched too: its rows have
            ``model/total_norm``, for comparisons with models that have one.

    Attributes:
        records: The rows.

    Raises:
        ConfigurationError: If the model has no constrained weight (with `unconstrained`: nothing to
            train), or a number is below 1.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import StationarityMonitor
        >>> layer = stiefel.orthogonal(torch.nn.Linear(6, 6, dtype=torch.float64), via="cwy")
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> monitor = StationarityMonitor(layer, every=10)
        >>> for _ in range(100):
        ...     x = torch.randn(32, 6, dtype=torch.float64)
        ...     with monitor:
        ...         loss = (layer(x) - x.roll(1, -1)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> [row["step"] for row in monitor.records]
        [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
        >>> monitor.records[-1]["weight/max_residual"] < 1e-12
        True
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        loggers: Iterable[Logger] = (),
        side_conditions: SideConditions | None = None,
        differential_every: int | None = None,
        scale: Any = 1.0,
        unconstrained: bool = False,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        if every < 1 or (differential_every is not None and differential_every < 1):
            raise ConfigurationError(
                f"expected every >= 1 and differential_every >= 1 or None, got {every} and "
                f"{differential_every}"
            )
        trained = unconstrained and any(each.requires_grad for each in model.parameters())
        if not trained and next(constraints(model), None) is None:
            raise ConfigurationError(
                f"{type(model).__name__} has no constrained weight to watch: constrain one with "
                "stiefel.orthogonal(module, via=...) first, or pass unconstrained=True to watch "
                "the gradient of its trained parameters alone"
            )
        self.model: nn.Module | None = model
        self.every, self.differential_every, self.scale = every, differential_every, scale
        self.loggers, self.side_conditions = list(loggers), side_conditions
        self.records: list[dict[str, Any]] = []
        self._seen: dict[str, Seen] = {}
        self._block: _Block | None = None
        self.step = 0

    @property
    def step(self) -> int:
        """Training steps so far."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._due = 1 if step == 0 else (step // self.every + 1) * self.every

    # -- what the records say -------------------------------------------------------------------
    def judge(self, figure: str | None = None, **options: Any) -> Judgement:
        """Judges whether the gradient falls as the theorem promises, or where it has come to.

        The records are of single batches: their squared gradients end at the noise floor of a
        batch. Where `measure_noise` was called its floor is taken into account, for figures of the
        Euclidean gradient.

        Args:
            figure: Key of a record; with ``_squared`` behind it the squares of it. None for
                ``"model/euclidean_norm_squared"``; ``"model/total_norm_squared"`` where no record
                has a constrained weight.
            **options: Those of `stiefel.diagnostics.judge_rate`, such as ``confidence=``.

        Returns:
            The judgement. Gradients that are not finite at the end mean divergence; before that
            they are left out where a `scale` skips their steps.

        Raises:
            ConfigurationError: If no record has the figure; the message lists those that are there.
        """
        figure = figure or default_figure(self.records)
        floor = column(MODEL, names.NOISE_FLOOR)
        noise = [row[floor] for row in self.records if floor in row]
        if figure == JUDGED and noise:
            options.setdefault("noise_floor", noise[-1])
        scaled = hasattr(self.scale, "get_scale")
        return judge_records(self.records, figure, scaled=scaled, **options)

    def report(self, figure: str | None = None, **options: Any) -> MonitorReport:
        """Says whether weights are feasible and stationary, how sure that is, and what is missing.

        Args:
            figure: As in `judge`.
            **options: As in `judge`.

        Returns:
            A report; print it. Its ``ok`` means that all weights are on their manifolds, that the
            gradient does not diverge, and that the side conditions hold where they are checked.
        """
        conditions = None if self.side_conditions is None else self.side_conditions.report()
        weights = {path: found for path, (_, found) in self._seen.items()}
        figure = figure or default_figure(self.records)
        measured = is_measured(self.records, constrained=bool(self._seen))
        judgement = self.judge(figure, **options) if measured else None
        return write_report(self.records, self.step, weights, judgement, figure, conditions)

    def measure_noise(
        self,
        losses: Iterable[Callable[[], Tensor]],
        *,
        per_batch: int | None = None,
        **options: Any,
    ) -> dict[str, NormEstimate]:
        """Estimates the squared gradient without the noise of the batches, at today's weights.

        Appends a row with ``squared_gradient``, ``squared_gradient_low``, ``_high`` and
        ``noise_floor`` of every weight and of the model, in the Euclidean metric.

        Args:
            losses: One function for each part, all of one size, which returns its mean loss:
                two halves of a batch, or better eight parts and more.
            per_batch: How many such parts make up a batch of training, of which ``noise_floor``
                is recorded: 1 where each is a batch; None for all of them together.
            **options: Those of `stiefel.diagnostics.gradient_noise`.

        Returns:
            The estimates by path, ``"model"`` among them.

        Raises:
            ConfigurationError: If `per_batch` is below 1; and as `gradient_noise`.
        """
        if per_batch is not None and per_batch < 1:
            raise ConfigurationError(f"expected per_batch of at least 1, got {per_batch}")
        found = gradient_noise(self._model(), losses, **options)
        self._write({STEP: self.step, **noise_figures(found, per_batch, options)})
        return found

    # -- checkpoints and copies -----------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Steps and records, as plain values that ``torch.load(weights_only=True)`` takes."""
        seen = {path: [step, dataclasses.asdict(now)] for path, (step, now) in self._seen.items()}
        return {"step": self.step, "records": copy.deepcopy(self.records), "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; side conditions and loggers have no part in it.

        Args:
            state: What `state_dict` gave.
        """
        self.records = copy.deepcopy(state["records"])
        self._seen = {
            path: (step, Feasibility(**{**now, "shape": tuple(now["shape"])}))
            for path, (step, now) in state["seen"].items()
        }
        self._block = None
        self.step = state["step"]

    def __deepcopy__(self, memo: dict[int, Any]) -> StationarityMonitor:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "_block": None}, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        gone = {"model": None, "side_conditions": None, "scale": 1.0, "_block": None}
        return {**self.__dict__, **gone}

    # -- around a step ----------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self._step + 1 == self._due:
            self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._block is None:
            self._step += kind is None
            return
        block, self._block = self._block, None
        block.stack.close()
        if kind is None:
            self.step += 1
            self._record(block)

    def abandon(self) -> None:
        """Leaves a block that will not be left by itself, as an exception would."""
        if self._block is not None:
            self.__exit__(RuntimeError)

    def _open(self) -> None:
        if self._block is not None:
            raise ConfigurationError("the monitor is inside a step already: one block a step")
        model = self._model()
        scale = self.scale.get_scale() if hasattr(self.scale, "get_scale") else self.scale
        frozen = skeleton(model)
        leaves = {constraint.path: constraint.leaves for constraint in constraints(model)}
        with contextlib.ExitStack() as stack:
            gradients = stack.enter_context(point_gradients(model))
            ordinary = stack.enter_context(OrdinaryGradients(model))
            block = _Block(frozen, leaves, float(scale), gradients, ordinary, stack)
            stack.callback(register_optimizer_step_post_hook(block.note).remove)
            block.stack = stack.pop_all()
        self._block = block

    def _record(self, block: _Block) -> None:
        """Measures what came to light in a step, and writes it down."""
        gradients = {path: _unscaled(found, block.scale) for path, found in block.gradients.items()}
        used = {
            path: [block.used(leaf) for leaf in leaves] for path, leaves in block.leaves.items()
        }
        count = sum(_FIGURE in row for row in self.records)
        figures = stationarity_figures(block.frozen, gradients, used)
        row = {STEP: self.step, **figures}
        row |= total_figures(figures, block.ordinary.norm(block.scale))
        row |= feasibility_figures(self.step, block.frozen, self._seen)
        if self.differential_every is not None and count % self.differential_every == 0:
            row |= differential_figures(block.frozen, figures)
        if self.side_conditions is not None:
            self._note(self.side_conditions, block.frozen, used)
        self._write(row)

    def _note(
        self,
        conditions: SideConditions,
        frozen: nn.Module,
        used: Mapping[str, Sequence[Tensor | None]],
    ) -> None:
        """Tells the side conditions of the step that was taken."""
        now = {constraint.path: constraint for constraint in constraints(self._model())}
        steps = [
            step
            for before in constraints(frozen)
            if before.path in now
            and (
                step := reflections(
                    now[before.path], before, used[before.path] if _together() else None
                )
            )
        ]
        if steps:
            conditions.note(self.step, *map(list, zip(*steps, strict=True)))

    def _write(self, row: dict[str, Any]) -> None:
        self.records.append(row)
        if _together() and torch.distributed.get_rank() > 0:
            return
        for logger in self.loggers:
            logger.log(row)

    def _model(self) -> nn.Module:
        if self.model is None:
            raise ConfigurationError(
                "a monitor that was pickled comes back without its model: make a new one and give "
                "it the state of the old one, or set monitor.model"
            )
        return self.model


def _together() -> bool:
    """Whether processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _unscaled(found: PointGradient, scale: float) -> PointGradient:
    if found.gradient is None or scale == 1.0:
        return found
    return dataclasses.replace(found, gradient=found.gradient / scale)
