"""How states and gradients grow or shrink along a sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.models.activations import drop_units
from stiefel.models.base import RecurrentNetwork
from stiefel.models.frames import FrameRNN
from stiefel.models.masks import within
from stiefel.models.rollout import as_lengths
from stiefel.models.step import Parts, Stepper

__all__ = ["LayerFlow", "gradient_flow"]


@dataclass
class LayerFlow:
    """The norms that one layer and direction had in one run over a sequence.

    Attributes:
        network: Name of the network in the model, as `torch.nn.Module.named_modules` has it.
        layer: Number of the layer.
        direction: 0, or 1 for the recurrence that runs backwards.
        part: ``"h"``, or ``"c"`` for the cells of an LSTM.
    """

    network: str
    layer: int
    direction: int
    part: str
    _states: list[Tensor] = field(default_factory=list, repr=False)
    _adjoints: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def states(self) -> Tensor:
        """|h_t| `(T, B)`, in the order of the sequence; NaN past the end of a sequence.

        The mean over the batch is ``states.nanmean(1)``. The batch of a `PackedSequence` is in its
        sorted order, longest first.
        """
        return torch.stack(self._states)

    @property
    def adjoints(self) -> Tensor:
        """|dC/dh_t| `(T, B)` of the last backward pass; NaN past ends, and where no gradient came.

        The total derivative of the cost C that was differentiated, by way of the output and all
        later states; h_t and c_t count as independent. If C is a mean over the batch, so is this:
        it has a factor 1 / B.
        """
        return torch.stack(self._adjoints)

    def _put(self, t: int, state: Tensor, active: Tensor | None) -> None:
        """Takes the norms of a state `(B, ...)` now, and of its gradient when that comes."""
        norms = _norms(state.detach(), active)
        while len(self._states) <= t:
            self._states.append(torch.full_like(norms, torch.nan))
            self._adjoints.append(torch.full_like(norms, torch.nan))
        self._states[t] = norms
        if state.requires_grad:

            def note(gradient: Tensor) -> None:
                self._adjoints[t] = _norms(gradient.detach(), active)

            state.register_hook(note)


@contextlib.contextmanager
def gradient_flow(model: nn.Module) -> Iterator[list[LayerFlow]]:
    """Records |h_t| and |dC/dh_t| of every recurrent layer that runs inside the block.

    Of all `RecurrentNetwork` and convolutional networks (`FrameRNN`) in the model, those inside of
    `Seq2Seq` and `VideoPredictor` included, and of the steps of `RecurrentNetwork.stepper`. Run
    the model and its backward pass inside the block; the backward pass may also come later. Each
    run of a network adds its layers to the list.

    The gradients are the adjoints themselves, not bounds: inside the block a sequence is walked
    step by step under plain autograd, with a hook on every state. Values and gradients are those
    of the ordinary run, to rounding. It costs what a plain loop costs, several times the time and
    memory of the rollout; a convolutional network also reads its kernel at every step. Nothing is
    kept on the model: outside of the block nothing is recorded and nothing is slower.

    Args:
        model: A model with recurrent networks inside, or one itself; not a compiled one.

    Yields:
        The list that the records go to, one for each run, layer, direction and part of the state.

    Raises:
        ConfigurationError: If there is no such network in the model.

    Example:
        >>> import torch
        >>> from stiefel.models import OrthogonalRNN, gradient_flow
        >>> rnn = OrthogonalRNN(3, 8, nonlinearity="abs")
        >>> with gradient_flow(rnn) as flow:
        ...     output, last = rnn(torch.randn(50, 4, 3))
        ...     last.square().sum().backward()
        >>> flow[0].states.shape, flow[0].adjoints.shape
        (torch.Size([50, 4]), torch.Size([50, 4]))
        >>> ratio = flow[0].adjoints[0] / flow[0].adjoints[-1]  # abs and an orthogonal weight
        >>> torch.allclose(ratio, torch.ones(4), atol=1e-4)
        True
    """
    flows: list[LayerFlow] = []
    changes = list(_changes(model, flows))
    if not changes:
        raise ConfigurationError(
            f"expected a model with a recurrent network of this library inside, got "
            f"{type(model).__name__}: networks of torch keep their states to themselves"
        )
    before = [(module, name, module.__dict__.get(name)) for module, name, _ in changes]
    try:
        for module, name, function in changes:
            setattr(module, name, function)
        yield flows
    finally:
        for module, name, function in before:
            delattr(module, name)
            if function is not None:  # of a block around this one
                setattr(module, name, function)


def _changes(
    model: nn.Module, flows: list[LayerFlow]
) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Modules, names of their methods, and what takes their place inside the block."""
    for name, module in model.named_modules():
        if isinstance(module, RecurrentNetwork):
            recorder = _Recorder(flows, name, module.state_names)
            yield module, "_run", _Walk(module, recorder).run
            yield module, "stepper", _Walk(module, recorder).stepper
        elif isinstance(module, FrameRNN):
            recorder = _Recorder(flows, name, module.state_names)
            layers = {layer: index for index, layer in reversed(list(enumerate(module.layers)))}
            for layer, index in layers.items():  # a tied one once, as its first
                yield layer, "forward", _frames(layer.forward, index, recorder)


class _Recorder:
    """Opens records of one network."""

    def __init__(self, flows: list[LayerFlow], name: str, state_names: tuple[str, ...]) -> None:
        self.flows, self.name = flows, name
        self.parts = [state_name.removesuffix("0") for state_name in state_names]

    def open(self, layer: int, direction: int = 0) -> Callable[..., tuple[Tensor, ...]]:
        """New records of a layer, as ``parts = put(t, parts, active)``.

        The parts of a state count as independent, but a cell may make h_t from c_t: the run goes
        on with another name of c_t, through which all later steps, and they alone, reach it.
        """
        records = [LayerFlow(self.name, layer, direction, part) for part in self.parts]
        self.flows.extend(records)

        def put(
            t: int, parts: Sequence[Tensor], active: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            renamed = (parts[0], *(part.view_as(part) for part in parts[1:]))
            for record, part in zip(records, renamed, strict=True):
                record._put(t, part, active)
            return renamed

        return put


class _Walk:
    """Takes the place of `RecurrentNetwork._run` and `RecurrentNetwork.stepper`."""

    def __init__(self, network: RecurrentNetwork, recorder: _Recorder) -> None:
        self.network, self.recorder = network, recorder

    def stepper(self) -> Stepper:
        """The step of the network, which records."""
        puts = [self.recorder.open(layer) for layer in range(self.network.num_layers)]
        taken = [0] * len(puts)

        def watch(layer: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            taken[layer] += 1
            return puts[layer](taken[layer] - 1, parts)

        return Stepper(self.network, watch)

    def run(
        self,
        x: Tensor,
        states: Sequence[Tensor | None],
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, list[Tensor], None]:
        """All layers over `(T, B, features)`, step by step; as `RecurrentNetwork._run`."""
        network = self.network
        real = None
        if lengths is not None:
            real = within(as_lengths(lengths, x), len(x))
            x = x.masked_fill(~real.unsqueeze(-1), 0)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(network.num_layers):
            outputs = []
            for direction in range(network.directions):
                index = layer * network.directions + direction
                start = tuple(None if state is None else state[index] for state in states)
                output, end = self._layer(x, start, real, layer, direction)
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, dim=-1)
            if network.dropout and layer < network.num_layers - 1:
                x = drop_units(x, network.dropout, network.training)
        return x, [torch.stack(part) for part in zip(*ends, strict=True)], None

    def _layer(
        self, x: Tensor, parts: Parts, real: Tensor | None, layer: int, direction: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer and direction; a state stays what it is past the end of its sequence."""
        step = self.network.layer_step(layer * self.network.directions + direction)
        put = self.recorder.open(layer, direction)
        inputs = x.unbind(0)
        active = [None] * len(inputs) if real is None else real.unbind(0)
        outputs: list[Any] = [None] * len(inputs)
        after: tuple[Tensor, ...] = ()
        for t in reversed(range(len(inputs))) if direction else range(len(inputs)):
            after, mask = step(inputs[t], parts), active[t]
            if mask is not None:
                after = tuple(
                    torch.where(mask.unsqueeze(-1), new, 0 if old is None else old)
                    for new, old in zip(after, parts, strict=True)
                )
            after = put(t, after, mask)
            outputs[t], parts = after[0], after
        output = torch.stack(outputs)
        return output if real is None else output.masked_fill(~real.unsqueeze(-1), 0), after


def _frames(
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], layer: int, recorder: _Recorder
) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    """The forward of a layer over frames, frame by frame."""

    def run(
        x: Tensor, state: tuple[Tensor, ...] | None, real: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        put, outputs = recorder.open(layer), []
        masks = [None] * len(x) if real is None else real.split(1)
        for t, (frame, mask) in enumerate(zip(x.split(1), masks, strict=True)):
            output, state = forward(frame, state, mask)
            outputs.append(output)
            state = put(t, state, None if mask is None else mask.flatten())
        assert state is not None
        return torch.cat(outputs), state

    return run


def _norms(tensor: Tensor, active: Tensor | None) -> Tensor:
    """Norms of the rows `(B, ...)`, NaN where a row is past its end."""
    norms = tensor.flatten(1).norm(dim=1)
    return norms if active is None else torch.where(active, norms, torch.nan)
