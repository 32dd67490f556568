"""OrthogonalRNN and SequenceModel: the conventions of `nn.RNN`, starts, counts, errors."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import stiefel
from stiefel import errors
from stiefel.geometry import orthonormality_residual
from stiefel.models import (
    NONLINEARITIES,
    OrthogonalRNN,
    RecurrentLayer,
    SequenceModel,
    activate,
    layer,
)
from stiefel.parametrizations import CWY

VIAS = ("cwy", "rgd-c-c", "rgd-e-qr", None)


def double(*args: Any, **options: Any) -> OrthogonalRNN:
    return OrthogonalRNN(*args, dtype=torch.float64, **options)


def layers(rnn: OrthogonalRNN) -> list[RecurrentLayer]:
    return [cast(RecurrentLayer, one) for one in rnn.layers]


def recurrent(rnn: OrthogonalRNN) -> Tensor:
    return layers(rnn)[0].recurrent.weight


def like_rnn(reference: nn.RNN, **options) -> OrthogonalRNN:
    """A network with plain weights and the values of an `nn.RNN`."""
    rnn = double(
        reference.input_size,
        reference.hidden_size,
        reference.num_layers,
        reference.nonlinearity,
        batch_first=reference.batch_first,
        bidirectional=reference.bidirectional,
        via=None,
        **options,
    )
    state = reference.state_dict()
    names = [k.removeprefix("weight_hh") for k in state if k.startswith("weight_hh")]
    with torch.no_grad():
        for one, suffix in zip(layers(rnn), names, strict=True):
            one.input.weight.copy_(state["weight_ih" + suffix])
            one.recurrent.weight.copy_(state["weight_hh" + suffix])
            one.input.bias.copy_(state["bias_ih" + suffix] + state["bias_hh" + suffix])
    return rnn


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_equals_nn_rnn(nonlinearity: str) -> None:
    for count, bidirectional, batch_first, with_h0 in itertools.product(
        (1, 2), (False, True), (False, True), (False, True)
    ):
        reference = nn.RNN(
            3,
            5,
            count,
            nonlinearity,
            batch_first=batch_first,
            bidirectional=bidirectional,
            dtype=torch.float64,
        )
        rnn = like_rnn(reference)
        shape = (4, 9, 3) if batch_first else (9, 4, 3)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        h0 = None
        if with_h0:
            h0 = torch.randn(count * rnn.directions, 4, 5, dtype=torch.float64, requires_grad=True)
        mine, theirs = rnn(x, h0), reference(x, h0)
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)
        leaves = [x] if h0 is None else [x, h0]
        suffixes = [f"_l{i}{d}" for i in range(count) for d in ("", "_reverse")[: rnn.directions]]
        pairs = [
            (parameter, getattr(reference, name + suffix))
            for one, suffix in zip(layers(rnn), suffixes, strict=True)
            for parameter, name in (
                (one.recurrent.weight, "weight_hh"),
                (one.input.weight, "weight_ih"),
                (one.input.bias, "bias_ih"),
            )
        ] + [(leaf, leaf) for leaf in leaves]
        cotangents = [torch.randn_like(b) for b in theirs]
        slopes = torch.autograd.grad(mine, [pair[0] for pair in pairs], cotangents)
        expected = torch.autograd.grad(theirs, [pair[1] for pair in pairs], cotangents)
        for a, b in zip(slopes, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_and_lengths_equal_nn_rnn(enforce_sorted: bool) -> None:
    reference = nn.RNN(3, 5, 2, bidirectional=True, dtype=torch.float64)
    rnn = like_rnn(reference)
    lengths = torch.tensor([9, 7, 2] if enforce_sorted else [2, 9, 7])
    x = torch.randn(9, 3, 3, dtype=torch.float64)
    h0 = torch.randn(4, 3, 5, dtype=torch.float64)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    for first in (None, h0):
        expected, expected_last = reference(packed, first)
        output, last = rnn(packed, first)
        assert isinstance(output, PackedSequence)
        assert torch.allclose(output.data, expected.data, atol=1e-12)
        assert torch.equal(output.batch_sizes, expected.batch_sizes)
        assert torch.allclose(last, expected_last, atol=1e-12)
        padded, _ = pad_packed_sequence(expected)
        for given in (lengths, lengths.tolist()):
            output, last = rnn(x, first, lengths=given)
            assert torch.allclose(output, padded, atol=1e-12)  # zero past the end
            assert torch.allclose(last, expected_last, atol=1e-12)


def test_unbatched_sequences_equal_nn_rnn() -> None:
    reference = nn.RNN(3, 5, 2, batch_first=True, bidirectional=True, dtype=torch.float64)
    rnn = like_rnn(reference)
    x = torch.randn(9, 3, dtype=torch.float64)
    h0 = torch.randn(4, 5, dtype=torch.float64)
    for first in (None, h0):
        for a, b in zip(rnn(x, first), reference(x, first), strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)


def loop(rnn: OrthogonalRNN, x: Tensor, h0: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """All layers and directions, one sequence and one step at a time."""
    ends = []
    for at in range(rnn.num_layers):
        outputs = []
        for direction in range(rnn.directions):
            index = at * rnn.directions + direction
            one = layers(rnn)[index]
            Q, rows, last = one.recurrent.weight, [], []
            for i, steps in enumerate(lengths):
                h = h0[index, i]
                row = [torch.zeros_like(h)] * len(x)
                for t in reversed(range(steps)) if direction else range(steps):
                    z = Q @ h + one.input(x[t, i])
                    row[t] = h = activate(one.nonlinearity, z, one.beta)
                rows.append(torch.stack(row))
                last.append(h)
            outputs.append(torch.stack(rows, dim=1))
            ends.append(torch.stack(last))
        x = torch.cat(outputs, dim=-1)
    return x, torch.stack(ends)


@pytest.mark.parametrize("reflections", [8, 3])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_equals_a_loop_with_gradients_to_the_coordinates(
    nonlinearity: str, reflections: int, device: torch.device
) -> None:
    rnn = double(
        3,
        8,
        2,
        nonlinearity,
        bidirectional=True,
        batch_first=True,
        reflections=reflections,
        device=device,
    )
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(3, 6, 3, dtype=torch.float64, device=device)
    h0 = torch.randn(4, 3, 8, dtype=torch.float64, device=device)
    lengths = [6, 2, 4]
    output, last = rnn(x, h0, lengths=lengths)
    expected, expected_last = loop(rnn, x.transpose(0, 1), h0, lengths)
    assert torch.allclose(output, expected.transpose(0, 1), atol=1e-11)
    assert torch.allclose(last, expected_last, atol=1e-11)
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(output.square().sum() + last.sum(), leaves)
    wanted = torch.autograd.grad(expected.square().sum() + expected_last.sum(), leaves)
    for a, b in zip(slopes, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


# ---------------------------------------------------------------------------- starts and counts


def test_parameter_count_of_the_copying_model() -> None:
    """CWY with L = N = 190, 10 inputs, 9 outputs: N^2 + N K + N + N out + out."""
    model = SequenceModel(OrthogonalRNN(10, 190), 9)
    assert sum(p.numel() for p in model.parameters()) == 39_909
    plain = SequenceModel(OrthogonalRNN(10, 190, via=None), 9)
    assert sum(p.numel() for p in plain.parameters()) == 39_909


def test_the_bias_goes_with_the_nonlinearity() -> None:
    for nonlinearity in NONLINEARITIES:
        one = layers(OrthogonalRNN(3, 4, nonlinearity=nonlinearity))[0]
        assert (one.beta is not None) == (nonlinearity == "modrelu")
        assert (one.input.bias is not None) == (nonlinearity != "modrelu")
        if one.input.bias is not None:
            assert not one.input.bias.any()
    both = layers(OrthogonalRNN(3, 4, bias=True))[0]
    assert both.beta is not None
    assert both.input.bias is not None
    assert layers(OrthogonalRNN(3, 4, nonlinearity="abs", bias=False))[0].input.bias is None


def test_starts_of_the_input_kernel_and_of_modrelu() -> None:
    one = layers(OrthogonalRNN(50, 400, generator=torch.Generator().manual_seed(1)))[0]
    assert one.input.weight.std().item() == pytest.approx((2 / 50) ** 0.5, rel=0.02)
    assert one.input.weight.mean().abs() < 5e-3
    assert 0.009 < one.beta.abs().max() <= 0.01
    filled = layers(OrthogonalRNN(3, 4, input_init=nn.init.ones_))[0]
    assert torch.equal(filled.input.weight, torch.ones(4, 3))


def test_every_via_has_the_same_start() -> None:
    for init in (None, "henaff", "cayley", "haar", nn.init.eye_):
        models = []
        for via in VIAS:
            generator = torch.Generator().manual_seed(3)
            models.append(double(3, 7, via=via, init=init, generator=generator))
        first = layers(models[-1])[0]
        assert orthonormality_residual(first.recurrent.weight) < 1e-12
        for other in models[:-1]:
            one = layers(other)[0]
            assert torch.equal(one.input.weight, first.input.weight)
            assert torch.equal(one.beta, first.beta)
            assert torch.allclose(one.recurrent.weight, first.recurrent.weight, atol=1e-12)
            assert len(list(stiefel.constraints(other))) == 1
    assert not list(stiefel.constraints(models[-1]))


def test_the_default_start_is_henaff_in_blocks_of_two() -> None:
    weight = recurrent(double(3, 8, via=None))
    outside = torch.block_diag(*[torch.ones(2, 2)] * 4) == 0
    assert not weight[outside].any()
    for block in (weight[i : i + 2, i : i + 2] for i in range(0, 8, 2)):
        assert torch.allclose(block[0, 0], block[1, 1])
        assert torch.allclose(block[0, 1], -block[1, 0])


def test_few_reflections_take_a_start_that_they_can_hold() -> None:
    rnn = double(3, 16, reflections=4, generator=torch.Generator().manual_seed(0))
    weight = recurrent(rnn)
    assert orthonormality_residual(weight) < 1e-12
    eye = torch.eye(16, dtype=torch.float64)
    assert torch.linalg.matrix_rank(weight - eye) == 4
    again = double(3, 16, reflections=4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight, recurrent(again))
    with pytest.raises(errors.RepresentationError, match="reflections"):
        double(3, 16, reflections=4, init="henaff")


def test_determinant_charts_made_by_hand_and_options() -> None:
    for determinant in (1, -1):
        for options in ({}, {"reflections": 3}, {"via": "rgd-c-c"}):
            rnn = double(3, 8, determinant=determinant, **options)
            weight = recurrent(rnn)
            assert torch.linalg.det(weight).item() == pytest.approx(determinant)
    chart = CWY(8, reflections=2)
    by_hand = double(3, 8, 2, via=chart)
    assert by_hand.via == "cwy"
    for one in layers(by_hand):
        storage: Any = one.recurrent.parametrizations
        assert storage.weight.chart.reflections == 2
    riemannian = double(3, 8, via="riemannian", retraction="qr")
    (constraint,) = stiefel.constraints(riemannian)
    assert constraint.manifold.retraction == "qr"


def test_weights_and_the_generator_decide_everything() -> None:
    def make() -> SequenceModel:
        generator = torch.Generator().manual_seed(7)
        return SequenceModel(OrthogonalRNN(3, 6, 2, generator=generator), 2, generator=generator)

    one, two = make().state_dict(), make().state_dict()
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key])


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


# -------------------------------------------------------------------------------------- options


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


# ----------------------------------------------------------------------------- the head


@pytest.mark.parametrize("bidirectional", [False, True])
def test_readouts(bidirectional: bool) -> None:
    rnn = OrthogonalRNN(3, 6, 2, bidirectional=bidirectional, batch_first=True)
    x = torch.randn(4, 5, 3)
    every = SequenceModel(rnn, 7)
    assert torch.allclose(every(x), every.head(rnn(x)[0]))
    last = SequenceModel(rnn, 7, readout="last")
    lengths = [5, 2, 1, 4]
    output = rnn(x, lengths=lengths)[0]
    ends = torch.stack([output[i, n - 1, :6] for i, n in enumerate(lengths)])
    if bidirectional:
        ends = torch.cat([ends, output[:, 0, 6:]], dim=1)
    assert torch.allclose(last(x, lengths=lengths), last.head(ends), atol=1e-6)
    assert last(x[0]).shape == (7,)
    packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
    assert torch.allclose(last(packed), last(x, lengths=lengths), atol=1e-6)
    logits = every(packed)
    assert isinstance(logits, PackedSequence)
    assert logits.data.shape == (12, 7)


def test_heads_start_as_published() -> None:
    rnn = OrthogonalRNN(3, 500, via=None)
    copying = SequenceModel(rnn, 900).head
    assert copying.weight.std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert not copying.bias.any()
    pixels = SequenceModel(rnn, 900, head_init="default").head
    bound = 500**-0.5
    for parameter in pixels.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.06)
    with pytest.raises(errors.UnknownNameError, match="kaiming"):
        SequenceModel(rnn, 9, head_init="xavier")
    with pytest.raises(errors.UnknownNameError, match="last"):
        SequenceModel(rnn, 9, readout="first")


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_heads_take_the_networks_of_torch(kind: Any) -> None:
    rnn = kind(3, 6, num_layers=2, bidirectional=True)
    x = torch.randn(5, 4, 3)
    assert SequenceModel(rnn, 7)(x).shape == (5, 4, 7)
    model = SequenceModel(rnn, 7, readout="last")
    output = rnn(x)[0]
    ends = torch.cat([output[-1, :, :6], output[0, :, 6:]], dim=1)
    assert torch.allclose(model(x), model.head(ends), atol=1e-6)
