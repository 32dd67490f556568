"""The interface of the convolutional recurrent networks: layouts, lengths, states, contracts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel
from stiefel import errors
from stiefel.models import ConvLSTM, ConvNERU
from stiefel.models.frames import FrameRNN, FrameState
from tests.frame_networks import NETWORKS, disturb, frames, parts


@pytest.fixture(params=NETWORKS)
def make(request: pytest.FixtureRequest) -> Any:
    def made(**options: Any) -> FrameRNN:
        network = NETWORKS[request.param](**options)
        disturb(network)
        return network

    return made


def close(a: FrameState, b: FrameState) -> bool:
    return all(torch.allclose(x, y, atol=1e-12) for x, y in zip(parts(a), parts(b), strict=True))


def test_one_sequence_is_its_steps(make: Any) -> None:
    rnn = make(num_layers=2)
    x = frames(6, 3, 2, 5, 4)
    output, end = rnn(x)
    assert output.shape == (6, 3, 3, 5, 4)
    assert all(part.shape == (2, 3, 3, 5, 4) for part in parts(end))
    assert torch.equal(output[-1], parts(end)[0][-1])
    state = None
    for t in range(6):
        step, state = rnn(x[t : t + 1], state)
        assert torch.allclose(step[0], output[t], atol=1e-12)
    assert state is not None
    assert close(state, end)
    assert not torch.allclose(output, rnn(x.flip(0))[0].flip(0)) or rnn.kernel == "zeros"


def test_layouts(make: Any) -> None:
    rnn, turned = make(num_layers=2), make(num_layers=2, batch_first=True)
    turned.load_state_dict(rnn.state_dict())
    x = frames(4, 3, 2, 5, 4)
    output, end = rnn(x)
    first, first_end = turned(x.transpose(0, 1))
    assert torch.allclose(first.transpose(0, 1), output)
    assert close(first_end, end)
    alone, alone_end = rnn(x[:, 1])
    assert alone.shape == (4, 3, 5, 4)
    assert torch.allclose(alone, output[:, 1])
    assert close(alone_end, tuple(part[:, 1] for part in parts(end)))
    again, _ = rnn(x[:, 1], alone_end)
    assert torch.allclose(again, rnn(x, end)[0][:, 1])


def test_ragged_lengths_are_the_sequences_alone(make: Any) -> None:
    rnn = make(num_layers=2)
    lengths = [4, 1, 3]
    x = frames(4, 3, 2, 5, 4)
    state: Any = tuple(part.detach() + 0.1 for part in parts(rnn(x.clone())[1]))
    state = state if len(state) > 1 else state[0]
    for b, length in enumerate(lengths):
        x[length:, b] = torch.nan  # never read
    output, end = rnn(x, state, lengths)
    weights = torch.randn_like(output)
    loss = (output * weights).sum() + sum(part.square().sum() for part in parts(end))
    slopes = torch.autograd.grad(loss, list(rnn.parameters()))
    loss = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(lengths):
        first = [part[:, b : b + 1] for part in parts(state)]
        alone, alone_end = rnn(x[:length, b : b + 1], tuple(first) if len(first) > 1 else first[0])
        assert torch.allclose(output[:length, b], alone[:, 0], atol=1e-12)
        assert not output[length:, b].any()
        assert close(tuple(part[:, b : b + 1] for part in parts(end)), alone_end)
        loss = loss + (alone[:, 0] * weights[:length, b]).sum()
        loss = loss + sum(part.square().sum() for part in parts(alone_end))
    expected = torch.autograd.grad(loss, list(rnn.parameters()))
    for a, b in zip(slopes, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-9)
    packed, packed_end = rnn(pack_padded_sequence(x, torch.tensor(lengths), False, False), state)
    repacked = pack_padded_sequence(output, torch.tensor(lengths), enforce_sorted=False)
    assert torch.allclose(packed.data, repacked.data, atol=1e-12)
    assert close(packed_end, end)


def test_first_states_are_learned(make: Any) -> None:
    rnn = make(learnable_h0=True, num_layers=2)
    x = frames(2, 3, 2, 5, 4)
    learned = [getattr(rnn, name) for name in rnn.state_names]
    full: Any = tuple(h[:, None, :, None, None].expand(2, 3, 3, 5, 4) for h in learned)
    assert torch.allclose(rnn(x)[0], rnn(x, full if len(full) > 1 else full[0])[0])
    without = make(num_layers=2).expected_parameters()
    assert rnn.expected_parameters() == without + 2 * 3 * len(learned)
    if getattr(rnn, "kernel", None) != "zeros":
        rnn(x)[0].sum().backward()
        assert all(h.grad is not None and h.grad.any(dim=1).all() for h in learned)


def test_what_is_tied_counts_once(make: Any) -> None:
    rnn, one = make(num_layers=2, in_channels=3), make(in_channels=3)
    for effective in (False, True):
        alone = one.expected_parameters(effective=effective)
        assert rnn.expected_parameters(effective=effective) == 2 * alone
        rnn.layers[1] = rnn.layers[0]
        assert rnn.expected_parameters(effective=effective) == alone
        rnn.layers[1] = copy.deepcopy(rnn.layers[0])


def test_what_is_printed_is_how_the_kernels_are_trained_now() -> None:
    rnn = ConvNERU(2, 3, via="rgd-c-c", num_layers=2)
    assert rnn.via == "rgd-c-c"
    assert "via='tcwy'" in repr(stiefel.convert(rnn, "tcwy"))
    stiefel.convert(rnn.layers[0], "own")
    assert rnn.via == "own, tcwy"
    assert stiefel.release(rnn).via is None
    assert ConvNERU(2, 3, kernel="free").via is ConvNERU(2, 3, kernel="zeros").via is None


def test_an_empty_batch(make: Any) -> None:
    rnn = make(num_layers=2)
    output, end = rnn(torch.zeros(3, 0, 2, 5, 4, dtype=torch.float64))
    assert output.shape == (3, 0, 3, 5, 4)
    assert all(part.shape == (2, 0, 3, 5, 4) for part in parts(end))
    output.sum().backward()


def test_copies_checkpoints_and_training(make: Any) -> None:
    rnn, other = make(), make()
    x = frames(3, 2, 2, 5, 4)
    optimizer = stiefel.optim.build(rnn, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (rnn(x)[0] - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected, _ = rnn(x)
    other.load_state_dict(rnn.state_dict())
    assert torch.equal(other(x)[0], expected)
    assert torch.equal(copy.deepcopy(rnn)(x)[0], expected)
    low = rnn.float()
    assert torch.allclose(low(x.float())[0].double(), expected, atol=1e-4)


class _Work(TorchDispatchMode):
    """Counts operations and the entries that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view:
            made = torch.utils._pytree.tree_leaves(result)
            self.entries += sum(one.numel() for one in made if isinstance(one, Tensor))
        return result


def test_twice_the_steps_are_twice_the_work(make: Any) -> None:
    rnn = make()

    def work(steps: int) -> _Work:
        x = torch.rand(steps, 1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
        with _Work() as counted:
            rnn(x)[0].sum().backward()
        return counted

    work(1)
    few, many = work(40), work(80)
    assert many.operations < 2.1 * few.operations
    assert many.entries < 2.1 * few.entries


@pytest.mark.parametrize("kind", [ConvNERU, ConvLSTM])
def test_low_precision(kind: Any, device: torch.device) -> None:
    rnn = kind(2, 3).to(device)
    x = torch.randn(4, 2, 2, 5, 5, device=device)
    expected, _ = rnn(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output, end = rnn(x)
        from_half, _ = rnn(x.bfloat16())
    assert output.dtype == from_half.dtype == parts(end)[0].dtype == torch.float32
    assert 0 < (output - expected).abs().max() < 0.05
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rnn.parameters())
    half = rnn.bfloat16()
    output, end = half(x.bfloat16())
    assert output.dtype == parts(end)[-1].dtype == torch.bfloat16
    assert (output.float() - expected).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_fullgraph(make: Any) -> None:
    torch.compiler.reset()
    rnn = make()
    x = frames(3, 2, 2, 5, 4)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    output, end = compiled(x)
    expected, expected_end = rnn(x)
    assert torch.allclose(output, expected, atol=1e-12)
    assert close(end, expected_end)
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(output.square().sum(), leaves)
    for a, b in zip(slopes, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_errors_teach() -> None:
    rnn: nn.Module = ConvNERU(2, 3)
    x = torch.randn(3, 2, 2, 5, 4)
    with pytest.raises(errors.ShapeError, match="C = 2 channels"):
        rnn(torch.randn(3, 2, 1, 5, 4))
    with pytest.raises(errors.ShapeError, match="C = 2 channels"):
        rnn(torch.randn(3, 2, 5))
    with pytest.raises(errors.ShapeError, match="C = 2 channels"):
        rnn(torch.randn(3, 2, 2, 0, 4))
    with pytest.raises(errors.ShapeError, match="T = 0"):
        rnn(torch.randn(0, 2, 2, 5, 4))
    with pytest.raises(errors.ShapeError, match=r"state of shape \(1, 2, 3, 5, 4\)"):
        rnn(x, torch.zeros(1, 1, 3, 5, 4))
    with pytest.raises(errors.ShapeError, match=r"state of shape \(1, 3, 5, 4\)"):
        rnn(x[:, 0], torch.zeros(1, 1, 3, 5, 4))
    with pytest.raises(errors.ShapeError, match="from 1 to T = 3"):
        rnn(x, lengths=[4, 1])
    with pytest.raises(errors.ShapeError, match="one integer length for each of 2"):
        rnn(x, lengths=[3])
    with pytest.raises(errors.ShapeError, match="unbatched"):
        rnn(x[:, 0], lengths=[3])
    with pytest.raises(errors.ConfigurationError, match="its own lengths"):
        rnn(pack_padded_sequence(x, [3, 2]), lengths=[3, 2])
    with pytest.raises(errors.DtypeError, match="expected input of torch"):
        rnn(x.double())


def test_lengths_and_states_of_any_kind(make: Any) -> None:
    network, x = make(), frames(260, 2, 2, 5, 4)
    expected, _ = network(x, lengths=[200, 17])
    output, _ = network(x, lengths=torch.tensor([200, 17], dtype=torch.uint8))
    assert torch.equal(output, expected)
    assert network(x[:, :0], lengths=[])[0].shape == (260, 0, 3, 5, 4)
    for state in ("zeros", 3, (1, 2)[: len(network.state_names)]):
        with pytest.raises(errors.ShapeError, match="pass on what the last call gave"):
            network(x, state)


def test_functional_call_gradients_and_maps(make: Any) -> None:
    """`torch.func`: gradients by function, for parts of a batch, and of an ensemble."""
    network, x = make(), frames(3, 4, 2, 5, 4)
    leaves = dict(network.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(network, values, (x,))[0].square().sum()

    values = {name: leaf.detach() for name, leaf in leaves.items()}
    slopes = torch.func.grad(loss)(values, x)
    wanted = torch.autograd.grad(network(x)[0].square().sum(), list(leaves.values()))
    halves = torch.stack(x.split(2, dim=1))
    own = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, halves)
    ensemble = {name: torch.stack([value, value]) for name, value in values.items()}
    both = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(ensemble, x)
    for name, slope in zip(leaves, wanted, strict=True):
        bound = 1e-10 * max(1.0, slope.abs().max().item())
        assert (slopes[name] - slope).abs().max() < bound
        assert (own[name].sum(0) - slope).abs().max() < bound
        assert (both[name][1] - slope).abs().max() < bound
