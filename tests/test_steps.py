"""`RecurrentNetwork.stepper`: single steps are the same function as the whole sequence."""

from __future__ import annotations

import pytest
import torch

import stiefel
from stiefel import errors
from stiefel.models import GRU, LSTM, OrthogonalRNN, layer, step
from stiefel.models.step import Stepper
from stiefel.operators import CompactWY
from tests.registry import NETWORKS

OPTIONS = {"compact": {"reflections": 2}, "flipped": {"reflections": 3, "determinant": -1}}


def parts(state):
    return list(state) if isinstance(state, tuple) else [state]


def random_state(rnn, batch):
    shape = (rnn.num_layers, batch, rnn.hidden_size)
    drawn = [torch.randn(shape, dtype=rnn._like.dtype) for _ in rnn.state_names]
    return drawn[0] if len(drawn) == 1 else tuple(drawn)


def disturbed(rnn):
    with torch.no_grad():
        for parameter in rnn.parameters():
            if not hasattr(parameter, "manifold"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return rnn


def by_steps(rnn, x, state=None):
    step, outputs = rnn.stepper(), []
    for x_t in x.unbind(0):
        output, state = step(x_t, state)
        outputs.append(output)
    return torch.stack(outputs), state


def along(leaves, slopes):
    """The gradients, of points along their manifolds: off them, a function is anybody's guess."""
    return [
        leaf.manifold.egrad2rgrad(leaf, slope) if hasattr(leaf, "manifold") else slope
        for leaf, slope in zip(leaves, slopes, strict=True)
    ]


def compared(rnn, x, state=None):
    """The largest difference of values, and of gradients."""
    leaves = [x, *rnn.parameters(), *(part for part in parts(state) if part is not None)]
    for leaf in leaves:
        leaf.requires_grad_()
    results = []
    for output, last in (rnn(x, state), by_steps(rnn, x, state)):
        loss = output.abs().square().sum() + sum(part.sin().real.sum() for part in parts(last))
        slopes = along(leaves, torch.autograd.grad(loss, leaves, allow_unused=True))
        results.append(([output, *parts(last)], slopes))
    (values, slopes), (others, gradients) = results
    for a, b in zip(values, others, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-12
    used = [(a, b) for a, b in zip(slopes, gradients, strict=True) if a is not None]
    assert len(used) >= len(leaves) - 1
    for a, b in used:
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-11 * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_are_the_sequence(name):
    rnn = disturbed(NETWORKS[name].make("cwy", num_layers=2))
    compared(rnn, torch.randn(6, 3, 3, dtype=torch.float64), random_state(rnn, 3))
    learned = disturbed(NETWORKS[name].make("rgd-c-c", learnable_h0=True))
    compared(learned, torch.randn(4, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("form", OPTIONS)
def test_compact_operators_stay_thin(form, monkeypatch):
    options = {"init": "chart", "nonlinearity": "abs", "dtype": torch.float64, **OPTIONS[form]}
    rnn = OrthogonalRNN(3, 9, **options)
    compared(rnn, torch.randn(6, 3, 3, dtype=torch.float64), random_state(rnn, 3))

    def formed(operator):
        raise AssertionError("the matrix was formed")

    monkeypatch.setattr(CompactWY, "to_dense", formed)
    assert by_steps(rnn, torch.randn(6, 3, 3, dtype=torch.float64))[0].shape == (6, 3, 9)


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_gates_without_biases(kind):
    rnn = kind(3, 4, bias=False, dtype=torch.float64)
    compared(rnn, torch.randn(4, 2, 3, dtype=torch.float64))


def test_the_operator_is_read_once_when_the_stepper_is_made(monkeypatch):
    rnn = OrthogonalRNN(3, 4, 2, dtype=torch.float64)
    x, reads, read = torch.randn(5, 2, 3, dtype=torch.float64), [], layer.operator
    monkeypatch.setattr(layer, "operator", lambda module: reads.append(module) or read(module))
    step, state = rnn.stepper(), None
    for x_t in x.unbind(0):
        _, state = step(x_t, state)
    assert reads == [one.recurrent for one in rnn.layers]


def test_second_derivatives_of_steps():
    rnn = OrthogonalRNN(2, 3, nonlinearity="tanh", dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: by_steps(rnn, x)[0], x)


def test_what_is_watched():
    rnn, x = LSTM(3, 4, 2), torch.randn(2, 3)
    step = Stepper(rnn, lambda index, parts: tuple(part + index + 1 for part in parts))
    output, (h, c) = step(x)
    plain, (h0, c0) = rnn.stepper()(x)
    assert torch.equal(h[0], h0[0] + 1)
    assert torch.equal(c[0], c0[0] + 1)
    assert torch.equal(output, h[1])
    assert not torch.equal(output, plain + 2)  # layer 1 goes on with what layer 0 was given


def test_dropout_between_layers_only():
    rnn = OrthogonalRNN(3, 64, 2, dropout=0.5, nonlinearity="identity", dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64)
    _, state = rnn.stepper()(x)
    _, once_more = rnn.stepper()(x)
    assert torch.equal(state[0], once_more[0])
    assert not torch.equal(state[1], once_more[1])
    rnn.eval()
    compared(rnn, torch.randn(4, 2, 3, dtype=torch.float64))


def test_16_bits_and_autocast():
    rnn = OrthogonalRNN(3, 8, 2)
    x = torch.randn(4, 2, 3)
    expected, _ = by_steps(rnn, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = by_steps(rnn, x)
    assert output.dtype == state.dtype == torch.float32
    assert torch.equal(output, expected)
    half, _ = by_steps(rnn.bfloat16(), x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() < 0.3


def test_products_are_in_full_precision_whatever_the_settings(monkeypatch):
    used = []

    def product(A, B):
        used.append(A.dtype)
        return A @ B

    monkeypatch.setattr(step, "product", product)
    rnn, x = OrthogonalRNN(3, 8), torch.randn(2, 3)
    before = torch.get_float32_matmul_precision()
    try:
        for setting, products in (("highest", 0), ("high", 3), ("medium", 3)):
            torch.set_float32_matmul_precision(setting)
            used.clear()
            one = rnn.stepper()
            one(x, one(x)[1])
            assert len(used) == products
            rnn.double().stepper()(x.double())
            assert len(used) == products  # no setting reduces float64
            rnn.float()
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rnn.stepper()(x)
    assert used[-1] == torch.float32


def test_errors_teach():
    rnn = OrthogonalRNN(3, 4, bidirectional=True)
    with pytest.raises(errors.ConfigurationError, match="bidirectional=True"):
        rnn.stepper()
    step = LSTM(3, 4).stepper()
    with pytest.raises(errors.ShapeError, match=r"\(B, K\) with K = 3"):
        step(torch.randn(5, 2, 3))
    with pytest.raises(errors.ShapeError, match="h0, c0"):
        step(torch.randn(2, 3), torch.zeros(1, 2, 4))
    with pytest.raises(errors.DtypeError, match="float32"):
        step(torch.randn(2, 3).double())


def test_training_through_steps_stays_on_the_manifold():
    rnn = OrthogonalRNN(2, 6, via="rgd-c-c", dtype=torch.float64)
    optimizer = stiefel.optim.build(rnn, lr=1e-2, lr_riemannian=1e-2)
    x, losses = torch.randn(5, 4, 2, dtype=torch.float64), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (by_steps(rnn, x)[0] - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    residual = stiefel.geometry.orthonormality_residual(next(stiefel.constraints(rnn)).point)
    assert residual < 1e-12
