"""Greedy and beam search over any function that gives the next token's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Decoded", "NextToken", "beam_search", "greedy_search", "map_state"]

#: Tokens `(N,)` and a state, to log-probabilities of the next token `(N, V)` and the next state.
#: A state is a tensor `(layers, N, H)` or a tuple of them.
NextToken = Callable[[Tensor, Any], tuple[Tensor, Any]]


class Decoded(NamedTuple):
    """Sentences that a model wrote."""

    #: Tokens `(T, B)`, padding past the end; the end token is there where it was reached.
    tokens: Tensor
    #: Tokens of each sentence, the end token included, `(B,)`.
    lengths: Tensor
    #: Log-probability of each sentence `(B,)`.
    scores: Tensor


def map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The state with every part changed."""
    return tuple(map(change, state)) if isinstance(state, tuple) else change(state)


def greedy_search(
    step: NextToken, state: Any, batch: int, *, begin: int, end: int, padding: int, max_length: int
) -> Decoded:
    """Takes the likeliest token at every step, until all sentences have ended.

    Args:
        step: The next token's log-probabilities.
        state: The first state, of `batch` rows.
        batch: Sentences.
        begin: Token that sentences start from; not written.
        end: Token that ends a sentence.
        padding: Token written past the end.
        max_length: Most tokens of a sentence.

    Returns:
        The sentences.
    """
    first: Tensor = state[0] if isinstance(state, tuple) else state
    tokens = torch.full((batch,), begin, device=first.device)
    ended = torch.zeros(batch, dtype=torch.bool, device=first.device)
    lengths, written = tokens.new_zeros(batch), []
    scores: Any = 0
    for _ in range(max_length):
        log_probabilities, state = step(tokens, state)
        best, tokens = log_probabilities.max(dim=-1)
        tokens = tokens.masked_fill(ended, padding)
        scores = scores + best.masked_fill(ended, 0)
        lengths = lengths + (~ended).long()
        written.append(tokens)
        ended = ended | (tokens == end)
        if bool(ended.all()):
            break
    return Decoded(torch.stack(written), lengths, scores)


def beam_search(
    step: NextToken,
    state: Any,
    batch: int,
    *,
    width: int,
    length_penalty: float,
    begin: int,
    end: int,
    padding: int,
    max_length: int,
) -> Decoded:
    """Keeps the `width` best beginnings of every sentence, finished ones among them.

    Beginnings compete by log p / length^`length_penalty`. It ends when all that are kept are
    finished, or at `max_length`, where unfinished ones count as they are.

    Args:
        step: The next token's log-probabilities.
        state: The first state, of `batch` times `width` rows: those of a sentence together.
        batch: Sentences.
        width: Beginnings of a sentence that are kept.
        length_penalty: Exponent of the length; 0 for the plain log-probability.
        begin: Token that sentences start from; not written.
        end: Token that ends a sentence.
        padding: Token written past the end.
        max_length: Most tokens of a sentence.

    Returns:
        The best sentences that were found.
    """
    first: Tensor = state[0] if isinstance(state, tuple) else state
    device = first.device
    tokens = torch.full((batch, width), begin, device=device)
    lengths = torch.zeros_like(tokens)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    written = tokens.new_empty(0, batch, width)
    rows = torch.arange(batch, device=device).unsqueeze(-1) * width
    scores = None
    for t in range(max_length):
        log_probabilities, state = step(tokens.flatten(), state)
        vocabulary = log_probabilities.shape[-1]
        if scores is None:  # all beginnings are the same one: only the first counts
            scores = log_probabilities.new_full((batch, width), -torch.inf)
            scores[:, 0] = 0
        going = scores.masked_fill(ended, -torch.inf).unsqueeze(-1)
        longer = going + log_probabilities.view(batch, width, vocabulary)
        candidates = torch.cat([longer.flatten(1), scores.masked_fill(~ended, -torch.inf)], dim=1)
        sizes = torch.cat(
            [lengths.new_full((batch, width * vocabulary), t + 1), lengths.clamp(min=1)], dim=1
        )
        _, chosen = (candidates / sizes.to(scores.dtype) ** length_penalty).topk(width, dim=1)
        kept = chosen >= width * vocabulary
        parents = torch.where(kept, chosen - width * vocabulary, chosen // vocabulary)
        tokens = torch.where(kept, padding, chosen % vocabulary)
        scores, lengths = candidates.gather(1, chosen), sizes.gather(1, chosen)
        ended = kept | (tokens == end)
        written = torch.cat([written.gather(2, parents.expand(t, -1, -1)), tokens.unsqueeze(0)])
        if bool((ended | scores.isneginf()).all()):
            break
        index = (rows + parents).flatten()
        state = map_state(lambda part, index=index: part.index_select(1, index), state)
    assert scores is not None
    best = (scores / lengths.to(scores.dtype) ** length_penalty).argmax(dim=1, keepdim=True)
    found = written.gather(2, best.expand(len(written), -1, -1)).squeeze(2)
    lengths = lengths.gather(1, best).squeeze(1)
    return Decoded(found[: _longest(lengths)], lengths, scores.gather(1, best).squeeze(1))


def better(first: Decoded, second: Decoded, *, length_penalty: float, padding: int) -> Decoded:
    """The better of two for each sentence, by log p / length^`length_penalty`."""
    ranks = [
        one.scores / one.lengths.to(one.scores.dtype) ** length_penalty for one in (first, second)
    ]
    taken = ranks[1] > ranks[0]
    steps = max(len(first.tokens), len(second.tokens))
    padded = [
        torch.nn.functional.pad(one.tokens, (0, 0, 0, steps - len(one.tokens)), value=padding)
        for one in (first, second)
    ]
    lengths = torch.where(taken, second.lengths, first.lengths)
    tokens = torch.where(taken, padded[1], padded[0])[: _longest(lengths)]
    return Decoded(tokens, lengths, torch.where(taken, second.scores, first.scores))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
