"""The matrix exponential as a chart: EXPRNN around the identity, DTRIV around a moving base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, RepresentationError, unknown
from stiefel.geometry.exponential_products import exponential_of_coordinates
from stiefel.geometry.factors import polar_factor
from stiefel.geometry.frame_exponential import frame_exponential
from stiefel.geometry.logarithms import canonical_logarithm, unitary_logarithm
from stiefel.geometry.sampling import block_rotations, haar, with_determinant
from stiefel.geometry.skew_coordinates import skew_to_coordinates
from stiefel.numerics import compute_dtype, double_dtype, full_precision, real_dtype, tolerance
from stiefel.parametrizations.base import Move
from stiefel.parametrizations.component import OneComponent
from stiefel.parametrizations.options import count_option

__all__ = ["MatrixExp"]


def _is_length(value: Any) -> bool:
    """Whether a value is a positive finite number; True and False are none."""
    try:
        return not isinstance(value, bool) and bool(0 < value < math.inf)
    except TypeError:
        return False


class MatrixExp(OneComponent):
    r"""X = exp_B(u), the exponential of the canonical metric at a base B, of free coordinates.

    Square: ``Q = B exp(A)`` with A = triu(V, 1) - triu(V, 1)^H, for complex V plus
    i sqrt(2) Im diag(V). What is below the diagonal of V does not matter. Tall:
    `stiefel.geometry.frame_exponential`, which never forms an n x n matrix. Both are evaluated by
    products alone, for angles of any size, and scaled so that plain SGD on V, rebased at every
    step, is Riemannian gradient descent along geodesics of the canonical metric at the same rate.

    With ``base="identity"`` and a square weight this is EXPRNN (Lezcano-Casado and
    Martinez-Rubio, ICML 2019): ``Q = exp(A)``, and for real Q of determinant -1 the last row is
    negated (the buffer `flip`). With ``base="current"`` it is DTRIV (Lezcano-Casado, NeurIPS
    2019): the base is where the weight was last set or rebased; `rebase` moves it to the current
    weight, whose coordinates are then zero, and the moments of the optimizer are reset.

    Args:
        n: Rows.
        p: Columns; n by default.
        batch: Leading dimensions.
        base: ``"current"`` or ``"identity"``.
        rebase_every: Optimizer steps between rebases; None for none. For ``base="current"``.
        project_every: Rebases between projections of the base to the nearest point, which take
            away the rounding errors of many rebases; None for none. The weight itself is taken to
            orthonormality at every forward pass.
        max_angle: A bound on the spectral norm of u, if one is known: the same products are then
            taken whatever V is, and nothing is read back to the host. A longer u is shortened:
            the weight stays orthonormal, and a little beyond the bound it no longer moves away.

    Raises:
        ShapeError: If n < p.
        ConfigurationError: If an option is out of range, or ``base="identity"`` comes with
            `rebase_every` or `project_every`.
        UnknownNameError: If `base` is none of the two.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import MatrixExp
        >>> chart = MatrixExp(4)
        >>> Q = chart(torch.randn(4, 4, dtype=torch.float64))
        >>> torch.allclose(Q.mT @ Q, torch.eye(4, dtype=torch.float64))
        True
    """

    name = "matrix_exp"
    rebases: Tensor

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        base: str = "current",
        rebase_every: int | None = None,
        project_every: int | None = None,
        max_angle: float | None = None,
    ) -> None:
        super().__init__(n, p, batch=batch)
        if base not in ("current", "identity"):
            raise unknown("base", base, ("current", "identity"))
        for option, value in (("rebase_every", rebase_every), ("project_every", project_every)):
            if value is None:
                continue
            if base == "identity":
                raise ConfigurationError(
                    f"base='identity' never moves, so {option}={value!r} has no meaning: leave it "
                    "out, or use base='current' (via='matrix_exp')"
                )
            count_option(self.name, option, value, 1, said=self.said)
        if max_angle is not None and not _is_length(max_angle):
            raise ConfigurationError(
                f"{self.label}: expected max_angle > 0 or None, got {max_angle!r}. It is an angle "
                "in radians; leave it out where no bound is known"
            )
        self.has_base = base == "current"
        self.rebase_every, self.project_every = rebase_every, project_every
        self.max_angle = None if max_angle is None else float(max_angle)
        self.keep_flip()
        if self.has_base:
            eye = torch.eye(self.n, self.p).expand(self.shape)
            self.register_buffer("base", eye.clone(memory_format=torch.contiguous_format))
        if self.project_every is not None:
            self.register_buffer("rebases", torch.zeros((), dtype=torch.int64))

    # ------------------------------------------------------------------------ the map

    def _base_for(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """B in a working dtype."""
        if self.has_base:
            return self.base.to(dtype)
        return torch.eye(self.n, self.p, dtype=dtype, device=device).expand(self.shape)

    def _weight(self, V: Tensor, max_angle: float | None) -> Tensor:
        """The weight in float32 or better."""
        V = V.to(compute_dtype(V.dtype))
        if self.p < self.n:
            B = self._base_for(V.dtype, V.device)
            return frame_exponential(V, B.expand(V.shape), max_angle=max_angle)
        if not self.has_base:
            return self.flip_rows(exponential_of_coordinates(V, max_angle=max_angle))
        B = self._base_for(V.dtype, V.device).expand(V.shape)
        return exponential_of_coordinates(V, B, max_angle=max_angle)

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from V, shape ``(*batch, n, p)``."""
        return self.emit(self._weight(originals[0], self.max_angle), originals[0])

    # -------------------------------------------------------------------- its inverse

    def right_inverse(self, X: Tensor) -> Tensor:
        """Coordinates ``(*batch, n, p)`` of X: its logarithm at the base, zero at the base itself.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If the columns of X are not orthonormal.
            RepresentationError: If det X is not that of the base (real square weights), or X is
                too far from the base (tall weights), or farther than `max_angle` lets it be.
        """
        lifted = self.check_point(X)
        B = self._base_for(lifted.dtype, lifted.device)
        if torch.equal(lifted, B):
            return torch.zeros_like(X, memory_format=torch.contiguous_format)
        reason = self.determinant_obstacle(lifted)
        if reason is not None:
            raise RepresentationError(reason)
        V = self._coordinates(lifted, B)
        self._check_angles(V, tolerance(X.dtype, self.n, self.p))
        return V.to(X.dtype)

    @torch.no_grad()
    def _check_angles(self, V: Tensor, bound: float) -> None:
        """Raises a RepresentationError where `max_angle` shortens V: another weight results."""
        if self.max_angle is None or V.numel() == 0:
            return
        V = V.to(double_dtype(V.dtype))
        moved = float((self._weight(V, self.max_angle) - self._weight(V, None)).abs().amax())
        if moved <= bound:
            return
        remedy = (
            "assign the weight, which moves the base"
            if self.has_base
            else "use base='current', which takes any value"
        )
        raise RepresentationError(
            f"{self.label}: the matrix has angles from the base above "
            f"max_angle={self.max_angle:.4g}, so that the weight would be {moved:.2g} away from "
            f"it: make the chart with a larger max_angle= or without it, or {remedy}"
        )

    @full_precision()
    def _coordinates(self, X: Tensor, B: Tensor) -> Tensor:
        if self.p == self.n:
            double = double_dtype(X.dtype)
            Q = B.to(double).mH @ X.to(double) if self.has_base else self.flip_rows(X)
            return skew_to_coordinates(unitary_logarithm(Q))
        try:
            u = canonical_logarithm(B, X)
        except RepresentationError as error:
            remedy = (
                "assign the weight, which moves the base"
                if self.has_base
                else "use base='current', which takes any value"
            )
            raise RepresentationError(f"{self.label}: {error}: {remedy}") from error
        a = B.mH @ u
        return u + B @ a * (math.sqrt(0.5) - 1)

    def obstacle(self, X: Tensor) -> str | None:
        """The wrong determinant, or a matrix too far from the base; None for other points."""
        if self.p == self.n and (self.max_angle is None or self.max_angle >= math.pi):
            return self.determinant_obstacle(self.check_point(X))
        return super().obstacle(X)

    def meaning(self) -> dict[str, Any]:
        """Whether there is a base, and the bound that longer coordinates are shortened to."""
        return {**super().meaning(), "max_angle": self.max_angle}

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Uninitialised V, shape ``(*batch, n, p)``."""
        return torch.empty(self.shape, dtype=dtype, device=device)

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A Haar point of the base's component; around the identity a rotation that it reaches.

        With ``base="identity"`` the square start is that of EXPRNN: blocks [[0, a], [-a, 0]] with
        a uniform on (-pi, pi), or as far as `max_angle` where that is less, after Henaff, Szlam and
        LeCun; tall, a random frame at a distance below one half.
        """
        working = compute_dtype(dtype)
        if self.has_base:
            size = (self.n, self.p, self.batch)
            X = haar(*size, dtype=working, device=device, generator=generator)
            signs = self.determinants()
            if signs is not None and not working.is_complex:
                X = with_determinant(X, signs.to(X))
            return X.to(dtype)
        if self.p == self.n:
            size = (*self.batch, self.n // 2)
            t = torch.rand(size, dtype=real_dtype(working), device=device, generator=generator)
            most = math.pi if self.max_angle is None else min(math.pi, self.max_angle)
            Q = block_rotations(most * (2 * t - 1), self.n).to(working)
            return self.flip_rows(Q).to(dtype)
        random = torch.randn(self.shape, dtype=working, device=device, generator=generator)
        with torch.no_grad():
            return self._weight(random / (4 * math.sqrt(self.n)), self.max_angle).to(dtype)

    # ---------------------------------------------------------------------- new bases

    @torch.no_grad()
    def rebase(self, originals: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Move]:
        """Moves the base to the current weight; the coordinates are zero and the moments reset.

        Around the identity nothing changes.
        """
        if not self.has_base:
            return super().rebase(originals)
        V = originals[0].detach()
        X = self._weight(V, self.max_angle)
        if self.project_every is not None:
            self.rebases = self.rebases + 1
            if int(self.rebases) % self.project_every == 0:
                X = polar_factor(X)
        self._store_base(X)

        def move(index: int, key: str, moment: Tensor) -> Tensor | None:
            return None if moment.shape == V.shape else moment

        return (torch.zeros_like(V),), move

    def extra_repr(self) -> str:
        """Sizes and the options that are set."""
        options = {
            "base": "current" if self.has_base else "identity",
            "rebase_every": self.rebase_every,
            "project_every": self.project_every,
            "max_angle": self.max_angle,
        }
        given = ", ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
        return f"{super().extra_repr()}, {given}"
