"""Sweeps of plane rotations over rows, in place and in real arithmetic.

The state is a real tensor ``(kinds, parts, m, ., .)``: kinds is 1, or 2 where the gradient travels
beside the state; parts is 1, or 2 for the real and imaginary parts of complex numbers; m rows. The
last two dimensions are columns and matrices, in either order: the longer one last, since that is
the one that the processor runs over. Angles are ``(count, matrices)``.

A rotation by an angle of at most a quarter turn is three shears, three passes over half the rows:
with ``t = tan(th / 2), s = sin th``,

    a <- a - t b,  b <- b + s a,  a <- a - t b.

Larger angles lose a half turn, ``R(th) = -R(th - pi)``. The signs are not applied: rows keep one
until the end of the sweep, and a rotation of rows whose signs differ has the opposite angle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, unknown

__all__ = ["Step", "layer_steps", "rotation_count", "skew_sweep", "sweep"]


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

    def rows(self, A: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The two rows of all pairs, dimension `dim` of A, as ``(groups, stride)`` in its place."""
        block = A.narrow(dim, self.first, 2 * self.pairs)
        rows = block.unflatten(dim, (self.groups, 2, self.stride))
        return rows.select(dim + 1, 0), rows.select(dim + 1, 1)

    def angles(self, table: Tensor) -> Tensor:
        """The entries of a table ``(count, ...)`` as ``(groups, stride, ...)``."""
        return table.narrow(0, self.offset, self.pairs).unflatten(0, (self.groups, self.stride))


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
        ConfigurationError: If n does not fit the style.
        UnknownNameError: If the style is none of the two.
    """
    if style not in ("tunable", "fft"):
        raise unknown("style", style, ("tunable", "fft"))
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


class _Shears:
    """The tables of a sweep: t and s of each rotation, with the signs of rows taken in.

    Args:
        theta: Angles, shape ``(count, matrices)``.
        phi: Phases, same shape, or None.
        steps: The steps, in the order in which they act.
        rows: How many rows there are.

    Attributes:
        turns: t and s of the rotations, of shape ``(count, matrices)``.
        phases: t and s of the phases; empty without.
        relative: Product of the signs of the two rows of each rotation.
        signs: The signs of the rows after all the steps, shape ``(rows, matrices)``.
    """

    def __init__(self, theta: Tensor, phi: Tensor | None, steps: Sequence[Step], rows: int) -> None:
        t, s, turned = _quarter(theta)
        self.phases, flipped = [], None
        if phi is not None:
            *self.phases, flipped = _quarter(phi)
        self.signs = theta.new_ones(rows, theta.shape[1])
        self.relative = torch.ones_like(theta)
        for step in steps:
            if step.pairs == 0:
                continue
            a, b = step.rows(self.signs, 0)
            if flipped is not None:
                b.mul_(step.angles(flipped))
            torch.mul(a, b, out=step.angles(self.relative))
            a.mul_(step.angles(turned))
            b.mul_(step.angles(turned))
        self.turns = [t.mul_(self.relative), s.mul_(self.relative)]


def _quarter(angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tan of half and sin of the angle less the half turn that it may have, -1 where it has."""
    cosine = torch.cos(angle)
    turned = torch.copysign(torch.ones_like(cosine), cosine)
    sine = torch.sin(angle).mul_(turned)
    return sine / cosine.abs_().add_(1), sine, turned


def _rotate(a: Tensor, b: Tensor, t: Tensor, s: Tensor, undo: bool) -> None:
    """``(a, b) <- (cos a - sin b, sin a + cos b)`` in place, or back."""
    sign = 1 if undo else -1
    a.addcmul_(b, t, value=sign)
    b.addcmul_(a, s, value=-sign)
    a.addcmul_(b, t, value=sign)


def _moment(a: Tensor, b: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``sum G_b X_a - G_a X_b`` over the columns, kinds (X, G) in the first dimension."""
    return (b[1] * a[0]).addcmul_(a[1], b[0], value=-1).sum(dims)


def sweep(
    Z: Tensor,
    steps: Sequence[Step],
    theta: Tensor,
    phi: Tensor | None = None,
    *,
    undo: bool = False,
    moments: Sequence[Tensor] | None = None,
    along: int = -1,
) -> None:
    """Turns the rows of Z by all the steps, or back from the last to the first; in place.

    Args:
        Z: The state ``(kinds, parts, m, ., .)``.
        steps: The steps.
        theta: Angles, shape ``(count, matrices)``.
        phi: Phases, same shape, or None; parts is 2 then.
        undo: Whether to apply the inverse.
        moments: Where the derivatives by th and phi go, ``(count, matrices)`` each; kinds is 2.
        along: The dimension of Z that holds columns, -1 or -2.
    """

    def tables(pair: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
        return step.angles(pair[0]), step.angles(pair[1])

    def wide(table: Tensor) -> Tensor:
        """A table as ``(count, ., .)``."""
        return table.unsqueeze(along)

    shears = _Shears(theta, phi, steps, Z.shape[2])
    turns, phases = [[wide(t) for t in pair] for pair in (shears.turns, shears.phases)]
    signs = wide(shears.signs)
    if undo:
        Z.mul_(signs)
    for step in reversed(steps) if undo else steps:
        if step.pairs == 0:
            continue
        block = Z.narrow(along, step.first, 2 * step.pairs) if step.columns else Z
        a, b = step.rows(block, 2)  # (kinds, parts, groups, stride, ., .)
        if undo:
            if moments is not None:
                step.angles(moments[0]).copy_(_moment(a, b, (0, along)))
            _rotate(a, b, *tables(turns, step), undo)
        if phases:
            re, im = b[:, 0], b[:, 1]
            if moments is not None:
                step.angles(moments[1]).copy_(_moment(re, im, (along,)))
            _rotate(re, im, *tables(phases, step), undo)
        if not undo:
            _rotate(a, b, *tables(turns, step), undo)
            if moments is not None:
                step.angles(moments[0]).copy_(_moment(a, b, (0, along)))
    if not undo:
        Z.mul_(signs)
    if moments is not None:
        moments[0].mul_(shears.relative)


def skew_sweep(K: Tensor, steps: Sequence[Step], theta: Tensor) -> Tensor:
    """Turns rows and columns of skew matrices back by all the steps, reading on the way.

    Args:
        K: Skew matrices, the last dimension along them, shape ``(m, m, matrices)``; overwritten.
        steps: The steps, of all columns.
        theta: Angles, shape ``(count, matrices)``.

    Returns:
        The entry (b, a) of each rotation of rows a and b, before it is undone; shape of theta.
    """
    m = len(K)
    shears = _Shears(theta, None, steps, m)
    K.mul_(shears.signs.unsqueeze(0)).mul_(shears.signs.unsqueeze(1))
    entries, numbers = torch.empty_like(theta), torch.arange(m, device=K.device)
    for step in reversed(steps):
        if step.pairs == 0:
            continue
        a, b = step.rows(numbers, 0)
        chosen = (b * m + a).flatten()
        entries.narrow(0, step.offset, step.pairs).copy_(K.flatten(0, 1).index_select(0, chosen))
        if step is steps[0]:
            break
        t, s = (step.angles(table) for table in shears.turns)
        _rotate(*step.rows(K, 0), t.unsqueeze(2), s.unsqueeze(2), True)
        _rotate(*step.rows(K, 1), t, s, True)
    return entries.mul_(shears.relative)
