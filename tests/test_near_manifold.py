"""Points that are near a Stiefel manifold, `Stiefel(tolerance=...)`, and counts of steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, OffManifoldError
from stiefel.optim.batches import Joint


def off(distance: float) -> torch.Tensor:
    """A 6 x 2 matrix whose largest entry of |X^T X - I| is `distance`."""
    X = geometry.haar(6, 2, dtype=torch.float64)
    return X * (1 + distance) ** 0.5


def test_a_matrix_is_a_point_up_to_the_tolerance():
    thick = stiefel.Stiefel(tolerance=0.1)
    assert thick.check_point_on_manifold(off(0.09))
    assert not thick.check_point_on_manifold(off(0.11))
    assert not stiefel.Stiefel().check_point_on_manifold(off(0.09))
    stiefel.ManifoldParameter(off(0.09), thick)
    with pytest.raises(OffManifoldError, match="tolerance"):
        stiefel.ManifoldParameter(off(0.11), thick)
    assert thick != stiefel.Stiefel()
    assert hash(thick) != hash(stiefel.Stiefel())
    assert thick == copy.deepcopy(thick) == stiefel.Stiefel(tolerance=0.1)
    assert "tolerance=0.1" in repr(thick)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1.0, float("nan")])
def test_a_tolerance_is_between_zero_and_one(wrong):
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        stiefel.Stiefel(tolerance=wrong)


def test_never_finer_than_floating_point():
    usual = stiefel.tolerance(torch.float32, 6, 2)
    assert stiefel.Stiefel(tolerance=1e-12).tolerance_for(torch.float32, 6, 2) == usual


def test_a_checkpoint_of_near_points_loads_where_they_are_allowed():
    thick = stiefel.orthogonal(nn.Linear(2, 6).double(), via="riemannian", tolerance=0.1)
    with torch.no_grad():
        thick.parametrizations.weight.original.copy_(off(0.09))
    twin = stiefel.orthogonal(nn.Linear(2, 6).double(), via="riemannian", tolerance=0.1)
    twin.load_state_dict(thick.state_dict())
    assert torch.equal(twin.weight, thick.weight)
    thin = stiefel.orthogonal(nn.Linear(2, 6).double(), via="riemannian")
    with pytest.raises(RuntimeError, match="off the manifold"):
        thin.load_state_dict(thick.state_dict())


@pytest.mark.parametrize(
    "batches", [[()], [(3,)], [(), ()], [(2,), (2,)], [(), (3,), (0,), (2, 2)]]
)
def test_states_of_every_kind_are_joined_and_separated(batches):
    leaves = [torch.randn(*batch, 5, 2) for batch in batches]
    joint = Joint(leaves, 2)
    numbers = [torch.tensor(float(k + 1)) for k in range(len(leaves))]
    of_matrix = [torch.randn(*batch, 1, 1) for batch in batches]
    points = joint.join(leaves)
    for kind, values in (("point", leaves), ("matrix", of_matrix), ("leaf", numbers)):
        joined = joint.join(values, kind)
        assert torch.broadcast_shapes(joined.shape, points.shape) == points.shape
        zeros = joint.zeros(points, kind)
        assert zeros.shape == joined.shape
        for leaf, before, after in zip(leaves, values, joint.separate(joined, kind), strict=True):
            assert after.shape == before.shape
            assert torch.equal(after, before) or leaf.numel() == 0
    whole = (joint.join(numbers, "leaf") * torch.ones_like(points)).expand(points.shape)
    for number, part in zip(numbers, joint.separate(whole), strict=True):
        assert bool((part == number).all())
