"""Points stay on their manifold whatever the steps are, with gradients that are not finite too."""

from __future__ import annotations

import copy

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.optim import RGD
from stiefel.optim.mending import onto_manifold
from tests.accelerators import as_on_an_accelerator
from tests.registry import BY_RETRACTION, DTYPES, SHAPES

every = pytest.mark.parametrize(
    ("case", "manifold"), BY_RETRACTION, ids=[f"{c.name}-{m.retraction}" for c, m in BY_RETRACTION]
)
LEAVES = [((), 6, 6), ((2, 3), 6, 2), ((), 24, 16)]
RATES = (0.1, 1e2, 1e6)


def leaves_on(manifold, device):
    return [
        stiefel.ManifoldParameter(
            geometry.haar(n, p, batch, dtype=torch.float32, device=device), manifold
        )
        for batch, n, p in LEAVES
    ]


def noisy(leaf, size):
    leaf.grad = size * torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)


@every
@pytest.mark.parametrize("where", ["here", "accelerator"])
@pytest.mark.parametrize("steps", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_thread")
def test_no_step_takes_a_point_off_its_manifold(case, manifold, where, steps, device, monkeypatch):
    """Rates up to 1e6, gradients from 1e-4 to 1e4 in size, some of them with NaN or infinity."""
    if where == "accelerator":
        as_on_an_accelerator(monkeypatch)
    leaves = {rate: leaves_on(manifold, device) for rate in RATES}
    groups = [{"params": some, "lr": rate} for rate, some in leaves.items()]
    optimizer = case.kind(groups, lr=1.0, skip_nonfinite=True, **case.options)
    moved = dict.fromkeys(RATES, 0)
    for step in range(steps):
        bad = step % 3 == 2
        for leaf in (leaf for some in leaves.values() for leaf in some):
            noisy(leaf, 10 ** (8 * float(torch.rand(())) - 4))
            if bad:
                leaf.grad[(-1,) * leaf.ndim] = float("nan" if step % 2 else "inf")
        before = copy.deepcopy(leaves)
        optimizer.step()
        for rate, some in leaves.items():
            for leaf, old in zip(some, before[rate], strict=True):
                bound = manifold.tolerance_for(leaf.dtype, *leaf.shape[-2:])
                assert geometry.orthonormality_residual(leaf).max() <= bound
                assert not bad or torch.equal(leaf, old)
                moved[rate] += not torch.equal(leaf, old)
    good = len(LEAVES) * (steps - steps // 3)
    assert moved[0.1] > 0.95 * good  # all but steps of 1e3 that single precision cannot take
    assert moved[1e2] > 0.7 * good


@every
def test_skipping_changes_no_step_that_is_finite(case, manifold, device):
    """Long steps are mended as they are without it, where numbers can be read for nothing."""
    leaves = leaves_on(manifold, device)
    twins = copy.deepcopy(leaves)
    optimizers = [
        case.kind(some, lr=30.0, skip_nonfinite=skip, **case.options)
        for some, skip in ((leaves, True), (twins, False))
    ]
    for _ in range(3):
        for leaf, twin in zip(leaves, twins, strict=True):
            noisy(leaf, 10.0)
            twin.grad = leaf.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for leaf, twin in zip(leaves, twins, strict=True):
            assert torch.equal(leaf, twin) or leaf.device.type != "cpu"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_are_taken_onto_the_manifold_by_products(shape, dtype, device):
    """Near it to the nearest point, from anywhere else to some point."""
    batch, n, p = shape
    X = geometry.haar(n, p, batch, dtype=dtype, device=device)
    E = torch.randn(X.shape, dtype=dtype, device=device)
    E = E / torch.linalg.matrix_norm(E, 2)[..., None, None]
    bound = 2 * stiefel.tolerance(dtype, n, p)
    for size in (0.0, 1e-4, 0.1):
        Z = X + size * E
        assert (onto_manifold(Z) - geometry.polar_factor(Z)).abs().max() < 4e-5 * size + bound
    for Z in (1e-3 * X, 3**0.5 * X, 7 * X + E, 1e12 * X, X + 0.9 * E):
        assert geometry.orthonormality_residual(onto_manifold(Z)).max() < bound


@pytest.mark.parametrize("options", [{"nesterov": True}, {"transport": "cayley"}], ids=str)
@pytest.mark.parametrize("where", ["here", "accelerator"])
def test_long_steps_do_not_spoil_momentum_for_ever(options, where, device, monkeypatch):
    """A Cayley step of 1e6 is lost in single precision, and what is carried along it too."""
    if where == "accelerator":
        as_on_an_accelerator(monkeypatch)
    leaf = leaves_on(stiefel.Stiefel(), device)[2]
    optimizer = RGD([leaf], lr=1e2, momentum=0.9, skip_nonfinite=True, **options)
    longest = 0.0
    for _ in range(60):
        noisy(leaf, 10 ** (8 * float(torch.rand(())) - 4))
        longest = max(longest, 2 * float(leaf.grad.norm()))
        before = leaf.detach().clone()
        optimizer.step()
        assert not torch.equal(leaf, before)
        assert optimizer.state[leaf]["momentum_buffer"].norm() <= longest / (1 - 0.9)
