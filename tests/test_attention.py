"""Additive attention: its formula, its mask, and searches over what it is used for."""

from __future__ import annotations

import pytest
import torch

from stiefel import errors
from stiefel.models import AdditiveAttention, masked_cross_entropy


def made(*sizes, **options):
    return AdditiveAttention(*(sizes or (3, 4, 5)), dtype=torch.float64, **options)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_the_formula():
    attention, s, e = made(), drawn(2, 4), drawn(6, 2, 3)
    W1, b1 = attention.encoded.weight, attention.encoded.bias
    W2, b2 = attention.state.weight, attention.state.bias
    v = attention.score.weight[0]
    context, weights = attention(s, e)
    for b in range(2):
        scores = torch.stack([v @ torch.tanh(W1 @ e[i, b] + b1 + W2 @ s[b] + b2) for i in range(6)])
        a = scores.exp() / scores.exp().sum()
        assert (weights[:, b] - a).abs().max() < 1e-14
        assert (context[b] - sum(a[i] * e[i, b] for i in range(6))).abs().max() < 1e-14


def test_weights_are_zero_outside_of_the_mask_and_sum_to_one_over_it():
    attention, s = made(), drawn(3, 4)
    e, mask = drawn(6, 3, 3), torch.rand(6, 3) < 0.5
    mask[2] = True
    context, weights = attention(s, e, mask)
    assert not weights[~mask].any()
    assert (weights.sum(0) - 1).abs().max() < 1e-14
    assert (weights[mask] > 0).all()
    for b in range(3):
        alone, own = attention(s[b : b + 1], e[mask[:, b], b : b + 1])
        assert (context[b] - alone[0]).abs().max() < 1e-14
        assert (weights[mask[:, b], b] - own[:, 0]).abs().max() < 1e-14


@pytest.mark.parametrize("filler", [1e30, torch.inf, torch.nan])
def test_what_stands_outside_of_the_mask_is_never_read(filler):
    attention, s = made(), drawn(2, 4).requires_grad_()
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    e = drawn(3, 2, 3)
    spoilt = torch.where(mask.unsqueeze(-1), e, filler)
    leaves = [s, *attention.parameters()]
    slopes = []
    for sequence in (e, spoilt):
        sequence.requires_grad_()
        context, weights = attention(s, sequence, mask)
        slopes.append(torch.autograd.grad(context.sin().sum(), [sequence, *leaves]))
    assert torch.equal(context, attention(s, e, mask)[0])
    assert not weights[~mask].any()
    assert not slopes[1][0][~mask].any()
    for a, b in zip(*slopes, strict=True):
        assert torch.equal(a, b)


def test_an_empty_mask_sees_nothing():
    attention, s = made(), drawn(2, 4)
    e, mask = drawn(3, 2, 3), torch.tensor([[True, False]]).repeat(3, 1)
    context, weights = attention(s, e, mask)
    assert not context[1].any()
    assert not weights[:, 1].any()
    context.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())


def test_gradients():
    attention, s, e = made(), drawn(2, 4).requires_grad_(), drawn(3, 2, 3).requires_grad_()
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    assert torch.autograd.gradcheck(lambda s, e: attention(s, e, mask), (s, e))


def test_prepared_once_for_many_states():
    attention, e = made(), drawn(3, 2, 3)
    keys = attention.prepare(e)
    for _ in range(2):
        s = drawn(2, 4)
        for a, b in zip(attention.attend(s, keys), attention(s, e), strict=True):
            assert torch.equal(a, b)
    twice = keys.repeated(2)
    context, _ = attention.attend(drawn(1, 4).expand(4, -1), twice)
    assert torch.equal(context[0], context[1])
    assert not torch.equal(context[1], context[2])


def test_counts_and_starts():
    E, D = 7, 5
    attention = made(E, D)
    A = attention.score.in_features
    assert attention.expected_parameters() == A * (E + 1) + A * (D + 1) + A
    assert attention.score.in_features == 5
    first = made(generator=torch.Generator().manual_seed(1))
    second = made(generator=torch.Generator().manual_seed(1))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_errors_teach():
    attention = made()
    with pytest.raises(errors.ShapeError, match=r"\(S, B, 3\)"):
        attention(drawn(2, 4), drawn(6, 2, 4))
    with pytest.raises(errors.ShapeError, match=r"a state of shape \(2, 4\)"):
        attention(drawn(3, 4), drawn(6, 2, 3))
    with pytest.raises(errors.ShapeError, match="bool mask"):
        attention(drawn(2, 4), drawn(6, 2, 3), torch.ones(6, 2))
    with pytest.raises(errors.ConfigurationError, match="attention_size"):
        made(3, 4, 0)


def test_the_loss_counts_every_real_token_once():
    logits, tokens, lengths = drawn(4, 3, 5), torch.randint(5, (4, 3)), torch.tensor([4, 1, 0])
    real = [(t, b) for b, steps in enumerate(lengths) for t in range(steps)]
    wanted = sum(-logits[t, b].log_softmax(0)[tokens[t, b]] for t, b in real) / len(real)
    assert (masked_cross_entropy(logits, tokens, lengths) - wanted).abs() < 1e-14
    assert masked_cross_entropy(logits, tokens, torch.zeros(3, dtype=torch.int64)) == 0


def test_the_loss_takes_tokens_of_any_integer_dtype_and_lengths_as_a_list():
    logits, tokens = torch.randn(3, 2, 4), torch.randint(4, (3, 2))
    expected = masked_cross_entropy(logits, tokens, torch.tensor([3, 1]))
    assert torch.equal(masked_cross_entropy(logits, tokens.int(), [3, 1]), expected)
