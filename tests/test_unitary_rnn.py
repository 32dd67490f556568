"""`OrthogonalRNN` with complex weights: a loop over steps, its real twin, its norms and counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stiefel
from stiefel import errors
from stiefel.geometry import orthonormality_residual, realify, realify_vector
from stiefel.models import ASRNN, OrthogonalRNN, SequenceModel, activate, modrelu

VIAS = [
    ("urnn", {}),
    ("eurnn", {"layers": 2}),
    ("eurnn", {}),
    ("cwy", {}),
    ("cwy", {"reflections": 2}),
]


def unitary(*args: Any, **options: Any) -> OrthogonalRNN:
    return OrthogonalRNN(*args, **{"dtype": torch.complex128, **options})


def layer_of(rnn: OrthogonalRNN) -> Any:
    return rnn.layers[0]


def loop(layer: Any, x: Tensor, h: Tensor) -> Tensor:
    states = []
    for x_t in x.unbind(0):
        z = h @ layer.recurrent.weight.mT + x_t.to(h.dtype) @ layer.input.weight.mT
        if layer.input.bias is not None:
            z = z + layer.input.bias
        h = activate(layer.nonlinearity, z, layer.beta)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize(("via", "options"), [*VIAS, ("rgd-c-c", {}), (None, {})])
@pytest.mark.parametrize("nonlinearity", ["modrelu", "identity"])
def test_equals_a_loop(via: str, options: dict[str, Any], nonlinearity: str) -> None:
    rnn = unitary(3, 8, nonlinearity=nonlinearity, via=via, **options)
    layer = layer_of(rnn)
    with torch.no_grad():
        if layer.beta is not None:
            layer.beta.uniform_(-0.5, 0.5)
        else:
            layer.input.bias.normal_()
    h0 = torch.randn(1, 4, 8, dtype=torch.complex128, requires_grad=True)
    for dtype in (torch.float64, torch.complex128):
        x = torch.randn(7, 4, 3, dtype=dtype, requires_grad=True)
        output, last = rnn(x, h0)
        wanted = loop(layer, x, h0[0])
        assert output.dtype == torch.complex128
        assert (output - wanted).abs().max() < 1e-11
        assert torch.equal(last[0], output[-1])
        leaves = [x, h0, *rnn.parameters()]
        cotangent = torch.randn_like(wanted)
        slopes = torch.autograd.grad((output * cotangent).real.sum(), leaves)
        right = torch.autograd.grad((wanted * cotangent).real.sum(), leaves)
        for a, b in zip(slopes, right, strict=True):
            assert b.abs().max() > 1e-4
            assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize(("via", "options"), VIAS)
def test_steps_equal_the_sequence(via: str, options: dict[str, Any]) -> None:
    rnn = unitary(3, 8, 2, via=via, **options)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    output, last = rnn(x)
    step, state, rows = rnn.stepper(), None, []
    for x_t in x.unbind(0):
        row, state = step(x_t, state)
        rows.append(row)
    assert (torch.stack(rows) - output).abs().max() < 1e-12
    assert (state - last).abs().max() < 1e-12


def test_modrelu_cuts_off_and_jumps() -> None:
    """On the modulus: zero where |z| + beta <= 0, and nothing at z = 0 whatever beta is."""
    z = torch.tensor([0, 0.3j, -0.3 + 0.4j, 1 - 1j], dtype=torch.complex128, requires_grad=True)
    cut = modrelu(z, torch.full((4,), -0.4, dtype=torch.float64))
    assert torch.equal(cut[:2].detach(), torch.zeros(2, dtype=torch.complex128))
    assert (cut[2] - 0.2 * (-0.3 + 0.4j)).abs() < 1e-12
    grown = modrelu(z, torch.full((4,), 0.5, dtype=torch.float64))
    assert grown[0] == 0
    assert (grown[1] - 0.8j).abs() < 1e-12
    rnn = unitary(1, 4, via="urnn")
    layer = layer_of(rnn)
    with torch.no_grad():
        layer.beta.fill_(0.5)
    output, _ = rnn(torch.zeros(5, 2, 1, dtype=torch.float64))  # z = 0 for ever
    assert not output.any()
    output.abs().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in rnn.parameters())


@pytest.mark.parametrize(("via", "options"), VIAS)
def test_the_real_twin_takes_the_same_steps(via: str, options: dict[str, Any]) -> None:
    """realify maps U(n) into O(2n): a real network on [Re h, Im h] agrees step by step."""
    rnn = unitary(
        3, 6 if via == "cwy" else 8, nonlinearity="identity", bias=False, via=via, **options
    )
    layer = layer_of(rnn)
    H = rnn.hidden_size
    real = OrthogonalRNN(
        3, 2 * H, nonlinearity="identity", bias=False, via=None, dtype=torch.float64
    )
    with torch.no_grad():
        V = layer.input.weight
        layer_of(real).input.weight.copy_(torch.cat([V.real, V.imag]))
        layer_of(real).recurrent.weight.copy_(realify(layer.recurrent.weight))
    assert orthonormality_residual(layer_of(real).recurrent.weight) < 1e-12
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    assert (realify_vector(rnn(x)[0]) - real(x)[0]).abs().max() < 1e-12


@pytest.mark.parametrize(("via", "options"), VIAS)
def test_norms_are_kept_over_a_thousand_steps(via: str, options: dict[str, Any]) -> None:
    for nonlinearity in ("modrelu", "identity"):
        rnn = unitary(1, 8, nonlinearity=nonlinearity, bias=False, via=via, **options)
        layer = layer_of(rnn)
        if layer.beta is not None:
            torch.nn.init.zeros_(layer.beta)
        h0 = torch.randn(1, 2, 8, dtype=torch.complex128)
        output, _ = rnn(torch.zeros(1000, 2, 1, dtype=torch.float64), h0)
        drift = torch.linalg.vector_norm(output, dim=2) - torch.linalg.vector_norm(h0, dim=2)
        assert drift.abs().max() < 1e-10


def test_lengths_packs_directions_and_layers() -> None:
    rnn = unitary(3, 6, 2, bidirectional=True, learnable_h0=True)
    with torch.no_grad():
        rnn.h0.normal_()
    x, lengths = torch.randn(6, 3, 3, dtype=torch.float64), [6, 1, 4]
    output, last = rnn(x, lengths=lengths)
    for i, steps in enumerate(lengths):
        alone, end = rnn(x[:steps, i : i + 1])
        assert (output[:steps, i : i + 1] - alone).abs().max() < 1e-12
        assert not output[steps:, i].any()
        assert (last[:, i : i + 1] - end).abs().max() < 1e-12
    packed, end = rnn(pack_padded_sequence(x, lengths, enforce_sorted=False))
    with torch.no_grad():  # torch packs complex numbers without gradients only
        padded = pad_packed_sequence(packed._replace(data=packed.data.detach()))[0]
    assert (padded - output).abs().max() < 1e-12
    with torch.no_grad():
        again, _ = rnn(pack_padded_sequence(x.to(torch.complex128), lengths, enforce_sorted=False))
    assert (again.data - packed.data).abs().max() < 1e-12
    assert (end - last).abs().max() < 1e-12


def test_counts_of_the_paper() -> None:
    """7 N recurrent numbers of uRNN; N^2 is the dimension of U(N)."""
    K, N = 3, 16
    shared = 2 * K * N + N  # a complex kernel, and beta
    assert unitary(K, N, via="urnn").expected_parameters() == shared + 7 * N
    assert unitary(K, N, via="eurnn").expected_parameters(effective=True) == shared + N * N
    assert unitary(K, N, via="cwy").expected_parameters(effective=True) == shared + N * N


def test_trains_with_a_real_head_on_both_parts() -> None:
    for via, options in (("urnn", {}), ("eurnn", {"layers": 4}), ("cwy", {}), ("rgd-c-c", {})):
        torch.manual_seed(0)
        rnn = OrthogonalRNN(3, 8, via=via, dtype=torch.complex64, **options)
        model = SequenceModel(rnn, 2)
        assert model.head.weight.shape == (2, 16)
        assert model.head.weight.dtype == torch.float32
        assert model.expected_parameters() == rnn.expected_parameters() + 16 * 2 + 2
        optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
        x, losses = torch.randn(5, 4, 3), []
        for _ in range(12):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        weight = layer_of(rnn).recurrent.weight
        assert orthonormality_residual(weight) < stiefel.tolerance(weight.dtype, 8, 8)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
        other = SequenceModel(OrthogonalRNN(3, 8, via=via, dtype=torch.complex64, **options), 2)
        if via != "urnn":  # its permutation is part of the state
            other.load_state_dict(model.state_dict())
            assert torch.equal(other(x), model(x))
    last = SequenceModel(rnn, 2, readout="last")
    assert last(x).shape == (4, 2)


@pytest.mark.filterwarnings("ignore")
def test_compiles() -> None:
    torch.compiler.reset()
    rnn = unitary(3, 6, via="cwy")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    assert (compiled(x)[0] - rnn(x)[0]).abs().max() < 1e-12


def test_errors_teach() -> None:
    for nonlinearity in ("abs", "relu", "tanh"):
        with pytest.raises(errors.ConfigurationError, match="on the modulus"):
            unitary(3, 8, nonlinearity=nonlinearity)
    rnn = unitary(3, 8)
    with pytest.raises(errors.DtypeError, match=r"torch\.float64"):
        rnn(torch.randn(5, 2, 3))
    with pytest.raises(errors.DtypeError, match="h0"):
        rnn(torch.randn(5, 2, 3).double(), torch.zeros(1, 2, 8).double())
    with pytest.raises(errors.DtypeError, match="OrthogonalRNN has complex states"):
        ASRNN(3, 8, dtype=torch.complex64)
    with pytest.raises(errors.DtypeError, match="int64"):
        OrthogonalRNN(3, 8, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("via", ["cwy", "urnn", "rgd-c-c"])
def test_conversions_keep_real_tensors_real_and_one_precision(via: str) -> None:
    model = SequenceModel(unitary(3, 8, 2, via=via, learnable_h0=True, dtype=torch.complex64), 2)
    x = torch.randn(5, 2, 3)
    expected = model(x)
    assert {p.dtype for p in model.double().parameters()} == {torch.float64, torch.complex128}
    assert (model(x.double()) - expected).abs().max() < 1e-5
    assert {p.dtype for p in model.float().parameters()} == {torch.float32, torch.complex64}
    assert (model(x) - expected).abs().max() < 1e-5
    rnn = unitary(3, 8, via=via, dtype=torch.complex64)
    assert {p.dtype for p in rnn.to(torch.complex128).parameters()} <= {
        torch.float64,
        torch.complex128,
    }
    assert rnn(x.double())[0].dtype == torch.complex128
    with pytest.raises(errors.DtypeError, match="keep it complex"):
        rnn.to(torch.float64)
    model.share_memory()
