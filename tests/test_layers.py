"""`OrthogonalLinear` and `OrthogonalConv2d`."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.models import OrthogonalConv2d, OrthogonalLinear

VIAS = ["cwy", "matrix_exp", "own", "rgd-c-c", "rgd-e-qr"]
every_via = pytest.mark.parametrize("via", VIAS)


def gram_error(W):
    W = W if W.shape[-2] >= W.shape[-1] else W.mT
    return float(geometry.orthonormality_residual(W).max())


@every_via
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_linear_has_orthonormal_columns_or_rows(via, inputs, outputs, device):
    layer = OrthogonalLinear(inputs, outputs, via=via, device=device, dtype=torch.float64)
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == (outputs, inputs)
    assert gram_error(layer.weight) < 1e-12
    assert len(list(stiefel.constraints(layer))) == 1
    x = torch.randn(7, inputs, device=device, dtype=torch.float64)
    turned = layer(x) - layer.bias
    if outputs >= inputs:
        assert (turned.norm(dim=1) - x.norm(dim=1)).abs().max() < 1e-12
    else:
        assert bool((turned.norm(dim=1) <= x.norm(dim=1) + 1e-12).all())


@every_via
def test_layers_train_copy_and_reload(via, device):
    def build():
        return nn.Sequential(
            OrthogonalConv2d(2, 6, 3, padding=1, via=via),
            nn.ReLU(),
            nn.Flatten(),
            OrthogonalLinear(6 * 16, 5, via=via),
        ).to(device)

    model = build()
    optimizer = stiefel.optim.build(model, lr=0.05)
    x = torch.randn(8, 2, 4, 4, device=device)
    y = torch.randn(8, 5, device=device)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for constraint in stiefel.constraints(model):
        n, p = constraint.point.shape
        residual = geometry.orthonormality_residual(constraint.point)
        assert residual < stiefel.tolerance(torch.float32, n, p)
    twin, other = copy.deepcopy(model), build()
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    assert torch.equal(other(x), model(x))


def test_the_start_is_haar_or_what_the_chart_can_hold(device):
    generator = torch.Generator(device=device).manual_seed(1)
    options = {"device": device, "dtype": torch.float64}
    first = OrthogonalLinear(6, 6, via="cwy", generator=generator, **options)
    generator.manual_seed(1)
    second = OrthogonalLinear(6, 6, via="rgd-c-c", generator=generator, **options)
    assert (first.weight - second.weight).abs().max() < 1e-12
    few = OrthogonalLinear(12, 12, via="cwy", reflections=2, **options)
    assert gram_error(few.weight) < 1e-12
    near = OrthogonalLinear(6, 6, init="identity", **options)
    assert (near.weight - torch.eye(6, **options)).abs().max() < 0.5
    minus = OrthogonalLinear(5, 5, determinant=-1, **options)
    assert torch.linalg.det(minus.weight).item() == pytest.approx(-1)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "taps"), [(3, 3, 3), (2, 4, 3), (4, 2, 5), (3, 3, 1)]
)
def test_convolution_never_increases_norms_and_is_not_orthogonal(
    padding_mode, inputs, outputs, taps, device
):
    layer = OrthogonalConv2d(
        inputs,
        outputs,
        taps,
        padding=taps // 2,
        bias=False,
        padding_mode=padding_mode,
        device=device,
        dtype=torch.float64,
    )
    K = layer.weight.detach()
    assert gram_error(taps * K.permute(2, 3, 1, 0).reshape(-1, outputs)) < 1e-12
    size = 6
    basis = torch.eye(inputs * size**2, dtype=torch.float64, device=device)
    images = layer(basis.reshape(-1, inputs, size, size)).flatten(1)  # the dense operator, rows
    values = torch.linalg.svdvals(images)
    assert values.max() <= 1 + 1e-12
    if taps == 1:
        assert (values - 1).abs().max() < 1e-12  # inputs == outputs here: all norms are kept
    else:
        assert values.min() < 0.9


def test_convolution_scale_groups_and_stride(device):
    layer = OrthogonalConv2d(4, 6, (3, 2), scale=1.0, groups=2, stride=2, device=device)
    W = layer.weight.detach()
    assert W.shape == (6, 2, 3, 2)
    assert gram_error(W.permute(2, 3, 1, 0).reshape(-1, 6)) < 1e-5
    assert layer(torch.randn(1, 4, 9, 9, device=device)).shape == (1, 6, 4, 4)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(OrthogonalLinear, nn.Linear), (OrthogonalConv2d, nn.Conv2d)]
)
def test_arguments_follow_torch(ours, theirs):
    """Every argument of torch's layer is there, in its order, with its default."""
    mine, its = (inspect.signature(kind.__init__).parameters for kind in (ours, theirs))
    positional = [name for name in its if name not in ("device", "dtype")]
    assert list(mine)[: len(positional)] == positional
    assert all(mine[name].default == its[name].default for name in its)
