"""One recurrence with an orthogonal recurrent weight, and how it starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, RepresentationError, unknown
from stiefel.init import INITIALIZERS
from stiefel.models.rollout import rollout
from stiefel.parameter import operator, orthogonal
from stiefel.parameter.via import make_chart
from stiefel.parametrizations import Parametrization

__all__ = ["Initializer", "RecurrentLayer"]

Initializer = Callable[..., Any]


def _initializer(init: str | Initializer) -> Initializer:
    if callable(init):
        return init
    if init not in INITIALIZERS:
        raise unknown("init", init, INITIALIZERS)
    return INITIALIZERS[init]


def _call(initializer: Initializer, tensor: Tensor, **offered: Any) -> None:
    """Calls an initialiser with those of ``generator=`` and ``determinant=`` that it knows."""
    known = inspect.signature(initializer).parameters
    given = {name: value for name, value in offered.items() if value is not None and name in known}
    with torch.no_grad():
        result = initializer(tensor, **given)
        if isinstance(result, Tensor) and result is not tensor:
            tensor.copy_(result)


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
            beta = nn.Parameter(torch.empty(hidden_size, **empty))
        self.register_parameter("beta", beta)
        self._start(input_init, generator)
        _start_recurrent(self.recurrent, via, init, determinant, generator, options)

    def _start(self, input_init: Initializer | None, generator: torch.Generator | None) -> None:
        """Input kernel Kaiming-normal (fan_in, relu), b = 0, beta ~ U(-0.01, 0.01)."""
        if input_init is not None:
            _call(input_init, self.input.weight, generator=generator)
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


def _start_recurrent(
    module: nn.Linear,
    via: str | Parametrization | None,
    init: str | Initializer | None,
    determinant: int | None,
    generator: torch.Generator | None,
    options: dict[str, Any],
) -> None:
    """Sets the recurrent weight to its start and constrains it, through the one door."""
    initializer = _initializer("henaff" if init is None else init)
    if via is None:
        if options:
            raise ConfigurationError(
                f"via=None is a plain weight and takes no options, got {sorted(options)}: name a "
                "chart or a metric in via="
            )
        _call(initializer, module.weight, generator=generator, determinant=determinant)
        return
    door: dict[str, Any] = {
        "via": via,
        "determinant": determinant,
        "generator": generator,
        **options,
    }
    try:
        orthogonal(module, init=initializer, **door)
    except RepresentationError:
        if init is not None:
            raise
        weight = module.weight
        chart = make_chart(via, weight.shape, options)
        if determinant is not None:
            chart.set_determinant(torch.tensor(determinant))
        with torch.no_grad():
            weight.copy_(chart.start(weight.dtype, weight.device, generator))
        orthogonal(module, init="keep", **door)
