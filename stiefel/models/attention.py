"""Additive attention over a padded sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, ShapeError
from stiefel.models.counts import Counted

__all__ = ["AdditiveAttention", "Keys"]


class Keys(NamedTuple):
    """What attention needs of a sequence, computed once: see `AdditiveAttention.prepare`."""

    #: The vectors e_i `(S, B, E)`, zero in the padding.
    encoded: Tensor
    #: W1 e_i + b1 `(S, B, A)`.
    projected: Tensor
    #: True at the vectors to look at `(S, B)`, or None for all.
    mask: Tensor | None

    def repeated(self, times: int) -> Keys:
        """The same with each sequence of the batch `times` times, one after another."""
        mask = None if self.mask is None else self.mask.repeat_interleave(times, dim=1)
        return Keys(
            self.encoded.repeat_interleave(times, dim=1),
            self.projected.repeat_interleave(times, dim=1),
            mask,
        )


class AdditiveAttention(Counted):
    """Additive attention (Bahdanau, Cho and Bengio 2015).

    With the vectors e_i of a sequence and a state s,

        score_i = v^T tanh(W1 e_i + b1 + W2 s + b2),  a = softmax(score),  context = sum_i a_i e_i,

    where the softmax runs over the positions of the mask: weights are exactly 0 outside of it and
    sum to 1 over it, and what stands outside is never read, NaN included. A sequence whose mask is
    empty has nothing to look at: its weights and its context are zero. v has no bias, which would
    not change the weights.

    Args:
        encoded_size: Entries of e_i, E.
        state_size: Entries of s, D.
        attention_size: Entries of v, A; `state_size` if None.
        generator: Source of randomness of the start, that of `torch.nn.Linear`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ConfigurationError: If a size is not a positive integer.

    Example:
        >>> import torch
        >>> from stiefel.models import AdditiveAttention
        >>> attention = AdditiveAttention(16, 8)
        >>> encoded, mask = torch.randn(5, 2, 16), torch.ones(5, 2, dtype=torch.bool)
        >>> mask[3:, 0] = False
        >>> context, weights = attention(torch.randn(2, 8), encoded, mask)
        >>> context.shape, weights[3:, 0]
        (torch.Size([2, 16]), tensor([0., 0.], grad_fn=<SelectBackward0>))
    """

    def __init__(
        self,
        encoded_size: int,
        state_size: int,
        attention_size: int | None = None,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        attention_size = state_size if attention_size is None else attention_size
        sizes = {
            "encoded_size": encoded_size,
            "state_size": state_size,
            "attention_size": attention_size,
        }
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"expected {name} to be a positive integer, got {value!r}")
        self.encoded = nn.Linear(encoded_size, attention_size, device=device, dtype=dtype)
        self.state = nn.Linear(state_size, attention_size, device=device, dtype=dtype)
        self.score = nn.Linear(attention_size, 1, bias=False, device=device, dtype=dtype)
        for linear in (self.encoded, self.state, self.score):
            start_linear(linear, generator)

    def prepare(self, encoded: Tensor, mask: Tensor | None = None) -> Keys:
        """Computes what depends on the sequence alone, once for all states that look at it.

        Args:
            encoded: The vectors e_i, `(S, B, E)`.
            mask: True at the vectors to look at, bool `(S, B)`; all of them if None.

        Returns:
            The keys, for `attend`.

        Raises:
            ShapeError: If shapes disagree, or the mask is not bool.
        """
        if encoded.ndim != 3 or encoded.shape[2] != self.encoded.in_features:
            raise ShapeError(
                f"expected vectors of shape (S, B, {self.encoded.in_features}), got "
                f"{tuple(encoded.shape)}"
            )
        if mask is not None:
            if mask.shape != encoded.shape[:2] or mask.dtype != torch.bool:
                raise ShapeError(
                    f"expected a bool mask of shape {tuple(encoded.shape[:2])}, (S, B), true at "
                    f"the vectors to look at, got {tuple(mask.shape)} of {mask.dtype}"
                )
            encoded = encoded.masked_fill(~mask.unsqueeze(-1), 0)
        return Keys(encoded, self.encoded(encoded), mask)

    def attend(self, state: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """Looks at a prepared sequence.

        Args:
            state: s, `(B, D)`.
            keys: What `prepare` gave.

        Returns:
            The context `(B, E)` and the weights `(S, B)`.

        Raises:
            ShapeError: If shapes disagree.
        """
        wanted = (keys.encoded.shape[1], self.state.in_features)
        if tuple(state.shape) != wanted:
            raise ShapeError(f"expected a state of shape {wanted}, got {tuple(state.shape)}")
        scores = self.score(torch.tanh(keys.projected + self.state(state))).squeeze(-1)
        if keys.mask is None:
            weights = scores.softmax(dim=0)
        else:  # the least number and not -inf, which would make an empty softmax NaN
            scores = scores.masked_fill(~keys.mask, torch.finfo(scores.dtype).min)
            weights = scores.softmax(dim=0).masked_fill(~keys.mask, 0)
        weights = weights.to(keys.encoded.dtype)
        return (weights.unsqueeze(-1) * keys.encoded).sum(dim=0), weights

    def forward(
        self, state: Tensor, encoded: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Looks at a sequence once; see `prepare` and `attend` for many states.

        Args:
            state: s, `(B, D)`.
            encoded: The vectors e_i, `(S, B, E)`.
            mask: True at the vectors to look at, bool `(S, B)`; all of them if None.

        Returns:
            The context `(B, E)` and the weights `(S, B)`.

        Raises:
            ShapeError: If shapes disagree, or the mask is not bool.
        """
        return self.attend(state, self.prepare(encoded, mask))


def start_linear(linear: nn.Linear, generator: torch.Generator | None) -> None:
    """The start of `torch.nn.Linear`, all entries U(-1/sqrt(F), 1/sqrt(F)), from a generator."""
    bound = linear.in_features**-0.5
    for parameter in linear.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
