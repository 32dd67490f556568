"""Layers of `stiefel` in the states that the benchmarks time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import require
from benchmarks.peers import reflect
from stiefel.models import OrthogonalRNN, RecurrentLayer
from stiefel.parameter import orthogonal

__all__ = ["constrained", "reflections_linear", "reflections_oracle", "rnn_like"]

_RNN_LEAVES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class _Weight(nn.Module):
    """A module that has a weight and nothing else."""

    def __init__(self, shape: Sequence[int], device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tuple(shape), device=device, dtype=dtype))


def constrained(
    shape: Sequence[int],
    via: str,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    """Returns a module with a constrained weight, at the chart's own start.

    Args:
        shape: Shape ``(..., n, p)`` of the weight, n >= p.
        via: As in `stiefel.orthogonal`.
        device: Where.
        dtype: Of the weight.
        **options: Of the chart.
    """
    return orthogonal(_Weight(shape, device, dtype), via=via, init="chart", **options)


def reflections_linear(n: int, p: int, via: str, device: str, **options: Any) -> nn.Module:
    """Returns a layer with an (n, p) weight made of reflections with Gaussian vectors.

    Args:
        n: Rows.
        p: Columns.
        via: ``"cwy"`` or ``"tcwy"``.
        device: Where.
        **options: Of the chart, such as ``reflections=128``.
    """
    layer = nn.Linear(p, n, bias=False, device=device)
    with warnings.catch_warnings():
        # A product of few reflections cannot keep the layer's value; it is replaced below.
        warnings.simplefilter("ignore", UserWarning)
        layer = orthogonal(layer, "weight", via=via, **options)
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.normal_()
    return layer


def _flip(layer: nn.Module) -> Tensor | None:
    """Returns the chart's buffer that flips the last row, None when it has none."""
    for name, buffer in layer.named_buffers():
        if name.endswith("flip"):
            return buffer
    return None


def reflections_oracle(columns: int = 4) -> Callable[[nn.Module], None]:
    """Returns a check that weight and gradient equal those of the ordered Householder product.

    The product is applied to a few columns in float64, reflection by reflection, and
    differentiated by autograd: no compact form is involved.

    Args:
        columns: How many columns of the weight are compared.
    """

    def check(layer: nn.Module) -> None:
        (leaf,) = layer.parameters()
        weight = layer.weight
        assert isinstance(weight, Tensor)
        n, p = weight.shape
        mixing = torch.randn(p, columns, dtype=torch.float64, device=weight.device)
        mixing = torch.linalg.qr(mixing).Q
        cotangent = torch.randn(n, columns, dtype=torch.float64, device=weight.device)
        padded = torch.cat((mixing, mixing.new_zeros(n - p, columns)))
        v = leaf.detach().double().requires_grad_()
        expected = reflect(v, padded)
        flip = _flip(layer)
        if flip is not None:
            expected = torch.cat((expected[:-1], expected[-1:] * flip.double().reshape(())))
        (slope,) = torch.autograd.grad((expected * cotangent).sum(), v)
        leaf.grad = None
        weight.backward((cotangent @ mixing.mT).to(weight.dtype))
        assert leaf.grad is not None
        value_error = (weight.detach().double() @ mixing - expected).abs().max().item()
        slope_error = ((leaf.grad.double() - slope).norm() / slope.norm()).item()
        require("distance to the ordered Householder product", value_error, 2e-5)
        require("relative distance of the gradients", slope_error, 2e-4)
        leaf.grad = None

    return check


def rnn_like(
    rnn: nn.RNN, via: str | None = None, **options: Any
) -> tuple[OrthogonalRNN, list[tuple[Tensor, tuple[Tensor, ...]]]]:
    """Makes an `OrthogonalRNN` (tanh) that computes what a one-layer `nn.RNN` computes.

    Args:
        rnn: The network to copy.
        via: How the recurrent weight is trained. None copies it as a plain weight; a chart starts
            at its own value instead.
        **options: Of the chart.

    Returns:
        The network, and its leaves with those of `rnn` whose gradients must be the same.
    """
    w_in, w, b_in, b = (getattr(rnn, f"{name}_l0") for name in _RNN_LEAVES)
    twin = OrthogonalRNN(
        rnn.input_size, rnn.hidden_size, nonlinearity="tanh", via=via, device=w.device, **options
    )
    (layer,) = twin.layers
    assert isinstance(layer, RecurrentLayer)
    with torch.no_grad():
        layer.input.weight.copy_(w_in)
        layer.input.bias.copy_(b_in + b)
        pairs = [(layer.input.weight, (w_in,)), (layer.input.bias, (b_in, b))]
        if via is None:
            layer.recurrent.weight.copy_(w)
            pairs.append((layer.recurrent.weight, (w,)))
    return twin, pairs
