"""What torch does to a rollout: gradcheck, transforms, compilation, what autograd saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stiefel import errors
from stiefel.geometry import realify
from stiefel.models import NONLINEARITIES, rollout
from stiefel.models.activations import MODULUS
from stiefel.models.rollout import _backward_op, _forward_op
from stiefel.operators import Dense
from tests.recurrences import FORMS, Case, make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_gradcheck(nonlinearity: str, form: str) -> None:
    case = make(form, nonlinearity, T=3, B=2, K=2, H=7, bias=True, h0=True)
    names = [
        n for n in ("x", "kernel", "vectors", "bias", "beta", "h0") if getattr(case, n) is not None
    ]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return replace(case, **dict(zip(names, leaves, strict=True))).run()

    assert torch.autograd.gradcheck(function, case.leaves(), fast_mode=form != "dense")


@pytest.mark.parametrize("nonlinearity", ["tanh", "abs", "modrelu"])
def test_only_needed_gradients_are_returned(nonlinearity: str) -> None:
    case = make("compact", nonlinearity, bias=True, h0=True)
    every = torch.autograd.grad(case.run()[0].square().sum(), case.leaves())
    for at, leaf in enumerate(case.leaves()):
        for other in case.leaves():
            other.grad = None
        detached = [other for other in case.leaves() if other is not leaf]
        for other in detached:
            other.requires_grad_(False)
        case.run()[0].square().sum().backward()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, every[at], atol=1e-13)
        for other in detached:
            assert other.grad is None
            other.requires_grad_()


def test_func_grad_vmap_and_their_compositions() -> None:
    case = make("dense", "abs")
    x, V, Q = (leaf.detach() for leaf in case.leaves())
    xs = torch.randn(4, *x.shape, dtype=torch.float64)
    h0 = torch.randn(3, 7, dtype=torch.float64)

    def loss(x: Tensor, V: Tensor, Q: Tensor) -> Tensor:
        states, last = rollout(x, V, Q, nonlinearity="abs", h0=h0)
        return states.pow(3).sum() + last.sum()

    leaves = [t.clone().requires_grad_() for t in (x, V, Q)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(x, V, Q), expected, strict=True):
        assert torch.equal(a, b)

    # over inputs alone, over everything, over another place
    looped = torch.stack([loss(x, V, Q) for x in xs])
    assert torch.allclose(torch.vmap(loss, in_dims=(0, None, None))(xs, V, Q), looped)
    everything = torch.vmap(loss)(xs, V.expand(4, -1, -1), Q.expand(4, -1, -1))
    assert torch.allclose(everything, looped)
    moved = torch.vmap(loss, in_dims=(3, None, None))(xs.movedim(0, 3), V, Q)
    assert torch.allclose(moved, looped)

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))
    single = [torch.func.grad(loss, argnums=(0, 1, 2))(x, V, Q) for x in xs]
    for k, stacked in enumerate(per_sample(xs, V, Q)):
        assert torch.allclose(stacked, torch.stack([grads[k] for grads in single]))
    outer = torch.func.grad(lambda Q: torch.vmap(lambda x: loss(x, V, Q))(xs).sum())(Q)
    assert torch.allclose(outer, sum(grads[2] for grads in single))


def test_vmap_over_inputs_with_lengths() -> None:
    case = make("compact", "tanh", lengths=True)
    xs = torch.randn(2, *case.x.shape, dtype=torch.float64)
    states, last = torch.vmap(lambda x: replace(case, x=x).run())(xs)
    for i, x in enumerate(xs):
        single = replace(case, x=x).run()
        assert torch.allclose(states[i], single[0])
        assert torch.allclose(last[i], single[1])


# Tracing an autograd.Function, torch instantiates one itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("nonlinearity", "form"), [("modrelu", "dense"), ("abs", "compact-flipped")]
)
def test_compile_fullgraph(nonlinearity: str, form: str) -> None:
    torch.compiler.reset()
    case = make(form, nonlinearity, h0=True, lengths=True)
    names = [n for n in ("x", "kernel", "vectors", "beta", "h0") if getattr(case, n) is not None]

    def loss(*leaves: Tensor) -> Tensor:
        states, last = replace(case, **dict(zip(names, leaves, strict=True))).run()
        return states.square().sum() + last.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*case.leaves()), case.leaves())
    expected = torch.autograd.grad(loss(*case.leaves()), case.leaves())
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


class _Exported(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kernel = torch.nn.Parameter(case.kernel.detach())
        self.weight = torch.nn.Parameter(case.vectors.detach())

    def forward(self, x: Tensor) -> Tensor:
        return rollout(x, self.kernel, self.weight, nonlinearity="abs")[0]


def test_export_with_dynamic_length_and_batch() -> None:
    case = make("dense", "abs")
    module = _Exported(case)
    sizes = {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B", min=2)}
    program = torch.export.export(module, (case.x.detach(),), dynamic_shapes=(sizes,))
    other = torch.randn(40, 5, 4, dtype=torch.float64)
    assert torch.equal(program.module()(other), module(other))


def test_a_second_derivative_is_a_clear_error() -> None:
    case = make("dense", "tanh")
    (slope,) = torch.autograd.grad(case.run()[0].sum(), case.vectors, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="first derivative only"):
        slope.sum().backward()
    x, V, Q = (leaf.detach() for leaf in case.leaves())

    def loss(Q: Tensor) -> Tensor:
        return rollout(x, V, Q, nonlinearity="tanh")[0].sum()

    with pytest.raises(errors.DoubleBackwardError):
        torch.func.grad(lambda Q: torch.func.grad(loss)(Q).sum())(Q)


@pytest.mark.parametrize("lengths", [False, True])
def test_operators_are_registered_correctly(lengths: bool) -> None:
    case = make("compact", "abs", h0=True, bias=True, lengths=lengths)
    U, Y = (factor.detach() for factor in (case.recurrent().U, case.recurrent().Y))
    plain = [case.x.detach(), case.kernel.detach(), case.bias.detach(), U, Y, None, None]
    problem = (*plain, case.h0.detach(), case.lengths, "abs", False)
    torch.library.opcheck(_forward_op, problem)
    states, last, kept = _forward_op(*problem)
    needs = [True, True, True, True, True, False, True]
    torch.library.opcheck(_backward_op, (states, last, states, kept, needs, *problem))


@pytest.mark.parametrize("form", ["dense", "compact"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_saved_memory_is_the_hidden_sequence(nonlinearity: str, form: str) -> None:
    """And one byte an entry for abs; nothing more."""
    T, B, H = 50, 4, 16
    case = make(form, nonlinearity, T=T, B=B, H=H, bias=True, h0=True)
    recurrent = case.recurrent()
    factors = [recurrent] if isinstance(recurrent, Tensor) else [recurrent.U, recurrent.Y]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = rollout(
            case.x,
            case.kernel,
            Dense(recurrent) if isinstance(recurrent, Tensor) else recurrent,
            nonlinearity=nonlinearity,
            bias=case.bias,
            beta=case.beta,
            h0=case.h0,
        )
    for given in (*case.leaves(), *factors):
        saved.pop(given.untyped_storage().data_ptr(), None)
    assert states.untyped_storage().data_ptr() in saved
    sign = T * B * H if nonlinearity == "abs" else 0
    assert sum(saved.values()) == 8 * T * B * H + sign


def test_what_complex_states_keep_aside() -> None:
    """The hidden sequence and its moduli, through every transform of torch."""
    T, B, H = 5, 3, 4
    x = torch.randn(T, B, 2, dtype=torch.complex128)
    V = torch.randn(H, 2, dtype=torch.complex128)
    Q = torch.linalg.qr(torch.randn(H, H, dtype=torch.complex128)).Q
    beta = torch.linspace(-0.5, 0.5, H, dtype=torch.float64)

    def run(V: Tensor, beta: Tensor) -> Tensor:
        return rollout(x, V, Q, beta=beta)[0]

    leaves = (V.requires_grad_(), beta.requires_grad_())
    assert torch.autograd.gradcheck(run, leaves)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(*leaves)
    assert T * B * H in [tensor.numel() for tensor in saved if tensor.dtype == torch.float64]
    assert all(tensor.numel() <= 2 * T * B * H for tensor in saved)
    batched = torch.vmap(lambda x: rollout(x, V, Q, beta=beta)[0], in_dims=1)(x.unsqueeze(2))
    assert torch.allclose(batched.squeeze(2).transpose(0, 1), run(*leaves))
    twin = [t.detach() for t in (x.real.contiguous(), torch.cat([V.real, V.imag]), realify(Q))]
    problem = (*twin[:2], None, twin[2], None, None, beta.detach(), None, None, MODULUS, False)
    torch.library.opcheck(_forward_op, problem)
    states, last, kept = _forward_op(*problem)
    assert kept.shape == (T, B, H)
    needs = [True, True, False, True, False, True, True]
    torch.library.opcheck(_backward_op, (states, last, states, kept, needs, *problem))
