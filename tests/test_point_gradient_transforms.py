"""Gradients with respect to the point beside torch's transforms and wrappers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from stiefel.diagnostics import point_gradients
from stiefel.models import OrthogonalRNN
from tests.point_gradient_cases import VIAS, close, linear
from tests.stationarity_oracle import plain_gradients

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_count_once(reentrant):
    layer = linear()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    _, G = plain_gradients(layer, lambda model: model(x).cos().sum())["weight"]
    with point_gradients(layer) as gradients:
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        y.cos().sum().backward()
    close(gradients["weight"].gradient, G)


def test_a_cached_weight_is_read_once():
    layer = linear()
    x = torch.randn(5, 6, dtype=torch.float64)
    _, G = plain_gradients(layer, lambda model: model(model(x)).cos().sum())["weight"]
    with point_gradients(layer) as gradients, parametrize.cached():
        layer(layer(x)).cos().sum().backward()
    close(gradients["weight"].gradient, G)
    with parametrize.cached():
        layer(x)
        with point_gradients(layer) as gradients:
            layer(x).sum().backward()
    assert "cached" in str(gradients["weight"].missing)


def test_transforms_of_torch_func_are_named():
    layer, x = linear(), torch.randn(5, 6, dtype=torch.float64)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    with point_gradients(layer) as gradients:
        torch.func.grad(loss)({k: v.detach() for k, v in layer.named_parameters()})
    assert "torch.func" in str(gradients["weight"].missing)


def test_functional_call_is_seen():
    x = torch.randn(5, 6, dtype=torch.float64)
    layer, other = linear(determinant=1), linear(determinant=1)
    _, G = plain_gradients(other, lambda model: model(x).cos().sum())["weight"]
    with point_gradients(layer) as gradients:
        parameters = dict(other.named_parameters())
        torch.func.functional_call(layer, parameters, (x,)).cos().sum().backward()
    close(gradients["weight"].gradient, G)
    close(gradients["weight"].point, other.weight.detach())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_models_run_eagerly_inside():
    rnn = OrthogonalRNN(3, 8, via="cwy", reflections=2)
    x = torch.randn(4, 2, 3)
    _, G = plain_gradients(rnn, lambda model: model(x)[0].cos().sum())["layers.0.recurrent.weight"]
    compiled = torch.compile(rnn, backend="eager")
    before = compiled(x)[0]
    with point_gradients(compiled) as gradients:
        compiled(x)[0].cos().sum().backward()
    (found,) = gradients.values()
    close(found.gradient.double(), G, 1e-5)
    torch.testing.assert_close(compiled(x)[0], before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("via", VIAS)
def test_what_is_compiled_inside_is_there_once_the_compiler_is_loaded(via):
    torch.compiler.reset()  # loads it
    layer, x = linear(via), torch.randn(5, 6, dtype=torch.float64)
    _, G = plain_gradients(layer, lambda model: model(x).cos().sum())["weight"]
    with point_gradients(layer) as gradients:
        torch.compile(layer, backend="eager")(x).cos().sum().backward()
    assert gradients["weight"].missing is None
    close(gradients["weight"].gradient, G)


FIRST = """
import sys, torch
from stiefel.diagnostics import point_gradients
from tests.point_gradient_cases import linear

layer, x = linear(), torch.randn(5, 6, dtype=torch.float64)
assert "torch._dynamo" not in sys.modules
with point_gradients(layer) as gradients:
    torch.compile(layer, backend="eager")(x).cos().sum().backward()
assert gradients["weight"].gradient is None
print(gradients["weight"].missing)
"""


def test_what_loads_the_compiler_inside_is_said_to_be_missing():
    run = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("it was not read inside the block")


def test_autocast_changes_the_gradient_but_not_the_point():
    layer = linear(dtype=torch.float32)
    x = torch.randn(5, 6)
    with point_gradients(layer) as gradients, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(x).float().cos().sum()
        loss.backward()
    found = gradients["weight"]
    assert found.point.dtype == found.gradient.dtype == torch.float32
    close(found.point, layer.weight.detach(), 0)
    W = layer.weight.detach().clone().requires_grad_()
    (x @ W.mT).cos().sum().backward()
    close(found.gradient, W.grad, 5e-2)


def test_under_ddp_it_is_the_gradient_of_this_process(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        for via in VIAS:
            layer, x = linear(via), torch.randn(5, 6, dtype=torch.float64)
            _, G = plain_gradients(layer, lambda model, x=x: model(x).cos().sum())["weight"]
            wrapped = nn.parallel.DistributedDataParallel(layer)
            with point_gradients(wrapped) as gradients:
                wrapped(x).cos().sum().backward()
            assert list(gradients) == ["module.weight"]
            close(gradients["module.weight"].gradient, G)
    finally:
        torch.distributed.destroy_process_group()
