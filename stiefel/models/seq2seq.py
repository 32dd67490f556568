"""Translation: an encoder, additive attention and a decoder around any recurrent network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, DtypeError, ShapeError
from stiefel.models.attention import AdditiveAttention, Keys, start_linear
from stiefel.models.cells import Cell, check_networks, network_maker
from stiefel.models.counts import Counted
from stiefel.models.decoding import Decoded, beam_search, better, greedy_search, map_state
from stiefel.models.masks import masked_cross_entropy, within
from stiefel.models.rollout import as_lengths
from stiefel.models.step import Stepper
from stiefel.numerics import compute_dtype
from stiefel.parametrizations import Parametrization

__all__ = ["Seq2Seq"]


class Seq2Seq(Counted):
    """A recurrent encoder and decoder with additive attention (Bahdanau, Cho and Bengio 2015).

    The encoder runs over the embedded source and gives e_1..e_S and its last state, the decoder's
    first state s_0. With s_{t-1} the output part of the state of the decoder's last layer,

        c_t = AdditiveAttention(s_{t-1}, e),
        s_t = cell((c_t, embedding(y_{t-1})), s_{t-1}),
        logits_t = W s_t + b.

    Encoder and decoder have networks of one kind, and every orthogonal weight in them is trained
    as `via` says. Padding is never read, gets no attention and does not count in the loss, and the
    state of the decoder is carried from step to step, on which the recurrent weight acts: widely
    copied code gets each of the three wrong. Encoder and decoder read their weights once a batch.

    Dropout is on while the module trains: call ``model.eval()`` before decoding.

    Args:
        source_vocabulary: Tokens of the source language, numbered from 0.
        target_vocabulary: Tokens of the target language, numbered from 0.
        embedding_size: Entries of an embedded token, U(-0.05, 0.05) at the start.
        hidden_size: Hidden units of encoder and decoder, H.
        cell: A name of `stiefel.models.cells.CELLS`, a class of recurrent networks, or a function
            ``cell(features)`` that makes a network of H hidden units for that many inputs, called
            for the encoder and then for the decoder. An `OrthogonalRNN` has the nonlinearity
            ``"abs"`` here unless told otherwise, which preserves norms exactly.
        via: How orthogonal weights are trained, anything that ``stiefel.orthogonal(via=)`` takes.
            Cells without any, and functions, do not use it.
        num_layers: Layers of encoder and decoder; a function decides on its own.
        attention_size: Entries of the hidden layer of the attention; H if None.
        padding: The token that fills up sentences of both languages. Where no lengths are given,
            a sentence ends with its last token that is not this one.
        batch_first: Whether sentences are `(B, T)` and logits `(B, T, V)`.
        learnable_h0: Whether the encoder's first state is learned; a function decides on its own.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Further options of the class, and of the chart or the metric.

    Raises:
        UnknownNameError: If `cell`, `via` or an option's name is unknown.
        ConfigurationError: If a size is out of range, or what `cell` makes does not fit.

    Example:
        >>> import torch
        >>> from stiefel.models import Seq2Seq
        >>> model = Seq2Seq(20, 30, embedding_size=8, hidden_size=16, via="cwy")
        >>> source, target = torch.randint(1, 20, (7, 2)), torch.randint(1, 30, (5, 2))
        >>> model(source, target, [7, 4]).shape
        torch.Size([5, 2, 30])
        >>> loss = model.loss(source, target, [7, 4], [3, 5])
        >>> model.greedy(source, [7, 4], begin=1, end=2, max_length=6).tokens.shape[1]
        2
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        embedding_size: int = 256,
        hidden_size: int = 1024,
        *,
        cell: Cell = "orthogonal-rnn",
        via: str | Parametrization | None = "cwy",
        num_layers: int = 1,
        attention_size: int | None = None,
        padding: int = 0,
        batch_first: bool = False,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_sizes(source_vocabulary, target_vocabulary, embedding_size, hidden_size, padding)
        if not (torch.get_default_dtype() if dtype is None else dtype).is_floating_point:
            raise DtypeError(f"expected a real floating point dtype for Seq2Seq, got {dtype}")
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.padding, self.batch_first, self.hidden_size = padding, batch_first, hidden_size
        self.source_embedding = nn.Embedding(source_vocabulary, embedding_size, **empty)
        self.target_embedding = nn.Embedding(target_vocabulary, embedding_size, **empty)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.uniform_(embedding.weight, -0.05, 0.05, generator=generator)
        shared = {"generator": generator, **empty, **options}
        make = network_maker(cell, via, hidden_size, num_layers, shared, options)
        self.encoder = make(embedding_size, learnable_h0)
        self.attention = AdditiveAttention(
            hidden_size, hidden_size, attention_size, generator=generator, **empty
        )
        self.decoder = make(hidden_size + embedding_size, False)
        dtype = self.source_embedding.weight.dtype
        check_networks(self.encoder, self.decoder, hidden_size, embedding_size, dtype)
        self.head = nn.Linear(hidden_size, target_vocabulary, **empty)
        start_linear(self.head, generator)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | Sequence[int] | None = None,
        target_lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Teacher forcing: the logits of the token after each token of the target.

        Args:
            source: Sentences to read, int `(S, B)`.
            target: Sentences that the decoder is fed with, int `(T, B)`, the begin token first.
            source_lengths: Tokens of each source `(B,)`, from 1 to S; what lies past them is never
                looked at. None: up to the last token that is not padding.
            target_lengths: Tokens of each target `(B,)`, from 1 to T; None as above.

        Returns:
            Logits `(T, B, V)`, zero past the end of a target; all in the layout of `batch_first`.

        Raises:
            ShapeError: If shapes disagree, a sentence is empty, or a length is out of range.
            DtypeError: If tokens are not integers.
        """
        tokens, lengths = self._tokens(target, target_lengths, "target")
        read, state = self._start(source, source_lengths)
        if tokens.shape[1] != read.keys.encoded.shape[1]:
            raise ShapeError(
                f"expected as many targets as sources, got {tokens.shape[1]} and "
                f"{read.keys.encoded.shape[1]}: the batch is "
                f"{'first' if self.batch_first else 'second, after the tokens,'} in both"
            )
        outputs = []
        for token in self.target_embedding(tokens).unbind(0):
            output, state = read(token, state)
            outputs.append(output)
        logits = self.head(torch.stack(outputs))
        logits = logits.masked_fill(~within(lengths, len(tokens)).unsqueeze(-1), 0)
        return logits.transpose(0, 1) if self.batch_first else logits

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | Sequence[int] | None = None,
        target_lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """The mean cross-entropy, in nats, of every token of the target after its first.

        Args:
            source: Sentences to read, int `(S, B)`.
            target: Whole sentences, int `(T, B)` with T >= 2: the begin token, the words and the
                end token. The decoder is fed with all but the last.
            source_lengths: Tokens of each source `(B,)`, or None; see `forward`.
            target_lengths: Tokens of each target `(B,)`, the begin and end tokens included.

        Returns:
            A scalar. Every real token counts the same; padding does not count.

        Raises:
            ShapeError: As `forward`, or if T < 2.
            DtypeError: If tokens are not integers.
        """
        tokens, lengths = self._tokens(target, target_lengths, "target")
        if len(tokens) < 2:
            raise ShapeError(
                f"expected targets of at least two tokens, begin and end, got {tuple(target.shape)}"
            )
        fed = tokens[:-1].transpose(0, 1) if self.batch_first else tokens[:-1]
        logits = self(source, fed, source_lengths, (lengths - 1).clamp(min=1))
        logits = logits.transpose(0, 1) if self.batch_first else logits
        return masked_cross_entropy(logits, tokens[1:], lengths - 1)

    @torch.no_grad()
    def greedy(
        self,
        source: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        begin: int,
        end: int,
        max_length: int = 50,
    ) -> Decoded:
        """Writes the likeliest token at every step.

        Args:
            source: Sentences to read, int `(S, B)`.
            lengths: Tokens of each source `(B,)`, or None; see `forward`.
            begin: Token that targets begin with.
            end: Token that targets end with.
            max_length: Most tokens to write.

        Returns:
            Tokens `(T, B)` without the begin token, padding after the end; the number of tokens
            of each sentence, the end included, and its log-probability.

        Raises:
            ShapeError: As `forward`.
            ConfigurationError: If a token is not in the vocabulary, or `max_length` < 1.
        """
        self._check_search(begin, end, max_length)
        read, state = self._start(source, lengths)
        found = greedy_search(
            self._next_token(read),
            state,
            read.keys.encoded.shape[1],
            begin=begin,
            end=end,
            padding=self.padding,
            max_length=max_length,
        )
        return self._in_layout(found)

    @torch.no_grad()
    def beam(
        self,
        source: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        begin: int,
        end: int,
        width: int = 4,
        length_penalty: float = 0.0,
        max_length: int = 50,
    ) -> Decoded:
        """Writes the best sentence that a beam search finds, by log p / length^`length_penalty`.

        Finished sentences keep their place among the `width` that are held. A beam can lose the
        greedy sentence on the way and end worse than it, so that this one is a candidate of its
        own: the result is never worse. With ``width=1`` it is the greedy one.

        Args:
            source: Sentences to read, int `(S, B)`.
            lengths: Tokens of each source `(B,)`, or None; see `forward`.
            begin: Token that targets begin with.
            end: Token that targets end with.
            width: Beginnings of a sentence that are held.
            length_penalty: Exponent of the length; 0 compares log-probabilities, 1 their means.
            max_length: Most tokens to write.

        Returns:
            As `greedy`; the scores are log-probabilities, not divided by anything.

        Raises:
            ShapeError: As `forward`.
            ConfigurationError: If a token is not in the vocabulary, or `width` or `max_length` < 1.
        """
        self._check_search(begin, end, max_length)
        if type(width) is not int or width < 1:
            raise ConfigurationError(f"expected a width of at least 1, got {width!r}")
        common = {"begin": begin, "end": end, "padding": self.padding, "max_length": max_length}
        read, state = self._start(source, lengths)
        batch = read.keys.encoded.shape[1]
        found = greedy_search(self._next_token(read), state, batch, **common)
        if width > 1:
            wide = map_state(lambda part: part.repeat_interleave(width, dim=1), state)
            step = self._next_token(read.repeated(width))
            penalty = {"length_penalty": length_penalty}
            best = beam_search(step, wide, batch, width=width, **penalty, **common)
            found = better(best, found, padding=self.padding, **penalty)
        return self._in_layout(found)

    def extra_repr(self) -> str:
        """Options, for printing."""
        return f"padding={self.padding}, batch_first={self.batch_first}"

    def _start(self, source: Tensor, lengths: Tensor | Sequence[int] | None) -> tuple[_Reader, Any]:
        """Encodes the source: a decoder that looks at it, and its first state."""
        tokens, steps = self._tokens(source, lengths, "source")
        encoded, state = self.encoder(self.source_embedding(tokens), lengths=steps)
        keys = self.attention.prepare(encoded, within(steps, len(tokens)))
        return _Reader(self.decoder.stepper(), self.attention, keys), state

    def _next_token(self, read: _Reader) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
        def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            output, state = read(self.target_embedding(tokens), state)
            logits = self.head(output)
            return logits.log_softmax(dim=-1, dtype=compute_dtype(logits.dtype)), state

        return step

    def _tokens(
        self, tokens: Tensor, lengths: Tensor | Sequence[int] | None, name: str
    ) -> tuple[Tensor, Tensor]:
        """Tokens `(T, B)`, padding past their ends, and the lengths `(B,)`."""
        layout = "(B, T)" if self.batch_first else "(T, B)"
        if tokens.ndim != 2 or tokens.shape[1 if self.batch_first else 0] == 0:
            raise ShapeError(
                f"expected {name} tokens of shape {layout} with T >= 1, got {tuple(tokens.shape)}"
            )
        if tokens.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"expected {name} tokens of int64 or int32, numbers of words, got {tokens.dtype}"
            )
        tokens = tokens.transpose(0, 1) if self.batch_first else tokens
        if lengths is None:
            steps = torch.arange(1, len(tokens) + 1, device=tokens.device).unsqueeze(-1)
            lengths = (steps * (tokens != self.padding)).amax(dim=0)
        lengths = as_lengths(lengths, tokens)
        return tokens.masked_fill(~within(lengths, len(tokens)), self.padding), lengths

    def _in_layout(self, found: Decoded) -> Decoded:
        if not self.batch_first:
            return found
        return found._replace(tokens=found.tokens.transpose(0, 1))

    def _check_search(self, begin: int, end: int, max_length: int) -> None:
        for name, token in (("begin", begin), ("end", end)):
            if not 0 <= token < self.head.out_features:
                raise ConfigurationError(
                    f"expected {name} to be a token of the target vocabulary, from 0 to "
                    f"{self.head.out_features - 1}, got {token}"
                )
        if type(max_length) is not int or max_length < 1:
            raise ConfigurationError(f"expected max_length to be at least 1, got {max_length!r}")


class _Reader:
    """The decoder's step, with its weights read and a source to look at."""

    def __init__(self, step: Stepper, attention: AdditiveAttention, keys: Keys) -> None:
        self.step, self.attention, self.keys = step, attention, keys

    def __call__(self, embedded: Tensor, state: Any) -> tuple[Tensor, Any]:
        """s_t from the embedded y_{t-1} `(B, e)` and s_{t-1}; the output `(B, H)` comes first."""
        hidden: Tensor = state[0] if isinstance(state, tuple) else state
        context, _ = self.attention.attend(hidden[-1], self.keys)
        return self.step(torch.cat([context, embedded.to(context.dtype)], dim=-1), state)

    def repeated(self, times: int) -> _Reader:
        """The same for every row of the batch `times` times."""
        return _Reader(self.step, self.attention, self.keys.repeated(times))


def _check_sizes(source: int, target: int, embedding: int, hidden: int, padding: int) -> None:
    sizes = {
        "source_vocabulary": source,
        "target_vocabulary": target,
        "embedding_size": embedding,
        "hidden_size": hidden,
    }
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"expected {name} to be a positive integer, got {value!r}")
    if not 0 <= padding < min(source, target):
        raise ConfigurationError(
            f"expected the padding token in both vocabularies, from 0 to {min(source, target) - 1},"
            f" got {padding}"
        )
