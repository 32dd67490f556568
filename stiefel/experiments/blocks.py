"""The video predictors of the methods: one hourglass, whose recurrent blocks are swapped together.

The blocks of a method have a name here; the rows of Likhosherstov et al. (2021) are `ConvLSTM`,
`ConvNERU` without a recurrent kernel, with a free one, and with one on the Stiefel manifold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stiefel.models import VideoPredictor

__all__ = ["BLOCKS", "KERNEL_SIZE", "video_predictor"]

#: Options of `VideoPredictor` for each ``Method.block``. ``via=`` and ``init=`` come on top.
BLOCKS: dict[str, dict[str, Any]] = {
    "stiefel": {"cell": "convneru", "kernel": "stiefel"},
    "free": {"cell": "convneru", "kernel": "free"},
    "zeros": {"cell": "convneru", "kernel": "zeros"},
    "convlstm": {"cell": "convlstm"},
}
#: Rows and columns of every recurrent kernel, q.
KERNEL_SIZE = 5

_DARK = -2.0  # bias of the last layer: a new model answers with sigmoid(-2) = 0.12, not 0.5


def video_predictor(
    block: str,
    hidden: int,
    frame_size: int,
    *,
    via: str | None,
    init: str,
    dtype: torch.dtype,
    **options: Any,
) -> VideoPredictor:
    """A predictor with one level for every halving of a frame down to 8 pixels.

    Args:
        block: A name of `BLOCKS`.
        hidden: Channels of the first level, doubled at each further one.
        frame_size: Pixels of a side of a frame.
        via: How recurrent kernels are trained; None leaves plain ones.
        init: Start of the recurrent kernels, where there are any.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the manifold.

    Returns:
        A model of frames (T, B, 1, S, S) to predictions of the same shape.
    """
    levels = (frame_size // 8).bit_length() - 1
    cells: dict[str, Any] = {**BLOCKS[block], "kernel_size": KERNEL_SIZE, **options}
    if block == "stiefel":
        cells["via"] = via
    if block in ("stiefel", "free"):
        cells["init"] = init
    widths = [hidden * 2**level for level in range(levels)]
    model = VideoPredictor(1, widths=widths, head_channels=hidden, dtype=dtype, **cells)
    last = model.head[1]
    assert isinstance(last, nn.Conv2d)
    assert last.bias is not None
    nn.init.constant_(last.bias, _DARK)
    return model
