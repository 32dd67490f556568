"""Factors of a matrix that have orthonormal columns: polar (nearest), QR, Cholesky-QR."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stiefel.errors import DoubleBackwardError
from stiefel.geometry.guard import guarded
from stiefel.geometry.tangent import skew

__all__ = ["cholesky_qr_factor", "polar_factor", "qr_factor"]


@guarded
def qr_factor(Z: Tensor) -> Tensor:
    """The Q factor of ``Z = Q R`` whose R has a positive diagonal.

    The sign (for complex matrices the phase) of each diagonal entry of R is moved into Q, out of
    place: without it the factor jumps between points and a Gaussian Z does not give Haar Q.

    Args:
        Z: Matrices of full column rank, shape ``(..., n, p)``, n >= p.

    Returns:
        Q, shape ``(..., n, p)``, orthonormal columns.

    Raises:
        ShapeError: If n < p.
    """
    Q, R = torch.linalg.qr(Z)
    diagonal = R.diagonal(dim1=-2, dim2=-1)
    phase = torch.where(diagonal == 0, torch.ones_like(diagonal), torch.sgn(diagonal))
    return Q * phase.unsqueeze(-2)


@guarded
def cholesky_qr_factor(Z: Tensor) -> Tensor:
    """The Q factor of `qr_factor` by two Cholesky factorisations of the Gram matrix.

    ``R^H R = Z^H Z + s I, Z <- Z R^-1``, twice, with a shift s of a few rounding errors of
    ``|Z|^2`` the first time, so that the factorisation exists for every Z of numerical full rank
    (Fukaya et al., SIAM J. Sci. Comput. 42 (2020)); the second pass, on a well-conditioned matrix,
    has none, for it would be left in the result. It is made of products and small triangular solves, so it is
    batched where QR is not; the condition number of Z must stay below about ``eps^(-1/2)`` for
    full accuracy.

    Args:
        Z: Matrices of full column rank, shape ``(..., n, p)``, n >= p.

    Returns:
        Q, shape ``(..., n, p)``, orthonormal columns.
    """
    p = Z.shape[-1]
    identity = torch.eye(p, dtype=Z.dtype, device=Z.device)
    eps = torch.finfo(Z.dtype).eps
    for shift in (4 * eps, 0):
        gram = Z.mH @ Z
        if shift:
            trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).detach()
            gram = gram + (shift * trace)[..., None, None] * identity
        R = torch.linalg.cholesky_ex(gram).L.mH
        Z = torch.linalg.solve_triangular(R, Z, upper=True, left=False)
    return Z


class _Polar(torch.autograd.Function):
    """Polar factor W of Z = W P with the closed-form derivative, finite at repeated values.

    dW = W Omega + (I - W W^H) dZ P^-1, where P Omega + Omega P = 2 skew(W^H dZ).
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, values, right = torch.linalg.svd(Z, full_matrices=False)
        return left @ right, values, right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _PolarBackward.apply(grads[0], *ctx.saved_tensors)  # pyright: ignore

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], Z: Tensor) -> tuple[Any, Any]:
        return _Polar.apply(Z.movedim(in_dims[0] or 0, 0)), (0, 0, 0)


class _PolarBackward(torch.autograd.Function):
    """Z-bar = 2 W F + (I - W W^H) W-bar P^-1 with P F + F P = skew(W^H W-bar)."""

    @staticmethod
    def forward(grad: Tensor, W: Tensor, values: Tensor, right: Tensor) -> Tensor:
        # P = V diag(values) V^H with V = right^H: work in the basis V.
        tiny = torch.finfo(values.dtype).tiny
        E = right @ (W.mH @ grad) @ right.mH
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        F = skew(E) / sums.clamp_min(tiny)
        tangent = 2 * W @ (right.mH @ F @ right)
        outside = grad - W @ (W.mH @ grad)
        scaled = (outside @ right.mH) / values.clamp_min(tiny).unsqueeze(-2)
        return tangent + scaled @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise DoubleBackwardError(
            "polar_factor has a first derivative only; for second derivatives compute the factor "
            "with torch.linalg.svd, whose derivative is finite at distinct singular values"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        moved = [
            a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
            for a, d in zip(args, in_dims, strict=True)
        ]
        return _PolarBackward.apply(*moved), 0  # pyright: ignore


@guarded
def polar_factor(Z: Tensor) -> Tensor:
    """The matrix with orthonormal columns nearest to `Z` in the Frobenius norm.

    ``Z = W P`` with P positive semidefinite; W is computed from the singular value decomposition,
    its derivative in closed form, so that it is finite at repeated singular values (every
    orthonormal Z has them).

    Args:
        Z: Matrices of full column rank, shape ``(..., n, p)``, n >= p.

    Returns:
        W, shape ``(..., n, p)``, orthonormal columns.

    Raises:
        ShapeError: If n < p.
        DoubleBackwardError: In a second derivative.
    """
    return _Polar.apply(Z)[0]  # pyright: ignore
