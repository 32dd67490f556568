"""The Stiefel manifold as a geoopt manifold: composition of the functions in `stiefel.geometry`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stiefel import geometry
from stiefel.errors import ConfigurationError, OffManifoldError, ShapeError, unknown
from stiefel.manifolds.base import Manifold, ManifoldTensor
from stiefel.manifolds.pairs import two_points
from stiefel.numerics import tolerance

__all__ = ["Stiefel", "auto_retraction"]

_INNERS = {"canonical": geometry.canonical_inner, "euclidean": geometry.euclidean_inner}
_GRADIENTS = {"canonical": geometry.canonical_gradient, "euclidean": geometry.euclidean_gradient}
_DISTANCES = {"canonical": geometry.canonical_distance, "euclidean": geometry.euclidean_distance}


def auto_retraction(n: int, p: int, device: torch.device | str | None = None) -> str:
    """Chooses a retraction by shape and device.

    Cayley (third order, no drift) for thin frames on the CPU, Cholesky-QR (products and small
    solves) for nearly square matrices and on accelerators.

    Args:
        n: Rows.
        p: Columns.
        device: Where the point lives; the CPU by default.

    Returns:
        The name of a retraction.
    """
    on_cpu = device is None or torch.device(device).type == "cpu"
    return "cayley" if on_cpu and 2 * p <= n else "cholesky_qr"


class Stiefel(Manifold):
    r"""The manifold of matrices with orthonormal columns, St(n, p) = {X : X^H X = I}, n >= p.

    Points are tensors ``(..., n, p)``, real or complex; leading dimensions are a batch. Two
    instances with the same metric and retraction are equal.

    Args:
        inner: The metric, ``"canonical"`` or ``"euclidean"``; kept as the attribute `metric`.
        retraction: ``"cayley"``, ``"qr"``, ``"cholesky_qr"``, ``"polar"``, ``"exp"`` (the
            exponential of the metric), or ``"auto"``, which needs `sizes` and is resolved now.
        sizes: (n, p), for ``retraction="auto"`` only.
        device: Where the points will live, for ``retraction="auto"`` only.
        tolerance: The largest entry of |X^H X - I| at which X still counts as a point, for
            optimizers that keep their iterates near the manifold, not on it;
            `stiefel.tolerance` by default.

    Raises:
        UnknownNameError: If a name is not one of those above.
        ConfigurationError: If ``retraction="auto"`` comes without `sizes`, or `tolerance` is not
            between 0 and 1.

    Example:
        >>> import torch, stiefel
        >>> manifold = stiefel.Stiefel(inner="euclidean", retraction="qr")
        >>> X = manifold.random(5, 2, dtype=torch.float64)
        >>> manifold.check_point_on_manifold(X)
        True
        >>> manifold == stiefel.Stiefel("euclidean", "qr")
        True
    """

    name = "Stiefel"
    ndim = 2
    reversible = False

    def __init__(
        self,
        inner: str = "canonical",
        retraction: str = "cayley",
        *,
        sizes: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        if inner not in _INNERS:
            raise unknown("inner product", inner, _INNERS)
        if retraction == "auto":
            if sizes is None:
                raise ConfigurationError(
                    "retraction='auto' is resolved when the manifold is made: expected "
                    "sizes=(n, p), got None. Give sizes, or name a retraction"
                )
            retraction = auto_retraction(*sizes, device)
        if retraction not in geometry.RETRACTIONS and retraction != "exp":
            raise unknown("retraction", retraction, [*geometry.RETRACTIONS, "exp", "auto"])
        if tolerance is not None and not 0 < tolerance < 1:
            raise ConfigurationError(
                f"expected a tolerance between 0 and 1, got {tolerance}: beyond 1 the columns may "
                "be linearly dependent. Leave it out for points on the manifold"
            )
        self.metric = inner
        self.retraction = retraction
        self.tolerance = tolerance

    def _options(self) -> tuple[Any, ...]:
        return type(self), self.metric, self.retraction, self.tolerance

    def __eq__(self, other: object) -> bool:
        """Whether `other` has the same type, metric, retraction and tolerance."""
        return isinstance(other, Stiefel) and other._options() == self._options()

    def __hash__(self) -> int:
        """Hash by value, as equality is."""
        return hash(self._options())

    def extra_repr(self) -> str:
        """The options; the tolerance where it is not the usual one."""
        thick = "" if self.tolerance is None else f", tolerance={self.tolerance:g}"
        return f"inner={self.metric!r}, retraction={self.retraction!r}{thick}"

    def tolerance_for(self, dtype: torch.dtype, n: int, p: int) -> float:
        """The largest entry of |X^H X - I| at which X counts as a point."""
        usual = tolerance(dtype, n, p)
        return usual if self.tolerance is None else max(self.tolerance, usual)

    # -- metric ---------------------------------------------------------------------------------
    def inner(
        self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False
    ) -> Tensor:
        """Inner product of tangent vectors `u` and `v` (default u) at `x`, shape ``(...)``."""
        value = _INNERS[self.metric](x, u, u if v is None else v)
        return value[..., None, None] if keepdim else value

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian gradient in the manifold's metric of the ambient gradient `u` at `x`."""
        return _GRADIENTS[self.metric](x, u)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Riemannian Hessian-vector product in the manifold's metric.

        Args:
            x: The point.
            egrad: The ambient gradient at `x`.
            ehess: Its derivative along `u`, the ambient Hessian-vector product.
            u: A tangent vector.
        """
        return geometry.HESSIANS[self.metric](x, egrad, ehess, u)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Orthogonal projection of `u` onto the tangent space at `x`."""
        return geometry.tangent_projection(x, u)

    def projx(self, x: Tensor) -> Tensor:
        """The point nearest to `x` (its polar factor)."""
        return geometry.polar_factor(x)

    # -- moving ---------------------------------------------------------------------------------
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Retraction of the tangent vector `u` at `x`.

        The exponential is followed by one step towards the nearest point: its rounding errors
        would add up over thousands of steps, 1e-5 in a few hundred in float32.
        """
        if self.retraction == "exp":
            return geometry.polish(self.expmap(x, u))
        return geometry.RETRACTIONS[self.retraction](x, u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Exponential of the manifold's metric: the geodesic from `x` along `u` at time one."""
        return geometry.EXPONENTIALS[self.metric](x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector at `x` whose geodesic reaches `y` at time one: inverse of `expmap`.

        Computed in float64 by a convergent iteration; `stiefel.geometry.LOGARITHMS` also gives its
        residual. No gradient flows through it; that of `dist` is exact.

        Raises:
            RepresentationError: If the iteration does not converge; the message states its
                residual.
            ShapeError: If the matrices differ in size.
            OffManifoldError: If it fails because `x` or `y` is no point.
        """
        with two_points(self, x, y):
            return geometry.LOGARITHMS[self.metric](*torch.broadcast_tensors(x, y))

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length of the geodesic from `x` to `y`, shape ``(...)``; differentiable once.

        Raises:
            RepresentationError: If `logmap` does not converge; the message states its residual.
        """
        with two_points(self, x, y):
            value = _DISTANCES[self.metric](x, y)
        return value[..., None, None] if keepdim else value

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Transport of `v` from `x` to `y` by projection."""
        return geometry.projection_transport(y, v)

    def transp_follow_retr(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Transport of `v` along the retraction of `u`; isometric for the Cayley retraction."""
        return self.retr_transp(x, u, v)[1]

    def transp_follow_expmap(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Transport of `v` to ``expmap(x, u)`` by projection."""
        return geometry.projection_transport(self.expmap(x, u), v)

    def retr_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``(retr(x, u), v carried there)``: isometric for Cayley, by projection otherwise."""
        y = self.retr(x, u)
        if self.retraction == "cayley":
            return y, geometry.cayley_transport(x, u, v)
        return y, geometry.projection_transport(y, v)

    def expmap_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``(expmap(x, u), v carried there by projection)``."""
        y = self.expmap(x, u)
        return y, geometry.projection_transport(y, v)

    # -- points ---------------------------------------------------------------------------------
    def random(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A Haar distributed point of shape `size` (``n, p`` last).

        Args:
            *size: Shape, as integers or one sequence.
            dtype: Dtype of the point.
            device: Device of the point.
            generator: Source of randomness.
            **kwargs: Further options of `stiefel.geometry.haar`, such as ``determinant=``.
        """
        shape = self._shape(size)
        n, p = shape[-2:]
        X = geometry.haar(
            n, p, shape[:-2], dtype=dtype, device=device, generator=generator, **kwargs
        )
        return ManifoldTensor(X, manifold=self)

    def origin(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> Tensor:
        """The first p columns of the identity, as a point of shape `size`; `seed` is ignored."""
        shape = self._shape(size)
        eye = torch.eye(*shape[-2:], dtype=dtype, device=device)
        return ManifoldTensor(eye.expand(shape).contiguous(), manifold=self)

    def _shape(self, size: tuple[Any, ...]) -> tuple[int, ...]:
        shape = tuple(size) if size and isinstance(size[0], int) else tuple(*size)
        self._raise_for_shape(shape, "x")
        return shape

    # -- checks ---------------------------------------------------------------------------------
    def _check_shape(self, shape: Any, name: str) -> tuple[bool, str | None]:
        if len(shape) < 2 or shape[-2] < shape[-1]:
            return False, (
                f"expected {name!r} of shape (..., n, p) with n >= p, got {tuple(shape)}: "
                "transpose wide matrices first, or use stiefel.orthogonal, which does"
            )
        return True, None

    def _raise_for_shape(self, shape: Any, name: str) -> None:
        ok, reason = self._check_shape(shape, name)
        if not ok:
            raise ShapeError(reason)

    def assert_check_point(self, x: Tensor) -> None:
        """Raises `ShapeError` if `x` has not the shape of a point."""
        self._raise_for_shape(x.shape, "x")

    def assert_check_vector(self, u: Tensor) -> None:
        """Raises `ShapeError` if `u` has not the shape of a tangent vector."""
        self._raise_for_shape(u.shape, "u")

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float | None = None, rtol: float | None = None
    ) -> tuple[bool, str | None]:
        bound = self.tolerance_for(x.dtype, *x.shape[-2:]) if atol is None else atol
        residual = geometry.orthonormality_residual(x)
        worst = float(residual.max()) if residual.numel() else 0.0
        if worst <= bound:
            return True, None
        return False, (
            f"expected orthonormal columns: the largest entry of |X^H X - I| is {worst:.2e}, the "
            f"tolerance for {x.dtype} and shape {tuple(x.shape)} is {bound:.2e}. Project with "
            "manifold.projx(x)"
        )

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float | None = None, rtol: float | None = None
    ) -> tuple[bool, str | None]:
        size = float(u.detach().abs().max()) if u.numel() else 0.0
        bound = tolerance(x.dtype, *x.shape[-2:]) * max(1.0, size) if atol is None else atol
        residual = geometry.tangency_residual(x, u)
        worst = float(residual.max()) if residual.numel() else 0.0
        if worst <= bound:
            return True, None
        return False, (
            f"expected a tangent vector: the largest entry of |X^H u + u^H X| is {worst:.2e}, the "
            f"tolerance is {bound:.2e}. Project with manifold.proju(x, u)"
        )

    def check_point_on_manifold(
        self,
        x: Tensor,
        *,
        explain: bool = False,
        atol: float | None = None,
        rtol: float | None = None,
    ) -> Any:
        """Whether `x` is a point, within `tolerance_for` (or `atol`, when given).

        Args:
            x: Tensor to check.
            explain: Also return the reason of a failure.
            atol: Absolute bound instead of that.
            rtol: Ignored; kept for geoopt's signature.

        Returns:
            A bool, or ``(bool, reason)`` with `explain`.
        """
        ok, reason = self._check_shape(x.shape, "x")
        if ok:
            ok, reason = self._check_point_on_manifold(x, atol=atol)
        return (ok, reason) if explain else ok

    def check_vector_on_tangent(
        self,
        x: Tensor,
        u: Tensor,
        *,
        ok_point: bool = False,
        explain: bool = False,
        atol: float | None = None,
        rtol: float | None = None,
    ) -> Any:
        """Whether `u` is tangent at `x`, within `stiefel.tolerance` (or `atol`, when given).

        Args:
            x: The point.
            u: The vector.
            ok_point: Skip the check of the point.
            explain: Also return the reason of a failure.
            atol: Absolute bound instead of `stiefel.tolerance`.
            rtol: Ignored; kept for geoopt's signature.

        Returns:
            A bool, or ``(bool, reason)`` with `explain`.
        """
        ok, reason = self._check_shape(u.shape, "u")
        if ok and not ok_point:
            ok, reason = self.check_point_on_manifold(x, explain=True, atol=atol)
        if ok:
            ok, reason = self._check_vector_on_tangent(x, u, atol=atol)
        return (ok, reason) if explain else ok

    def assert_check_point_on_manifold(
        self, x: Tensor, *, atol: float | None = None, rtol: float | None = None
    ) -> None:
        """Raises `ShapeError` or `OffManifoldError` if `x` is not a point."""
        self.assert_check_point(x)
        ok, reason = self._check_point_on_manifold(x, atol=atol)
        if not ok:
            raise OffManifoldError(reason)

    def assert_check_vector_on_tangent(
        self,
        x: Tensor,
        u: Tensor,
        *,
        ok_point: bool = False,
        atol: float | None = None,
        rtol: float | None = None,
    ) -> None:
        """Raises `ShapeError` or `OffManifoldError` if `u` is not tangent at `x`."""
        self.assert_check_vector(u)
        ok, reason = self.check_vector_on_tangent(x, u, ok_point=ok_point, explain=True, atol=atol)
        if not ok:
            raise OffManifoldError(reason)
