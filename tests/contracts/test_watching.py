"""Who sees the points that a storage forms: blocks that nest, fail, and meet copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import stiefel
from stiefel.operators import Dense

VIAS = ["cwy", "matrix_exp", "riemannian"]


def linear(via="cwy", **options):
    return stiefel.orthogonal(nn.Linear(4, 4, bias=False), via=via, **options)


def storage_of(layer):
    return layer.parametrizations.weight


class Log:
    """A watcher that keeps what it sees."""

    def __init__(self):
        self.seen = []

    def __call__(self, storage, X):
        self.seen.append((storage, X.detach().clone()))

    def __len__(self):
        return len(self.seen)


@pytest.mark.parametrize("via", VIAS)
def test_every_point_is_seen_with_its_storage(via):
    layer, other, log = linear(via), linear(via), Log()
    with storage_of(layer).watched(log):
        weight = layer.weight
        _ = other.weight
        assert isinstance(stiefel.operator(layer, "weight"), Dense)
    _ = layer.weight
    assert [storage for storage, _ in log.seen] == [storage_of(layer)] * 2
    assert all(torch.equal(X, weight) for _, X in log.seen)


def test_blocks_nest_and_end_in_any_order():
    layer, outer, inner = linear(), Log(), Log()
    first, second = storage_of(layer).watched(outer), storage_of(layer).watched(inner)
    first.__enter__()
    second.__enter__()
    _ = layer.weight
    first.__exit__(None, None, None)
    assert storage_of(layer).is_watched
    _ = layer.weight
    second.__exit__(None, None, None)
    _ = layer.weight
    assert (len(outer), len(inner)) == (1, 2)
    assert not storage_of(layer).is_watched


def test_one_watcher_in_two_blocks_sees_twice():
    layer, log = linear(), Log()
    with storage_of(layer).watched(log):
        with storage_of(layer).watched(log):
            _ = layer.weight
        _ = layer.weight
    assert len(log) == 3


def test_an_error_in_the_block_or_in_a_watcher_ends_it():
    layer, log = linear(), Log()

    def fail(storage, X):
        raise RuntimeError("planted")

    with storage_of(layer).watched(log):
        with pytest.raises(RuntimeError, match="planted"), storage_of(layer).watched(fail):
            _ = layer.weight
        _ = layer.weight
    assert len(log) == 2
    assert "_watchers" not in vars(storage_of(layer))


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save", "replica"])
@pytest.mark.parametrize("via", VIAS)
def test_copies_are_not_watched(via, how):
    storage, log = storage_of(linear(via)), Log()
    with storage.watched(log):
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(storage, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        elif how == "replica":  # of torch.nn.DataParallel, whose copies carry no parameters yet
            twin = storage._replicate_for_data_parallel()
            for key, original in zip(storage.original_names, storage.originals, strict=True):
                setattr(twin, key, original * 1)
        else:
            make = {"deepcopy": copy.deepcopy, "copy": copy.copy}
            twin = make.get(how, lambda each: pickle.loads(pickle.dumps(each)))(storage)
        assert storage.is_watched
        assert not twin.is_watched
        weight = twin()
    assert len(log) == 0
    assert torch.equal(weight, storage())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("via", VIAS)
def test_a_reload_inside_the_block_is_seen(via, assign):
    layer, source, log = linear(via), linear(via, init="haar"), Log()
    with storage_of(layer).watched(log):
        layer.load_state_dict(source.state_dict(), assign=assign)
        _ = layer.weight
        layer.double()
        _ = layer.weight
    assert torch.equal(log.seen[0][1], source.weight)
    assert log.seen[1][1].dtype == torch.float64


def test_a_block_keeps_no_storage_alive():
    layer, log = linear(), Log()
    with storage_of(layer).watched(log):
        _ = layer.weight
    log.seen.clear()
    storage = weakref.ref(storage_of(layer))
    del layer
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("how", ["pickle", "replica"])
def test_a_copy_of_a_scheduled_storage_has_no_schedule(how):
    layer = linear("matrix_exp", rebase_every=2)
    optimizer = stiefel.optim.build(layer, lr=0.1)
    storage = storage_of(layer)
    assert storage.is_attached_to(optimizer)
    if how == "replica":
        twin = storage._replicate_for_data_parallel()
    else:
        twin = pickle.loads(pickle.dumps(storage))
    assert storage.attached
    assert not twin.attached
