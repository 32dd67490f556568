"""Greedy and beam search of `Seq2Seq`, against the formulas and against all sentences."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.translation import BEGIN, END, SOURCE_LENGTHS, made, sentences, slow_logits, written


def log_probability(model, source, tokens):
    """Of a sentence without its begin token."""
    fed = torch.tensor([BEGIN, *tokens[:-1]], device=source.device)
    rows = slow_logits(model, source, fed).log_softmax(1)
    return sum(rows[t, token].item() for t, token in enumerate(tokens))


@pytest.mark.parametrize("cell", ["orthogonal-rnn", "lstm"])
def test_greedy_takes_the_likeliest_token(cell):
    torch.manual_seed(2)
    model = made(cell, num_layers=2)
    source, _ = sentences()
    found = model.greedy(source, begin=BEGIN, end=END, max_length=6)
    for b, S in enumerate(SOURCE_LENGTHS):
        tokens = written(found, b)
        fed = [BEGIN]
        for token in tokens:
            logits = slow_logits(model, source[:S, b], torch.tensor(fed))
            assert logits[-1].argmax() == token
            fed.append(token)
        assert tokens[-1] == END or len(tokens) == 6
        assert END not in tokens[:-1]
        assert not found.tokens[found.lengths[b] :, b].any()
        exact = log_probability(model, source[:S, b], tokens)
        assert abs(exact - found.scores[b].item()) < 1e-12


def louder(model, factor=4.0):
    """The model with probabilities far from uniform."""
    with torch.no_grad():
        model.head.weight.mul_(factor)
    return model


def test_beams_are_never_worse_than_greedy_and_one_is_greedy(device):
    options = {"begin": BEGIN, "end": END, "max_length": 6}
    for seed in range(4):
        torch.manual_seed(seed)
        model = louder(made("gru")).to(device)
        source = sentences()[0].to(device)
        greedy = model.greedy(source, **options)
        one = model.beam(source, width=1, **options)
        assert all(torch.equal(a, b) for a, b in zip(greedy, one, strict=True))
        for width, penalty in itertools.product((2, 3, 5), (0.0, 1.0)):
            found = model.beam(source, width=width, length_penalty=penalty, **options)
            ours = found.scores / found.lengths**penalty
            assert (ours >= greedy.scores / greedy.lengths**penalty - 1e-12).all()
            for b, S in enumerate(SOURCE_LENGTHS):
                exact = log_probability(model, source[:S, b], written(found, b))
                assert abs(exact - found.scores[b].item()) < 1e-12


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.5])
def test_a_wide_beam_is_an_exhaustive_search(penalty):
    model = louder(made(hidden_size=4, embedding_size=2), 2.0)
    model.head = torch.nn.Linear(4, 4, dtype=torch.float64)  # a vocabulary of 4
    louder(model, 5.0)
    source, _ = sentences()
    ended = [[*words, END] for n in range(3) for words in itertools.product([0, 1, 3], repeat=n)]
    every = ended + [list(words) for words in itertools.product([0, 1, 3], repeat=3)]
    options = {"begin": BEGIN, "end": END, "max_length": 3}
    found = model.beam(source, width=64, length_penalty=penalty, **options)
    for b, S in enumerate(SOURCE_LENGTHS):
        ranks = [log_probability(model, source[:S, b], s) / len(s) ** penalty for s in every]
        best = max(range(len(every)), key=ranks.__getitem__)
        assert written(found, b) == every[best]
        assert abs(found.scores[b].item() - ranks[best] * len(every[best]) ** penalty) < 1e-12


def test_searches_of_an_empty_batch():
    model = made()
    source = torch.zeros(4, 0, dtype=torch.int64)
    options = {"begin": BEGIN, "end": END, "max_length": 3}
    assert model(source, torch.zeros(5, 0, dtype=torch.int64)).shape == (5, 0, 7)
    assert model.greedy(source, **options).tokens.shape[1] == 0
    assert model.beam(source, **options).tokens.shape[1] == 0
