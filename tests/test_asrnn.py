"""`ASRNN`: its Elman form, its limits, its starts and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import stiefel
from stiefel import errors, geometry
from stiefel.models import ASRNN, SequenceModel

I9 = torch.eye(9, dtype=torch.float64)


def double(*args: Any, **options: Any) -> ASRNN:
    return ASRNN(*args, dtype=torch.float64, **options)


def three_products(layer: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = W_f^-1 tanh(W_f (W_xh x_t + W_hh h_{t-1} + b)), a step at a time, as published."""
    d = layer.s.abs() + layer.eps
    W_f, W_f_inverse = (
        layer.mixing.weight @ torch.diag(d),
        torch.diag(1 / d) @ layer.mixing.weight.mT,
    )
    assert (torch.linalg.inv(W_f) - W_f_inverse).abs().max() < 1e-10
    states = []
    for x_t in x.unbind(0):
        z = layer.input(x_t) + h @ layer.recurrent.weight.mT
        h = torch.tanh(z @ W_f.mT) @ W_f_inverse.mT
        states.append(h)
    return torch.stack(states), h


def far_from_the_start(**options: Any) -> ASRNN:
    """A network whose W_f is neither diagonal nor a multiple of an orthogonal matrix."""

    def near(U: Tensor) -> Tensor:
        return geometry.polar_factor(I9 + 0.2 * torch.randn_like(I9))

    rnn = double(3, 9, a=0.3, b=1.5, eps=0.05, mixing_init=near, **options)
    layer: Any = rnn.layers[0]
    with torch.no_grad():
        layer.s[::2].neg_()
        if layer.input.bias is not None:
            layer.input.bias.normal_()
    return rnn


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"via": "exprnn", "bias": False},
        {"via": "rgd-c-c"},
        {"via": None},
        {"recurrent": "free"},
    ],
    ids=str,
)
def test_elman_form_equals_three_products(options: dict[str, Any]) -> None:
    rnn = far_from_the_start(**options)
    x = torch.randn(12, 4, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 4, 9, dtype=torch.float64, requires_grad=True)
    output, last = rnn(x, h0)
    layer: Any = rnn.layers[0]
    wanted, end = three_products(layer, x, h0[0])
    assert (output - wanted).abs().max() < 1e-10
    assert (last[0] - end).abs().max() < 1e-10
    leaves = [x, h0, *rnn.parameters()]
    cotangent = torch.randn_like(output)
    slopes = torch.autograd.grad((output * cotangent).sum() + last.square().sum(), leaves)
    right = torch.autograd.grad((wanted * cotangent).sum() + end.square().sum(), leaves)
    raw = list(layer.mixing.parameters())
    for leaf, a, b in zip(leaves, slopes, right, strict=True):
        if options.get("via", "cwy") in (None, "rgd-c-c") and any(leaf is U for U in raw):
            # h_0 meets U_f^T U_f, which is I on the manifold: its tangent part is the gradient
            a, b = (geometry.tangent_projection(leaf.detach(), slope) for slope in (a, b))
        assert b.abs().max() > 1e-3
        assert (a - b).abs().max() < 1e-10


def test_a_small_d_is_a_linear_network() -> None:
    """tanh(z) = z - z^3 / 3: halving D_f quarters the distance."""
    x = torch.randn(20, 2, 3, dtype=torch.float64)
    distances = []
    for eps in (1e-2, 5e-3):
        rnn = double(3, 9, a=0, b=0, eps=eps, generator=torch.Generator().manual_seed(0))
        layer: Any = rnn.layers[0]
        h, states = x.new_zeros(2, 9), []
        for x_t in x.unbind(0):
            h = layer.input(x_t) + h @ layer.recurrent.weight.mT
            states.append(h)
        distances.append((rnn(x)[0] - torch.stack(states)).abs().max().item())
    assert distances[0] < 0.1
    assert distances[0] / distances[1] == pytest.approx(4, rel=0.02)


def test_a_multiple_of_the_identity_is_an_elementwise_tanh() -> None:
    """U_f = I, D_f = c I: h_t = tanh(c z_t) / c."""
    rnn = double(3, 9, via="exprnn", a=0.4, b=0.4, eps=0.1)
    layer: Any = rnn.layers[0]
    assert torch.equal(layer.mixing.weight, I9)
    x, h, states = torch.randn(8, 2, 3, dtype=torch.float64), torch.zeros(2, 9).double(), []
    for x_t in x.unbind(0):
        h = torch.tanh(0.5 * (layer.input(x_t) + h @ layer.recurrent.weight.mT)) / 0.5
        states.append(h)
    assert (rnn(x)[0] - torch.stack(states)).abs().max() < 1e-10


def test_the_jacobian_of_the_nonlinearity_contracts_in_some_basis() -> None:
    """dh_t/dz_t = W_f^-1 diag(1 - tanh^2) W_f: eigenvalues in (0, 1], norm at most cond(D_f)."""
    rnn = far_from_the_start(recurrent="free")
    layer: Any = rnn.layers[0]
    x = torch.randn(1, 1, 3, dtype=torch.float64)

    def step(h: Tensor) -> Tensor:
        return rnn(x, h)[0]

    J: Any = torch.autograd.functional.jacobian(step, torch.randn(1, 1, 9, dtype=torch.float64))
    J = J.reshape(9, 9) @ torch.linalg.inv(layer.recurrent.weight)
    moduli = torch.linalg.eigvals(J)
    assert moduli.imag.abs().max() < 1e-10
    assert moduli.real.min() > 0
    assert moduli.real.max() <= 1 + 1e-10
    d = layer.s.abs() + layer.eps
    assert torch.linalg.matrix_norm(J, 2) <= d.max() / d.min() + 1e-10


def test_starts() -> None:
    for via in ("cwy", "givens", "exprnn", "cayley", "polar", "rgd-e-qr", None):
        rnn = double(3, 12, via=via)
        layer: Any = rnn.layers[0]
        U, W = layer.mixing.weight, layer.recurrent.weight
        distance = (U - torch.eye(12)).abs().max()
        near = via in ("cwy", "givens")
        assert (1e-3 < distance < 0.1) if near else (distance < 1e-12)
        assert geometry.orthonormality_residual(W) < 1e-12
        assert geometry.orthonormality_residual(layer.input.weight) < 1e-12
        assert not layer.input.bias.any()
        assert (layer.s == 0.02).all()
    layer = double(3, 12, a=0.8, b=3, eps=1e-6).layers[0]
    assert 0.8 <= layer.s.min() < layer.s.max() <= 3
    assert layer.s.std() > 0.2


@pytest.mark.parametrize("via", ["cwy", "householder", "givens"])
def test_every_direction_is_open_at_the_start_of_u_f(via: str) -> None:
    """The differential of the chart is onto the tangent space: rank 66 for 12 x 12."""
    layer: Any = double(3, 12, via=via).layers[0]
    storage = layer.mixing.parametrizations.weight
    leaves = tuple(parameter.detach() for parameter in layer.mixing.parameters())
    jacobians: Any = torch.autograd.functional.jacobian(storage[0], leaves)
    J = torch.cat([part.reshape(144, -1) for part in jacobians], dim=1)
    singular = torch.linalg.svdvals(J)
    assert (singular > 1e-5 * singular[0]).sum() == 66


def test_the_published_start_is_frozen_and_the_default_is_not() -> None:
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    for options, trains in (({"a": 0, "b": 0, "eps": 1e-5}, False), ({}, True)):
        rnn = double(3, 9, **options)
        layer: Any = rnn.layers[0]
        rnn(x)[0].square().sum().backward()
        assert bool(layer.s.grad.any()) == trains
        assert layer.input.weight.grad.any()


def test_free_recurrent_weight() -> None:
    rnn = ASRNN(3, 9, recurrent="free")
    layer: Any = rnn.layers[0]
    assert [c.module for c in stiefel.constraints(rnn)] == [layer.mixing]
    assert isinstance(layer.recurrent.weight, torch.nn.Parameter)
    assert geometry.orthonormality_residual(layer.recurrent.weight) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "classes", "count"),
    [((1, 122), 10, 16_358), ((1, 257), 10, 69_143), ((1, 364), 10, 136_874)],
)
def test_published_counts(sizes: tuple[int, int], classes: int, count: int) -> None:
    rnn = ASRNN(*sizes, via=None)
    model = SequenceModel(rnn, classes)
    K, N = sizes
    assert model.expected_parameters() == N * (K + 2) + 2 * N**2 + classes * (N + 1)
    layer: Any = rnn.layers[0]
    stiefel.orthogonal(layer.recurrent, via="rgd-c-c", init="keep")
    stiefel.orthogonal(layer.mixing, via="rgd-c-c", init="keep")
    assert model.expected_parameters(effective=True) == count


def test_published_count_of_copying() -> None:
    model = SequenceModel(ASRNN(10, 138, via="rgd-c-c"), 9)
    assert model.expected_parameters(effective=True) == 21_813


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True}], ids=str)
def test_a_head_takes_the_decoder_into_its_weight(options: dict[str, Any]) -> None:
    """W (a R) = a (W R^T)^T: the same logits and gradients as when the states are made."""
    rnn = double(3, 9, 2, a=0.3, b=1.5, eps=0.05, **options)
    x, lengths = torch.randn(5, 5, 3, dtype=torch.float64), [5, 1, 4, 2, 3]
    for readout in ("all", "last"):
        model = SequenceModel(rnn, 4, readout=readout)
        with torch.no_grad():
            model.head.bias.normal_()
        for given in (None, lengths):
            output, last = rnn(x, lengths=given)
            ends = torch.cat(last[-rnn.directions :].unbind(0), dim=-1)
            wanted = model.head(output if readout == "all" else ends)
            logits = model(x, lengths=given)
            assert isinstance(logits, Tensor)
            assert (logits - wanted).abs().max() < 1e-11
            leaves = list(model.parameters())
            slopes = torch.autograd.grad(logits.square().sum(), leaves)
            right = torch.autograd.grad(wanted.square().sum(), leaves)
            for a, b in zip(slopes, right, strict=True):
                assert (a - b).abs().max() < 1e-9 * (1 + b.abs().max())
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    if not rnn.batch_first:
        every: Any = SequenceModel(rnn, 4)
        assert (every(packed).data - every.head(rnn(packed)[0].data)).abs().max() < 1e-11


def test_hooks_see_the_states_and_the_head() -> None:
    model = SequenceModel(double(3, 9), 4)
    x, seen = torch.randn(5, 2, 3, dtype=torch.float64), []
    plain = model(x)
    for module in (model.rnn, model.head):
        handle = module.register_forward_hook(lambda module, given, made: seen.append(made))
        assert torch.allclose(model(x), plain, atol=1e-12)
        handle.remove()
    assert len(seen) == 2
    assert seen[0][0].shape == (5, 2, 9)
    model.head = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(9, 4).double())
    assert torch.allclose(model(x), model.head(model.rnn(x)[0]))


def test_errors_teach() -> None:
    with pytest.raises(errors.UnknownNameError, match="free, orthogonal"):
        ASRNN(3, 9, recurrent="fre")
    with pytest.raises(errors.ConfigurationError, match="eps > 0"):
        ASRNN(3, 9, eps=0)
    with pytest.raises(errors.ConfigurationError, match="0 <= a <= b"):
        ASRNN(3, 9, a=1, b=0.5)
    with pytest.raises(errors.UnknownNameError, match="cwy"):
        ASRNN(3, 9, via="cyw")
