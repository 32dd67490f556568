"""Large batches in pieces, kept memory, remembered sorting: none of it may be seen in a result."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, LostManifoldError
from stiefel.geometry.linear import inverse_near_identity
from stiefel.optim import RGD
from stiefel.optim import batches as batches_module
from tests.registry import OPTIMIZERS

OPTIONS = [
    pytest.param(case, id=case.name) for case in OPTIMIZERS if case.manifolds[0].tolerance is None
]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(batches_module, "_PIECE", 8 * 8 * 10 * 4)


def leaves_on(manifold, count, batch=(), n=5, p=2, dtype=torch.float64):
    X = geometry.haar(n, p, (count, *batch), dtype=dtype)
    return [stiefel.ManifoldParameter(x.clone(), manifold) for x in X]


def fill(leaves, *others):
    for group in zip(leaves, *others, strict=True):
        group[0].grad = torch.randn_like(group[0])
        for leaf in group[1:]:
            leaf.grad = group[0].grad.clone()


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize(
    ("count", "batch", "skip"), [(100, (), False), (50, (3,), True), (1, (100,), False)]
)
def test_pieces_equal_the_whole(case, count, batch, skip, small_pieces, monkeypatch):
    manifold = case.manifolds[0]
    leaves = leaves_on(manifold, count, batch)
    twins = copy.deepcopy(leaves)
    cut = case.kind(leaves, lr=0.1, skip_nonfinite=skip, **case.options)
    whole = case.kind(twins, lr=0.1, skip_nonfinite=skip, **case.options)
    for _ in range(3):
        fill(leaves, twins)
        assert len(cut.gather().batches[0].cuts(whole_leaves=skip)) > 3
        cut.step()
        with monkeypatch.context() as patch:
            patch.setattr(batches_module, "_PIECE", 2**19)
            whole.step()
    for leaf, twin in zip(leaves, twins, strict=True):
        assert (leaf - twin).abs().max() < 1e-13
        assert cut.state[leaf].keys() == whole.state[twin].keys()
        for name, value in cut.state[leaf].items():
            assert value.shape == whole.state[twin][name].shape
            assert (value - whole.state[twin][name]).abs().max() < 1e-13


def test_one_lost_point_in_one_piece_is_mended_alone(small_pieces):
    leaves = leaves_on(stiefel.Stiefel(), 100, dtype=torch.float32)
    twins = copy.deepcopy(leaves)
    fill(leaves, twins)
    leaves[63].grad *= 1e12
    RGD(leaves, lr=0.1).step()
    RGD(twins, lr=0.1).step()
    assert all(leaf.manifold.check_point_on_manifold(leaf) for leaf in leaves)
    same = [torch.equal(a, b) for a, b in zip(leaves, twins, strict=True)]
    assert same == [k != 63 for k in range(100)]


def test_a_non_finite_gradient_in_a_piece_holds_its_leaf_alone(small_pieces):
    leaves = leaves_on(stiefel.Stiefel(), 100)
    before = [leaf.detach().clone() for leaf in leaves]
    fill(leaves)
    leaves[63].grad[0, 0] = torch.nan
    RGD(leaves, lr=0.1, skip_nonfinite=True).step()
    same = [torch.equal(a, b) for a, b in zip(leaves, before, strict=True)]
    assert same == [k == 63 for k in range(100)]


class TestRememberedSorting:
    def start(self, **options):
        leaves = leaves_on(stiefel.Stiefel(), 4)
        optimizer = RGD(leaves, lr=0.1, **options)
        fill(leaves)
        optimizer.step()
        return leaves, optimizer

    def stepped(self, leaves, optimizer):
        before = [leaf.detach().clone() for leaf in leaves]
        optimizer.step()
        return [not torch.equal(a, b) for a, b in zip(leaves, before, strict=True)]

    def test_nothing_is_sorted_twice(self, monkeypatch):
        leaves, optimizer = self.start()
        monkeypatch.setattr(
            "stiefel.optim.base.sort", lambda *args: pytest.fail("sorted without a cause")
        )
        fill(leaves)
        assert all(self.stepped(leaves, optimizer))

    def test_gradients_that_come_and_go(self):
        leaves, optimizer = self.start()
        fill(leaves)
        leaves[1].grad = None
        assert self.stepped(leaves, optimizer) == [True, False, True, True]
        fill(leaves)
        assert self.stepped(leaves, optimizer) == [True] * 4

    def test_a_leaf_changed_in_the_list_of_its_group(self):
        leaves, optimizer = self.start()
        (other,) = leaves_on(stiefel.Stiefel(), 1)
        optimizer.param_groups[0]["params"][2] = other
        fill(leaves)
        fill([other])
        assert self.stepped([*leaves, other], optimizer) == [True, True, False, True, True]

    def test_a_group_added_and_a_rate_changed(self):
        leaves, optimizer = self.start()
        more = leaves_on(stiefel.Stiefel(), 2)
        optimizer.add_param_group({"params": more})
        optimizer.param_groups[0]["lr"] = 0.0
        fill([*leaves, *more])
        before = [leaf.detach().clone() for leaf in leaves]
        assert self.stepped(more, optimizer) == [True, True]
        for leaf, old in zip(leaves, before, strict=True):
            assert (leaf - old).abs().max() < 1e-15

    def test_a_lost_manifold(self):
        leaves, optimizer = self.start()
        del leaves[1].manifold
        fill(leaves)
        with pytest.raises(LostManifoldError):
            optimizer.step()

    def test_another_manifold(self):
        leaves, optimizer = self.start()
        leaves[1].manifold = stiefel.Stiefel("euclidean", "qr")
        fill(leaves)
        X, G = leaves[1].detach().clone(), leaves[1].grad
        optimizer.step()
        manifold = leaves[1].manifold
        expected = manifold.retr(X, -0.1 * manifold.egrad2rgrad(X, G))
        assert (leaves[1] - expected).abs().max() < 1e-13

    def test_another_dtype_and_another_shape(self):
        leaves, optimizer = self.start()
        leaves[0].grad = leaves[2].grad = None
        leaves[0].data = leaves[0].data.float()
        leaves[2].data = geometry.haar(7, 3, dtype=torch.float64)
        fill(leaves)
        assert all(self.stepped(leaves, optimizer))
        assert leaves[0].dtype == torch.float32
        assert all(leaf.manifold.check_point_on_manifold(leaf) for leaf in leaves)

    def test_a_sparse_gradient_and_a_decay(self):
        leaves, optimizer = self.start()
        fill(leaves)
        leaves[3].grad = leaves[3].grad.to_sparse()
        with pytest.raises(ConfigurationError, match=r"dense gradient.*parameter 3 of group 0"):
            optimizer.step()
        fill(leaves)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with pytest.raises(ConfigurationError, match="weight_decay=0"):
            optimizer.step()

    def test_a_state_taken_away_and_a_state_loaded(self):
        leaves, optimizer = self.start(momentum=0.9)
        saved = copy.deepcopy(optimizer.state_dict())
        points = [leaf.detach().clone() for leaf in leaves]
        gradients = [torch.randn_like(leaf) for leaf in leaves]
        ends = []
        for _ in range(2):
            with torch.no_grad():
                for leaf, point, gradient in zip(leaves, points, gradients, strict=True):
                    leaf.copy_(point)
                    leaf.grad = gradient.clone()
            optimizer.load_state_dict(saved)
            optimizer.step()
            ends.append([leaf.detach().clone() for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        optimizer.state.pop(leaves[1])
        fill(leaves)
        X, G = leaves[1].detach().clone(), leaves[1].grad
        optimizer.step()
        manifold = leaves[1].manifold
        expected = manifold.retr(X, -0.1 * manifold.egrad2rgrad(X, G))
        assert (leaves[1] - expected).abs().max() < 1e-13

    def test_forgotten_leaves_are_freed(self):
        leaves, optimizer = self.start()
        gone = weakref.ref(leaves[1])
        optimizer.forget({id(leaves[1])})
        del leaves[1]
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_inverse_near_the_identity(dtype):
    """Matrices of all sizes, in one batch and by size: each is decided on by itself."""
    sizes = torch.tensor([0, 1e-9, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 3] * 30, dtype=torch.float64)
    A, B = (torch.randn(len(sizes), 6, 6, dtype=dtype) / 4 for _ in range(2))
    A, B = ((sizes[:, None, None] * Z).to(dtype) for Z in (A, B))
    E = A - A.mH - B.mH @ B
    wide = E.to(torch.complex128)
    expected = torch.linalg.inv(torch.eye(6) - wide)
    together = inverse_near_identity(E)
    assert (together - expected).abs().max() < 10 * torch.finfo(dtype).eps
    for k in range(9):
        apart = inverse_near_identity(E[k::9])
        assert (apart - together[k::9]).abs().max() < 2 * torch.finfo(dtype).eps
