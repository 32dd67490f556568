"""What the tests of `Seq2Seq` share: small models, sentences with padding, the slow formulas."""

from __future__ import annotations

import torch

from stiefel.models import Seq2Seq

BEGIN, END = 1, 2
SOURCE_LENGTHS, TARGET_LENGTHS = [6, 2, 4], [3, 5, 4]


def made(cell="orthogonal-rnn", **options):
    shape = {"embedding_size": 3, "hidden_size": 5, "dtype": torch.float64}
    return Seq2Seq(9, 7, cell=cell, **{**shape, **options})


def sentences():
    """Sources (6, 3) and targets (5, 3) with padding."""
    source, target = torch.randint(3, 9, (6, 3)), torch.randint(3, 7, (5, 3))
    target[0] = BEGIN
    for b, (steps, ends) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        source[steps:, b], target[ends:, b] = 0, 0
    return source, target


def slow_logits(model, source, target):
    """One pair of sentences without padding, by the formulas; `(T, V)`."""
    attention = model.attention
    encoded, state = model.encoder(model.source_embedding(source).unsqueeze(1))
    rows = []
    for token in target:
        s = (state[0] if isinstance(state, tuple) else state)[-1]
        hidden = torch.tanh(attention.encoded(encoded[:, 0]) + attention.state(s[0]))
        weights = (hidden @ attention.score.weight[0]).softmax(0)
        x = torch.cat([weights @ encoded[:, 0], model.target_embedding(token)])
        output, state = model.decoder(x.view(1, 1, -1), state)  # a sequence of one step
        rows.append(model.head(output[0, 0]))
    return torch.stack(rows)


def written(found, b):
    return found.tokens[: found.lengths[b], b].tolist()
