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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, unknown

__all__ = ["Shears", "Step", "layer_steps", "rotation_count", "shears", "skew_sweep", "sweep"]

_View = TypeVar("_View")


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

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """Which pairs are turned, whatever their angles."""
        return self.first, self.groups, self.stride, self.columns

    def rows(self, A: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The two rows of all pairs, dimension `dim` of A: ``(groups, stride)`` in its place.

        With a stride of 1 that dimension is left out; so it is in `entries` and `_shared`.
        """
        end = self.first + 2 * self.pairs
        if self.stride == 1:
            before = (slice(None),) * dim
            return A[*before, self.first : end : 2], A[*before, self.first + 1 : end : 2]
        rows = A.narrow(dim, self.first, 2 * self.pairs)
        rows = rows.unflatten(dim, (self.groups, 2, self.stride))
        return rows.select(dim + 1, 0), rows.select(dim + 1, 1)

    def entries(self, K: Tensor) -> Tensor:
        """The entries (b, a) of ``(m, m, ...)``, shape ``(groups, stride, ...)``; a view."""
        below = K.diagonal(-self.stride, 0, 1).movedim(-1, 0)  # (a + stride, a) at number a
        if self.stride == 1:
            return below[self.first : self.first + 2 * self.pairs : 2]
        return below[self.first :].unfold(0, self.stride, 2 * self.stride).movedim(-1, 1)


def _shared(steps: Sequence[Step], table: Tensor) -> list[Tensor]:
    """A table ``(count, ...)`` shared out to the steps: ``(groups, stride, ...)`` each."""
    parts = table.split([step.pairs for step in steps])
    return [
        part if step.stride == 1 else part.unflatten(0, (step.groups, step.stride))
        for step, part in zip(steps, parts, strict=True)
    ]


def _views(steps: Sequence[Step], view: Callable[[Step], _View]) -> list[_View]:
    """``view(step)`` of every step, made once for steps of the same pairs."""
    made: dict[Any, _View] = {}
    for step in steps:
        if step.place not in made:
            made[step.place] = view(step)
    return [made[step.place] for step in steps]


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


class Shears(NamedTuple):
    """The tables of a sweep: t and s of each rotation, with the signs of rows taken in.

    Attributes:
        turns: t and s of the rotations, each of shape ``(count, matrices)``.
        phases: t and s of the phases; empty without.
        relative: Product of the signs of the two rows of each rotation, ``(count, matrices)``.
        signs: The signs of the rows after all the steps, ``(rows, matrices)``.
    """

    turns: Sequence[Tensor]
    phases: Sequence[Tensor]
    relative: Tensor
    signs: Tensor


def shears(theta: Tensor, phi: Tensor | None, steps: Sequence[Step], rows: int) -> Shears:
    """The tables of a sweep.

    Args:
        theta: Angles, shape ``(count, matrices)``; overwritten, and so is phi.
        phi: Phases, same shape, or None.
        steps: The steps, in the order in which they act.
        rows: How many rows there are.
    """
    t, s, relative = _quarter(theta)
    phases, flips = [], None
    if phi is not None:
        *phases, flipped = _quarter(phi)
        flips = _shared(steps, flipped)
    signs = s.new_ones(rows, s.shape[1])
    views = _views(steps, lambda step: step.rows(signs, 0))
    for k, ((a, b), turned) in enumerate(zip(views, _shared(steps, relative), strict=True)):
        if flips is not None:
            b.mul_(flips[k])
        product = a * b
        a.mul_(turned)
        b.mul_(turned)
        turned.copy_(product)
    return Shears((t.mul_(relative), s.mul_(relative)), phases, relative, signs)


def _quarter(angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tan of half and sin of the angle less the half turn that it may have, -1 where it has.

    The last is in the memory of the angle.
    """
    sine, cosine = torch.sin(angle), angle.cos_()
    tangent = cosine.abs().add_(1)  # 1 + cos of what is left
    turned = torch.copysign(angle.new_ones(()), cosine, out=cosine)
    return torch.div(sine.mul_(turned), tangent, out=tangent), sine, turned


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
    tables: Shears,
    *,
    undo: bool = False,
    moments: Sequence[Tensor] | None = None,
    along: int = -1,
) -> None:
    """Turns the rows of Z by all the steps, or back from the last to the first; in place.

    Args:
        Z: The state ``(kinds, parts, m, ., .)``; parts is 2 where there are phases.
        steps: The steps.
        tables: Their `shears`.
        undo: Whether to apply the inverse.
        moments: Where the derivatives by th and phi go, ``(count, matrices)`` each; kinds is 2.
        along: The dimension of Z that holds columns, -1 or -2.
    """
    turns, phases = (
        [_shared(steps, t.unsqueeze(along)) for t in both] for both in (tables.turns, tables.phases)
    )
    sums = [_shared(steps, moment) for moment in moments or ()]
    signs = tables.signs.unsqueeze(along)

    def rows(step: Step) -> tuple[Tensor, Tensor]:  # (kinds, parts, groups, stride, ., .)
        block = Z.narrow(along, step.first, 2 * step.pairs) if step.columns else Z
        return step.rows(block, 2)

    if undo:
        Z.mul_(signs)
    numbered = list(enumerate(_views(steps, rows)))
    for k, (a, b) in reversed(numbered) if undo else numbered:
        if undo:
            if sums:
                sums[0][k].copy_(_moment(a, b, (0, along)))
            _rotate(a, b, turns[0][k], turns[1][k], undo)
        if phases:
            re, im = b[:, 0], b[:, 1]
            if sums:
                sums[1][k].copy_(_moment(re, im, (along,)))
            _rotate(re, im, phases[0][k], phases[1][k], undo)
        if not undo:
            _rotate(a, b, turns[0][k], turns[1][k], undo)
            if sums:
                sums[0][k].copy_(_moment(a, b, (0, along)))
    if not undo:
        Z.mul_(signs)
    if moments is not None:
        moments[0].mul_(tables.relative)


def skew_sweep(K: Tensor, steps: Sequence[Step], tables: Shears, out: Tensor) -> Tensor:
    """Turns rows and columns of skew matrices back by all the steps, reading on the way.

    Args:
        K: Skew matrices, the last dimension along them, shape ``(m, m, matrices)``; overwritten.
        steps: The steps, of all columns.
        tables: Their `shears`, without phases.
        out: Takes the result, shape ``(count, matrices)``.

    Returns:
        The entry (b, a) of each rotation of rows a and b, before it is undone.
    """
    K.mul_(tables.signs.unsqueeze(0)).mul_(tables.signs.unsqueeze(1))
    rows = _views(steps, lambda step: step.rows(K, 0))
    columns = _views(steps, lambda step: step.rows(K, 1))
    entries = _views(steps, lambda step: step.entries(K))
    t, s = (_shared(steps, table) for table in tables.turns)
    results = _shared(steps, out)
    for k in reversed(range(len(steps))):
        results[k].copy_(entries[k])
        if k:
            (a, b), (c, d) = rows[k], columns[k]
            _rotate(a, b, t[k].unsqueeze(-2), s[k].unsqueeze(-2), True)
            _rotate(c, d, t[k], s[k], True)
    return out.mul_(tables.relative)
