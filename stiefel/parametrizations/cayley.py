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
from stiefel.geometry.sampling import block_rotations
from stiefel.numerics import compute_dtype, double_dtype, full_precision, real_dtype, tolerance
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
            count_option(self.name, "negative", negative, 0, n, said=self.said)
        if rebase_every is not None:
            count_option(self.name, "rebase_every", rebase_every, 1, said=self.said)
        self.negative = negative
        self.rebase_every = rebase_every
        self.has_base = rebase_every is not None
        parity = (-1) ** (negative or 0)
        self.fixed_determinant = None if negative is None else parity
        self.keep_flip(parity)
        if self.has_base:
            D = torch.diag(self._signs(torch.float32))
            self.register_buffer("base", D.expand(*self.batch, n, n).clone())

    def _signs(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """The diagonal of D."""
        D = torch.ones(self.n, dtype=dtype, device=device)
        D[self.n - (self.negative or 0) :] = -1
        return D

    def _weight(self, V: Tensor) -> Tensor:
        """The weight of coordinates in float32 or better."""
        if self.has_base:
            return product(cayley_map(V), self.base.to(V.dtype))
        return cayley_map(V, flip=self.flip_for(V.dtype), negative=self.negative or 0)

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from coordinates V ``(*batch, n, n)``."""
        (V,) = originals
        return self.emit(self._weight(V.to(compute_dtype(V.dtype))), V)

    def meaning(self) -> dict[str, Any]:
        """Whether there is a base, and where not the number of -1 in D."""
        return {"base": self.has_base, "negative": 0 if self.has_base else self.negative or 0}

    # ------------------------------------------------------------------------- the inverse

    @full_precision()
    def _centred(self, X: Tensor) -> Tensor:
        """K with C(A) = K: F X D, or X B^H, in float64."""
        X = X.to(double_dtype(X.dtype))
        if self.has_base:
            return X @ self.base.to(X.dtype).mH
        return self.flip_rows(X) * self._signs(X.dtype, X.device)

    def right_inverse(self, X: Tensor) -> Tensor:
        """Coordinates V ``(*batch, n, n)`` of X, zero where they do not count.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If X is not orthogonal (unitary).
            RepresentationError: If det X is another, or F X D (with a base X B^H) has an
                eigenvalue at -1, or so near that rounded coordinates miss X by more than
                `tolerance`.
        """
        point = self.check_point(X)
        obstacle = self.determinant_obstacle(point)
        if obstacle is not None:
            raise RepresentationError(obstacle)
        if self.has_base and self.base.dtype == point.dtype and torch.equal(self.base, point):
            return torch.zeros_like(X)
        V = cayley_coordinates(self._centred(point)).to(X.dtype)
        back = self._weight(V.to(point.dtype))
        if not bool(((back - point).abs() <= tolerance(X.dtype, self.n, self.n)).all()):
            raise RepresentationError(self._describe(point, X.dtype))
        return V

    def _describe(self, point: Tensor, dtype: torch.dtype) -> str:
        """Why coordinates are too large, and the nearest remedy."""
        K = self._centred(point)
        eye = torch.eye(self.n, dtype=K.dtype, device=K.device)
        smallest = float(torch.linalg.svdvals(eye + K).amin())
        what = "X B^H, B the base," if self.has_base else "F X D"
        if self.has_base:
            remedy = "stiefel.convert or Constraint.assign, which move the base there"
        else:
            remedy = "rebase_every= (its base can be the matrix), another number of -1 by negative="
        return (
            f"Cayley coordinates are infinite where {what} has an eigenvalue -1, and the matrix is "
            f"there or too near for {dtype}: the smallest singular value of I + K is "
            f"{smallest:.2g}. Use {remedy}, via='matrix_exp' or via='cwy'"
        )

    def determinant_remedy(self) -> str:
        """What to do about a matrix of the other determinant; `negative` may have fixed ours."""
        if self.negative is None:
            return super().determinant_remedy()
        near = self.negative + (1 if self.negative < self.n else -1)
        return (
            f"negative={self.negative} fixes it. Take via='cayley' without negative=, which "
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

        C(A) is a rotation by -t in each plane, so the coordinates are small (no eigenvalue of C
        near -1). The last row is negated where the determinant asks for it.
        """
        working = compute_dtype(dtype)
        size = (*self.batch, self.n // 2)
        t = torch.rand(size, dtype=real_dtype(working), device=device, generator=generator)
        Q = block_rotations(-math.pi / 2 * t, self.n).to(working) * self._signs(working, device)
        signs = self.determinants()
        if signs is not None and not dtype.is_complex:
            Q = with_determinant(Q, signs.to(Q).expand(self.batch))
        return Q.to(dtype)

    @full_precision()
    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """Moves the base to the weight, B <- C(A) B, A <- 0; the optimizer's moments are reset.

        Without a base nothing changes.
        """
        if not self.has_base:
            return super().rebase(originals)
        V = originals[0].detach()
        working = torch.promote_types(compute_dtype(V.dtype), self.base.dtype)
        self._store_base(polish(self._weight(V.to(working))))

        def move(index: int, key: str, moment: Tensor) -> Tensor | None:
            return None if moment.shape == V.shape else moment

        return (torch.zeros_like(V),), move

    def extra_repr(self) -> str:
        """Sizes and options."""
        options = {"negative": self.negative, "rebase_every": self.rebase_every}
        said = [f"{key}={value}" for key, value in options.items() if value is not None]
        return ", ".join([super().extra_repr(), *said])
