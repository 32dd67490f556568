"""The mistakes of a first day are told what was expected, what came and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import StiefelError
from stiefel.models import LSTM, ConvNERU, OrthogonalRNN
from stiefel.parametrizations import CWY, Cayley, Polar


def holding(W):
    module = nn.Module()
    module.register_buffer("W", W)
    return module


def layer():
    return stiefel.orthogonal(nn.Linear(3, 3))


def set_weight(module, value):
    module.weight = value


def first(module):
    return next(stiefel.constraints(module))


def with_nan():
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, torch.nan)
    return module


MODULE = r"expected a torch\.nn\.Module, got {}: pass the model"
TENSOR = r"expected a tensor as the value .*, got {}: .*torch\.as_tensor"
MISTAKES = {
    # the module and the name of its weight
    "a tensor": (lambda: stiefel.orthogonal(torch.eye(3)), MODULE.format("Tensor")),
    "a parameter": (
        lambda: stiefel.orthogonal(nn.Parameter(torch.eye(3))),
        MODULE.format("Parameter"),
    ),
    "via second": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), "cwy"),
        r"no weight 'cwy', which is a way to train one: .*via='cwy'",
    ),
    "a slip": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), "wieght"),
        r"no weight 'wieght'.*in it: weight\. Give the name.*Did you mean 'weight'\?",
    ),
    "a recurrent module": (
        lambda: stiefel.orthogonal(nn.LSTM(3, 4)),
        r"in it: weight_ih_l0, weight_hh_l0\. Give the name .* second argument",
    ),
    "a container": (
        lambda: stiefel.orthogonal(nn.Sequential(nn.Linear(3, 3)), "0.weight"),
        r"no weight '0\.weight' of its own; .*on the submodule that holds it",
    ),
    "a lazy layer": (
        lambda: stiefel.orthogonal(nn.LazyLinear(3)),
        r"'weight' of LazyLinear has no shape yet: run the model once",
    ),
    "a lazy layer's slip": (
        lambda: stiefel.orthogonal(nn.Sequential(nn.LazyLinear(3))),
        r"Sequential has no weight 'weight' of its own; matrices in it: none",
    ),
    "spectral_norm by hooks": (
        lambda: stiefel.orthogonal(nn.utils.spectral_norm(nn.Linear(3, 3))),
        r"'weight' of Linear is no parameter: .*Undo that first",
    ),
    "a vector": (
        lambda: stiefel.orthogonal(nn.Linear(3, 4), "bias"),
        r"^'bias' of Linear: expected a weight with at least two dimensions, got shape \(4,\)",
    ),
    "whole numbers": (
        lambda: stiefel.orthogonal(holding(torch.eye(3, dtype=torch.int64)), "W"),
        r"^'W' of Module: expected a floating .*, got torch\.int64: convert the tensor first",
    ),
    "a NaN": (
        lambda: stiefel.orthogonal(with_nan(), init="keep"),
        r"expected finite entries, got NaN.*give it finite numbers first",
    ),
    # the way to train it
    "a class": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), via=CWY),
        r"got the class CWY: use via='cwy', or CWY\(n, p\)",
    ),
    "no way": (lambda: stiefel.orthogonal(nn.Linear(3, 3), via=None), r"unknown via None: .*cwy"),
    "a slip in an option": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), reflection=2),
        r"no option 'reflection': .*Did you mean 'reflections'\?",
    ),
    "a chart of another size": (
        lambda: stiefel.orthogonal(holding(torch.randn(2, 5, 3)), "W", via=Polar(4)),
        r"shape \(2, 5, 3\), got one for \(4, 4\): make it with Polar\(5, 3, batch=\(2,\)\)",
    ),
    "a determinant": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), determinant=2),
        r"expected determinant= to be \+1 or -1, or None .*, got 2",
    ),
    "a dtype's name": (
        lambda: stiefel.orthogonal(nn.Linear(3, 3), weight_dtype="float32"),
        r"expected weight_dtype= to be a torch\.dtype, such as torch\.float32, got 'float32'",
    ),
    # charts by hand
    "a size in words": (lambda: CWY("3"), r"chart 'cwy': expected whole numbers .*n = '3'"),
    "a size that is a float": (lambda: Cayley(3.0), r"chart 'cayley': .*got n = 3\.0"),
    "a batch that is a number": (
        lambda: Polar(3, batch=2),
        r"a tuple of them as batch=, got .*batch = 2",
    ),
    "a point of another size": (
        lambda: CWY(4).right_inverse(torch.eye(3)),
        r"shape \(4, 4\), got \(3, 3\)\. Give a weight of that shape",
    ),
    # setting a weight
    "a list": (lambda: set_weight(layer(), [[1.0]]), TENSOR.format("list")),
    "None": (lambda: set_weight(layer(), None), TENSOR.format("NoneType")),
    "an array": (
        lambda: first(layer()).assign(np.eye(3)),
        "^weight: " + TENSOR.format("ndarray"),
    ),
    "a complex value": (
        lambda: set_weight(layer(), torch.eye(3, dtype=torch.complex64)),
        r"expected a real value .*torch\.float32, got torch\.complex64: make the module complex",
    ),
    "a value on meta": (
        lambda: set_weight(layer(), torch.empty(3, 3, device="meta")),
        r"expected a value with numbers, .*on the meta device: make it",
    ),
    "a weight on meta": (
        lambda: set_weight(stiefel.orthogonal(nn.Linear(3, 3, device="meta")), torch.eye(3)),
        r"on the meta device: .*to_empty",
    ),
    # models and optimizers
    "a tensor for a model": (lambda: stiefel.convert(torch.eye(3), "cwy"), MODULE.format("Tensor")),
    "a released tensor": (lambda: stiefel.release(torch.eye(3)), MODULE.format("Tensor")),
    "parameters for a model": (
        lambda: list(stiefel.constraints(layer().parameters())),
        MODULE.format("generator"),
    ),
    "an optimizer's name": (
        lambda: stiefel.convert(layer(), "rgd-c-c", optimizer="adam"),
        r"expected an optimizer, got str: make one with stiefel\.optim\.build",
    ),
    "exchanged arguments": (
        lambda: stiefel.attach(torch.optim.SGD(layer().parameters(), lr=0.1), layer()),
        MODULE.format("SGD"),
    ),
    "a model for an optimizer": (
        lambda: stiefel.attach(layer(), layer()),
        r"expected an optimizer, got ParametrizedLinear: make one",
    ),
    "an operator of nothing": (
        lambda: stiefel.operator(nn.ReLU()),
        r"expected a module with a weight 'weight', got ReLU without: give the name",
    ),
    "parameters to build for": (
        lambda: stiefel.optim.build(layer().parameters(), lr=0.1),
        MODULE.format("generator"),
    ),
    "a model to move": (
        lambda: stiefel.optim.RGD(layer(), lr=0.1),
        r"RGD takes parameters .*, got the module ParametrizedLinear: use .*build\(model, lr=",
    ),
    "a container to move": (
        lambda: stiefel.optim.POGO(nn.Sequential(layer()), lr=0.1),
        r"got the module Sequential: use .*POGO\(model\.parameters\(\), \.\.\.\)",
    ),
    "nothing to move": (
        lambda: stiefel.optim.RGD(None, lr=0.1),
        r"RGD takes parameters or groups of them, got NoneType: use",
    ),
    # recurrent networks
    "no input": (
        lambda: OrthogonalRNN(3, 6)(None),
        r"input of OrthogonalRNN to be a tensor or .*, got NoneType: .*torch\.as_tensor",
    ),
    "frames in an array": (
        lambda: ConvNERU(3, 6)(np.zeros((2, 1, 3, 4, 4))),
        r"input of ConvNERU to be a tensor .*, got ndarray: .*dtype=torch\.float32",
    ),
    "features in words": (
        lambda: OrthogonalRNN("3", 4),
        r"expected input_size to be an integer .*, got '3' of type str: pass a number",
    ),
    "no hidden units": (
        lambda: LSTM(3, None),
        r"expected hidden_size to be an integer .*, got None of type NoneType",
    ),
    "dropout in words": (
        lambda: OrthogonalRNN(3, 4, dropout="0.1"),
        r"dropout probability in \[0, 1\], got '0\.1' of type str: pass a number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_what_to_do(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises(StiefelError, match=words):
        call()


def test_a_refused_value_changes_nothing():
    module = layer()
    before = module.weight.detach().clone()
    for value in (None, [[1.0]], torch.empty(3, 3, device="meta")):
        with pytest.raises(StiefelError):
            module.weight = value
    assert torch.equal(module.weight, before)


def test_sizes_of_numpy_are_whole_numbers():
    chart = CWY(np.int64(4), np.int32(2), batch=torch.Size([3]))
    assert (chart.n, chart.p, chart.batch) == (4, 2, (3,))
    assert type(chart.n) is int
