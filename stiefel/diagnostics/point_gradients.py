"""The gradient with respect to the point itself, from the backward pass of the training step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.diagnostics.feasibility import refuse_meta
from stiefel.numerics import compute_dtype, in_transform, plain
from stiefel.parameter import Constraint, ConstraintList, constraints
from stiefel.parameter.storage import storage_of

__all__ = ["PointGradient", "PointGradients", "point_gradients"]

_FROZEN = "its leaves are frozen (requires_grad is False), so that no gradient reaches it"


@dataclass
class PointGradient:
    """The gradient of the loss with respect to one constrained weight, seen as a point.

    Attributes:
        point: X ``(*batch, n, p)``, where the gradient was taken: a copy, in float32 or better.
        gradient: G = dL/dRe X + i dL/dIm X, same shape, summed over all reads of the weight and all
            backward passes in the block; None where there is none.
        missing: Why there is none; None where there is one.
        elsewhere: How many more times the weight was read at another point, after a step of the
            optimizer inside the block. What came from there is not in `gradient`.
    """

    point: Tensor
    gradient: Tensor | None
    missing: str | None
    elsewhere: int = 0


class PointGradients(Mapping[str, PointGradient]):
    """What `point_gradients` yields: a `PointGradient` for each `Constraint.path`.

    The entries follow the backward passes while the block is open, and stay what they are after it.
    """

    def __init__(self, model: nn.Module) -> None:
        found = list(constraints(model))
        for constraint in found:
            refuse_meta(constraint)
        self._records = {each.path: _Record(each) for each in found}

    def __getitem__(self, path: str) -> PointGradient:
        """The gradient of one weight.

        Raises:
            KeyError: If there is no such weight; the message lists those that there are.
        """
        if path not in self._records:
            raise KeyError(f"no constrained weight {path!r}: there are {list(self._records)}")
        return self._records[path].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@contextlib.contextmanager
def point_gradients(model: nn.Module) -> Iterator[PointGradients]:
    r"""Records dL/dX of every constrained weight, from the backward passes inside the block.

    Run the forward and the backward pass of a training step inside. Charts keep the gradient of
    their coordinates only; here the gradient that reaches the point X on its way there is kept as
    well. Several reads of a weight, tied weights and several backward passes add up. A block is
    about one point of each weight, that of the first read with gradients: open a new one for the
    next step (see `PointGradient.elsewhere`).

    Inside the block a matrix-free weight is formed, and multiplied as a matrix; models that
    `torch.compile` made run eagerly. Values and gradients are the same to rounding. The gradient is
    that of the loss that is differentiated: a scaled one under a `GradScaler`, and under
    `DistributedDataParallel` the share of this process, before the average. Blocks nest;
    copies of the model that are made inside are not recorded.

    Args:
        model: Any module, compiled and wrapped ones included.

    Yields:
        A mapping from `Constraint.path` to `PointGradient`.

    Raises:
        ConfigurationError: If a weight is on the meta device.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import point_gradients
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4, bias=False))
        >>> with point_gradients(layer) as gradients:
        ...     layer(torch.eye(4)).sum().backward()  # the sum of the entries of W^T
        >>> torch.equal(gradients["weight"].gradient, torch.ones(4, 4))
        True
    """
    gradients = PointGradients(model)
    with contextlib.ExitStack() as stack:
        for record in gradients._records.values():
            stack.callback(record.close)
            record.open()
            for storage in record.storages:
                stack.enter_context(storage.watched(record.take))
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield gradients


class _Record:
    """What the block sees of one weight."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        owned = (storage_of(module, name) for module, name in constraint.owners)
        self.storages = list({id(s): s for s in owned if s is not None}.values())
        self.gradient: Tensor | None = None
        self.elsewhere = 0
        self._point: Tensor | None = None
        self._read: Tensor | None = None  # the weight of the first read, as it was emitted
        self._blind: str | None = None  # why a read has no gradient
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begins with what can be hooked before it is read: a bare ManifoldParameter."""
        if self.constraint.storage is None:
            leaf = self.constraint.leaves[0]
            self._point, self._read = _lifted(leaf), _copy(leaf)
            if leaf.requires_grad:
                self._watch(leaf, self._read)

    def close(self) -> None:
        """Takes every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self, storage: ConstraintList, X: Tensor) -> None:
        """Takes a point that has just been formed."""
        self._blind = self._blind_spot(X)
        if self._blind is not None:
            return
        if self._read is None:
            self._read = _copy(X)
            exact = compute_dtype(X.dtype) == X.dtype  # a 16-bit weight is a rounded point
            self._point = self._read if exact else storage.exact_point().clone()
        elif not torch.equal(self._read, X.detach()):
            self.elsewhere += 1
            return
        elif X.is_leaf:  # one hook sees the sum over all reads
            return
        self._watch(X, self._read)

    def _blind_spot(self, X: Tensor) -> str | None:
        """Why no gradient can come from this read of the weight; None where it can."""
        if not torch.is_grad_enabled():
            return "it was formed inside the block only without gradients (torch.no_grad)"
        if in_transform(X):
            return (
                "it was read inside a transform of torch.func, whose gradients no hook sees: call "
                "backward() on the loss instead"
            )
        return None if X.requires_grad else _FROZEN

    def _watch(self, X: Tensor, read: Tensor) -> None:
        """Hooks the gradient of X; that of a leaf counts while the leaf is still at the point."""
        leaf = X if X.is_leaf else None  # no reference to the graph is kept

        def add(gradient: Tensor) -> None:
            if leaf is not None and not torch.equal(leaf.detach(), read):
                return
            G = _lifted(gradient)
            self.gradient = G if self.gradient is None else self.gradient + G

        self._handles.append(X.register_hook(add))

    def result(self) -> PointGradient:
        """What is known now."""
        before = self._blind
        point = self.constraint.point if self._point is None else self._point
        self._blind = before  # what `constraint.point` reads is no read of the model
        return PointGradient(point, self.gradient, self._missing(), self.elsewhere)

    def _missing(self) -> str | None:
        if self.gradient is not None:
            return None
        if not any(leaf.requires_grad for leaf in self.constraint.leaves):
            return _FROZEN
        if self._read is not None:
            return (
                "no backward pass inside the block reached the weight: call backward() inside, on "
                "a loss that depends on it"
            )
        return self._blind or (
            "it was not read inside the block: the forward pass has to run there, and not on a "
            "value kept from before (parametrize.cached, a captured graph)"
        )


def _lifted(X: Tensor) -> Tensor:
    """A copy in float32 or better."""
    return _copy(X).to(compute_dtype(X.dtype))


def _copy(X: Tensor) -> Tensor:
    return plain(X).clone()
