"""What every optimizer of the registry means by torch's words: arguments, gradients, groups, rates.

Laws of the arithmetic are in `test_optimizers.py`, those of whole models and of ordinary
parameters in `test_optimizer_models.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, NonFiniteError
from tests.registry import OPTIMIZERS

#: One manifold each: none of these laws depends on it, but for those of `everywhere`.
every = pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
EVERYWHERE = [(case, manifold) for case in OPTIMIZERS for manifold in case.manifolds]
everywhere = pytest.mark.parametrize(
    ("case", "manifold"), EVERYWHERE, ids=[f"{c.name}-{m!r}" for c, m in EVERYWHERE]
)


def leaf_of(case, batch=(), n=6, p=2, dtype=torch.float64, device="cpu", manifold=None):
    value = geometry.haar(n, p, batch, dtype=dtype, device=device)
    return stiefel.ManifoldParameter(value, manifold or case.manifolds[0])


def noisy(*leaves):
    for leaf in leaves:
        leaf.grad = torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaves[0]


def make(case, params, lr=0.1, **options):
    return case.kind(params, lr=lr, **{**case.options, **options})


def twins_of(leaves):
    """Copies of parameters, and of their gradients."""
    twins = copy.deepcopy(list(leaves))
    for leaf, twin in zip(leaves, twins, strict=True):
        twin.grad = None if leaf.grad is None else leaf.grad.clone()
    return twins


def assert_equal(first, second, optimizers=(), bound=0.0):
    for a, b in zip(first, second, strict=True):
        assert (a - b).abs().max() <= bound
        if optimizers:
            one, other = (o.state.get(x, {}) for o, x in zip(optimizers, (a, b), strict=True))
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert (value - other[name]).abs().max() <= bound


# ------------------------------------------------------------------------------------ arguments
@every
def test_unknown_keyword_arguments_are_refused(case):
    for word in ("fused", "foreach", "capturable", "learning_rate"):
        with pytest.raises(TypeError, match=word):
            make(case, [leaf_of(case)], **{word: True})


@every
def test_weight_decay_of_a_point_is_refused_with_a_sentence(case):
    with pytest.raises(ConfigurationError, match="decay pulls towards zero") as caught:
        make(case, [leaf_of(case)], weight_decay=0.01)
    assert "parameter 0 of group 0" in str(caught.value)
    bias = nn.Parameter(torch.zeros(3))
    groups = [{"params": [leaf_of(case)]}, {"params": [bias], "weight_decay": 0.01}]
    optimizer = make(case, groups, euclidean="sgd")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.01]


@every
def test_ordinary_parameters_are_refused_unless_told_what_to_do(case):
    with pytest.raises(ConfigurationError) as caught:
        make(case, [leaf_of(case), nn.Parameter(torch.zeros(2, 3))])
    for word in ("stiefel.optim.build", "euclidean='sgd'", "parameter 1 of group 0", "(2, 3)"):
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------ gradients
@every
def test_gradients_are_never_written_to(case, device):
    leaves = [leaf_of(case, batch, device=device) for batch in [(), (), (3,)]]
    optimizer = make(case, leaves)
    for _ in range(3):
        noisy(*leaves)
        gradients = [(leaf.grad, leaf.grad.clone()) for leaf in leaves]
        optimizer.step()
        for leaf, (gradient, value) in zip(leaves, gradients, strict=True):
            assert leaf.grad is gradient
            assert torch.equal(gradient, value)


@everywhere
def test_a_zero_gradient_moves_nothing_from_a_fresh_state(case, manifold, device):
    sizes = [(6, 2), (5, 5)]
    leaves = [leaf_of(case, (2,), *size, device=device, manifold=manifold) for size in sizes]
    before = [leaf.detach().clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf.detach())
    make(case, leaves).step()
    assert_equal(leaves, before, bound=4e-15)


@every
def test_without_a_gradient_there_is_no_step_and_no_state(case, device):
    still, frozen, moved = (leaf_of(case, device=device) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = make(case, [still, frozen, moved])
    before = still.detach().clone(), frozen.detach().clone(), moved.detach().clone()
    noisy(moved)
    optimizer.step()
    assert torch.equal(still, before[0])
    assert torch.equal(frozen, before[1])
    assert not torch.equal(moved, before[2])
    assert still not in optimizer.state
    assert frozen not in optimizer.state


@every
def test_sparse_gradients_are_refused(case, device):
    leaf = noisy(leaf_of(case, device=device))
    leaf.grad = leaf.grad.to_sparse()
    with pytest.raises(ConfigurationError, match="sparse=False"):
        make(case, [leaf]).step()


@every
def test_a_late_leaf_starts_with_a_state_of_its_own(case, device):
    """It steps as it would alone, though the others have taken steps before."""
    early, late = leaf_of(case, device=device), leaf_of(case, device=device)
    together = make(case, [early, late])
    for _ in range(3):
        noisy(early)
        together.step()
    (twin,) = twins_of([late])
    alone = make(case, [twin])
    for _ in range(2):
        noisy(early, late)
        twin.grad = late.grad.clone()
        together.step()
        alone.step()
        assert_equal([late], [twin], (together, alone), bound=1e-13)


@every
def test_a_non_finite_gradient_changes_nothing(case, device):
    leaves = [leaf_of(case, device=device) for _ in range(3)]
    optimizer = make(case, leaves)
    noisy(*leaves)
    optimizer.step()
    noisy(*leaves)
    leaves[1].grad[0, 0] = float("nan")
    twins, state = twins_of(leaves), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(NonFiniteError, match="parameter 1 of group 0"):
        optimizer.step()
    assert_equal(leaves, twins)
    for index, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(optimizer.state[leaves[index]][name], value)


@every
def test_a_huge_gradient_does_not_stop_a_parameter_for_ever(case, device):
    """Its square overflows in float32: refused with nothing changed, or all states stay finite."""
    leaf = leaf_of(case, (2,), dtype=torch.float32, device=device)
    optimizer = make(case, [leaf])
    noisy(leaf)
    leaf.grad[1] *= 1e25
    before = leaf.detach().clone()
    try:
        optimizer.step()
    except NonFiniteError:
        assert torch.equal(leaf, before)
        assert leaf not in optimizer.state
        return
    assert torch.isfinite(leaf).all()
    for value in optimizer.state[leaf].values():
        assert torch.isfinite(value).all()


@every
@pytest.mark.parametrize(("fresh", "euclidean"), [(True, "sgd"), (False, "adam")])
def test_skip_nonfinite_leaves_those_parameters_where_they_are(case, fresh, euclidean, device):
    sizes = [((), 6, 2)] * 3 + [((2,), 6, 2), ((), 4, 4)]
    leaves = [leaf_of(case, *size, device=device) for size in sizes]
    leaves += [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = make(case, leaves, euclidean=euclidean, skip_nonfinite=True)
    if not fresh:
        noisy(*leaves)
        optimizer.step()
    noisy(*leaves)
    twins = twins_of(leaves)
    reference = make(case, twins, euclidean=euclidean)
    reference.load_state_dict(optimizer.state_dict())
    for index in (1, 3, 4, 5):
        leaves[index].grad[(-1,) * leaves[index].ndim] = float("nan")
        twins[index].grad = None
    optimizer.step()
    reference.step()
    for leaf, twin in zip(leaves, twins, strict=True):
        assert (leaf - twin).abs().max() < 1e-13
        for name, value in optimizer.state[leaf].items():
            if not (leaf is leaves[5] and name == "step"):  # torch's own counts every step
                expected = reference.state[twin].get(name, torch.zeros_like(value))
                assert (value - expected).abs().max() < 1e-13
    assert torch.isnan(leaves[1].grad).any(), "gradients are never written to"


@every
def test_maximize_is_descent_of_the_negated_function(case, device):
    leaf = leaf_of(case, (2,), device=device)
    (twin,) = twins_of([leaf])
    up, down = make(case, [leaf], maximize=True), make(case, [twin])
    for _ in range(4):
        noisy(leaf)
        twin.grad = -leaf.grad
        up.step()
        down.step()
        assert (leaf - twin).abs().max() < 1e-13


# ---------------------------------------------------------------------------------------- rates
@every
def test_groups_have_rates_of_their_own(case, device):
    leaves = [leaf_of(case, device=device) for _ in range(3)]
    twins = twins_of(leaves)
    rates = (0.02, 0.1, 0.0)
    groups = [{"params": [leaf], "lr": lr} for leaf, lr in zip(leaves, rates, strict=True)]
    together = make(case, groups)
    alone = [make(case, [twin], lr=lr) for twin, lr in zip(twins, rates, strict=True)]
    start = leaves[2].detach().clone()
    for _ in range(3):
        noisy(*leaves)
        for leaf, twin, optimizer in zip(leaves, twins, alone, strict=True):
            twin.grad = leaf.grad.clone()
            optimizer.step()
        together.step()
    assert_equal(leaves, twins, bound=1e-13)
    assert (leaves[2] - start).abs().max() < 1e-14
    assert (leaves[0] - leaves[1]).abs().max() > 1e-3


@every
def test_a_rate_may_be_a_tensor(case, device):
    rates = [torch.tensor(0.0625), torch.tensor([0.0625], dtype=torch.float64)]
    leaf = leaf_of(case, (2,), device=device)
    first = make(case, [leaf], lr=0.0625)
    twins = [twins_of([leaf])[0] for _ in rates]
    others = [make(case, [twin], lr=rate) for twin, rate in zip(twins, rates, strict=True)]
    for _ in range(3):
        noisy(leaf)
        first.step()
        for twin, optimizer in zip(twins, others, strict=True):
            twin.grad = leaf.grad.clone()
            optimizer.step()
            assert (leaf - twin).abs().max() < 1e-13


SCHEDULES = {
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), 0.1),
    "exponential-tensor": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), torch.tensor(0.1)),
    "one-cycle": (
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8, cycle_momentum=False),
        0.1,
    ),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5), 0.1),
    "sequential": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
        ),
        0.1,
    ),
}


@every
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_set_the_rate_of_the_next_step(case, name, device):
    """The same steps as with rates that are written into the group by hand."""
    leaf = leaf_of(case, device=device)
    (twin,) = twins_of([leaf])
    schedule, lr = SCHEDULES[name]
    scheduled = make(case, [leaf], lr=copy.deepcopy(lr))
    scheduler = schedule(scheduled)
    by_hand, rates = make(case, [twin]), []
    for _ in range(6):
        noisy(leaf)
        twin.grad = leaf.grad.clone()
        rates.append(float(scheduled.param_groups[0]["lr"]))
        by_hand.param_groups[0]["lr"] = rates[-1]
        scheduled.step()
        by_hand.step()
        assert (leaf - twin).abs().max() <= (1e-13 if isinstance(lr, torch.Tensor) else 0)
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    assert len(set(rates)) > 3


# ------------------------------------------------------------------------------------- closures
@every
def test_a_closure_is_evaluated_once_with_gradients(case, device):
    leaf, calls = leaf_of(case, device=device), []
    optimizer = make(case, [leaf])

    def closure():
        optimizer.zero_grad()
        loss = (leaf[0] ** 2).sum()
        loss.backward()
        calls.append(loss.detach())
        return loss

    before = leaf.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert torch.equal(loss.detach(), calls[0])
    assert len(calls) == 1
    assert not torch.equal(leaf, before)
