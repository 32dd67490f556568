"""The walk of a recurrence along a sequence, in chunks of steps that stay in cache.

Out of place memory is the hidden sequence; everything else lives in buffers of one chunk, which
are filled, used and overwritten. The weight gradients are taken once a chunk, by one product over
all its steps, never once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel.models.activations import KERNELS, empty_kept

__all__ = ["Problem", "chunk_steps", "walk_backward", "walk_forward"]

#: Entries of one (steps, B, H) buffer: 2 MiB in float32, so that a few fit in a second level cache.
_CHUNK_ENTRIES = 2**19
_LEAST_STEPS, _MOST_STEPS = 8, 32


def chunk_steps(length: int, batch: int, hidden: int) -> int:
    """Steps of a chunk, 8 to 32 by the size of a state and at most the length: a static choice."""
    steps = _CHUNK_ENTRIES // max(batch * hidden, 1)
    return max(1, min(length, max(_LEAST_STEPS, min(_MOST_STEPS, steps))))


@dataclass
class Problem:
    """What a recurrence is: h_t = sigma(h_{t-1} Q^T + x_t V^T + b).

    Q is `left` (H, H) when `right` is None, else diag(`sign`) - `right` `left`^T with the thin
    factors (H, L): a compact WY form whose rows are already flipped.

    Attributes:
        x: Inputs `(T, B, K)`, contiguous.
        kernel: V `(H, K)`.
        bias: b `(H,)` or None.
        left: Q `(H, H)`, or U `(H, L)`.
        right: None, or Y `(H, L)`.
        sign: None, or the diagonal `(H,)` that the compact form starts from.
        beta: Bias of modReLU `(H,)` or None.
        h0: First state `(B, H)` or None for zero.
        lengths: Steps of each sequence `(B,)`, or None when all have T.
        nonlinearity: Name of sigma.
        reverse: Whether the walk goes from the last step to the first.
    """

    x: Tensor
    kernel: Tensor
    bias: Tensor | None
    left: Tensor
    right: Tensor | None
    sign: Tensor | None
    beta: Tensor | None
    h0: Tensor | None
    lengths: Tensor | None
    nonlinearity: str
    reverse: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Steps, sequences, hidden units: `(T, B, H)`."""
        return self.x.shape[0], self.x.shape[1], self.kernel.shape[0]

    def chunks(self, steps: int) -> Iterator[tuple[int, int]]:
        """Bounds `first, last` of the chunks, in the order of the walk."""
        length = self.x.shape[0]
        firsts = range(0, length, steps)
        for first in reversed(firsts) if self.reverse else firsts:
            yield first, min(first + steps, length)

    def order(self, first: int, last: int) -> range:
        """Steps of a chunk in the order of the walk."""
        return range(last - 1, first - 1, -1) if self.reverse else range(first, last)

    def padding(self) -> Tensor | None:
        """`(T, B, 1)` bool, true past the end of a sequence; None when there is no padding."""
        if self.lengths is None:
            return None
        steps = torch.arange(self.x.shape[0], device=self.x.device)
        return (steps[:, None] >= self.lengths[None, :]).unsqueeze(-1)

    def inputs(self, first: int, last: int, padding: Tensor | None) -> Tensor:
        """Inputs of a chunk as rows `(steps * B, K)`, zero in the padding."""
        rows = self.x[first:last]
        if padding is not None:
            rows = rows.masked_fill(padding[first:last], 0)
        return rows.flatten(0, 1)


class _Dense:
    """Q as a matrix: one product a step, forward and back."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.weight = problem.left
        self.transposed = problem.left.t()

    def add_(self, z: Tensor, h: Tensor) -> None:
        """z += h Q^T."""
        z.addmm_(h, self.transposed)

    def pull_(self, target: Tensor, delta: Tensor, j: int) -> None:
        """target += delta Q."""
        target.addmm_(delta, self.weight)

    def accumulate(
        self, d_left: Tensor, d_right: Tensor, delta: Tensor, h: Tensor, rows: slice
    ) -> None:
        """dQ += delta^T h, over the rows of a chunk."""
        d_left.addmm_(delta.t(), h)


class _Compact:
    """Q = diag(sign) - Y U^T: two thin products a step, forward and back."""

    def __init__(self, problem: Problem, steps: int) -> None:
        assert problem.right is not None
        batch = problem.x.shape[1]
        self.u, self.y, self.sign = problem.left, problem.right, problem.sign
        self.ut, self.yt = self.u.t(), self.y.t()
        self.thin = self.u.new_empty(steps * batch, self.u.shape[1])
        self.thin_steps = self.thin.view(steps, batch, -1).unbind(0)
        self.other = torch.empty_like(self.thin)

    def _add_diagonal_(self, target: Tensor, source: Tensor) -> None:
        if self.sign is None:
            target.add_(source)
        else:
            target.addcmul_(source, self.sign)

    def add_(self, z: Tensor, h: Tensor) -> None:
        """z += h diag(sign) - (h U) Y^T."""
        thin = torch.mm(h, self.u, out=self.thin_steps[0])
        self._add_diagonal_(z, h)
        z.addmm_(thin, self.yt, alpha=-1)

    def pull_(self, target: Tensor, delta: Tensor, j: int) -> None:
        """target += delta diag(sign) - (delta Y) U^T; keeps delta Y of step j for the chunk."""
        thin = torch.mm(delta, self.y, out=self.thin_steps[j])
        self._add_diagonal_(target, delta)
        target.addmm_(thin, self.ut, alpha=-1)

    def accumulate(
        self, d_left: Tensor, d_right: Tensor, delta: Tensor, h: Tensor, rows: slice
    ) -> None:
        """dU -= h^T (delta Y), dY -= delta^T (h U), over the rows of a chunk."""
        d_left.addmm_(h.t(), self.thin[rows], alpha=-1)
        d_right.addmm_(delta.t(), torch.mm(h, self.u, out=self.other[: len(h)]), alpha=-1)


def _recurrence(problem: Problem, steps: int) -> _Dense | _Compact:
    return _Dense(problem, steps) if problem.right is None else _Compact(problem, steps)


def walk_forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Walks the sequence once.

    Returns:
        The states `(T, B, H)`, zero past the end of a sequence; the state at each sequence's own
        last step `(B, H)`; what the nonlinearity keeps aside (`empty_kept`).
    """
    length, batch, hidden = problem.sizes
    states = problem.x.new_empty(length, batch, hidden)
    kept = empty_kept(problem.nonlinearity, states)
    if states.numel() == 0:
        return states, states.new_empty(batch, hidden), kept
    steps = chunk_steps(length, batch, hidden)
    recurrence = _recurrence(problem, steps)
    kernel = KERNELS[problem.nonlinearity](states[0], steps, problem.beta, kept)
    padding, transposed = problem.padding(), problem.kernel.t()
    h, each, previous = states.unbind(0), states.flatten(0, 1), problem.h0
    for first, last in problem.chunks(steps):
        rows = each[first * batch : last * batch]
        inputs = problem.inputs(first, last, padding)
        if problem.bias is None:
            torch.mm(inputs, transposed, out=rows)
        else:
            torch.addmm(problem.bias, inputs, transposed, out=rows)
        for t in problem.order(first, last):
            z = h[t]
            if previous is not None:
                recurrence.add_(z, previous)
            kernel.forward_(z, t)
            previous = z
        if padding is not None:
            states[first:last].masked_fill_(padding[first:last], 0)
    return states, _last_state(problem, states), kept


def _last_state(problem: Problem, states: Tensor) -> Tensor:
    """The state after the last step of the walk, `(B, H)`, each sequence at its own length."""
    if problem.lengths is None:
        return states[0 if problem.reverse else -1].clone()
    which = (problem.lengths - 1)[None, :, None].expand(1, -1, states.shape[2])
    return states.gather(0, which).squeeze(0)


def _gradient_buffers(problem: Problem, needs: list[bool]) -> list[Tensor]:
    """Buffers for the gradients of x, V, b, Q or U, Y, beta and h0; empty where not needed.

    That of h0 is always there: it carries the gradient from chunk to chunk.
    """

    def zeros(like: Tensor | None, need: bool) -> Tensor:
        return problem.x.new_zeros(like.shape if need and like is not None else (0,))

    return [
        torch.empty_like(problem.x) if needs[0] else problem.x.new_empty(0),
        zeros(problem.kernel.t(), needs[1]),  # transposed: for few inputs, five times faster
        zeros(problem.bias, needs[2]),
        zeros(problem.left, needs[3]),
        zeros(problem.right, needs[4]),
        zeros(problem.beta, needs[5]),
        problem.x.new_zeros(problem.sizes[1:]),
    ]


class _Upstream:
    """Loads the incoming gradient of a chunk into a buffer: zero in the padding."""

    def __init__(
        self, problem: Problem, padding: Tensor | None, states: Tensor | None, last: Tensor | None
    ) -> None:
        self.states, self.padding, self.last = states, padding, None
        if last is not None and problem.lengths is not None:
            steps = torch.arange(problem.x.shape[0], device=last.device)
            ends = steps[:, None] == problem.lengths[None, :] - 1
            self.ends, self.last = ends.unsqueeze(-1).to(last.dtype), last

    def load(self, delta: Tensor, first: int, last: int) -> None:
        """Fills `delta` `(steps, B, H)` with the gradient of the states of a chunk."""
        if self.states is None:
            delta.zero_()
        else:
            delta.copy_(self.states[first:last])
            if self.padding is not None:
                delta.masked_fill_(self.padding[first:last], 0)
        if self.last is not None:
            delta.addcmul_(self.ends[first:last], self.last)


def walk_backward(
    problem: Problem,
    states: Tensor,
    kept: Tensor,
    grad_states: Tensor | None,
    grad_last: Tensor | None,
    needs: list[bool],
) -> list[Tensor]:
    """Walks the sequence back: delta_t = sigma'(z_t) (g_t + delta_{t+1} Q).

    Args:
        problem: The recurrence.
        states: What `walk_forward` returned first.
        kept: What `walk_forward` returned last.
        grad_states: Gradient of the states `(T, B, H)`, or None for zero.
        grad_last: Gradient of the last state `(B, H)`, or None for zero.
        needs: Whether x, V, b, `left`, `right`, beta and h0 need a gradient.

    Returns:
        The gradients in that order, empty where not needed.
    """
    length, batch, hidden = problem.sizes
    grads = _gradient_buffers(problem, needs)
    if states.numel() == 0:
        return _turned(grads, needs)
    steps = chunk_steps(length, batch, hidden)
    recurrence = _recurrence(problem, steps)
    kernel = KERNELS[problem.nonlinearity](states[0], steps, problem.beta, kept)
    sums = _Sums(problem, recurrence, states, grads, needs)
    upstream = _Upstream(problem, sums.padding, grad_states, grad_last)
    deltas = states.new_empty(steps, batch, hidden)
    each, carry = deltas.unbind(0), grads[-1]
    if grad_last is not None and problem.lengths is None:
        carry.copy_(grad_last)
    for first, last in reversed(list(problem.chunks(steps))):
        chunk = deltas[: last - first]
        upstream.load(chunk, first, last)
        kernel.begin(states[first:last], first)
        order = [t - first for t in reversed(problem.order(first, last))]
        each[order[0]].add_(carry)
        for j, following in zip(order, [*order[1:], None], strict=True):
            kernel.backward_(each[j], j)
            target = carry.zero_() if following is None else each[following]
            recurrence.pull_(target, each[j], j)
        sums.add(chunk, first, last)
        if needs[5]:
            kernel.add_bias_gradient_(grads[5], chunk, sums.ones)
    return _turned(grads, needs)


def _turned(grads: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The gradients with that of V in the layout of V."""
    if needs[1]:
        grads[1] = grads[1].t().contiguous()
    return grads


class _Sums:
    """Takes out of a chunk of deltas everything that is summed over the steps."""

    def __init__(
        self,
        problem: Problem,
        recurrence: _Dense | _Compact,
        states: Tensor,
        grads: list[Tensor],
        needs: list[bool],
    ) -> None:
        self.problem, self.recurrence, self.states = problem, recurrence, states
        self.grads, self.needs, self.padding = grads, needs, problem.padding()
        length, batch, hidden = problem.sizes
        self.ones = states.new_ones(chunk_steps(length, batch, hidden) * batch)

    def add(self, chunk: Tensor, first: int, last: int) -> None:
        """Adds the chunk `(steps, B, H)` of the steps from `first` to before `last`."""
        delta, problem = chunk.flatten(0, 1), self.problem
        dx, d_kernel, d_bias, d_left, d_right, *_ = self.grads
        if self.needs[0]:
            torch.mm(delta, problem.kernel, out=dx[first:last].flatten(0, 1))
        if self.needs[1]:
            d_kernel.addmm_(problem.inputs(first, last, self.padding).t(), delta)
        if self.needs[2]:
            d_bias.addmv_(delta.t(), self.ones[: len(delta)])
        if self.needs[3]:
            for h, rows in self.previous(first, last):
                self.recurrence.accumulate(d_left, d_right, delta[rows], h, rows)

    def previous(self, first: int, last: int) -> Iterator[tuple[Tensor, slice]]:
        """Rows of the states that the steps of a chunk start from, and the steps' rows."""
        length, batch, _ = self.problem.sizes
        shift = 1 if self.problem.reverse else -1
        start, stop = max(first + shift, 0), min(last + shift, length)
        if stop > start:
            rows = slice((start - shift - first) * batch, (stop - shift - first) * batch)
            yield self.states[start:stop].flatten(0, 1), rows
        starts_here = last == length if self.problem.reverse else first == 0
        if starts_here and self.problem.h0 is not None:
            j = last - first - 1 if self.problem.reverse else 0
            yield self.problem.h0, slice(j * batch, (j + 1) * batch)
