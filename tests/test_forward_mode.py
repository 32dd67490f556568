"""Forward mode outside the charts: what refuses it, and what its error sends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, vjp

import stiefel
from stiefel.errors import ForwardModeError, StiefelError
from stiefel.geometry import canonical_distance, haar, product
from stiefel.geometry.kernel import apply_reverse
from stiefel.models import ASRNN, NNRNN, OrthogonalRNN, rollout

X = torch.linspace(-1, 1, 2 * 3, dtype=torch.float64).view(2, 3)


def refused(function: Callable[..., Any], *points: Tensor, match: str) -> None:
    with pytest.raises(ForwardModeError, match=match) as found:
        jvp(function, points, points)
    assert isinstance(found.value, StiefelError)


def test_kernels_name_themselves_and_what_to_do() -> None:
    refused(lambda A: product(A, A.mT), X, match=r"a product.*forward mode.*A @ B")
    P, Q = haar(4, 2, dtype=torch.float64), haar(4, 2, dtype=torch.float64)
    refused(canonical_distance, P, Q, match="the geodesic distance: expected a derivative")
    V, W = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    refused(lambda x: rollout(x, V, W)[0], X.unsqueeze(1), match=r"rollout.*plain autograd")


@pytest.mark.parametrize("kind", [OrthogonalRNN, ASRNN, NNRNN])
def test_networks(kind: Any) -> None:
    rnn = kind(3, 4, dtype=torch.float64)
    refused(lambda x: rnn(x)[0], X.unsqueeze(1), match="rollout of a recurrence")
    weights = {name: p.detach() for name, p in rnn.named_parameters()}
    with pytest.raises(ForwardModeError, match="reverse mode"):
        jvp(lambda w: functional_call(rnn, w, (X.unsqueeze(1),))[0], (weights,), (weights,))


def test_forward_over_reverse_and_along_cotangents() -> None:
    layer: Any = stiefel.orthogonal(torch.nn.Linear(3, 3, bias=False, dtype=torch.float64))
    storage = layer.parametrizations.weight
    chart, V = storage[0], storage.original.detach()
    refused(grad(lambda V: chart(V).sin().sum()), V, match="compact_wy: expected")
    with pytest.raises(ForwardModeError):
        hessian(lambda V: chart(V).sin().sum())(V)
    pull = vjp(chart, V)[1]
    refused(lambda G: pull(G)[0], V, match="the derivative of compact_wy")
    rnn = OrthogonalRNN(3, 4, dtype=torch.float64)
    output, pull = vjp(lambda x: rnn(x)[0], X.unsqueeze(1))[:2]
    refused(lambda G: pull(G)[0], output, match="rollout of a recurrence")


def test_what_the_errors_send_to() -> None:
    """A Riemannian weight under A @ B, and a recurrence step by step."""
    layer = stiefel.orthogonal(torch.nn.Linear(3, 4, dtype=torch.float64), via="riemannian")
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    moved = {name: torch.ones_like(p) for name, p in weights.items()}
    found = jvp(lambda w: functional_call(layer, w, (X,)), (weights,), (moved,))[1]
    torch.testing.assert_close(found, X.sum(-1, keepdim=True).expand(2, 4) + 1)
    rnn = OrthogonalRNN(3, 4, dtype=torch.float64, via="rgd-c-c", nonlinearity="tanh")

    def last(x: Tensor) -> Tensor:
        step, state = rnn.stepper(), None
        for x_t in x.unbind(0):
            _, state = step(x_t, state)
        return state[0]

    x, u = X.unsqueeze(1), torch.ones_like(X).unsqueeze(1)
    slope = jvp(last, (x,), (u,))[1]
    step = 1e-6
    ends = [rnn(x + s * u)[1][0] for s in (step, -step)]
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-8)


def test_errors_of_others_pass_through() -> None:
    """Only torch's refusal of forward mode is put in other words."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            raise NotImplementedError("no kernel")

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

    with pytest.raises(NotImplementedError, match="no kernel") as found:
        apply_reverse(Broken, X, name="broken")
    assert not isinstance(found.value, ForwardModeError)
