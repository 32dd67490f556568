"""The gradient of all that is trained, by which models with and without constraints compare."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stiefel
from stiefel.diagnostics import StationarityMonitor, Verdict
from tests.monitored_runs import layers, loss_of, sgd, step

TOTAL = "model/total_norm"


def free() -> nn.Module:
    """The same layers, without constraints."""
    return stiefel.release(layers())


def expected(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    """|grad| over all parameters, by autograd on released weights projected on tangent spaces."""
    twin = copy.deepcopy(model)
    points = {each.path: each.point.clone() for each in stiefel.constraints(twin)}
    stiefel.release(twin)
    loss(twin).backward()
    total = 0.0
    for name, parameter in twin.named_parameters():
        G = parameter.grad
        assert G is not None
        if name in points:
            X = points[name]
            S = X.mT @ G
            G = G - X @ (S + S.mT) / 2
        total += float(G.square().sum())
    return math.sqrt(total)


@pytest.mark.parametrize("make", [layers, free])
def test_the_total_norm_is_that_of_all_parameters(make: Callable[[], nn.Module]) -> None:
    model = make()
    monitor = StationarityMonitor(model, 1, unconstrained=True)
    for seed in range(3):
        value = expected(model, lambda model, seed=seed: loss_of(model, seed))
        with monitor:
            step(model, sgd(model), seed)
        assert monitor.records[-1][TOTAL] == pytest.approx(value, rel=1e-9)


def test_it_is_of_this_step_before_clipping_without_the_scale_and_adds_up() -> None:
    model = free()
    value = expected(model, lambda model: sum(loss_of(model, seed) for seed in range(3)) / 3)
    loss_of(model, 9).backward()  # accumulated before
    monitor = StationarityMonitor(model, 1, scale=8.0, unconstrained=True)
    with monitor:
        for seed in range(3):
            (8 * loss_of(model, seed) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        sgd(model).step()
    assert monitor.records[0][TOTAL] == pytest.approx(value, rel=1e-9)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_frozen_parameters_and_sparse_gradients() -> None:
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    linear.weight.requires_grad_(False)
    model = nn.Sequential(embedding, linear)
    monitor = StationarityMonitor(model, 1, unconstrained=True)
    with monitor:
        model(torch.tensor([1, 1, 4])).square().sum().backward()
    sparse, bias = embedding.weight.grad, linear.bias.grad
    assert sparse is not None
    assert bias is not None
    dense = sparse.to_dense()
    value = float(torch.cat([dense.flatten(), bias]).double().norm())
    assert monitor.records[0][TOTAL] == pytest.approx(value, rel=1e-6)
    with monitor:
        pass  # no backward pass
    assert TOTAL not in monitor.records[1]


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(sparse_first: bool) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    losses = [
        lambda: embedding(torch.tensor([1, 1, 4])).square().sum(),
        lambda: embedding.weight.sin().sum(),
    ]
    monitor = StationarityMonitor(embedding, 1, unconstrained=True)
    with monitor:
        for loss in losses if sparse_first else losses[::-1]:
            embedding.zero_grad()  # torch itself adds up in one order only
            loss().backward()
    W = embedding.weight
    G = torch.autograd.grad(sum(loss() for loss in losses), W)[0]
    value = float(G.to_dense().double().norm())
    assert monitor.records[0][TOTAL] == pytest.approx(value, rel=1e-6)


def test_lazy_layers_are_watched_from_their_second_step_on() -> None:
    model = nn.Sequential(nn.LazyLinear(4), stiefel.orthogonal(nn.Linear(4, 4)))
    monitor = StationarityMonitor(model, 1)
    for _ in range(2):
        with monitor:
            model(torch.randn(3, 5)).square().sum().backward()
    first, second = monitor.records
    assert math.isnan(first[TOTAL])
    assert first["model/euclidean_norm"] >= 0
    assert second[TOTAL] > second["model/euclidean_norm"]


def test_an_exception_leaves_no_hook() -> None:
    model = free()
    monitor = StationarityMonitor(model, 1, unconstrained=True)

    def fail() -> None:
        with monitor:
            loss_of(model).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert monitor.records == []


def test_a_model_without_constraints_is_judged_and_reported() -> None:
    model = free()
    optimizer, monitor = sgd(model, 0.05), StationarityMonitor(model, 1, unconstrained=True)
    for _ in range(200):
        with monitor:
            step(model, optimizer)  # one batch: the gradient falls for good
    assert monitor.judge() == monitor.judge("model/total_norm_squared")
    assert monitor.judge().verdict is Verdict.DECREASING
    printed = " ".join(str(monitor.report()).split())
    assert "feasible: not measured, no constrained weight was seen" in printed
    assert "model/total_norm_squared: decreasing" in printed
    assert "nan" not in printed
