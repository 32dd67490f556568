"""How far the weights of a model are from their manifolds, measured in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError
from stiefel.geometry.determinant import determinant_sign
from stiefel.manifolds import is_stiefel, tolerance_on
from stiefel.numerics import full_precision, in_double
from stiefel.parameter import Constraint, constraints

__all__ = ["Feasibility", "feasibility"]

#: |X^H X - I|_F below which the eigenvalues of X^H X - I give singular values to full accuracy.
_NEAR = 0.5


@dataclass(frozen=True)
class Feasibility:
    """How far one weight is from its manifold; of a batch, the worst matrix in it.

    The weight is measured as the model uses it: in 16 bits with their rounding, for which
    `tolerance` has room. On a manifold of geoopt other than Stiefel the residual is that of
    ``X - projx(X)``, and the singular values are NaN.

    Attributes:
        path: Name of the weight in the model.
        via: Its chart, or ``"riemannian"``.
        shape: Shape of the point, ``(*batch, n, p)`` with n >= p.
        max_residual: Largest entry of |X^H X - I|; NaN for a weight that is not finite.
        frobenius_residual: |X^H X - I|_F, the largest of a batch.
        smallest_singular_value: Of X; 1 on the manifold.
        largest_singular_value: Of X; 1 on the manifold.
        determinant: Sign of the determinant of a real square weight, +1 or -1; 0 where a batch has
            both signs or the weight is singular or not finite. None for other weights.
        tolerance: Largest entry of |X^H X - I| at which the weight counts as on its manifold.
    """

    path: str
    via: str
    shape: tuple[int, ...]
    max_residual: float
    frobenius_residual: float
    smallest_singular_value: float
    largest_singular_value: float
    determinant: int | None
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the weight is on its manifold, within `tolerance`."""
        return self.max_residual <= self.tolerance

    def drift_since(self, earlier: Feasibility, steps: int) -> float:
        """How much `max_residual` grew per step since an earlier measurement.

        Args:
            earlier: What `feasibility` gave for the same weight then.
            steps: Steps in between.

        Returns:
            ``(max_residual - earlier.max_residual) / steps``; negative where it fell.

        Raises:
            ConfigurationError: If `steps` is not positive, or it is another weight.
        """
        if steps < 1:
            raise ConfigurationError(f"expected at least one step in between, got steps={steps}")
        if (self.path, self.shape) != (earlier.path, earlier.shape):
            raise ConfigurationError(
                f"expected an earlier measurement of {self.path!r} {self.shape}, got one of "
                f"{earlier.path!r} {earlier.shape}: a drift is that of one weight"
            )
        return (self.max_residual - earlier.max_residual) / steps


@torch.no_grad()
def feasibility(model: nn.Module) -> dict[str, Feasibility]:
    """Measures how far every constrained weight is from its manifold.

    Args:
        model: Any module.

    Returns:
        The figures by `Constraint.path`, in the order of `stiefel.constraints`.

    Raises:
        ConfigurationError: If a weight is on the meta device.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import feasibility
        >>> layer = stiefel.orthogonal(torch.nn.Linear(8, 3))
        >>> found = feasibility(layer)["weight"]
        >>> found.ok, found.shape, found.via
        (True, (8, 3), 'cwy')
    """
    return {constraint.path: _measure(constraint) for constraint in constraints(model)}


@full_precision()
def _measure(constraint: Constraint) -> Feasibility:
    refuse_meta(constraint)
    X = constraint.point
    manifold, shape = constraint.manifold, tuple(X.shape)
    n, p = shape[-2:] if len(shape) > 1 else (X.numel(), 1)
    bound = tolerance_on(manifold, X.dtype, n, p)
    exact = in_double(X)
    if not is_stiefel(manifold):
        if X.numel() == 0:
            return Feasibility(
                constraint.path, constraint.via, shape, 0.0, 0.0, math.nan, math.nan, None, bound
            )
        residual = (exact - manifold.projx(exact.clone())).abs()
        numbers = float(residual.max()), float(residual.norm()), math.nan, math.nan, None
    else:
        numbers = _stiefel(exact)
    return Feasibility(constraint.path, constraint.via, shape, *numbers, bound)


def refuse_meta(constraint: Constraint) -> None:
    """Raises `ConfigurationError` for a weight without values."""
    if constraint.leaves[0].is_meta:
        raise ConfigurationError(
            f"{constraint.path}: the weight is on the meta device and has no values to measure: "
            "move the model with .to_empty(device=...) and load or initialise it first"
        )


def _stiefel(X: Tensor) -> tuple[float, float, float, float, int | None]:
    """Residuals, singular values and sign of the determinant of X ``(..., n, p)`` in float64.

    X^H X - I = V diag(mu) V^H gives sigma = sqrt(1 + mu) to full accuracy near the manifold.
    """
    n, p = X.shape[-2:]
    square = n == p and not X.is_complex()
    if X.numel() == 0:
        return 0.0, 0.0, 1.0, 1.0, None
    if not bool(X.isfinite().all()):
        return math.nan, math.nan, math.nan, math.nan, 0 if square else None
    E = X.mH @ X - torch.eye(p, dtype=X.dtype, device=X.device)
    frobenius = float(torch.linalg.matrix_norm(E).max())
    near = frobenius < _NEAR
    sigma = (1 + torch.linalg.eigvalsh(E)).sqrt() if near else torch.linalg.svdvals(X)
    determinant = None
    if square:
        signs = determinant_sign(X).flatten()
        determinant = int(signs[0]) if bool((signs == signs[0]).all()) else 0
    return float(E.abs().max()), frobenius, float(sigma.min()), float(sigma.max()), determinant
