"""Masks of padded batches of tokens, and the loss that leaves the padding out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stiefel.errors import ShapeError

__all__ = ["checked_lengths", "masked_cross_entropy", "within"]


def checked_lengths(lengths: Tensor | Sequence[int], steps: int, batch: int) -> Tensor:
    """Lengths of a padded batch as an int64 tensor `(B,)`, on their own device.

    Values are checked on the CPU, where looking at them costs no wait.

    Raises:
        ShapeError: If there is not one integer from 1 to `steps` for each sequence.
    """
    tensor = torch.as_tensor(lengths)
    if batch == 0 and tensor.shape == (0,):  # an empty list has no dtype of its own
        return tensor.to(torch.int64)
    if tensor.shape != (batch,) or tensor.dtype == torch.bool or not _whole(tensor):
        raise ShapeError(
            f"expected one integer length for each of {batch} sequences, got shape "
            f"{tuple(tensor.shape)} of {tensor.dtype}"
        )
    tensor = tensor.to(torch.int64)  # first, for T may be beyond 8 bits
    checkable = tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    if checkable and batch and not bool(((tensor >= 1) & (tensor <= steps)).all()):
        raise ShapeError(
            f"expected lengths from 1 to T = {steps}, got {tensor.tolist()[:8]}: a sequence "
            "cannot be longer than the padded input nor empty"
        )
    return tensor


def _whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def within(lengths: Tensor, steps: int) -> Tensor:
    """`(T, B)` bool, true up to the end of each sequence."""
    return torch.arange(steps, device=lengths.device).unsqueeze(-1) < lengths


def masked_cross_entropy(logits: Tensor, tokens: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """The mean cross-entropy in nats over the real tokens of a padded batch.

    Args:
        logits: `(T, B, V)`.
        tokens: The tokens that should have been predicted, of any integer dtype, `(T, B)`.
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
    real = within(torch.as_tensor(lengths, device=logits.device), len(tokens))
    wanted = tokens.long().masked_fill(~real, -100).flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
    return total / real.sum().clamp(min=1)
