"""The gradient with respect to the point: every way to read a weight, and nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import point_gradients
from stiefel.geometry import haar
from stiefel.models import HouseholderAdapter, OrthogonalRNN, SequenceModel
from stiefel.operators import CompactWY, Dense
from stiefel.parameter import ConstraintList
from tests.point_gradient_cases import VIAS, close, linear
from tests.stationarity_oracle import plain_gradients


def state_of(model):
    """What a model carries: attributes, hooks included, of every module."""
    return {
        name: {key: value for key, value in vars(module).items() if key != "_parameters"}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("via", VIAS)
def test_reads_and_backward_passes_add_up(via):
    layer = linear(via)
    x, y = torch.randn(2, 5, 6, dtype=torch.float64)

    def loss(model):
        return (model(model(x)).cos() + model.weight.sum()).sum()

    _, G = plain_gradients(layer, loss)["weight"]
    _, H = plain_gradients(layer, lambda model: model(y).sin().sum())["weight"]
    with point_gradients(layer) as gradients:
        total = loss(layer)
        total.backward(retain_graph=True)
        close(gradients["weight"].gradient, G)
        layer(y).sin().sum().backward()
        close(gradients["weight"].gradient, G + H)
        total.backward()
    close(gradients["weight"].gradient, 2 * G + H)
    assert gradients["weight"].missing is None
    assert gradients["weight"].elsewhere == 0


@pytest.mark.parametrize("via", VIAS)
def test_gradients_of_autograd_grad_are_seen(via):
    layer = linear(via)
    x = torch.randn(5, 6, dtype=torch.float64)
    _, G = plain_gradients(layer, lambda model: model(x).cos().sum())["weight"]
    with point_gradients(layer) as gradients:
        torch.autograd.grad(layer(x).cos().sum(), list(layer.parameters()))
    close(gradients["weight"].gradient, G)


@pytest.mark.parametrize("shared", ["storage", "original"])
@pytest.mark.parametrize("via", VIAS)
def test_tied_weights_are_one_weight(via, shared):
    model: Any = nn.ModuleDict({"a": linear(via), "b": linear(via)})
    model["b"].weight = model["a"].weight.detach()
    if shared == "storage":
        model["b"].parametrizations = model["a"].parametrizations
    else:
        model["b"].parametrizations.weight.original = model["a"].parametrizations.weight.original
    x = torch.randn(5, 6, dtype=torch.float64)
    W = model["a"].weight.detach().clone().requires_grad_()
    ((x @ W.mT).sin() @ W.mT).sum().backward()
    with point_gradients(model) as gradients:
        model["b"](model["a"](x).sin()).sum().backward()
    assert list(gradients) == ["a.weight"]
    close(gradients["a.weight"].gradient, W.grad)


def test_one_chart_object_may_serve_two_weights():
    chart = stiefel.parametrizations.MatrixExp(6, base="identity")
    model = nn.ModuleDict({"a": linear(chart), "b": linear(chart)})
    x = torch.randn(5, 6, dtype=torch.float64)
    expected = plain_gradients(model, lambda m: m["b"](m["a"](x).sin()).cos().sum())
    with point_gradients(model) as gradients:
        model["b"](model["a"](x).sin()).cos().sum().backward()
    for path, (X, G) in expected.items():
        close(gradients[path].point, X)
        close(gradients[path].gradient, G)


@pytest.mark.parametrize("via", ["tcwy", "riemannian"])
@pytest.mark.parametrize("layer", ["wide", "kernel", "blocks"])
def test_views(layer, via):
    module, x, view = {
        "wide": (nn.Linear(7, 3), torch.randn(4, 7), None),
        "kernel": (nn.Conv2d(3, 4, (2, 3)), torch.randn(2, 3, 5, 5), ("convolution", 0.3)),
        "blocks": (nn.Linear(3, 10), torch.randn(4, 3), ("blocks", 2)),
    }[layer]
    module, x = stiefel.orthogonal(module.double(), via=via, view=view), x.double()
    X, G = plain_gradients(module, lambda model: model(x).cos().sum())["weight"]
    with point_gradients(module) as gradients:
        module(x).cos().sum().backward()
    close(gradients["weight"].point, X)
    close(gradients["weight"].gradient, G)


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_of_float32_points(dtype, via):
    layer = linear(via, 8, 4, dtype=torch.float32, weight_dtype=dtype)
    C = torch.randn(8, 4).to(dtype)
    with point_gradients(layer) as gradients:
        (layer.weight * C).sum().backward()
        (layer.weight * C).sum().backward()
    found = gradients["weight"]
    assert found.point.dtype == found.gradient.dtype == torch.float32
    close(found.gradient, 2 * C.float())
    close(found.point, layer.parametrizations.weight.exact_point(), 0)
    residual = (found.point.mT @ found.point - torch.eye(4)).abs().max()
    assert residual < stiefel.tolerance(torch.float32, 8, 4)
    assert layer.weight.dtype == dtype


def test_a_matrix_free_weight_is_dense_inside_only():
    rnn = OrthogonalRNN(3, 16, via="cwy", reflections=2, dtype=torch.float64)
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    free = rnn(x)[0]
    recurrent = rnn.layers[0].recurrent
    with point_gradients(rnn):
        assert type(stiefel.operator(recurrent)) is Dense
        close(rnn(x)[0], free)
    assert type(stiefel.operator(recurrent)) is CompactWY


def test_models_with_operators():
    adapter = HouseholderAdapter(nn.Linear(16, 3, dtype=torch.float64), 2)
    model = SequenceModel(OrthogonalRNN(3, 16, via="cwy", reflections=2), 2).double()
    for module, x in ((adapter, torch.randn(4, 16)), (model, torch.randn(7, 2, 3))):
        x = x.double()
        expected = plain_gradients(module, lambda m, x=x: m(x).cos().sum())
        with point_gradients(module) as gradients:
            module(x).cos().sum().backward()
        for path, (_, G) in expected.items():
            close(gradients[path].gradient, G, 1e-10)


@pytest.mark.parametrize("via", VIAS)
def test_what_is_missing_is_said(via):
    layer, x = linear(via), torch.randn(5, 6, dtype=torch.float64)
    with point_gradients(layer) as gradients:
        assert "not read" in str(gradients["weight"].missing)
        with torch.no_grad():
            layer(x)
        assert "without gradients" in str(gradients["weight"].missing)
        loss = layer(x).sum()
        assert "no backward pass" in str(gradients["weight"].missing)
        assert gradients["weight"].gradient is None
        close(gradients["weight"].point, layer.weight.detach())
    loss.backward()
    assert "no backward pass" in str(gradients["weight"].missing)  # the block is over
    with point_gradients(layer) as gradients, torch.inference_mode():
        layer(x)
    assert "without gradients" in str(gradients["weight"].missing)
    layer.requires_grad_(False)
    with point_gradients(layer) as gradients:
        layer(x.requires_grad_()).sum().backward()
    assert "frozen" in str(gradients["weight"].missing)
    with pytest.raises(KeyError, match="there are"):
        gradients["bias"]


@pytest.mark.parametrize("via", VIAS)
def test_a_block_is_about_one_point(via):
    layer, x = linear(via), torch.randn(5, 6, dtype=torch.float64)
    X, G = plain_gradients(layer, lambda model: model(x).cos().sum())["weight"]
    optimizer = stiefel.optim.build(layer, lr=0.1)
    with point_gradients(layer) as gradients:
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).cos().sum().backward()
            optimizer.step()
    found = gradients["weight"]
    close(found.point, X)
    close(found.gradient, G)
    assert found.elsewhere == 1


class Bare(nn.Module):
    """A point of geoopt, and one of ours, in a user's own module."""

    def __init__(self):
        super().__init__()
        X, Y = haar(6, 3, (2,), dtype=torch.float64)
        self.theirs = geoopt.ManifoldParameter(X, geoopt.EuclideanStiefel())
        self.ours = stiefel.ManifoldParameter(Y)

    def forward(self, x):
        return (x @ self.theirs @ self.ours.mT).cos().sum()


def test_bare_points():
    model, x = Bare(), torch.randn(4, 6, dtype=torch.float64)
    with point_gradients(model) as gradients:
        model(x).backward()
        (2 * model(x)).backward()
        before = model.theirs.detach().clone()
        grads = {name: leaf.grad.clone() for name, leaf in model.named_parameters()}
        optimizer = geoopt.optim.RiemannianSGD(model.parameters(), lr=0.1)
        optimizer.step()
        model(x).backward()  # at another point
    for name, grad in grads.items():
        close(gradients[name].gradient, grad)
    close(gradients["theirs"].point, before.as_subclass(torch.Tensor))
    with point_gradients(model) as gradients:
        pass
    assert "no backward pass" in str(gradients["ours"].missing)
    model.ours.requires_grad_(False)
    with point_gradients(model) as gradients:
        model(x).backward()
    assert "frozen" in str(gradients["ours"].missing)
    assert gradients["theirs"].missing is None


def test_nothing_is_left_on_the_model():
    rnn = OrthogonalRNN(3, 16, via="cwy", reflections=2)
    model = nn.ModuleDict({"rnn": rnn, "b": linear("riemannian"), "bare": Bare()})
    before = state_of(model)
    x = torch.randn(7, 2, 3)

    def fail(gradients):
        with point_gradients(model) as found:
            rnn(x)[0].sum().backward()
            model["b"](torch.ones(1, 6).double()).sum().backward()
            gradients.update(found)
            raise RuntimeError("planted")

    gradients = {}
    with pytest.raises(RuntimeError, match="planted"):
        fail(gradients)
    assert gradients["rnn.layers.0.recurrent.weight"].gradient is not None
    assert str(state_of(model)) == str(before)
    assert not any(isinstance(m, ConstraintList) and m.is_watched for m in model.modules())
    for leaf in model.parameters():
        assert not leaf._backward_hooks


def test_blocks_nest():
    layer, x = linear(), torch.randn(5, 6, dtype=torch.float64)
    rnn = OrthogonalRNN(3, 16, via="cwy", reflections=2)
    with point_gradients(layer) as outer, point_gradients(rnn):
        layer(x).sum().backward()
        with point_gradients(layer) as inner, point_gradients(rnn):
            layer(x).sum().backward()
        assert type(stiefel.operator(rnn.layers[0].recurrent)) is Dense
    assert type(stiefel.operator(rnn.layers[0].recurrent)) is CompactWY
    close(outer["weight"].gradient / 2, inner["weight"].gradient)


def test_a_copy_made_inside_is_a_model_of_its_own():
    rnn = OrthogonalRNN(3, 16, via="cwy", reflections=2)
    x = torch.randn(7, 2, 3)
    with point_gradients(rnn) as gradients:
        twin = copy.deepcopy(rnn)
        assert type(stiefel.operator(twin.layers[0].recurrent)) is CompactWY
        twin(x)[0].sum().backward()
        assert "not read" in str(gradients["layers.0.recurrent.weight"].missing)
        rnn(x)[0].sum().backward()
    (found,) = gradients.values()
    assert found.gradient is not None
    with point_gradients(twin) as gradients:
        twin(x)[0].sum().backward()
    close(next(iter(gradients.values())).gradient, found.gradient, 1e-5)


def test_a_model_without_constrained_weights_gives_nothing():
    with point_gradients(nn.Linear(2, 2)) as gradients:
        pass
    assert len(gradients) == 0
