"""The scaled Cayley chart: (I + A)^-1 (I - A) D, or the Cayley map times a base that moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import RepresentationError
from stiefel.geometry import polish, product, with_determinant
from stiefel.geometry.cayley_map import cayley_coordinates, cayley_map
from stiefel.geometry.determinant import determinant_sign
from stiefel.numerics import compute_dtype, full_precision, real_dtype, tolerance
from stiefel.parametrizations.base import Move
from stiefel.parametrizations.component import OneComponent
from stiefel.parametrizations.options import count_option

__all__ = ["Cayley"]


class Cayley(OneComponent):
    """Q = F C(A) D with C(A) = (I + A)^-1 (I - A), or Q = C(A) B with a base B.

    scoRNN (Helfrich, Willmott, Ye, ICML 2018). A is skew-symmetric (skew-Hermitian), made of the
    entries of the original above its diagonal, for complex weights of the imaginary parts on it
    too; the others do nothing and get no gradient (`stiefel.geometry.cayley_map`). D =
    diag(1, ..., 1, -1, ..., -1) is fixed, F flips the last row where the determinant asks for it
    (real weights only). Covered is every matrix of that determinant but those with an eigenvalue
    -1 of F Q D, where A is infinite; near them A is large and steps in A are slow.

    With ``rebase_every=K`` the base B takes the place of F and D: it begins as D, and every K
    optimizer steps it moves to the weight while A becomes zero, so that no point is far away.
    Plain SGD at rate lr that is rebased after every step is RGD with the canonical inner product
    and the Cayley retraction at rate 4 lr, for real and complex weights:
    C(-lr dA) B = (I + 2 lr W)^-1 (I - 2 lr W) B with W = G B^H - B G^H.

    Other libraries write (I + A/2) (I - A/2)^-1: see `stiefel.parametrizations.conventions`.

    Args:
        n: Rows and columns.
        p: The same; the chart covers square matrices only.
        batch: Leading dimensions.
        negative: How many of the last entries of D are -1. A number fixes the determinant,
            (-1)^negative, of real weights; None is 0 with either determinant.
        rebase_every: Optimizer steps between rebases; None for a fixed D.

    Raises:
        ConfigurationError: If n != p, or `negative` is not a number from 0 to n, or
            `rebase_every` not a positive number.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import Cayley
        >>> chart = Cayley(4, negative=2)
        >>> Q = chart(torch.randn(4, 4, dtype=torch.float64))
        >>> torch.allclose(Q.mT @ Q, torch.eye(4, dtype=torch.float64))
        True
    """

    name = "cayley"
    tall = False
    base: Tensor

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        negative: int | None = None,
        rebase_every: int | None = None,
    ) -> None:
        super().__init__(n, p, batch=batch)
        if negative is not None:
            count_option(self.name, "negative", negative, 0, n)
        if rebase_every is not None:
            count_option(self.name, "rebase_every", rebase_every, 1)
        self.negative = negative
        self.rebase_every = rebase_every
        self.has_base = rebase_every is not None
        self.keep_flip((-1) ** (negative or 0))
        self.fixed_determinant = None if negative is None else self.parity
        if self.has_base or negative is not None:
            self.flip = None  # the base says which component, or `negative` does for good
        if self.has_base:
            D = torch.diag(self._signs(torch.float32))
            self.register_buffer("base", D.expand(*self.batch, n, n).clone())

    def _signs(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """The diagonal of D."""
        D = torch.ones(self.n, dtype=dtype, device=device)
        D[self.n - (self.negative or 0) :] = -1
        return D

    def _weight(self, X: Tensor) -> Tensor:
        """The weight of coordinates in float32 or better."""
        if self.has_base:
            return product(cayley_map(X), self.base.to(X.dtype))
        return cayley_map(X, flip=self.flip_for(X.dtype), negative=self.negative or 0)

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from coordinates ``(*batch, n, n)``."""
        (X,) = originals
        return self.emit(self._weight(X.to(compute_dtype(X.dtype))), X)

    def meaning(self) -> dict[str, Any]:
        """Whether there is a base, and where not the number of -1 in D."""
        return {"base": self.has_base, "negative": 0 if self.has_base else self.negative or 0}

    # ------------------------------------------------------------------------- the inverse

    @full_precision()
    def _centred(self, X: Tensor) -> Tensor:
        """K with C(A) = K: F X D, or X B^H, in float64."""
        X = X.to(torch.complex128 if X.is_complex() else torch.float64)
        if self.has_base:
            return X @ self.base.to(X.dtype).mH
        return self.flip_rows(X) * self._signs(X.dtype, X.device)

    def _invert(self, X: Tensor) -> tuple[Tensor, str | None]:
        """Coordinates of X, and what is wrong with them."""
        point = self.check_point(X)
        obstacle = self.determinant_obstacle(point)
        if obstacle is not None:
            return point, obstacle
        if self.has_base and self.base.dtype == point.dtype and torch.equal(self.base, point):
            return torch.zeros_like(X), None
        coordinates = cayley_coordinates(self._centred(point)).to(X.dtype)
        back = self._weight(coordinates.to(point.dtype))
        if bool(((back - point).abs() <= tolerance(X.dtype, self.n, self.n)).all()):
            return coordinates, None
        return coordinates, self._describe(point, X.dtype)

    def right_inverse(self, X: Tensor) -> Tensor:
        """Coordinates ``(*batch, n, n)`` of X, zero where they do not count.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If X is not orthogonal (unitary).
            RepresentationError: If det X is another, or F X D (with a base X B^H) has an
                eigenvalue at -1, or so near that rounded coordinates miss X by more than
                `tolerance`.
        """
        coordinates, obstacle = self._invert(X)
        if obstacle is not None:
            raise RepresentationError(obstacle)
        return coordinates

    def obstacle(self, X: Tensor) -> str | None:
        """The wrong determinant, or an eigenvalue at -1 where A would be infinite."""
        return self._invert(X)[1]

    def _describe(self, point: Tensor, dtype: torch.dtype) -> str:
        """Why coordinates are too large, and the nearest remedy."""
        K = self._centred(point)
        eye = torch.eye(self.n, dtype=K.dtype, device=K.device)
        smallest = float(torch.linalg.svdvals(eye + K).amin())
        what = "X B^H, B the base," if self.has_base else "F X D"
        known = [] if self.has_base else self._other_negatives(point, dtype)
        remedies = [*(f"negative={k}" for k in known[:1])]
        if not self.has_base:
            remedies.append("rebase_every= (its base can be the matrix)")
        else:
            remedies.append("stiefel.convert or Constraint.assign, which move the base there")
        return (
            f"Cayley coordinates are infinite where {what} has an eigenvalue -1, and the matrix is "
            f"there or too near for {dtype}: the smallest singular value of I + K is "
            f"{smallest:.2g}. Use {', '.join(remedies)}, via='matrix_exp' or via='cwy'"
        )

    def _other_negatives(self, point: Tensor, dtype: torch.dtype) -> list[int]:
        """Up to one other `negative` with which the chart holds the point, of eight tried."""
        step = max(1, self.n // 8)
        for k in range(self.n // 2 % step, self.n + 1, step):
            for number in (k, k + 1):
                if number == self.negative or number > self.n:
                    continue
                other = Cayley(self.n, batch=self.batch, negative=number).to(point.device)
                if other.determinant_obstacle(point) is not None:
                    continue
                coordinates = cayley_coordinates(other._centred(point)).to(dtype)
                back = other._weight(coordinates.to(point.dtype))
                if bool(((back - point).abs() <= tolerance(dtype, self.n, self.n)).all()):
                    return [number]
        return []

    # ------------------------------------------------------------------------ the component

    def _determinants(self) -> Tensor:
        """Determinants of real weights as the buffers are, shape ``(*batch)``."""
        if self.has_base:
            return determinant_sign(self.base.real if self.base.is_complex() else self.base)
        return self.parity * (torch.ones(self.batch) if self.flip is None else self.flip)

    def set_determinant(self, sign: Tensor) -> None:
        """Chooses the component of real weights, unless ``negative=`` has fixed it."""
        if self.fixed_determinant is not None:
            return
        if not self.has_base:
            super().set_determinant(sign)
        elif not self.base.is_complex():
            self._store_base(with_determinant(self.base, sign.to(self.base).expand(self.batch)))

    def determinant_obstacle(self, X: Tensor) -> str | None:
        """The determinant of X, where it is not the one that this chart has now; or None."""
        if X.is_complex() or X.numel() == 0:
            return None
        sign = determinant_sign(X)
        fixed = self.fixed_determinant
        ours = self._determinants().to(sign) if fixed is None else torch.full_like(sign, fixed)
        if bool((sign * ours > 0).all()):
            return None
        text = (
            f"chart {self.name!r} has determinant {ours.flatten().int().tolist()[:4]} now, the "
            f"matrix has {sign.flatten().int().tolist()[:4]}: "
        )
        if self.negative is None:
            return text + "leave determinant= out or give the sign of the matrix"
        near = self.negative + (1 if self.negative < self.n else -1)
        return (
            text + f"negative={self.negative} fixes it. Take via='cayley' without negative=, which "
            f"allows both signs, or with another parity such as negative={near}"
        )

    # ------------------------------------------------------------------- starts, new bases

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Uninitialised coordinates ``(*batch, n, n)``."""
        return torch.empty(*self.batch, self.n, self.n, dtype=dtype, device=device)

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """scoRNN's start C(A) D, A of blocks [[0, a], [-a, 0]], a = tan(t/2), t ~ U(0, pi/2).

        C turns each plane by exactly t, so the coordinates are small (no eigenvalue of C near
        -1). The last row is negated where the determinant asks for it.
        """
        working = compute_dtype(dtype)
        size = (*self.batch, self.n // 2)
        t = torch.rand(size, dtype=real_dtype(working), device=device, generator=generator)
        X = torch.zeros(*self.batch, self.n, self.n, dtype=working, device=device)
        even = torch.arange(0, 2 * (self.n // 2), 2, device=device)
        X[..., even, even + 1] = torch.tan(math.pi / 4 * t).to(working)
        Q = cayley_map(X, negative=self.negative or 0)
        if not dtype.is_complex:
            Q = with_determinant(Q, self._determinants().to(Q).expand(self.batch))
        return Q.to(dtype)

    @full_precision()
    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """Moves the base to the weight, B <- C(A) B, A <- 0; the optimizer's moments are reset.

        Without a base nothing changes.
        """
        if not self.has_base:
            return super().rebase(originals)
        X = originals[0].detach()
        working = torch.promote_types(compute_dtype(X.dtype), self.base.dtype)
        self._store_base(polish(self._weight(X.to(working))))

        def move(index: int, key: str, moment: Tensor) -> Tensor | None:
            return None if moment.shape == X.shape else moment

        return (torch.zeros_like(X),), move

    def extra_repr(self) -> str:
        """Sizes and options."""
        options = {"negative": self.negative, "rebase_every": self.rebase_every}
        said = [f"{key}={value}" for key, value in options.items() if value is not None]
        return ", ".join([super().extra_repr(), *said])
