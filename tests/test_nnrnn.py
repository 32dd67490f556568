"""`NNRNN`: its Schur form, what its eigenvalues are, its start, penalty and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stiefel import errors, geometry
from stiefel.models import NNRNN, activate


def layers_of(rnn: NNRNN) -> list[Any]:
    return list(rnn.layers)


def layer_of(rnn: NNRNN) -> Any:
    return layers_of(rnn)[0]


def disturbed(H: int, **options: Any) -> Any:
    layer = layer_of(NNRNN(3, H, dtype=torch.float64, **options))
    with torch.no_grad():
        layer.gamma.add_(torch.randn_like(layer.gamma) * 0.2)
        layer.T.normal_()
    return layer


@pytest.mark.parametrize("H", [1, 2, 7, 8])
def test_moduli_of_the_eigenvalues_are_gamma(H: int) -> None:
    layer = disturbed(H)
    got = torch.linalg.eigvals(layer.recurrent_matrix()).abs().sort().values
    gamma = layer.gamma.abs()
    wanted = torch.cat([gamma[: H // 2], gamma]).sort().values
    assert (got - wanted).abs().max() < 1e-10


def test_the_published_mask_lets_them_drift() -> None:
    layer = disturbed(8, mask="triangle")
    with torch.no_grad():
        layer.gamma.fill_(1)
    assert (torch.linalg.eigvals(layer.recurrent_matrix()).abs() - 1).abs().max() > 0.05


@pytest.mark.parametrize("H", [7, 8])
@pytest.mark.parametrize("mask", ["block", "triangle"])
def test_schur_form_equals_a_loop_over_blocks(H: int, mask: str) -> None:
    layer = disturbed(H, mask=mask)
    wanted, entries = torch.zeros(H, H, dtype=torch.float64), iter(layer.T.tolist())
    for i, gamma in enumerate(layer.gamma.tolist()):
        if 2 * i + 1 == H:
            wanted[2 * i, 2 * i] = gamma
            continue
        c, s = layer.theta[i].cos().item(), layer.theta[i].sin().item()
        wanted[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = gamma * torch.tensor([[c, -s], [s, c]])
    for row in range(H):
        for column in range(row + 1, H):
            if mask == "triangle" or row // 2 != column // 2:
                wanted[row, column] += next(entries)
    assert next(entries, None) is None
    assert (layer.schur_form() - wanted).abs().max() < 1e-6  # the angles passed through float32


@pytest.mark.parametrize("via", ["cwy", "exprnn", "rgd-e-qr", None])
def test_starts_orthogonal_without_a_bias(via: str | None) -> None:
    rnn = NNRNN(3, 9, via=via, dtype=torch.float64)
    layer = layer_of(rnn)
    assert geometry.orthonormality_residual(layer.recurrent_matrix()) < 1e-12
    assert layer.input.bias is None
    assert 0 <= layer.theta.min() <= layer.theta.max() <= 2 * torch.pi
    assert rnn.penalty(1.0, 1.0).item() == 0


def test_equals_a_loop_over_steps() -> None:
    rnn = NNRNN(3, 7, dtype=torch.float64)
    layer = layer_of(rnn)
    with torch.no_grad():
        layer.T.normal_(0, 0.1)
        layer.gamma.mul_(0.9)
    x, h = torch.randn(6, 2, 3, dtype=torch.float64), torch.randn(1, 2, 7, dtype=torch.float64)
    output, last = rnn(x, h)
    V, state, states = layer.recurrent_matrix(), h[0], []
    for x_t in x.unbind(0):
        state = activate("modrelu", state @ V.mT + layer.input(x_t), layer.beta)
        states.append(state)
    wanted = torch.stack(states)
    assert (output - wanted).abs().max() < 1e-11
    assert (last[0] - state).abs().max() < 1e-11
    leaves = list(rnn.parameters())
    slopes = torch.autograd.grad(output.square().sum(), leaves)
    for a, b in zip(slopes, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        assert (a - b).abs().max() < 1e-10


def test_penalty_and_groups() -> None:
    rnn = NNRNN(3, 8, 2, dtype=torch.float64)
    one, two = layers_of(rnn)
    with torch.no_grad():
        one.gamma[0], two.T[3] = 1.5, 2.0
    penalty = rnn.penalty(0.5, 0.1)
    assert penalty.item() == pytest.approx(0.5 * 0.25 + 0.1 * 2)
    penalty.backward()
    assert one.gamma.grad.tolist() == [0.5, 0, 0, 0]
    assert torch.allclose(two.T.grad, 0.1 * two.T)  # what weight_decay=0.1 adds
    groups = rnn.parameter_groups(0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [id(p) for p in groups[0]["params"]] == [id(one.T), id(two.T)]
    torch.optim.RMSprop(groups, lr=1e-3)
    listed = {id(p) for group in groups for p in group["params"]}
    assert listed == {id(p) for p in rnn.parameters()}


def test_training_with_the_penalty_holds_the_moduli() -> None:
    """A loss that wants states to grow; with a large delta gamma stays."""
    moved = []
    for delta in (0.0, 100.0):
        rnn = NNRNN(3, 8, generator=torch.Generator().manual_seed(1))
        gamma = layer_of(rnn).gamma
        optimizer = torch.optim.SGD([gamma], lr=1e-3)
        x = torch.full((5, 2, 3), 0.1)
        for _ in range(50):
            optimizer.zero_grad()
            (-rnn(x)[0].square().mean() + rnn.penalty(delta)).backward()
            optimizer.step()
        moved.append((gamma - 1).abs().max().item())
    assert moved[0] > 4 * moved[1]
    assert moved[0] > 0.01


def test_published_count() -> None:
    """PTB: 50 characters, embeddings of 200; the code's mask has an entry within each block."""
    rnn = NNRNN(200, 1024, via=None, mask="triangle")
    n, embedding = 1024, 50 * 200
    held = rnn.expected_parameters() + 50 * n + 50 + embedding
    effective = held - n * n + n * (n - 1) // 2
    assert effective == 1_315_650
    block = NNRNN(200, 1024, via=None)
    assert rnn.expected_parameters() - block.expected_parameters() == n // 2


def test_errors_teach() -> None:
    with pytest.raises(errors.UnknownNameError, match="block, triangle"):
        NNRNN(3, 8, mask="upper")
