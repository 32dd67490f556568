"""RGD: what it refuses, and extremes. What all optimizers share is in `tests/laws`."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    LostManifoldError,
    NonFiniteError,
    UnknownNameError,
)
from stiefel.optim import RGD


def point(*shape, dtype=torch.float64, device="cpu", inner="canonical", retraction="cayley"):
    *batch, n, p = shape
    value = geometry.haar(n, p, tuple(batch), dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, stiefel.Stiefel(inner, retraction))


def with_gradient(leaf, scale=1.0):
    leaf.grad = scale * torch.randn_like(leaf.detach().as_subclass(torch.Tensor))
    return leaf


def snapshot(optimizer):
    leaves = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return leaves, copy.deepcopy(optimizer.state_dict())


def unchanged(optimizer, before):
    leaves, state = before
    now, after = snapshot(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(leaves, now, strict=True))
    assert same(state, after)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ------------------------------------------------------------------------------- bad gradients
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["point", "ordinary"])
def test_a_non_finite_gradient_changes_nothing(bad, where, device):
    leaves = [point(5, 2, device=device), point(5, 2, device=device), point(3, 4, 2, device=device)]
    bias = nn.Parameter(torch.zeros(3, device=device))
    optimizer = RGD([*leaves, bias], lr=0.1, momentum=0.5, euclidean="sgd")
    for leaf in (*leaves, bias):
        with_gradient(leaf)
    optimizer.step()
    victim, name = (leaves[1], "parameter 1 of group 0") if where == "point" else (bias, "3 of")
    for leaf in (*leaves, bias):
        with_gradient(leaf)
    victim.grad[(0,) * victim.ndim] = bad
    before = snapshot(optimizer)
    with pytest.raises(NonFiniteError, match=name) as caught:
        optimizer.step()
    unchanged(optimizer, before)
    assert str(tuple(victim.shape)) in str(caught.value)
    assert f"1 of {victim.numel()} entries" in str(caught.value)
    assert "skip_nonfinite" in str(caught.value)


def test_large_finite_gradients_are_not_mistaken_for_infinite_ones(device):
    bias = nn.Parameter(torch.zeros(4, device=device))
    bias.grad = torch.full((4,), 3e38, device=device)  # their sum overflows
    RGD([bias], lr=1e-38, euclidean="sgd").step()
    assert bias.detach().tolist() == pytest.approx([-3.0] * 4)


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ConfigurationError, "lr >= 0"),
        ({"momentum": -0.1}, ConfigurationError, "momentum >= 0"),
        ({"nesterov": True}, ConfigurationError, "nesterov"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ConfigurationError, "dampening"),
        ({"transport": "parallel"}, UnknownNameError, "cayley, projection"),
        ({"euclidean": "lion"}, UnknownNameError, "adam, sgd"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        RGD([point(5, 2)], **{"lr": 0.1, **options})


def test_cayley_transport_needs_the_cayley_retraction():
    with pytest.raises(ConfigurationError, match="transport='projection'"):
        RGD([point(5, 2, retraction="qr")], lr=0.1, transport="cayley")


def test_empty_parameter_list():
    with pytest.raises(ConfigurationError, match="empty list"):
        RGD([], lr=0.1)


def test_sixteen_bit_points_are_refused():
    leaf = stiefel.ManifoldParameter(torch.eye(4, 2, dtype=torch.bfloat16))
    with pytest.raises(DtypeError, match="weight_dtype"):
        RGD([leaf], lr=0.1)


def test_a_refused_group_is_not_added():
    optimizer = RGD([point(5, 2)], lr=0.1)
    with pytest.raises(ConfigurationError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


def test_a_leaf_that_lost_its_manifold(device):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = point(5, 2, device=device)

    model = Bare()
    optimizer = RGD(model.parameters(), lr=0.1, euclidean="sgd")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if getattr(model.weight, "manifold", None) is None:
        with pytest.raises(LostManifoldError, match="ManifoldParameter"):
            optimizer.step()
    plain = nn.Parameter(torch.zeros(5, 2))
    leaf = point(5, 2, device=device)
    optimizer = RGD([leaf], lr=0.1, euclidean="sgd")
    torch.utils.swap_tensors(leaf, plain)
    with pytest.raises(LostManifoldError, match="ordinary parameter now"):
        optimizer.step()


# ------------------------------------------------------------------------------------- extremes
@pytest.mark.parametrize("retraction", ["cayley", "qr", "cholesky_qr", "polar", "exp"])
@pytest.mark.parametrize("lr", [1e2, 1e5, 1e9])
@pytest.mark.parametrize("rank", [1, 8])
def test_a_huge_step_stays_on_the_manifold(retraction, lr, rank, device):
    leaf = point(4, 20, 8, dtype=torch.float32, device=device, retraction=retraction)
    leaf.grad = torch.randn(4, 20, rank, device=device) @ torch.randn(4, rank, 8, device=device)
    optimizer = RGD([leaf], lr=lr, momentum=0.5)
    before = snapshot(optimizer)
    overflow = None
    try:
        optimizer.step()
    except NonFiniteError as error:  # beyond double precision
        overflow = error
    if overflow is not None:
        assert "overflows" in str(overflow)
        assert retraction in ("exp", "cholesky_qr")
        unchanged(optimizer, before)
    else:
        assert not torch.equal(leaf, before[0][0])
        bound = stiefel.tolerance(torch.float32, 20, 8)
        assert geometry.orthonormality_residual(leaf).max() < bound


def test_only_the_lost_points_are_mended(device):
    leaves = [point(20, 4, dtype=torch.float32, device=device) for _ in range(3)]
    direction = torch.randn(20, 1, device=device) @ torch.randn(1, 4, device=device)
    for leaf, size in zip(leaves, (0.1, 1e4, 0.1), strict=True):
        leaf.grad = size * direction
    gentle = copy.deepcopy([leaves[0], leaves[2]])
    for twin in gentle:
        twin.grad = 0.1 * direction
    RGD(leaves, lr=1.0).step()
    RGD(gentle, lr=1.0).step()
    assert torch.equal(leaves[0], gentle[0])
    assert torch.equal(leaves[2], gentle[1])
    for leaf in leaves:
        assert geometry.orthonormality_residual(leaf) < stiefel.tolerance(torch.float32, 20, 4)


def test_a_parameter_in_the_place_of_a_dropped_point_is_not_taken_for_it():
    """Python gives the ids of objects that are gone to new ones."""
    points = [stiefel.ManifoldParameter(torch.eye(4, 2)) for _ in range(50)]
    optimizer = RGD(points, lr=0.1, euclidean="sgd")
    optimizer.param_groups[0]["params"] = points[:1]
    del points
    gc.collect()
    plain = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    optimizer.add_param_group({"params": plain})
    for leaf in plain:
        leaf.grad = torch.ones(3)
    optimizer.step()
    assert all(leaf[0] < 1 for leaf in plain)


def test_empty_batches(device):
    leaf = point(0, 5, 2, device=device)
    leaf.grad = torch.zeros(0, 5, 2, dtype=torch.float64, device=device)
    RGD([leaf], lr=0.1).step()
    assert leaf.shape == (0, 5, 2)


# ------------------------------------------------------------------------------ torch's contract


def test_copies_and_pickles_remember_their_leaves(device):
    leaf = point(5, 2, device=device)
    optimizer = RGD([leaf], lr=0.1, momentum=0.9, skip_nonfinite=True)
    with_gradient(leaf)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (other,) = twin.param_groups[0]["params"]
        assert other is not leaf
        other.grad = leaf.grad.clone()
        leaf_before = leaf.detach().clone()
        twin.step()
        assert torch.equal(leaf, leaf_before)
        assert twin.skip_nonfinite
        assert other.manifold == leaf.manifold
        torch.utils.swap_tensors(other, nn.Parameter(torch.zeros(5, 2, device=device)))
        with pytest.raises(LostManifoldError):
            twin.step()


def test_reduced_precision_settings_do_not_reach_the_step(device):
    leaf = with_gradient(point(40, 20, dtype=torch.float32, device=device))
    twin = copy.deepcopy(leaf)
    twin.grad = leaf.grad.clone()
    RGD([leaf], lr=0.1).step()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        RGD([twin], lr=0.1).step()
    assert torch.equal(leaf, twin)
