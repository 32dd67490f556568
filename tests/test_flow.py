"""`gradient_flow`: exact adjoints, the same function inside, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from stiefel import errors
from stiefel.models import (
    NNRNN,
    ConvLSTM,
    ConvNERU,
    OrthogonalRNN,
    PlainRNN,
    Seq2Seq,
    SequenceModel,
    VideoPredictor,
    gradient_flow,
)
from tests.frame_networks import NETWORKS as FRAME_NETWORKS
from tests.frame_networks import disturb, frames
from tests.registry import NETWORKS

LENGTHS = [6, 1, 4]


def parts(state):
    return list(state) if isinstance(state, tuple) else [state]


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def cost(tensors):
    return sum(part.sin().abs().square().sum() + part.real.sum() for part in tensors)


@pytest.mark.parametrize("name", NETWORKS)
def test_adjoints_are_those_of_a_loop(name):
    """The loop: sequences of one step, the gradients of the states between them retained."""
    rnn, x = NETWORKS[name].make("cwy"), drawn(7, 3, 3)
    state, kept = None, []
    for t in range(7):
        _, state = rnn(x[t : t + 1], state)
        for part in parts(state):
            part.retain_grad()
        kept.append(parts(state))
    cost([*(one[0] for one in kept[::3]), *kept[-1][1:]]).backward()
    with gradient_flow(rnn) as flow:
        output, last = rnn(x)
        cost([output[::3], *parts(last)[1:]]).backward()
    assert [one.part for one in flow] == ["h", "c"][: len(flow)]
    for i, one in enumerate(flow):
        norms = torch.stack([each[i][0].norm(dim=1) for each in kept])
        slopes = torch.stack([each[i].grad[0].norm(dim=1) for each in kept])
        assert (one.states - norms).abs().max() < 1e-12
        assert (one.adjoints - slopes).abs().max() < 1e-11 * max(1.0, slopes.max().item())


@pytest.mark.parametrize("name", NETWORKS)
def test_inside_and_outside_are_the_same_function(name):
    rnn = NETWORKS[name].make("cwy", num_layers=2, bidirectional=True, learnable_h0=True)
    x = drawn(6, 3, 3).requires_grad_()
    leaves, results = [x, *rnn.parameters()], []

    def run():
        output, last = rnn(x, lengths=LENGTHS)
        slopes = torch.autograd.grad(cost([output, *parts(last)]), leaves)
        results.append([output, *parts(last), *slopes])

    run()
    with gradient_flow(rnn) as flow:
        run()
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-11 * max(1.0, a.abs().max().item())
    assert [(one.layer, one.direction) for one in flow if one.part == "h"] == [
        *((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for one in flow:
        for recorded in (one.states, one.adjoints):
            for b, steps in enumerate(LENGTHS):
                assert recorded[:steps, b].isfinite().all()
                assert recorded[steps:, b].isnan().all()


@pytest.mark.parametrize("name", NETWORKS)
def test_ragged_lengths_have_the_norms_of_each_sequence_by_itself(name):
    rnn, x = NETWORKS[name].make("cwy", num_layers=2, bidirectional=True), drawn(6, 3, 3)

    def run(x, lengths=None):
        with gradient_flow(rnn) as flow:
            output, last = rnn(x, lengths=lengths)
            cost([output, *parts(last)]).backward()
        return flow

    together = run(x, LENGTHS)
    for b, steps in enumerate(LENGTHS):
        alone = run(x[:steps, b : b + 1])
        for ours, wanted in zip(together, alone, strict=True):
            assert (ours.states[:steps, b] - wanted.states[:, 0]).abs().max() < 1e-12
            difference = ours.adjoints[:steps, b] - wanted.adjoints[:, 0]
            assert difference.abs().max() < 1e-11 * max(1.0, wanted.adjoints.max().item())


@pytest.mark.parametrize("nonlinearity", ["identity", "abs"])
@pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
def test_orthogonal_weights_keep_the_norm_of_the_adjoint(nonlinearity, via):
    rnn = OrthogonalRNN(3, 16, nonlinearity=nonlinearity, via=via, dtype=torch.float64)
    with gradient_flow(rnn) as flow:
        _, last = rnn(drawn(200, 4, 3))
        last.square().sum().backward()
    adjoints = flow[0].adjoints
    assert (adjoints / adjoints[-1] - 1).abs().max() < 1e-8
    free = PlainRNN(3, 16, init=lambda W, generator=None: W.copy_(0.9 * torch.eye(16)))
    with gradient_flow(free) as flow:
        _, last = free(torch.zeros(50, 4, 3), torch.full((1, 4, 16), 1e-3))
        last.sum().backward()
    assert (flow[0].adjoints[0] / flow[0].adjoints[-1]).max() < 0.01  # 0.9^49 = 0.006


def test_the_adjoint_of_a_lower_layer_comes_through_the_upper_one():
    rnn, x = OrthogonalRNN(2, 4, 2, "tanh", dtype=torch.float64), drawn(5, 3, 2)
    h, kept = [torch.zeros(3, 4, dtype=torch.float64)] * 2, []
    total = torch.zeros(())
    for t in range(5):
        below = x[t]
        for i, layer in enumerate(rnn.layers):
            h[i] = torch.tanh(layer.input(below) + h[i] @ layer.recurrent.weight.mT)
            h[i].retain_grad()
            below = h[i]
        kept.append(list(h))
        total = total + below.sin().sum()
    total.backward()
    with gradient_flow(rnn) as flow:
        rnn(x)[0].sin().sum().backward()
    for i in range(2):
        wanted = torch.stack([each[i].grad.norm(dim=1) for each in kept])
        assert (flow[i].adjoints - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("name", FRAME_NETWORKS)
def test_frames_are_the_same_function_with_the_adjoints_of_a_loop(name):
    rnn = FRAME_NETWORKS[name]()
    disturb(rnn)
    x = frames(5, 2, 2, 5, 4).requires_grad_()
    leaves, results = [x, *rnn.parameters()], []

    def run():
        output, last = rnn(x, lengths=[5, 3])
        slopes = torch.autograd.grad(
            cost([output, *parts(last)]), leaves, allow_unused=True, materialize_grads=True
        )
        results.append([output, *parts(last), *slopes])

    run()
    with gradient_flow(rnn) as flow:
        run()
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 1e-11 * max(1.0, a.abs().max().item())
    assert flow[0].adjoints[:3].isfinite().all()
    assert flow[0].adjoints[3:, 1].isnan().all()
    state, kept = None, []
    for t in range(5):
        _, state = rnn(x[t : t + 1], state)
        for part in parts(state):
            part.retain_grad()
        kept.append(parts(state))
    cost(kept[-1]).backward()
    with gradient_flow(rnn) as flow:
        cost(parts(rnn(x)[1])).backward()
    for i, one in enumerate(flow):
        slopes = torch.stack(
            [
                torch.zeros(2) if s[i].grad is None else s[i].grad[0].flatten(1).norm(dim=1)
                for s in kept
            ]
        )
        assert (one.adjoints.nan_to_num(0) - slopes).abs().max() < 1e-12
        norms = torch.stack([each[i][0].flatten(1).norm(dim=1) for each in kept])
        assert (one.states - norms).abs().max() < 1e-12


def test_conv_neru_does_not_raise_an_adjoint():
    """|dC/dG_t| <= |dC/dG_{t+1}| for a cost of the last state; a free kernel may."""
    rnn = ConvNERU(1, 4, nonlinearity="abs", init="box", dtype=torch.float64)
    with gradient_flow(rnn) as flow:
        rnn(frames(60, 2, 1, 6, 6))[1].square().sum().backward()
    (one,) = flow
    assert (one.adjoints[:-1] <= one.adjoints[1:] * (1 + 1e-12)).all()
    assert one.adjoints[0].min() > 0
    free = ConvNERU(1, 4, kernel="free", nonlinearity="identity", dtype=torch.float64)
    with torch.no_grad():
        free.layers[0].recurrent.weight.mul_(5)
    with gradient_flow(free) as flow:
        free(frames(60, 2, 1, 6, 6))[1].square().sum().backward()
    assert (flow[0].adjoints[0] > 100 * flow[0].adjoints[-1]).all()


def test_nothing_is_left_behind():
    model = SequenceModel(OrthogonalRNN(3, 4, 2), 2)
    before = [dict(module.__dict__) for module in model.modules()]
    x = torch.randn(5, 2, 3)
    with gradient_flow(model) as flow:
        model(x)
    with pytest.raises(errors.ShapeError), gradient_flow(model):
        model(x[..., :2])
    assert len(flow) == 2
    assert flow[0].network == "rnn"
    with gradient_flow(model) as outer, gradient_flow(model.rnn) as inner:
        model(x)
    assert (len(outer), len(inner)) == (0, 2)
    for module, entries in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == entries.keys()
    model(x).sum().backward()
    assert len(flow) == 2
    assert flow[0].adjoints.isnan().all()


def test_complex_states():
    rnn = OrthogonalRNN(3, 8, nonlinearity="identity", dtype=torch.complex128)
    with gradient_flow(rnn) as flow:
        _, last = rnn(drawn(20, 2, 3), lengths=[20, 7])
        (last.abs() ** 2).sum().backward()
    (one,) = flow
    assert one.states.dtype == one.adjoints.dtype == torch.float64
    assert (one.adjoints[:, 0] / one.adjoints[-1, 0] - 1).abs().max() < 1e-8
    assert (one.adjoints[:7, 1] / one.adjoints[6, 1] - 1).abs().max() < 1e-8
    assert (one.adjoints[6, 1] - 2 * one.states[6, 1]).abs() < 1e-12


def test_runs_without_a_gradient_have_norms_only():
    rnn = NNRNN(3, 4)
    with torch.no_grad(), gradient_flow(rnn) as flow:
        rnn(torch.randn(5, 3))
        rnn(torch.randn(2, 4, 3))
    assert [one.states.shape for one in flow] == [(5, 1), (2, 4)]
    assert all(one.states.isfinite().all() and one.adjoints.isnan().all() for one in flow)


@pytest.mark.parametrize("cell", ["orthogonal-rnn", "lstm"])
def test_encoder_and_decoder(cell):
    model = Seq2Seq(9, 7, 3, 5, cell=cell, dtype=torch.float64)
    source, target = torch.randint(3, 9, (6, 3)), torch.randint(3, 7, (4, 3))
    loss = model.loss(source, target)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    with gradient_flow(model) as flow:
        inside = model.loss(source, target)
    slopes = torch.autograd.grad(inside, list(model.parameters()))  # after the block
    assert (inside - loss).abs() < 1e-12
    for a, b in zip(slopes, wanted, strict=True):
        assert (a - b).abs().max() < 1e-12
    runs = {(one.network, one.part): one for one in flow}
    assert len(runs) == len(flow) == (2 if cell == "orthogonal-rnn" else 4)
    assert runs["encoder", "h"].adjoints.shape == (6, 3)
    assert runs["decoder", "h"].adjoints.shape == (3, 3)
    assert all(one.states.isfinite().all() for one in flow)
    assert runs["decoder", "h"].adjoints.isfinite().all()
    assert runs["encoder", "h"].adjoints.isfinite().all()


def test_a_video_predictor():
    for cell in ("convneru", "convlstm"):
        model = VideoPredictor(1, widths=(2, 3), head_channels=2, kernel_size=3, cell=cell)
        x = torch.rand(4, 2, 1, 8, 8)
        expected = model(x)
        with gradient_flow(model) as flow:
            prediction = model(x)
            prediction.square().sum().backward()
        assert (prediction - expected).abs().max() < 1e-5
        kinds = sum(isinstance(m, ConvNERU | ConvLSTM) for m in model.modules())
        assert kinds == len({one.network for one in flow}) > 0
        assert all(one.states.shape == (4, 2) for one in flow)
        assert all(one.adjoints[0].isfinite().all() for one in flow if one.part == "h")


def test_a_model_without_recurrences_teaches():
    with (
        pytest.raises(errors.ConfigurationError, match="networks of torch"),
        gradient_flow(torch.nn.LSTM(2, 3)),
    ):
        pass


def test_a_tied_layer_is_recorded_once_and_left_as_it_was():
    rnn, x = FRAME_NETWORKS["neru-cwy"](in_channels=3, num_layers=2), frames(4, 2, 3, 5, 4)
    rnn.layers[1] = rnn.layers[0]
    expected, _ = rnn(x)
    with gradient_flow(rnn) as flow:
        output, _ = rnn(x)
    assert torch.equal(output, expected)
    assert torch.equal(rnn(x)[0], expected)
    assert len(flow) == 2
    assert (flow[1].states - output.flatten(2).norm(dim=2)).abs().max() < 1e-12
