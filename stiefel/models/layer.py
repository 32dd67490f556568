"""One recurrence with an orthogonal recurrent weight, and how it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, RepresentationError
from stiefel.init import Initializer, fill_
from stiefel.models.rollout import rollout
from stiefel.models.step import LayerStep, elman_step
from stiefel.parameter import constraints, operator, orthogonal, release
from stiefel.parametrizations import Parametrization

__all__ = ["Constrained", "Initializer", "RecurrentLayer", "start_weight"]


class RecurrentLayer(nn.Module):
    """One direction of one layer: h_t = sigma(Q h_{t-1} + V x_t + b).

    ``recurrent.weight`` is Q `(hidden, hidden)`, ``input.weight`` is V `(hidden, input)` and
    ``input.bias`` b; ``beta`` is the bias of modReLU. See `OrthogonalRNN` for the arguments.
    """

    beta: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        nonlinearity: str,
        bias: bool,
        via: str | Parametrization | None,
        init: str | Initializer | None,
        input_init: Initializer | None,
        determinant: int | None,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input = nn.Linear(input_size, hidden_size, bias=bias, **empty)
        self.recurrent = nn.Linear(hidden_size, hidden_size, bias=False, **empty)
        beta = None
        if nonlinearity == "modrelu":
            like = self.input.weight
            beta = nn.Parameter(
                torch.empty(hidden_size, device=like.device, dtype=like.dtype.to_real())
            )
        self.register_parameter("beta", beta)
        self._start(input_init, generator)
        start_weight(
            self.recurrent,
            via,
            init,
            determinant=determinant,
            generator=generator,
            options=options,
        )

    def _start(self, input_init: Initializer | None, generator: torch.Generator | None) -> None:
        """Input kernel Kaiming-normal (fan_in, relu), b = 0, beta ~ U(-0.01, 0.01)."""
        if input_init is not None:
            fill_(self.input.weight, input_init, generator=generator)
        else:
            nn.init.kaiming_normal_(self.input.weight, nonlinearity="relu", generator=generator)
        if self.input.bias is not None:
            nn.init.zeros_(self.input.bias)
        if self.beta is not None:
            nn.init.uniform_(self.beta, -0.01, 0.01, generator=generator)

    def forward(
        self,
        x: Tensor,
        h0: Tensor | None = None,
        lengths: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs `x` `(T, B, input)` from `h0` `(B, hidden)`; asks for the operator once.

        Returns:
            The states `(T, B, hidden)` and the last state `(B, hidden)`.
        """
        return rollout(
            x,
            self.input.weight,
            operator(self.recurrent),
            nonlinearity=self.nonlinearity,
            bias=self.input.bias,
            beta=self.beta,
            h0=h0,
            lengths=lengths,
            reverse=reverse,
        )

    def stepper(self) -> LayerStep:
        """One step of this layer, as a function that holds the operator read here."""
        return elman_step(
            self.input.weight,
            operator(self.recurrent),
            nonlinearity=self.nonlinearity,
            bias=self.input.bias,
            beta=self.beta,
        )


def start_weight(
    module: nn.Module,
    via: str | Parametrization | None,
    init: str | Initializer | None,
    *,
    default: str | Initializer = "henaff",
    determinant: int | None = None,
    generator: torch.Generator | None = None,
    options: Mapping[str, Any],
) -> None:
    """Sets an orthogonal weight to its start and constrains it, through the one door.

    Args:
        module: The module whose `weight` it is.
        via: How it is trained; None leaves a plain weight with the same start.
        init: Its start, exactly or an error; None for `default` where the chart can hold it, and
            else the chart's own start.
        default: The start that the model is known by.
        determinant: +1 or -1 fixes the component.
        generator: Source of randomness.
        options: Options of the chart or the metric.

    Raises:
        ConfigurationError: If options do not go together.
        RepresentationError: If the chart cannot hold the start that `init` names.
    """
    if via is None and options:
        raise ConfigurationError(
            f"via=None is a plain weight and takes no options, got {sorted(options)}: name a "
            "chart or a metric in via="
        )
    if "weight_dtype" in options:
        raise ConfigurationError(
            "a recurrence computes in the dtype of its weights: expected no weight_dtype=, got "
            f"{options['weight_dtype']}. Convert the whole model with .to(...)"
        )
    door: dict[str, Any] = {"determinant": determinant, "generator": generator, **options}
    kind = "riemannian" if via is None else via
    try:
        orthogonal(module, via=kind, init=default if init is None else init, **door)
    except RepresentationError:
        if init is not None:
            raise
        orthogonal(module, via=kind, init="chart", **door)
    if via is None:
        release(module)


class Constrained:
    """A network whose weights go through `start_weight`: it says how they are trained."""

    #: The modules of each layer that hold such a weight, by name; one may be None.
    constrained: ClassVar[tuple[str, ...]] = ("recurrent",)

    layers: nn.ModuleList

    @property
    def via(self) -> str | None:
        """How the orthogonal weights are trained now, in the words that were said of them.

        A word of ``via=``, several with commas between, or None where all weights are plain.
        """
        charts = [
            None if constraint.storage is None else constraint.storage.chart
            for layer in self.layers
            for module in (getattr(layer, name) for name in self.constrained)
            if module is not None
            for constraint in constraints(module)
            if constraint.module is module and constraint.name == "weight"
        ]
        words = ["riemannian" if chart is None else chart.said or chart.name for chart in charts]
        return ", ".join(dict.fromkeys(words)) or None
