"""Every way to train a weight turns into every other at the same point, or says why not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import RepresentationError
from stiefel.geometry import haar, orthonormality_residual
from stiefel.numerics import real_dtype
from tests.chart_cases import RIEMANNIAN, fixed_determinant, reaches, takes
from tests.registry import CHARTS, DOUBLE

#: (rows, columns) of a linear layer's weight, the last one wide.
SIZES = [(6, 6), (8, 8), (7, 3), (3, 7)]
REMEDIES = ("via=", "reflections=", "determinant=", "layers=", "base=")
SAME = {torch.float64: 1e-12, torch.float32: 1e-6}


PAIRS = [
    (a, b, size)
    for size in SIZES
    for a in (*CHARTS, *RIEMANNIAN)
    for b in (*CHARTS, *RIEMANNIAN)
    if takes(a, size, torch.float64) or takes(a, size, torch.complex128)
    if takes(b, size, torch.float64) or takes(b, size, torch.complex128)
]
every_pair = pytest.mark.parametrize(
    ("a", "b", "size"), PAIRS, ids=[f"{a}-to-{b}-{m}x{n}" for a, b, (m, n) in PAIRS]
)


def constrained(case, size, dtype, determinant=None):
    """A linear layer whose weight is trained that way, from a random point or a chart's own."""
    layer = nn.Linear(size[1], size[0], bias=False, dtype=dtype)
    X = haar(max(size), min(size), dtype=dtype, determinant=determinant)
    with torch.no_grad():
        layer.weight.copy_(X if size[0] >= size[1] else X.mT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # charts that cannot hold the point say so
        return stiefel.orthogonal(layer, via=case.name, **case.options)


def refusal(layer, case, **options):
    """Converts; what the error says if the chart cannot hold the point, else None."""
    try:
        stiefel.convert(layer, case.name, **options, **case.options)
    except RepresentationError as error:
        return str(error)
    return None


def other_determinant(case, W):
    """Whether the chart's options allow one determinant only, and W has the other."""
    if W.is_complex() or W.shape[0] != W.shape[1]:
        return False
    return fixed_determinant(case, W.shape) == -int(torch.linalg.det(W).sign())


def is_special(case, W):
    """Whether W is out of the Cayley map's reach: W D has an eigenvalue at -1.

    Products of few reflections are so for a D of several -1, which negate vectors that W keeps.
    """
    if "negative" not in case.options:
        return False
    D = torch.ones(W.shape[1], dtype=W.dtype)
    D[-case.options["negative"] :] = -1
    return bool((torch.linalg.eigvals(W * D) + 1).abs().min() < 1e-5)


@every_pair
@torch.no_grad()  # to read a weight is no training step, of which charts with a schedule count some
def test_same_weight_or_a_reason(a, b, size):
    for dtype in (torch.float32, *DOUBLE):
        if not (takes(a, size, dtype) and takes(b, size, dtype)):
            continue
        torch.manual_seed(3)
        sign = None if dtype.is_complex or size[0] != size[1] else -1
        layer = constrained(a, size, dtype, sign)
        x = torch.randn(5, size[1], dtype=dtype)
        W, y, before = layer.weight.detach().clone(), layer(x), copy.deepcopy(layer.state_dict())
        reason = refusal(layer, b)
        if reason is not None:
            assert not reaches(b) or other_determinant(b, W) or is_special(b, W)
            assert any(word in reason for word in REMEDIES)
            assert next(stiefel.constraints(layer)).via == a.name
            assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
            continue
        bound = SAME[real_dtype(dtype)]
        assert next(stiefel.constraints(layer)).via == b.name
        assert layer.weight.dtype == dtype
        assert (layer.weight - W).abs().max() <= bound
        assert (layer(x) - y).abs().max() <= 10 * bound


@every_pair
def test_training_goes_on_with_the_same_optimizer(a, b, size):
    dtype = torch.float64 if takes(a, size, torch.float64) else torch.complex128
    if not (takes(b, size, dtype) and reaches(b)):
        return
    torch.manual_seed(3)
    sign = None if dtype.is_complex or size[0] != size[1] else 1
    layer = constrained(a, size, dtype, sign)
    optimizer = stiefel.optim.build(layer, lr=0.01)
    x, y = (torch.randn(5, k, dtype=dtype) for k in (size[1], size[0]))

    def step():
        optimizer.zero_grad()
        (layer(x) - y).abs().square().sum().backward()
        optimizer.step()

    step()
    W = layer.weight.detach().clone()
    if refusal(layer, b, optimizer=optimizer) is not None:
        assert other_determinant(b, W) or is_special(b, W)
        return
    assert (layer.weight - W).abs().max() <= 1e-12
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in layer.parameters()}
    assert set(map(id, optimizer.state)) <= held  # nothing of the old coordinates is left
    optimizer.zero_grad()
    layer(x).abs().sum().mul(0).backward()
    optimizer.step()
    assert (layer.weight - W).abs().max() <= 1e-12  # no momentum was carried by mistake
    step()
    assert (layer.weight - W).abs().max() > 1e-6
    (constraint,) = stiefel.constraints(layer)
    assert orthonormality_residual(constraint.point).max() <= stiefel.tolerance(dtype, *size)
