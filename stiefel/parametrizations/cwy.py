"""CWY and T-CWY: the weight as a product of reflections in compact WY form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefel.errors import RepresentationError
from stiefel.geometry.compact_wy import compact_wy
from stiefel.geometry.reflections import householder_vectors
from stiefel.geometry.wy_factors import (
    check_reflection_vectors,
    column_norms,
    compact_wy_factors,
)
from stiefel.numerics import compute_dtype, real_dtype, tolerance
from stiefel.operators import CompactWY, Dense, Operator
from stiefel.parametrizations.base import Move
from stiefel.parametrizations.component import OneComponent
from stiefel.parametrizations.options import count_option

__all__ = ["CWY"]

#: How the entries of an optimizer's state scale when a vector v is replaced by v / |v|: they are
#: multiplied by |v|^power, for the gradient scales as 1 / |v|.
_MOMENT_POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "exp_inf": 1,
    "grad_avg": 1,
    "prev": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "square_avg": 2,
    "sum": 2,
}


class CWY(OneComponent):
    """Q = F H(v_1) ... H(v_L): square matrices, or the first p columns of one.

    The columns of V are free nonzero vectors, H(v) = I - 2 v v^T / |v|^2; only their directions
    matter. Complex reflections have a real phase each, a second original:
    H = I - (1 - e^(i phi)) u u^H. F flips the last row where the determinant asks for it, for
    det H_1 ... H_L = (-1)^L (real square weights only; the buffer `flip`).

    A zero vector acts as the identity and gets a zero gradient: the weight stays orthogonal, its
    determinant is then another. Exclude V from weight decay.

    Args:
        n: Rows.
        p: Columns; n by default.
        batch: Leading dimensions.
        reflections: L; n for square weights and p for tall ones by default, at most n. Fewer
            cover the matrices with rank(Q - I) <= L only.

    Raises:
        ShapeError: If n < p.
        ConfigurationError: If there are more reflections than rows, or none.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import CWY
        >>> chart = CWY(4)
        >>> Q = chart(torch.randn(4, 4, dtype=torch.float64))
        >>> torch.allclose(Q.mT @ Q, torch.eye(4, dtype=torch.float64))
        True
    """

    name = "cwy"
    reflects = True

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        reflections: int | None = None,
    ) -> None:
        super().__init__(n, p, batch=batch)
        self.reflections = self.p if reflections is None else reflections
        count_option(self.name, "reflections", self.reflections, 1, n, said=self.said)
        self.keep_flip(parity=(-1) ** self.reflections)

    def _lift(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """V in float32 or better, and the phases in its precision."""
        V = originals[0].to(compute_dtype(originals[0].dtype))
        return [V, *(phases.to(real_dtype(V.dtype)) for phases in originals[1:])]

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from V ``(*batch, n, L)`` and, for complex V, phases ``(*batch, L)``."""
        lifted = self._lift(originals)
        X = compact_wy(*lifted, columns=self.p, flip=self.flip_for(lifted[0].dtype))
        return self.emit(X, originals[0])

    def operator(self, *originals: Tensor) -> Operator:
        """Compact WY form where that is cheaper (2 L < n), else the dense weight."""
        emitted = self.weight_dtype or originals[0].dtype
        if 2 * self.reflections >= self.n or compute_dtype(emitted) != emitted:
            return Dense(self(*originals))
        lifted = self._lift(originals)
        U, Y = compact_wy_factors(*lifted)
        flip = self.flip_for(lifted[0].dtype)
        return CompactWY(U.to(emitted), Y.to(emitted), columns=self.p, flip=flip)

    def right_inverse(self, X: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Unit reflection vectors ``(*batch, n, L)`` of X, with phases for complex X.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If the columns of X are not orthonormal.
            RepresentationError: If det X needs another `flip`, or rank(X - I) > L.
        """
        lifted = self.check_point(X)
        bound = tolerance(X.dtype, self.n, self.p)
        try:
            V, phases = householder_vectors(self.flip_rows(lifted), self.reflections, bound=bound)
        except RepresentationError as error:  # of the wrong determinant, or of too high a rank
            reason = self.determinant_obstacle(lifted)
            if reason is None:
                raise
            raise RepresentationError(reason) from error
        V = V.to(X.dtype)
        return V if phases is None else (V, phases.to(real_dtype(X.dtype)))

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Uninitialised V ``(*batch, n, L)`` and, for complex dtypes, phases ``(*batch, L)``."""
        V = torch.empty(*self.batch, self.n, self.reflections, dtype=dtype, device=device)
        if not dtype.is_complex:
            return V
        phases = torch.empty(*self.batch, self.reflections, dtype=real_dtype(dtype), device=device)
        return V, phases

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The weight of Gaussian reflection vectors (complex: phases uniform on the circle)."""
        working = compute_dtype(dtype)
        size = (*self.batch, self.n, self.reflections)
        V = torch.randn(size, dtype=working, device=device, generator=generator)
        originals = [V]
        if working.is_complex:
            turns = torch.rand(
                *self.batch,
                self.reflections,
                dtype=real_dtype(working),
                device=device,
                generator=generator,
            )
            originals.append((2 * turns - 1) * math.pi)
        flip = self.flip_for(V.dtype)
        flip = None if flip is None else flip.to(V.device)
        return compact_wy(*originals, columns=self.p, flip=flip).to(dtype)

    def obstacle(self, X: Tensor) -> str | None:
        """The wrong determinant, or rank(X - I) > L; None for every other point."""
        if self.reflections < self.p:
            return super().obstacle(X)
        return self.determinant_obstacle(X)

    def complaint(self, originals: Sequence[Tensor]) -> str | None:
        """Reflection vectors without a direction."""
        try:
            check_reflection_vectors(originals[0])
        except RepresentationError as error:
            return str(error)
        return None

    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """Normalises V (a zero vector is left alone) and rescales the moments; the weight stays.

        f depends on v / |v| only, so in the new coordinates the gradient is |v| times the old
        one: ``exp_avg`` and ``momentum_buffer`` are multiplied by |v|, ``exp_avg_sq`` and
        ``square_avg`` by |v|^2. State of another shape (a step count) is kept, an entry of an
        unknown name is reset.
        """
        V = originals[0].detach()
        lifted = V.to(compute_dtype(V.dtype))
        norms = column_norms(lifted)
        rest = tuple(original.detach().clone() for original in originals[1:])

        def move(index: int, key: str, moment: Tensor) -> Tensor | None:
            if index > 0 or moment.shape != V.shape:
                return moment
            power = _MOMENT_POWERS.get(key)
            if power is None:
                return None
            return (moment * (norms**power).to(real_dtype(moment.dtype))).to(moment.dtype)

        return ((lifted / norms).to(V.dtype), *rest), move

    def extra_repr(self) -> str:
        """Sizes and the number of reflections."""
        return f"{super().extra_repr()}, reflections={self.reflections}"
