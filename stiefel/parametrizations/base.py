"""What a chart of the manifold is: free coordinates, and a weight that is a map of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    OffManifoldError,
    RepresentationError,
    ShapeError,
)
from stiefel.geometry import orthonormality_residual, polish
from stiefel.numerics import compute_dtype, full_precision, tolerance
from stiefel.operators import Dense, Operator
from stiefel.parametrizations.options import chart_label

__all__ = ["Move", "Parametrization"]

#: ``move(i, key, moment)``: an optimizer's state of original i in the new coordinates, or None.
Move = Callable[[int, str, Tensor], Tensor | None]

#: Residual up to which a base is taken for a rounded point.
_MENDED = 0.1


class Parametrization(nn.Module, ABC):
    """A chart: ``forward(*originals)`` is a matrix with orthonormal columns, whatever they are.

    Subclasses give `forward`, `right_inverse` and `empty_originals`; the rest has defaults. A new
    chart is one file here and one line in `stiefel.parametrizations.CHARTS`.

    Args:
        n: Rows.
        p: Columns, at most n; n by default.
        batch: Leading dimensions.

    Attributes:
        n: Rows.
        p: Columns.
        batch: Leading dimensions, a tuple.
        rebase_every: Steps between rebases that the chart asks of an optimizer; None for none.
        weight_dtype: Dtype of the weight; None for `point_dtype` of the originals.

    Raises:
        ShapeError: If n < p or p < 1.
        ConfigurationError: If the sizes are no whole numbers, or the chart has no frames
            (``n > p``) or no batches and they are asked for.
    """

    name: ClassVar[str]
    #: The word that the user wrote for the chart, such as ``"scornn"``; None for `name` itself.
    said: str | None = None
    #: Whether complex weights are covered, more rows than columns, and batches of matrices.
    complex: ClassVar[bool] = True
    tall: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    #: Whether the coordinates are a matrix near the weight, so that a point is its own.
    proxy: ClassVar[bool] = False
    #: Whether the first coordinates are columns of reflection vectors: only their directions count.
    reflects: ClassVar[bool] = False
    #: Whether the chart is centred at a point, the buffer `base`, that `rebase` moves. The buffer
    #: stays in float32 or better, whatever the module is cast to.
    has_base: bool = False
    #: Whether `right_inverse` finds coordinates of a point at all.
    inverts: bool = True
    #: The determinant of every real weight, where an option of the chart fixes it.
    fixed_determinant: int | None = None

    def __init__(self, n: int, p: int | None = None, *, batch: Sequence[int] = ()) -> None:
        super().__init__()
        p = n if p is None else p
        n, p, batch = self._whole_sizes(n, p, batch)
        if not 1 <= p <= n:
            raise ShapeError(
                f"{self.label}: expected sizes 1 <= p <= n, got n = {n}, p = {p}. A wide "
                "weight is the transpose of a tall one; stiefel.orthogonal transposes by itself"
            )
        if p < n and not self.tall:
            raise ConfigurationError(
                f"{self.label} covers square matrices only, got {n} x {p}: via='tcwy', "
                "'cwy', 'matrix_exp', 'own', 'polar' and 'riemannian' cover tall and wide ones"
            )
        if batch and not self.batched:
            raise ConfigurationError(
                f"{self.label} covers single matrices only, got a batch {tuple(batch)}: "
                "via='cwy', 'matrix_exp' and 'polar' cover batches"
            )
        self.n, self.p, self.batch = n, p, batch
        self.rebase_every: int | None = None
        self.weight_dtype: torch.dtype | None = None

    @classmethod
    def called(cls, said: str | None, *args: Any, **options: Any) -> Self:
        """Makes a chart that the user calls `said`; errors of its ``__init__`` know the word."""
        chart = cls.__new__(cls)
        chart.said = said
        chart.__init__(*args, **options)
        return chart

    def _whole_sizes(self, n: Any, p: Any, batch: Any) -> tuple[int, int, tuple[int, ...]]:
        """The sizes as whole numbers, numpy's too."""
        try:
            return index(n), index(p), tuple(index(size) for size in batch)
        except TypeError:
            raise ConfigurationError(
                f"{self.label}: expected whole numbers n and p and a tuple of them as batch=, got "
                f"n = {n!r}, p = {p!r}, batch = {batch!r}"
            ) from None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, ``(*batch, n, p)``."""
        return torch.Size((*self.batch, self.n, self.p))

    @property
    def label(self) -> str:
        """What errors call the chart: the user's word, with `name` in brackets behind another."""
        return chart_label(self.name, self.said)

    # ---------------------------------------------------------------- what a chart must say

    @abstractmethod
    def forward(self, *originals: Tensor) -> Tensor:
        """The weight, shape ``(*batch, n, p)``: computed in float32 or better, then cast."""

    @abstractmethod
    def right_inverse(self, X: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Originals whose weight is X; pure.

        Args:
            X: A point, shape ``(*batch, n, p)``.

        Raises:
            RepresentationError: If the chart, as its buffers are set now, cannot represent X.
        """

    @abstractmethod
    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Uninitialised originals for a weight of that dtype (meta devices, loading)."""

    @abstractmethod
    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The chart's own starting point in its current component, shape ``(*batch, n, p)``."""

    # ------------------------------------------------------------------ what it may refine

    def starting_originals(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Originals of the chart's own start, in its current component; moves the base there."""
        X = self.start(dtype, device, generator)
        self.set_base(X)
        return self.right_inverse(X)

    def set_base(self, X: Tensor) -> None:
        """Moves the base to the point X, whose coordinates are then zero; without one, nothing."""
        if self.has_base:
            self._store_base(self.check_point(X))

    def point_dtype(self, originals: Sequence[Tensor]) -> torch.dtype:
        """Dtype of the weight of these originals; that of the first where it is a matrix.

        Charts whose coordinates are angles say here which real tensors mean a complex weight.
        """
        return originals[0].dtype

    def operator(self, *originals: Tensor) -> Operator:
        """The weight as an operator whose dense form is `forward`."""
        return Dense(self(*originals))

    def set_determinant(self, sign: Tensor) -> None:
        """Chooses the component of O(n): determinants +1 or -1, shape ``(*batch)``.

        Charts that cover a single component record a flip of the last row in a buffer; for every
        other chart, and for complex or tall weights, there is nothing to choose.
        """

    def obstacle(self, X: Tensor) -> str | None:
        """Why the chart cannot represent X as its buffers are set now, and what to do; or None.

        It is the text of the error that `right_inverse` raises; charts override it where the
        question is cheaper than the coordinates.
        """
        try:
            self.right_inverse(X)
        except RepresentationError as error:
            return str(error)
        return None

    def complaint(self, originals: Sequence[Tensor]) -> str | None:
        """What is wrong with coordinates that come from a checkpoint, and what to do; or None."""
        return None

    def meaning(self) -> dict[str, Any]:
        """Options that decide which weight given coordinates are; saved beside them.

        Plain values, which ``torch.load(weights_only=True)`` reads. Options that change the shape
        of the coordinates need not be among them.
        """
        return {"base": self.has_base}

    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """New originals of the same weight, and how an optimizer's moments follow.

        Returns:
            The new originals, and ``move(i, key, moment)``: the state `key` of original i in the
            new coordinates, or None where it must be reset: then all of the optimizer's state of
            that original is dropped.
        """
        return tuple(original.detach().clone() for original in originals), lambda i, key, m: m

    # --------------------------------------------------------------------------- helpers

    def _store_base(self, X: Tensor) -> None:
        """Replaces the base; a graph that was built on the old one stays valid."""
        with torch.inference_mode(False):  # gradients are taken through it later
            self.base = X.detach().clone(memory_format=torch.contiguous_format)

    def _mend_base(self) -> None:
        """Moves a base that carries the rounding of a lower precision onto the manifold."""
        base = self._buffers.get("base")
        if base is None or base.is_meta or base.numel() == 0:
            return
        residual = float(orthonormality_residual(base).max())
        if tolerance(base.dtype, self.n, self.p) < residual < _MENDED:
            self.base = polish(base, 3)

    def _apply(self, fn: Any, recurse: bool = True) -> Parametrization:
        """Keeps the base in float32 or better; on its manifold when the precision rises."""
        before = self._buffers.get("base")
        super()._apply(fn, recurse)
        after = self._buffers.get("base")
        if before is not None and after is not None and after.dtype != before.dtype:
            if compute_dtype(after.dtype) != after.dtype:  # 16 bits would lose the manifold
                kind = torch.complex64 if before.is_complex() else torch.float32
                self.base = before.to(after.device, kind)
            self._mend_base()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Loads a base in its own precision: one that was made on meta is still real float32."""
        saved, base = state_dict.get(prefix + "base"), self._buffers.get("base")
        if isinstance(saved, Tensor) and base is not None:
            self.base = base.to(torch.promote_types(saved.dtype, base.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        base = self._buffers.get("base")
        if base is not None:  # assign=True takes over the dtype of the checkpoint
            self.base = base.to(compute_dtype(base.dtype))
        self._mend_base()

    def emit(self, X: Tensor, original: Tensor) -> Tensor:
        """Casts a computed weight to `weight_dtype`, by default the dtype of the original."""
        return X.to(self.weight_dtype or original.dtype)

    @full_precision()
    def check_point(self, X: Tensor) -> Tensor:
        """Checks that X is a point of the right shape and lifts it to float32 or better.

        16-bit points carry a rounding of 1e-3 to 1e-2; they are moved to the nearby matrix with
        orthonormal columns by ``X <- X (3 I - X^H X) / 2``.

        Raises:
            ShapeError: If the shape is not ``(*batch, n, p)``.
            DtypeError: If X is complex and the chart is real.
            NonFiniteError: If X has a NaN or an infinity.
            OffManifoldError: If the columns of X are not orthonormal within `tolerance`.
        """
        X = X.detach()
        if X.shape != self.shape:
            raise ShapeError(
                f"{self.label}: expected a weight of shape {tuple(self.shape)}, got "
                f"{tuple(X.shape)}. Give a weight of that shape, or make a chart for this one"
            )
        working = compute_dtype(X.dtype)
        if X.is_complex() and not self.complex:
            raise DtypeError(
                f"{self.label} covers real weights only, got {X.dtype}: via='cwy', "
                "'matrix_exp' and 'polar' cover complex ones"
            )
        residual = orthonormality_residual(X)
        bound = tolerance(X.dtype, self.n, self.p)
        if not bool(residual.isfinite().all()):
            raise NonFiniteError(
                f"{self.label}: the weight of shape {tuple(X.shape)} has a NaN or an infinity, "
                "expected finite entries: give it finite numbers first"
            )
        worst = float(residual.amax()) if residual.numel() else 0.0
        if worst > bound:
            raise OffManifoldError(
                f"{self.label}: the columns are not orthonormal: max |X^H X - I| is "
                f"{worst:.2g}, the tolerance for {X.dtype} is {bound:.2g}. Project first, for "
                "instance with stiefel.geometry.polar_factor(X)"
            )
        X = X.to(working)
        if working == torch.float32 and bound > tolerance(working, self.n, self.p):
            X = polish(X, 3)
        return X

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        batch = f", batch={self.batch}" if self.batch else ""
        return f"{self.n}, {self.p}{batch}"
