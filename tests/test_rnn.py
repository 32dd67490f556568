"""`OrthogonalRNN`: its recurrent weight, what torch does to it, options, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import stiefel
from stiefel import errors
from stiefel.geometry import orthonormality_residual
from stiefel.models import OrthogonalRNN, SequenceModel, layer
from tests.recurrent_networks import double, layers, recurrent

# ----------------------------------------------------------------------------- the recurrent weight


def test_the_operator_is_asked_once_per_sequence_and_never_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def counting(module: nn.Module) -> stiefel.operators.Operator:
        asked.append(module)
        return stiefel.parameter.operator(module)

    monkeypatch.setattr(layer, "operator", counting)
    rnn = OrthogonalRNN(3, 8, 2)
    x = torch.randn(20, 2, 3)
    for mode in (rnn.train, rnn.eval):
        mode()
        with torch.no_grad():
            before, _ = rnn(x)
            assert len(asked) == 2
            storage: Any = layers(rnn)[0].recurrent.parametrizations
            original = storage.weight.original
            original.copy_(torch.randn_like(original))
            after, _ = rnn(x)
        assert not torch.allclose(before, after)
        assert torch.allclose(after, rnn(x)[0])
        asked.clear()


def test_few_reflections_never_form_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn = OrthogonalRNN(3, 8, reflections=3)
    monkeypatch.setattr(
        stiefel.operators.CompactWY, "to_dense", lambda self: pytest.fail("the matrix was formed")
    )
    rnn(torch.randn(5, 2, 3))[0].sum().backward()


@pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
def test_training_keeps_the_weight_orthogonal_and_lowers_the_loss(via: str) -> None:
    """The first input, a few steps later, which only the recurrent weight can bring forward."""
    generator = torch.Generator().manual_seed(0)
    rnn = OrthogonalRNN(2, 16, via=via, generator=generator)
    model = SequenceModel(rnn, 1, readout="last", generator=generator)
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2, optimizer="adam")
    start = recurrent(rnn).detach().clone()
    losses = []
    for _ in range(25):
        x = torch.randn(5, 16, 2, generator=generator)
        loss = (model(x).squeeze(-1) - x[0, :, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
    weight = recurrent(rnn)
    assert (weight - start).abs().max() > 0.05
    assert orthonormality_residual(weight) < stiefel.tolerance(weight.dtype, 16, 16)


# ---------------------------------------------------------------------------- what torch does to it


def test_copies_checkpoints_and_meta() -> None:
    rnn = OrthogonalRNN(3, 6, 2, "abs", bidirectional=True)
    x = torch.randn(5, 2, 3)
    expected, _ = rnn(x)
    assert torch.equal(copy.deepcopy(rnn)(x)[0], expected)
    other = OrthogonalRNN(3, 6, 2, "abs", bidirectional=True)
    other.load_state_dict(rnn.state_dict())
    assert torch.equal(other(x)[0], expected)
    with torch.device("meta"):
        empty = OrthogonalRNN(3, 6, 2, "abs", bidirectional=True)
    empty.load_state_dict(rnn.state_dict(), assign=True)
    assert torch.equal(empty(x)[0], expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_fullgraph() -> None:
    torch.compiler.reset()
    rnn = double(3, 6, 2)
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    output, last = compiled(x)
    expected, expected_last = rnn(x)
    assert torch.allclose(output, expected, atol=1e-12)
    assert torch.allclose(last, expected_last, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(compiled(x)[0], expected, atol=1e-12)
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(output.square().sum(), leaves)
    for a, b in zip(slopes, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_functional_call_func_grad_and_per_sample_gradients() -> None:
    rnn = double(3, 6)
    x = torch.randn(4, 9, 1, 3, dtype=torch.float64)
    parameters = dict(rnn.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(rnn, parameters, (x,))[0].square().sum()

    detached = {name: value.detach() for name, value in parameters.items()}
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(detached, x)
    for i, each in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, each), list(parameters.values()))
        for name, slope in zip(parameters, expected, strict=True):
            assert torch.allclose(per_sample[name][i], slope, atol=1e-11)


def test_autocast_leaves_the_recurrence_in_float32(device: torch.device) -> None:
    rnn = OrthogonalRNN(3, 6, device=device)
    x = torch.randn(5, 2, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output, _ = rnn(x)
        from_half, _ = rnn(x.bfloat16())
    assert output.dtype == from_half.dtype == torch.float32
    assert torch.equal(output, rnn(x)[0])
    assert torch.equal(from_half, rnn(x.bfloat16().float())[0])


def test_16_bit_models_run() -> None:
    rnn = OrthogonalRNN(3, 6).bfloat16()
    output, last = rnn(torch.randn(5, 2, 3, dtype=torch.bfloat16))
    assert output.dtype == last.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rnn.parameters())


# ------------------------------------------------------------------------------- options and errors


def test_dropout_between_layers() -> None:
    rnn = OrthogonalRNN(3, 6, 2, dropout=0.5)
    x = torch.randn(9, 2, 3)
    assert not torch.equal(rnn(x)[0], rnn(x)[0])
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])
    one = OrthogonalRNN(3, 6, 1, dropout=0.5)  # nothing to drop after the last layer
    assert torch.equal(one(x)[0], one(x)[0])


def test_a_learned_first_state() -> None:
    rnn = double(3, 6, 2, bidirectional=True, learnable_h0=True)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        rnn.h0.normal_()
    given = rnn.h0.detach().unsqueeze(1).repeat(1, 3, 1)
    assert torch.allclose(rnn(x)[0], rnn(x, given)[0])
    rnn(x)[1].sum().backward()
    assert rnn.h0.grad is not None
    assert (rnn.h0.grad != 0).all(dim=1).all()
    packed = pack_padded_sequence(x, [2, 5, 3], enforce_sorted=False)
    assert torch.allclose(rnn(packed)[0].data, rnn(packed, given)[0].data)


def test_an_empty_batch() -> None:
    rnn = OrthogonalRNN(3, 6, 2, bidirectional=True)
    output, last = rnn(torch.zeros(5, 0, 3))
    assert output.shape == (5, 0, 12)
    assert last.shape == (4, 0, 6)
    (output.sum() + last.sum()).backward()
    assert all(not p.grad.any() for p in rnn.parameters())


def test_errors_teach() -> None:
    rnn = OrthogonalRNN(3, 6, 2)
    x = torch.randn(5, 4, 3)
    with pytest.raises(errors.ShapeError, match="K = 3 features"):
        rnn(torch.randn(5, 4, 2))
    with pytest.raises(errors.ShapeError, match="T = 0"):
        rnn(torch.randn(0, 4, 3))
    with pytest.raises(errors.ShapeError, match="T = 0"):
        OrthogonalRNN(3, 6, batch_first=True)(torch.randn(4, 0, 3))
    with pytest.raises(errors.ShapeError, match=r"h0 of shape \(2, 4, 6\)"):
        rnn(x, torch.zeros(4, 6))
    with pytest.raises(errors.ShapeError, match=r"h0 of shape \(2, 6\)"):
        rnn(x[:, 0], torch.zeros(2, 1, 6))
    with pytest.raises(errors.ShapeError, match="from 1 to T = 5"):
        rnn(x, lengths=[6, 1, 1, 1])
    with pytest.raises(errors.ShapeError, match="unbatched"):
        rnn(x[:, 0], lengths=[5])
    with pytest.raises(errors.DtypeError, match="float64"):
        rnn(x.double())
    with pytest.raises(errors.DtypeError, match=r"h0 of torch\.float32"):
        rnn(x, torch.zeros(2, 4, 6, dtype=torch.float64))
    with pytest.raises(errors.DtypeError, match="meta"):
        rnn(x.to("meta"))
    with pytest.raises(errors.ConfigurationError, match="PackedSequence"):
        rnn(pack_padded_sequence(x, [5, 5, 5, 1]), lengths=[5, 5, 5, 1])
    with pytest.raises(errors.ShapeError, match="K = 3 features"):
        rnn(pack_padded_sequence(torch.randn(5, 1, 2), [5]))


def test_errors_of_construction_teach() -> None:
    with pytest.raises(errors.UnknownNameError, match="modrelu"):
        OrthogonalRNN(3, 6, nonlinearity="mod_relu")
    with pytest.raises(errors.UnknownNameError, match="cwy"):
        OrthogonalRNN(3, 6, via="cyw")
    with pytest.raises(errors.UnknownNameError, match="henaff"):
        OrthogonalRNN(3, 6, init="henaf")
    with pytest.raises(errors.ConfigurationError, match="reflections"):
        OrthogonalRNN(3, 6, via=None, reflections=2)
    with pytest.raises(errors.ConfigurationError, match="hidden_size"):
        OrthogonalRNN(3, 0)
    with pytest.raises(errors.ConfigurationError, match="dropout"):
        OrthogonalRNN(3, 6, dropout=1.5)
