"""A network that predicts the next frame of a video, with any convolutional recurrence inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, DtypeError, ShapeError, unknown
from stiefel.models.conv_lstm import ConvLSTM
from stiefel.models.conv_neru import ConvNERU
from stiefel.models.counts import Counted
from stiefel.models.frames import FrameState, within_lengths
from stiefel.models.masks import checked_lengths

__all__ = ["FRAME_CELLS", "VideoPredictor"]

#: The recurrent blocks that ``cell=`` takes by name.
FRAME_CELLS: dict[str, Callable[..., nn.Module]] = {"convneru": ConvNERU, "convlstm": ConvLSTM}


class _Block(nn.Module):
    """Convolution, instance norm, ReLU; after a bilinear upsampling by two, or of stride two."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        *,
        stride: int = 1,
        upsample: bool = False,
        **empty: Any,
    ) -> None:
        super().__init__()
        self.upsample = upsample
        self.convolution = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            bias=False,
            **empty,
        )
        self.norm = nn.GroupNorm(out_channels, out_channels, **empty)  # groups of one channel

    def forward(self, x: Tensor) -> Tensor:
        """Images `(B, in, H, W)` to `(B, out, H', W')`."""
        if self.upsample:
            x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.relu(self.norm(self.convolution(x)))


class VideoPredictor(Counted):
    """Predicts every next frame of a video from those before: an hourglass of recurrent blocks.

    With the default widths (32, 64, 128) and frames of 64 x 64 pixels:

    - encoder: convolution 5 x 5 to 32, recurrence @ 32 x 32; convolution 3 x 3 to 64, recurrence
      @ 16 x 16; convolution 3 x 3 to 128, recurrence @ 8 x 8, each convolution of stride two;
    - decoder: upsample, convolution 3 x 3 to 64, recurrence @ 16 x 16; upsample, convolution to
      32, recurrence @ 32 x 32; upsample, convolution to 32 @ 64 x 64. The second and third take
      the output of the encoder's recurrence of equal size beside the output of the block before;
    - head: convolution 3 x 3 to 32, then convolution 3 x 3 to the channels of a frame, sigmoid.

    Every convolution but the last is followed by an instance norm and a ReLU. This is the
    generator of Lee et al. (2018) without flow, masks and latent variables. All frames go through
    the parts without recurrence at once; output t sees the inputs up to t only.

    Args:
        in_channels: Channels of a frame, values in [0, 1].
        widths: Channels of each level of the encoder. Frames need sizes that are multiples of
            2^levels: 8 for three.
        cell: The recurrent blocks, all alike: ``"convneru"``, ``"convlstm"``, or a callable
            ``cell(in_channels, hidden_channels, **cell_options)`` that gives a module called like
            `ConvNERU`, over `(T, B, C, H, W)`.
        head_channels: Channels between the two convolutions of the head.
        batch_first: Whether videos are `(B, T, C, H, W)` instead of `(T, B, C, H, W)`.
        generator: Source of randomness of the recurrent blocks that are chosen by name.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **cell_options: Options of the blocks, such as ``via=``, ``kernel=``, ``nonlinearity=`` or
            ``peepholes=``; ``kernel_size=5`` where they are chosen by name.

    Raises:
        UnknownNameError: If the name of the cell is unknown.
        ConfigurationError: If a width is not a positive integer.

    Example:
        >>> import torch
        >>> from stiefel.models import VideoPredictor
        >>> model = VideoPredictor(1, widths=(4, 8), cell="convneru", via="cwy", kernel_size=3)
        >>> video = torch.rand(6, 2, 1, 16, 16)
        >>> prediction = model(video[:-1])
        >>> loss = (prediction - video[1:]).abs().mean()
        >>> prediction.shape
        torch.Size([5, 2, 1, 16, 16])
    """

    def __init__(
        self,
        in_channels: int = 1,
        *,
        widths: Sequence[int] = (32, 64, 128),
        cell: str | Callable[..., nn.Module] = "convneru",
        head_channels: int = 32,
        batch_first: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **cell_options: Any,
    ) -> None:
        super().__init__()
        widths = tuple(widths)
        for value in (in_channels, head_channels, *widths):
            if type(value) is not int or value < 1 or not widths:
                raise ConfigurationError(
                    f"expected positive integers, got in_channels={in_channels!r}, "
                    f"widths={widths!r}, head_channels={head_channels!r}"
                )
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(cell, str):
            if cell not in FRAME_CELLS:
                raise unknown("cell", cell, FRAME_CELLS)
            more = {"kernel_size": 5, "generator": generator, **empty}
            make, cell_options = FRAME_CELLS[cell], {**more, **cell_options}
        else:
            make = cell
        self.in_channels, self.widths, self.batch_first = in_channels, widths, batch_first
        before = (in_channels, *widths[:-1])
        self.encoder = nn.ModuleList(
            _Block(channels, width, 3 if level else 5, stride=2, **empty)
            for level, (channels, width) in enumerate(zip(before, widths, strict=True))
        )
        after = (*reversed(widths[:-1]), widths[0])  # the last upsampling keeps the first width
        taken = (widths[-1], *(2 * width for width in after[:-1]))
        self.decoder = nn.ModuleList(
            _Block(channels, width, upsample=True, **empty)
            for channels, width in zip(taken, after, strict=True)
        )
        self.cells = nn.ModuleList(
            make(width, width, **cell_options) for width in (*widths, *after[:-1])
        )
        self.head = nn.Sequential(
            _Block(widths[0], head_channels, **empty),
            nn.Conv2d(head_channels, in_channels, 3, padding=1, **empty),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """Predicts the frame after each frame, starting from states of zero.

        Args:
            x: Frames `(T, B, C, H, W)`, with batch_first `(B, T, C, H, W)`, unbatched
                `(T, C, H, W)`, values in [0, 1].
            lengths: Frames of each video `(B,)`, from 1 to T, of a padded batch.

        Returns:
            Predictions of the shape of `x`: output t is the frame t + 1. Zero in the padding.

        Raises:
            ShapeError: If a shape is wrong, T = 0, or a length is out of range.
            DtypeError: If the dtype of `x` is not that of the parameters.
        """
        return self.predict(x, None, lengths)[0]

    def predict(
        self,
        x: Tensor,
        state: Sequence[FrameState | None] | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, list[FrameState]]:
        """Predicts from given states, to go on with a video frame by frame.

        Args:
            x: As `forward` takes it.
            state: The state of each recurrent block, as the second result has them.
            lengths: As `forward` takes them.

        Returns:
            The predictions, and the state of each recurrent block at each video's own last frame.
        """
        batched = self._check(x, state, lengths)
        if not batched:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        within = None
        if lengths is not None:
            lengths = checked_lengths(lengths, *x.shape[:2])
            within = within_lengths(lengths, x)
            x = x.masked_fill(~within, 0)
        prediction, ends = self._run(x, state, lengths)
        if within is not None:
            prediction = prediction.masked_fill(~within, 0)
        if not batched:
            return prediction.squeeze(1), ends
        return (prediction.transpose(0, 1) if self.batch_first else prediction), ends

    def _run(
        self, x: Tensor, state: Sequence[FrameState | None] | None, lengths: Tensor | None
    ) -> tuple[Tensor, list[FrameState]]:
        """The hourglass over `(T, B, C, H, W)`."""
        steps, batch = x.shape[:2]
        ends: list[FrameState] = []

        def recur(images: Tensor) -> Tensor:
            index = len(ends)
            sequence = images.unflatten(0, (steps, batch))
            first = None if state is None else state[index]
            given = (sequence, first) if lengths is None else (sequence, first, lengths)
            output, end = self.cells[index](*given)
            ends.append(end)
            return output.flatten(0, 1)

        images, skips = x.flatten(0, 1), []
        for block in self.encoder:
            images = recur(block(images))
            skips.append(images)
        skips.pop()  # the deepest is what the decoder starts from
        last = len(self.decoder) - 1
        for level, block in enumerate(self.decoder):
            if level:
                images = torch.cat([images, skips.pop()], dim=1)
            images = block(images)
            if level < last:
                images = recur(images)
        return self.head(images).unflatten(0, (steps, batch)), ends

    def _check(
        self,
        x: Tensor,
        state: Sequence[FrameState | None] | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> bool:
        """Checks the shape of the frames and says whether they are batched."""
        layout = "(B, T, C, H, W)" if self.batch_first else "(T, B, C, H, W)"
        if x.ndim not in (4, 5) or x.shape[-3] != self.in_channels:
            raise ShapeError(
                f"expected frames of shape {layout} or unbatched (T, C, H, W) with C = "
                f"{self.in_channels} channels, got {tuple(x.shape)}"
            )
        first: Any = self.encoder[0]
        weight = first.convolution.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise DtypeError(
                f"expected frames of {weight.dtype}, as the parameters, got {x.dtype}: use "
                f"x.to({weight.dtype})"
            )
        batched = x.ndim == 5
        if x.shape[1 if batched and self.batch_first else 0] == 0:
            raise ShapeError(
                f"expected videos of at least one frame, got {tuple(x.shape)} with T = 0"
            )
        if lengths is not None and not batched:
            raise ShapeError(
                f"lengths= is for batches, got unbatched frames of shape {tuple(x.shape)}: cut "
                "the video at its length instead"
            )
        factor, (height, width) = 2 ** len(self.widths), x.shape[-2:]
        if height % factor or width % factor or height * width <= factor**2:
            raise ShapeError(
                f"expected frames whose height and width are multiples of {factor}, for "
                f"{len(self.widths)} levels halve them, and more than {factor} x {factor} pixels, "
                f"got {height} x {width}: pad or resize the frames, or pass fewer widths="
            )
        if state is not None and len(state) != len(self.cells):
            raise ShapeError(
                f"expected one state for each of {len(self.cells)} recurrent blocks, got "
                f"{len(state)}: pass on the second result of predict"
            )
        return batched
