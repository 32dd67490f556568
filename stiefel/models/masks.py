"""Masks of padded batches of tokens, and the loss that leaves the padding out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["masked_cross_entropy", "within"]


def within(lengths: Tensor, steps: int) -> Tensor:
    """`(T, B)` bool, true up to the end of each sequence."""
    return torch.arange(steps, device=lengths.device).unsqueeze(-1) < lengths


def masked_cross_entropy(logits: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The mean cross-entropy in nats over the real tokens of a padded batch.

    Args:
        logits: `(T, B, V)`.
        tokens: The tokens that should have been predicted, `(T, B)`.
        lengths: Real tokens of each sequence `(B,)`, from 0 to T.

    Returns:
        A scalar: every real token counts the same, and padding nothing. Zero without any.

    Example:
        >>> import torch
        >>> from stiefel.models import masked_cross_entropy
        >>> logits, tokens = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
        >>> masked_cross_entropy(logits, tokens, torch.tensor([3, 1]))  # log 4
        tensor(1.3863)
    """
    real = within(lengths.to(logits.device), len(tokens))
    wanted = tokens.masked_fill(~real, -100).flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
    return total / real.sum().clamp(min=1)
