"""Laws of the recurrent networks: one interface, the same numbers in every layout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import stiefel
from stiefel import errors
from stiefel.models import SequenceModel
from tests.registry import NETWORKS

LENGTHS = [6, 1, 4]


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]


def parts(state):
    return list(state) if isinstance(state, tuple) else [state]


def joined(tensors):
    state = tuple(tensors)
    return state if len(state) > 1 else next(iter(state))


def alike(first, second, bound=1e-12):
    output, state = first
    wanted, ends = second
    for a, b in zip([output, *parts(state)], [wanted, *parts(ends)], strict=True):
        assert a.shape == b.shape
        assert a.numel() == 0 or (a - b).abs().max() < bound


def disturbed(rnn):
    """The network with values that no start has, so that every parameter matters."""
    with torch.no_grad():
        for parameter in rnn.parameters():
            if not hasattr(parameter, "manifold"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return rnn


def random_state(network, rnn, batch, device):
    shape = (rnn.num_layers * rnn.directions, batch, rnn.hidden_size)
    options = {"dtype": network.dtype, "device": device}
    return joined(torch.randn(shape, **options) for _ in rnn.state_names)


def cost(output, last):
    """A real number that every state has its part in."""
    return output.abs().square().sum() + sum(part.real.sum() for part in parts(last))


def test_ragged_lengths_equal_each_sequence_by_itself(network, device):
    rnn = disturbed(network.make("cwy", num_layers=2, bidirectional=True).to(device))
    x = torch.randn(6, 3, 3, dtype=torch.float64, device=device)
    state = random_state(network, rnn, 3, device)
    output, last = rnn(x, state, lengths=LENGTHS)
    padded = x.clone()
    for i, steps in enumerate(LENGTHS):
        padded[steps:, i] = torch.nan
        own = joined(part[:, i : i + 1] for part in parts(state))
        alone, end = rnn(x[:steps, i : i + 1], own)
        assert (output[:steps, i : i + 1] - alone).abs().max() < 1e-12
        assert not output[steps:, i].any()
        for a, b in zip(parts(last), parts(end), strict=True):
            assert (a[:, i : i + 1] - b).abs().max() < 1e-12
    alike(rnn(padded, state, lengths=LENGTHS), (output, last))
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    data, end = rnn(packed, state)
    alike((torch.nn.utils.rnn.pad_packed_sequence(data)[0], end), (output, last))


def test_gradients_of_ragged_lengths(network):
    rnn = disturbed(network.make("cwy"))
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    loss = cost(*rnn(x, lengths=LENGTHS))
    alone = [cost(*rnn(x[:steps, i : i + 1])) for i, steps in enumerate(LENGTHS)]
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(loss, leaves)
    wanted = torch.autograd.grad(torch.stack(alone).sum(), leaves)
    for a, b in zip(slopes, wanted, strict=True):
        assert (a - b).abs().max() < 1e-10


def test_layouts_agree(network):
    rnn = disturbed(network.make("cwy", num_layers=2))
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    output, last = rnn(x)
    twin = network.make("cwy", num_layers=2, batch_first=True)
    twin.load_state_dict(rnn.state_dict())
    turned, end = twin(x.transpose(0, 1))
    alike((turned.transpose(0, 1), end), (output, last))
    alone, end = rnn(x[:, 0])
    alike((alone, end), (output[:, 0], joined(part[:, 0] for part in parts(last))))


def test_a_state_is_where_the_sequence_goes_on(network):
    rnn = disturbed(network.make("cwy", num_layers=2))
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    output, last = rnn(x)
    first, middle = rnn(x[:1])  # a sequence of one step
    second, end = rnn(x[1:], middle)
    alike((torch.cat([first, second]), end), (output, last))


def test_an_empty_batch(network):
    rnn = network.make("cwy", num_layers=2, bidirectional=True)
    for lengths in (None, torch.zeros(0, dtype=torch.int64)):
        output, last = rnn(torch.zeros(5, 0, 3, dtype=torch.float64), lengths=lengths)
        assert output.shape == (5, 0, 16)
        assert all(part.shape == (4, 0, 8) for part in parts(last))


def test_a_learned_first_state(network):
    rnn = network.make("cwy", num_layers=2, bidirectional=True, learnable_h0=True)
    learned = [getattr(rnn, name) for name in rnn.state_names]
    with torch.no_grad():
        for part in learned:
            part.normal_()
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    given = joined(part.detach().unsqueeze(1).repeat(1, 3, 1) for part in learned)
    output, last = rnn(x)
    alike((output, last), rnn(x, given))
    cost(output, last).backward()
    assert all((part.grad != 0).any(dim=1).all() for part in learned)
    packed = pack_padded_sequence(x, [2, 5, 3], enforce_sorted=False)
    assert rnn(packed)[0].data.shape == (10, 16)


def test_copies_checkpoints_meta_and_dtypes(network, device):
    rnn = disturbed(network.make("cwy", num_layers=2, learnable_h0=True).to(device))
    x = torch.randn(5, 3, 3, dtype=torch.float64, device=device)
    expected = rnn(x)
    alike(copy.deepcopy(rnn)(x), expected)
    with torch.device("meta"):
        empty = network.make("cwy", num_layers=2, learnable_h0=True)
    materialised = empty.to_empty(device=device) if not network.constraints else None
    if materialised is not None:
        materialised.load_state_dict(rnn.state_dict())
        alike(materialised(x), expected)
    other = network.make("cwy", num_layers=2, learnable_h0=True).to(device)
    other.load_state_dict(rnn.state_dict())
    alike(other(x), expected)
    alike(rnn.float()(x.float()), expected, 1e-4)
    assert rnn(x.float())[0].real.dtype == torch.float32
    assert rnn.double()(x)[0].dtype == network.dtype


def test_every_layer_and_direction_has_its_constraints(network):
    rnn = network.make("cwy", num_layers=2, bidirectional=True)
    assert len(list(stiefel.constraints(rnn))) == 4 * network.constraints


def test_counts_are_those_of_the_paper(network):
    for K, N in [(3, 8), (2, 5)]:
        rnn = network.make("cwy", K, N)
        assert rnn.expected_parameters(effective=True) == network.published(K, N)
        model = SequenceModel(rnn, 4)
        head = 4 * N * (2 if network.complex else 1) + 4
        assert model.expected_parameters(effective=True) == network.published(K, N) + head


def test_what_is_tied_counts_once(network):
    rnn, one = network.make("cwy", 8, 8, num_layers=3), network.make("cwy", 8, 8)
    if not hasattr(rnn, "layers"):  # torch's own network within, whose weights are not modules
        assert rnn.expected_parameters() == 3 * one.expected_parameters()
        return
    layer = one.layers[0]
    shared = sum(p.numel() * (2 if p.is_complex() else 1) for p in layer.input.parameters())
    counts = [one.expected_parameters(effective=effective) for effective in (False, True)]

    def counted(model):
        return [model.expected_parameters(effective=effective) for effective in (False, True)]

    assert counted(rnn) == [3 * count for count in counts]
    rnn.layers[1] = rnn.layers[0]
    assert counted(rnn) == [2 * count for count in counts]
    rnn.layers[2].input = rnn.layers[0].input
    assert counted(rnn) == [2 * count - shared for count in counts]
    for name, child in rnn.layers[0].named_children():  # all weights that modules hold
        setattr(rnn.layers[2], name, child)
    own = sum(p.numel() for p in layer.parameters(recurse=False))
    assert counted(rnn) == [count + own for count in counts]
    head = 2 * 8 * (2 if network.complex else 1) + 2
    assert counted(SequenceModel(rnn, 2)) == [count + own + head for count in counts]


def test_what_is_printed_is_how_the_weights_are_trained_now(network):
    if not network.constraints:
        assert "via=" not in repr(network.make("cwy"))
        return
    rnn = network.make(network.vias[0], num_layers=2)
    assert rnn.via == network.vias[0]
    for via in (*network.vias[1:], "cwy"):
        stiefel.convert(rnn, via)
        assert rnn.via == copy.deepcopy(rnn).via == via
        assert f"via={via!r}" in repr(rnn)
    stiefel.convert(rnn.layers[1], "cayley")
    assert rnn.via == "cwy, cayley"
    with pytest.raises(errors.UnknownNameError):
        stiefel.convert(rnn, "caley")
    assert rnn.via == "cwy, cayley"
    stiefel.release(rnn.layers[0])
    assert rnn.via == "cayley"
    stiefel.release(rnn)
    assert rnn.via is None
    assert "via=None" in repr(rnn)


def test_training_lowers_the_loss(network):
    torch.manual_seed(0)
    model = network.model("cwy")
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
    x, losses = network.sample(), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_autocast_and_16_bits(network, device):
    rnn = network.make("cwy", dtype=torch.float32, device=device)
    x = torch.randn(5, 3, 3, device=device)
    expected, _ = rnn(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output, _ = rnn(x.bfloat16())
    bound = 1e-5 if network.constraints else 0.1
    assert (output - rnn(x.bfloat16().float())[0]).abs().max() < bound
    if network.complex:
        with pytest.raises(errors.DtypeError, match="no complex numbers of that precision"):
            rnn.bfloat16()
        return
    half, _ = rnn.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() < 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compile(network):
    torch.compiler.reset()
    rnn = disturbed(network.make("cwy"))
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    expected = rnn(x)
    compiled = torch.compile(rnn, backend="aot_eager")
    alike(compiled(x), expected)
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(cost(*compiled(x)), leaves)
    for a, b in zip(slopes, torch.autograd.grad(cost(*expected), leaves), strict=True):
        assert (a - b).abs().max() < 1e-10


def test_errors_teach(network):
    rnn = network.make("cwy", num_layers=2)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    with pytest.raises(errors.ShapeError, match="K = 3 features"):
        rnn(x[..., :2])
    with pytest.raises(errors.ShapeError, match="T = 0"):
        rnn(x[:0])
    with pytest.raises(errors.ShapeError, match="from 1 to T = 5"):
        rnn(x, lengths=[6, 1, 1, 1])
    with pytest.raises(errors.ShapeError, match="unbatched"):
        rnn(x[:, 0], lengths=[5])
    with pytest.raises(errors.DtypeError, match="float64"):
        rnn(x.float())
    with pytest.raises(errors.ConfigurationError, match="PackedSequence"):
        rnn(pack_padded_sequence(x, [5, 5, 5, 1]), lengths=[5, 5, 5, 1])
    with pytest.raises(errors.ShapeError, match=r"h0 of shape \(2, 4, 8\)|the state \(h0, c0\)"):
        rnn(x, torch.zeros(4, 8, dtype=torch.float64))
    with pytest.raises(errors.ShapeError, match=r"got (str|int)"):
        rnn(x, "zeros" if len(rnn.state_names) == 1 else (0, 0))
    with pytest.raises(errors.ConfigurationError, match="hidden_size"):
        network.make("cwy", 3, 0)


def test_lengths_of_any_integer_dtype(network):
    rnn, x = network.make("cwy"), torch.randn(300, 2, 3, dtype=torch.float64)
    expected = rnn(x, lengths=[200, 17])
    for dtype in (torch.uint8, torch.int32):
        alike(rnn(x, lengths=torch.tensor([200, 17], dtype=dtype)), expected, 1e-15)
    output, last = rnn(x[:, :0], lengths=[])
    assert output.shape == (300, 0, 8)
    assert all(part.shape == (1, 0, 8) for part in parts(last))


def test_functional_call_gradients_and_maps(network):
    """`torch.func`: gradients by function, for each sequence, and of an ensemble of networks."""
    rnn = disturbed(network.make("cwy", num_layers=2))
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    names, leaves = zip(*rnn.named_parameters(), strict=True)
    values = {name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)}

    def loss(values, x):
        return cost(*functional_call(rnn, values, (x,)))

    slopes = torch.func.grad(loss)(values, x)
    wanted = torch.autograd.grad(cost(*rnn(x)), leaves)
    for name, slope in zip(names, wanted, strict=True):
        assert (slopes[name] - slope).abs().max() < 1e-10 * max(1.0, slope.abs().max().item())
    if not network.maps:
        return
    sequences = x.transpose(0, 1).unsqueeze(2)  # each a batch of one
    own = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, sequences)
    ensemble = {name: torch.stack([value, 0.9 * value]) for name, value in values.items()}
    both = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(ensemble, x)
    other = torch.func.grad(loss)({name: 0.9 * value for name, value in values.items()}, x)
    for name, slope in slopes.items():
        bound = 1e-10 * max(1.0, slope.abs().max().item())
        assert (own[name].sum(0) - slope).abs().max() < bound
        assert (both[name][0] - slope).abs().max() < bound
        assert (both[name][1] - other[name]).abs().max() < bound


def test_dropout_takes_whole_units_between_layers(network):
    rnn = network.make("cwy", num_layers=2, dropout=0.5)
    x = torch.randn(40, 4, 3, dtype=torch.float64)
    seen = []
    if network.maps:  # the gates of torch drop inside
        rnn.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    output, _ = rnn(x)
    assert not torch.equal(output, rnn(x)[0])
    rnn.eval()
    kept = rnn(x)[0]
    assert torch.equal(kept, rnn(x)[0])
    if seen:
        dropped, whole = seen[0], seen[-1]
        gone = dropped == 0
        assert 0.3 < gone.double().mean() - (whole == 0).double().mean() / 2 < 0.7
        assert (dropped - 2 * whole)[~gone].abs().max() < 1e-12
