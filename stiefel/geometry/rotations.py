"""Sweeps of plane rotations over rows, in place and in real arithmetic.

The state is a real tensor ``(m, kinds, parts, ., .)``: m rows; kinds is 1, or 2 where the gradient
travels beside the state; parts is 1, or 2 for the real and imaginary parts of complex numbers. The
last two dimensions are columns and matrices, in either order: the longer one last, since that is
the one that the processor runs over. Angles are tables ``(count, 1, 1, ., .)``, broadcast to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError

__all__ = ["Step", "layer_steps", "rotation_count", "sweep", "trigonometric"]


class Step(NamedTuple):
    """Disjoint rotations of rows ``first + 2 stride g + i`` and ``... + stride``, i < stride.

    Attributes:
        first: First row.
        groups: How many groups of ``2 stride`` rows.
        stride: Distance of the two rows of a pair.
        offset: Where the angles of the step begin; there are ``groups * stride``.
        columns: Whether only the columns with the numbers of these rows are touched.
    """

    first: int
    groups: int
    stride: int
    offset: int
    columns: bool = False

    @property
    def pairs(self) -> int:
        """How many pairs."""
        return self.groups * self.stride


@functools.lru_cache(maxsize=64)
def layer_steps(n: int, layers: int, style: str) -> tuple[Step, ...]:
    """The layers of a style, the first to act first; angles are numbered along them.

    Args:
        n: Rows; a power of 2 for ``"fft"``.
        layers: How many layers.
        style: ``"tunable"``, neighbours in bricks, or ``"fft"``, butterflies.

    Returns:
        A step for each layer.

    Raises:
        ConfigurationError: If the style is unknown, or n does not fit it.
    """
    if style not in ("tunable", "fft"):
        raise ConfigurationError(f"expected style 'tunable' or 'fft', got {style!r}")
    if style == "fft" and n & (n - 1):
        raise ConfigurationError(
            f"style='fft' pairs coordinates by the bits of their numbers: expected n to be a power "
            f"of 2, got n = {n}. Use style='tunable', which takes any n"
        )
    steps, offset = [], 0
    for k in range(layers):
        if style == "tunable":
            step = Step(k % 2, max(n - k % 2, 0) // 2, 1, offset)
        else:
            stride = 1 << (k % max(int(math.log2(n)), 1))
            step = Step(0, n // (2 * stride), stride, offset)
        steps.append(step)
        offset += step.pairs
    return tuple(steps)


def rotation_count(n: int, layers: int, style: str) -> int:
    """How many rotations the layers have: n (n - 1) / 2 for n tunable layers."""
    return sum(step.pairs for step in layer_steps(n, layers, style))


def trigonometric(theta: Tensor, phi: Tensor | None) -> list[Tensor]:
    """``cos th, sin th`` and, with phases, ``cos phi, sin phi``: the tables of a sweep."""
    angles = [theta] if phi is None else [theta, phi]
    return [f(angle) for angle in angles for f in (torch.cos, torch.sin)]


def _rotate(a: Tensor, b: Tensor, cosine: Tensor, sine: Tensor, undo: bool) -> None:
    """``(a, b) <- (c a - s b, s a + c b)`` in place, or back."""
    turned = a * sine
    sign = 1 if undo else -1
    a.mul_(cosine).addcmul_(b, sine, value=sign)
    b.mul_(cosine).add_(turned, alpha=-sign)


def _moment(a: Tensor, b: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``sum G_b X_a - G_a X_b`` over the columns, kinds (X, G) in dimension 2."""
    product = b.select(2, 1) * a.select(2, 0)
    return product.addcmul_(a.select(2, 1), b.select(2, 0), value=-1).sum(dims)


def sweep(
    Z: Tensor,
    steps: Sequence[Step],
    tables: Sequence[Tensor],
    *,
    undo: bool = False,
    moments: Sequence[Tensor] | None = None,
    along: int = -1,
) -> None:
    """Turns the rows of Z by all the steps, or back from the last to the first; in place.

    Args:
        Z: The state ``(m, kinds, parts, ., .)``.
        steps: The steps.
        tables: ``cos th, sin th`` and perhaps ``cos phi, sin phi``, ``(count, 1, 1, ., .)``.
        undo: Whether to apply the inverse.
        moments: Where the derivatives by th and phi go, ``(count, matrices)`` each; kinds is 2.
        along: The dimension of Z that holds columns, -1 or -2.
    """
    for step in reversed(steps) if undo else steps:
        if step.pairs == 0:
            continue
        block = Z.narrow(0, step.first, 2 * step.pairs)
        if step.columns:
            block = block.narrow(along, step.first, 2 * step.pairs)
        rows = block.unflatten(0, (step.groups, 2, step.stride))
        a, b = rows.select(1, 0), rows.select(1, 1)
        at = slice(step.offset, step.offset + step.pairs)
        cs = [table[at].unflatten(0, (step.groups, step.stride)) for table in tables]
        if undo and moments is not None:
            moments[0][at] = _moment(a, b, (2, along)).flatten(0, 1)
        if undo:
            _rotate(a, b, cs[0], cs[1], undo)
        if len(cs) == 4:
            # (groups, stride, kinds, parts, ., .): the parts of b
            re, im = b.narrow(3, 0, 1), b.narrow(3, 1, 1)
            if moments is not None:
                moments[1][at] = _moment(re, im, (2, along)).flatten(0, 1)
            _rotate(re, im, cs[2], cs[3], undo)
        if not undo:
            _rotate(a, b, cs[0], cs[1], undo)
            if moments is not None:
                moments[0][at] = _moment(a, b, (2, along)).flatten(0, 1)
