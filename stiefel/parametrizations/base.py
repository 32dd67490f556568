"""What a chart of the manifold is: free coordinates, and a weight that is a map of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    OffManifoldError,
    ShapeError,
)
from stiefel.geometry import orthonormality_residual
from stiefel.numerics import compute_dtype, full_precision, tolerance
from stiefel.operators import Dense, Operator

__all__ = ["Move", "Parametrization"]

#: ``move(i, key, moment)``: an optimizer's state of original i in the new coordinates, or None.
Move = Callable[[int, str, Tensor], Tensor | None]


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
        weight_dtype: Dtype of the weight; None for that of the first original.

    Raises:
        ShapeError: If n < p or p < 1.
        ConfigurationError: If the chart has no frames (``n > p``) or no batches and they are
            asked for.
    """

    name: ClassVar[str]
    #: Whether complex weights are covered, more rows than columns, and batches of matrices.
    complex: ClassVar[bool] = True
    tall: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    #: Whether the chart is centred at a point that `rebase` moves.
    has_base: ClassVar[bool] = False

    def __init__(self, n: int, p: int | None = None, *, batch: Sequence[int] = ()) -> None:
        super().__init__()
        p = n if p is None else p
        if not 1 <= p <= n:
            raise ShapeError(
                f"chart {self.name!r}: expected sizes 1 <= p <= n, got n = {n}, p = {p}. A wide "
                "weight is the transpose of a tall one; stiefel.orthogonal transposes by itself"
            )
        if p < n and not self.tall:
            raise ConfigurationError(
                f"chart {self.name!r} covers square matrices only, got {n} x {p}"
            )
        if batch and not self.batched:
            raise ConfigurationError(
                f"chart {self.name!r} covers single matrices only, got a batch {tuple(batch)}"
            )
        self.n, self.p, self.batch = int(n), int(p), tuple(int(size) for size in batch)
        self.rebase_every: int | None = None
        self.weight_dtype: torch.dtype | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, ``(*batch, n, p)``."""
        return torch.Size((*self.batch, self.n, self.p))

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

    def operator(self, *originals: Tensor) -> Operator:
        """The weight as an operator whose dense form is `forward`."""
        return Dense(self(*originals))

    def set_determinant(self, sign: Tensor) -> None:
        """Chooses the component of O(n): determinants +1 or -1, shape ``(*batch)``.

        Charts that cover a single component record a flip of the last row in a buffer; for every
        other chart, and for complex or tall weights, there is nothing to choose.
        """

    def obstacle(self, X: Tensor) -> str | None:
        """Why the chart cannot represent X as its buffers are set now, and what to do; or None."""
        return None

    def complaint(self, originals: Sequence[Tensor]) -> str | None:
        """What is wrong with coordinates that come from a checkpoint, and what to do; or None."""
        return None

    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """New originals of the same weight, and how an optimizer's moments follow.

        Returns:
            The new originals, and ``move(i, key, moment)``: the state `key` of original i in the
            new coordinates, or None where it must be reset.
        """
        return tuple(original.detach().clone() for original in originals), lambda i, key, m: m

    # --------------------------------------------------------------------------- helpers

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
                f"chart {self.name!r}: expected a weight of shape {tuple(self.shape)}, got "
                f"{tuple(X.shape)}"
            )
        working = compute_dtype(X.dtype)
        if X.is_complex() and not self.complex:
            raise DtypeError(f"chart {self.name!r} covers real weights only, got {X.dtype}")
        residual = orthonormality_residual(X)
        bound = tolerance(X.dtype, self.n, self.p)
        if not bool(residual.isfinite().all()):
            raise NonFiniteError(
                f"chart {self.name!r}: the weight of shape {tuple(X.shape)} has a NaN or an "
                "infinity"
            )
        worst = float(residual.amax()) if residual.numel() else 0.0
        if worst > bound:
            raise OffManifoldError(
                f"chart {self.name!r}: the columns are not orthonormal: max |X^H X - I| is "
                f"{worst:.2g}, the tolerance for {X.dtype} is {bound:.2g}. Project first, for "
                "instance with stiefel.geometry.polar_factor(X)"
            )
        X = X.to(working)
        if working == torch.float32 and bound > tolerance(working, self.n, self.p):
            eye = torch.eye(self.p, dtype=working, device=X.device)
            for _ in range(3):
                X = X @ (3 * eye - X.mH @ X) / 2
        return X

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        batch = f", batch={self.batch}" if self.batch else ""
        return f"{self.n}, {self.p}{batch}"
