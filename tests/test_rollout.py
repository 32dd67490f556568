"""The rollout against a loop that does one step at a time under plain autograd."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stiefel import errors
from stiefel.models import NONLINEARITIES, _walk, rollout
from tests.recurrences import FORMS, Case, make


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 steps, so that short sequences cross several of them, one not full."""
    monkeypatch.setattr(_walk, "_LEAST_STEPS", 1)
    monkeypatch.setattr(_walk, "_MOST_STEPS", 4)


def assert_same_gradients(case: Case, bound: float = 1e-11) -> None:
    mine, theirs = case.run(), case.loop()
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < bound
    weights = [torch.randn_like(a) for a in mine]
    losses = {
        "states and end": lambda out: (out[0] * weights[0]).sum() + (out[1] * weights[1]).sum(),
        "end only": lambda out: (out[1] * weights[1]).sum(),
        "states only": lambda out: out[0].square().sum(),
    }
    for name, loss in losses.items():
        found = torch.autograd.grad(loss(mine), case.leaves(), retain_graph=True)
        expected = torch.autograd.grad(loss(theirs), case.leaves(), retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= bound * (1 + b.abs().max()), name


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_values_and_gradients_equal_a_loop(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    for h0, lengths, reverse in itertools.product((False, True), repeat=3):
        case = make(
            form, nonlinearity, device, bias=h0 != lengths, h0=h0, lengths=lengths, reverse=reverse
        )
        assert_same_gradients(case)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_chunk_size_does_not_matter(
    reverse: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = make("dense", "tanh", device, T=70, bias=True, h0=True, reverse=reverse)
    results = []
    for steps in (1, 7, 32, 70):
        monkeypatch.setattr(_walk, "_LEAST_STEPS", 1)
        monkeypatch.setattr(_walk, "_MOST_STEPS", steps)
        states, last = case.run()
        grads = torch.autograd.grad(states.square().sum() + last.sum(), case.leaves())
        results.append((states, last, *grads))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_default_chunks_are_between_8_and_32_steps() -> None:
    assert _walk.chunk_steps(1000, 1, 128) == 32
    assert _walk.chunk_steps(1000, 128, 190) == 21
    assert _walk.chunk_steps(1000, 128, 4096) == 8
    assert _walk.chunk_steps(5, 1, 1) == 5


@pytest.mark.parametrize("T", [1, 2])
def test_the_shortest_sequences(T: int, device: torch.device) -> None:
    for reverse in (False, True):
        assert_same_gradients(make("dense", "abs", device, T=T, h0=True, reverse=reverse))
        assert_same_gradients(make("compact", "abs", device, T=T, reverse=reverse))


# -------------------------------------------------------------------------------- what it preserves


@pytest.mark.parametrize("nonlinearity", ["abs", "modrelu", "identity"])
@pytest.mark.parametrize("form", FORMS)
def test_the_norm_is_kept_over_a_thousand_steps(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    case = make(form, nonlinearity, device, T=1000, B=2, h0=True)
    x = torch.zeros_like(case.x)
    beta = None if case.beta is None else torch.zeros_like(case.beta)
    states, _ = replace(case, x=x, beta=beta).run()
    assert case.h0 is not None
    assert (states.norm(dim=-1) - case.h0.norm(dim=-1)).abs().max() < 1e-10


@pytest.mark.parametrize("nonlinearity", ["abs", "identity"])
@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_the_gradient_is_constant(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    """|dC/dh_t| by way of the input: V = I, so that dC/dx_t = dC/dz_t."""
    case = make(form, nonlinearity, device, T=300, K=7, H=7)
    case = replace(case, kernel=torch.eye(7, dtype=torch.float64, device=device))
    _, last = case.run()
    (slope,) = torch.autograd.grad(last.square().sum(), case.x)
    norms = slope.norm(dim=-1)
    assert (norms / norms[-1] - 1).abs().max() < 1e-8


# ----------------------------------------------------------------------------- what does not matter


def test_padding_is_never_read(device: torch.device) -> None:
    for reverse in (False, True):
        case = make("dense", "relu", device, h0=True, lengths=True, reverse=reverse)
        clean = case.run()
        expected = torch.autograd.grad(clean[0].sum() + clean[1].sum(), case.leaves())
        assert case.lengths is not None
        past = torch.arange(len(case.x), device=device)[:, None] >= case.lengths
        with torch.no_grad():
            case.x[past] = torch.nan
        dirty = case.run()
        found = torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), case.leaves())
        assert torch.equal(dirty[0], clean[0])
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(clean[0][past], torch.zeros_like(clean[0][past]))


def test_reduced_precision_does_not_reach_the_recurrence(device: torch.device) -> None:
    case = make("dense", "tanh", device, T=20, B=64, H=64, K=64)
    x, V, Q = (leaf.detach().float().requires_grad_() for leaf in case.leaves())

    def results() -> list[Tensor]:
        states, _ = rollout(x, V, Q, nonlinearity="tanh")
        return [states, *torch.autograd.grad(states.square().sum(), (x, V, Q))]

    expected = results()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under_autocast = results()
    torch.set_float32_matmul_precision("medium")
    try:
        under_medium = results()
    finally:
        torch.set_float32_matmul_precision("highest")
    for found in (under_autocast, under_medium):
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


def test_16_bit_tensors_are_lifted_to_float32(device: torch.device) -> None:
    case = make("dense", "tanh", device)
    x, V, Q = (leaf.detach().bfloat16() for leaf in case.leaves())
    states, last = rollout(x, V, Q, nonlinearity="tanh")
    assert states.dtype == last.dtype == torch.bfloat16
    lifted, _ = rollout(x.float(), V.float(), Q.float(), nonlinearity="tanh")
    assert torch.equal(states, lifted.bfloat16())


def test_layouts_do_not_matter(device: torch.device) -> None:
    case = make("dense", "abs", device, lengths=True)
    turned = case.x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    other = replace(
        case,
        x=turned,
        kernel=case.kernel.detach().mT.contiguous().mT.requires_grad_(),
        vectors=case.vectors.detach().mT.contiguous().mT.requires_grad_(),
    )
    results = []
    for each in (case, other):
        states, _ = each.run()
        # an expanded and a transposed gradient
        for out in (states.sum(), states.transpose(0, 1).contiguous().square().sum()):
            results.append(torch.autograd.grad(out, each.leaves(), retain_graph=True))
    for a, b in zip(results[:2], results[2:], strict=True):
        for left, right in zip(a, b, strict=True):
            assert torch.allclose(left, right, atol=1e-13)


# ----------------------------------------------------------------------------------- bad and empty


def test_an_empty_batch_gives_empty_results_and_zero_gradients() -> None:
    for lengths in (None, torch.zeros(0, dtype=torch.int64)):
        x = torch.randn(5, 0, 4, requires_grad=True)
        V, Q = torch.randn(7, 4, requires_grad=True), torch.randn(7, 7, requires_grad=True)
        states, last = rollout(x, V, Q, nonlinearity="abs", lengths=lengths)
        assert states.shape == (5, 0, 7)
        assert last.shape == (0, 7)
        dx, dV, dQ = torch.autograd.grad(states.sum() + last.sum(), (x, V, Q))
        assert dx.shape == x.shape
        assert not dV.any()
        assert not dQ.any()


def test_errors_teach() -> None:
    x, V, Q = torch.randn(5, 3, 4), torch.randn(7, 4), torch.randn(7, 7)
    with pytest.raises(errors.ShapeError, match="at least one step"):
        rollout(x[:0], V, Q)
    with pytest.raises(errors.ShapeError, match=r"\(T, B, 4\)"):
        rollout(x[..., :3], V, Q)
    with pytest.raises(errors.ShapeError, match=r"\(7, 7\)"):
        rollout(x, V, Q[:, :6])
    with pytest.raises(errors.ShapeError, match=r"h0 of shape \(3, 7\)"):
        rollout(x, V, Q, h0=torch.zeros(2, 7))
    with pytest.raises(errors.ShapeError, match="beta"):
        rollout(x, V, Q, beta=torch.zeros(6))
    with pytest.raises(errors.UnknownNameError, match="leaky_relu"):
        rollout(x, V, Q, nonlinearity="leaky-relu")
    with pytest.raises(errors.ConfigurationError, match="beta"):
        rollout(x, V, Q, nonlinearity="tanh", beta=torch.zeros(7))
    with pytest.raises(errors.DtypeError, match="float64"):
        rollout(x.double(), V, Q)
    with pytest.raises(errors.DtypeError, match="float64"):
        rollout(x, V, Q.double())
    with pytest.raises(errors.DtypeError, match="floating point"):
        rollout(x.long(), V, Q)
    for lengths in ([1, 2, 6], [0, 1, 2]):
        with pytest.raises(errors.ShapeError, match="from 1 to T = 5"):
            rollout(x, V, Q, lengths=lengths)
    with pytest.raises(errors.ShapeError, match="3 sequences"):
        rollout(x, V, Q, lengths=[1, 2])
