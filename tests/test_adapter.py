"""`HouseholderAdapter`: a frozen linear layer times a product of reflections."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, ShapeError
from stiefel.models import HouseholderAdapter

DTYPES = [torch.float32, torch.float64, torch.complex128]
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.complex128: 1e-13}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def adapted(dtype=torch.float64, d=20, out=7, reflections=4, device=None):
    linear = nn.Linear(d, out, dtype=dtype, device=device)
    return HouseholderAdapter(linear, reflections)


def disturb(adapter):
    """Coordinates of a rotation that is not the identity."""
    with torch.no_grad():
        for leaf in adapter.rotation.parameters():
            leaf.add_(0.5 * torch.randn_like(leaf))
    return adapter


def vectors(adapter):
    return next(adapter.rotation.parameters()).detach()


@every_dtype
@pytest.mark.parametrize("reflections", [2, 4, 14, 20])
def test_the_start_is_the_identity(dtype, reflections, device):
    linear = nn.Linear(20, 7, dtype=dtype, device=device)
    x = torch.randn(3, 5, 20, dtype=dtype, device=device)
    before = linear(x)
    adapter = HouseholderAdapter(linear, reflections)
    assert adapter.reflections == reflections
    assert (adapter(x) - before).abs().max() < ROUNDING[dtype] * 10


@every_dtype
def test_it_is_the_layer_after_the_reflections_one_by_one(dtype, device):
    adapter = disturb(adapted(dtype, device=device))
    x = torch.randn(6, 20, dtype=dtype, device=device)
    turned = x
    V, *phases = (leaf.detach() for leaf in adapter.rotation.parameters())
    for k in reversed(range(4)):
        v = V[:, k]
        tau = 2.0 if not phases else 1 - torch.exp(1j * phases[0][k])
        turned = turned - tau * (turned @ v.conj())[:, None] * v / (v.conj() @ v).real
    expected = adapter.linear(turned)
    assert (adapter(x) - expected).abs().max() < ROUNDING[dtype] * 10


def test_gradients_are_those_of_the_formed_product(device):
    adapter = disturb(adapted(device=device))
    twin = copy.deepcopy(adapter)
    x = torch.randn(6, 20, dtype=torch.float64, device=device, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    probe = torch.randn(6, 7, dtype=torch.float64, device=device)
    (adapter(x) * probe).sum().backward()
    formed = nn.functional.linear(y, twin.linear.weight @ twin.rotation.weight, twin.linear.bias)
    (formed * probe).sum().backward()
    assert (x.grad - y.grad).abs().max() < 1e-12
    pairs = zip(adapter.rotation.parameters(), twin.rotation.parameters(), strict=True)
    assert all((a.grad - b.grad).abs().max() < 1e-12 for a, b in pairs)


def test_only_the_rotation_is_trained_and_it_learns(device):
    """A layer whose input was turned by four reflections is found again."""
    torch.manual_seed(3)
    adapter = adapted(d=12, out=12, device=device)
    target = disturb(copy.deepcopy(adapter))
    W, b = adapter.linear.weight.clone(), adapter.linear.bias.clone()
    optimizer = stiefel.optim.build(adapter, lr=0.05, lr_orthogonal=0.05)
    x = torch.randn(64, 12, dtype=torch.float64, device=device)
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        loss = (adapter(x) - target(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]
    assert torch.equal(adapter.linear.weight, W)
    assert torch.equal(adapter.linear.bias, b)
    assert geometry.orthonormality_residual(adapter.rotation.weight) < 1e-12


@every_dtype
def test_merge_and_unmerge(dtype, device):
    adapter = disturb(adapted(dtype, device=device)).eval()
    x = torch.randn(6, 20, dtype=dtype, device=device)
    W, expected = adapter.linear.weight.clone(), adapter(x)
    assert adapter.merge().merge().merged
    assert (adapter(x) - expected).abs().max() < ROUNDING[dtype] * 10
    assert torch.equal(adapter(x), adapter.linear(x))
    assert not adapter.unmerge().unmerge().merged
    assert torch.equal(adapter.linear.weight, W)


def test_a_merged_state_says_so_and_can_be_unmerged(device):
    adapter = disturb(adapted(device=device)).eval()
    x = torch.randn(6, 20, dtype=torch.float64, device=device)
    W, expected = adapter.linear.weight.clone(), adapter(x)
    adapter.merge()
    file = io.BytesIO()
    torch.save(adapter.state_dict(), file)
    file.seek(0)
    twin = adapted(device=device).eval()
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.merged
    assert (twin(x) - expected).abs().max() < 1e-12
    twin.unmerge()
    assert (twin.linear.weight - W).abs().max() < 1e-13
    adapter.load_state_dict(twin.state_dict())
    assert not adapter.merged
    assert (adapter(x) - expected).abs().max() < 1e-12


def test_a_merged_adapter_is_not_trained_in_silence(device):
    adapter = adapted(device=device).merge()
    x = torch.randn(2, 20, dtype=torch.float64, device=device)
    with pytest.raises(ConfigurationError, match="unmerge"):
        adapter(x)
    with torch.no_grad():
        adapter(x)
    adapter.eval()(x)


def test_sixteen_bits_and_autocast(device):
    linear = nn.Linear(64, 32, dtype=torch.bfloat16, device=device)
    adapter = disturb(HouseholderAdapter(linear, 4))
    assert vectors(adapter).dtype == torch.float32
    x = torch.randn(5, 64, device=device)
    y = adapter(x.bfloat16())
    assert y.dtype == torch.bfloat16
    exact = x @ adapter.rotation.weight.mT @ linear.weight.float().mT + linear.bias.float()
    assert (y - exact).abs().max() < 0.05
    with torch.autocast(device.type, torch.bfloat16):
        assert (HouseholderAdapter(nn.Linear(64, 32), 4)(x)).dtype == torch.bfloat16


def test_shapes_and_bad_arguments(device):
    adapter = adapted(device=device)
    assert adapter(torch.randn(20, dtype=torch.float64, device=device)).shape == (7,)
    assert adapter(torch.randn(0, 20, dtype=torch.float64, device=device)).shape == (0, 7)
    with pytest.raises(ShapeError, match="20"):
        adapter(torch.randn(3, 19, dtype=torch.float64, device=device))
    for wrong in (3, 0, 22, 2.0, True):
        with pytest.raises(ConfigurationError, match="even number"):
            HouseholderAdapter(nn.Linear(20, 7), wrong)
    with pytest.raises(ConfigurationError, match="Linear"):
        HouseholderAdapter(nn.Conv2d(3, 3, 3), 2)


def test_generators_settle_the_start():
    first, second = (
        HouseholderAdapter(nn.Linear(8, 8), 4, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert torch.equal(vectors(first), vectors(second))


def test_a_weight_made_of_other_tensors_is_not_merged_into(device):
    """W Q written into a weight that is made anew at every read would be lost in silence."""
    x = torch.randn(5, 8, device=device)
    made = [
        stiefel.orthogonal(nn.Linear(8, 8, device=device), init="haar"),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 3, device=device)),
    ]
    for linear in made:
        adapter = disturb(HouseholderAdapter(linear, 4)).eval()
        expected = adapter(x)
        with pytest.raises(ConfigurationError, match="remove_parametrizations"):
            adapter.merge()
        assert not adapter.merged
        assert torch.equal(adapter(x), expected)
        linear.requires_grad_(True)  # a frozen one would become no parameter
        nn.utils.parametrize.remove_parametrizations(linear, "weight")
        assert (adapter.merge()(x) - expected).abs().max() < 1e-5


def test_a_hundred_merges_leave_no_trace(device):
    adapter = disturb(adapted(torch.float32, device=device))
    before = adapter.linear.weight.clone()
    merged = adapter.merge().linear.weight.clone()
    for _ in range(100):
        assert torch.equal(adapter.unmerge().linear.weight, before)
        assert torch.equal(adapter.merge().linear.weight, merged)


def test_what_is_written_while_merged_is_not_lost(device):
    """A weight that is loaded into the merged layer: unmerging keeps the function."""
    adapter = disturb(adapted(device=device)).eval()
    x = torch.randn(5, 20, dtype=torch.float64, device=device)
    adapter.merge()
    with torch.no_grad():
        adapter.linear.weight.normal_()
    expected = adapter(x)
    assert (adapter.unmerge()(x) - expected).abs().max() < 1e-12
