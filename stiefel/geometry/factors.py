"""Factors of a matrix that have orthonormal columns: polar (nearest), QR, Cholesky-QR."""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.guard import guarded
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.polar_gradient import keeps_left, pairs_fake, polar_gradient

__all__ = ["cholesky_qr_factor", "polar_factor", "qr_factor", "triangular_quotient"]


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

    Example:
        >>> import torch
        >>> from stiefel.geometry import qr_factor
        >>> Z = torch.tensor([[2.0, 1.0], [0.0, -3.0], [0.0, 0.0]])
        >>> qr_factor(Z) + 0.0
        tensor([[ 1.,  0.],
                [ 0., -1.],
                [ 0.,  0.]])
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
    has none, for it would be left in the result. It is made of products and small triangular
    solves, so it is batched where QR is not; the condition number of Z must stay below about
    ``eps^(-1/2)`` for full accuracy.

    Args:
        Z: Matrices of full column rank, shape ``(..., n, p)``, n >= p.

    Returns:
        Q, shape ``(..., n, p)``, orthonormal columns.

    Example:
        >>> import torch
        >>> from stiefel.geometry import cholesky_qr_factor, qr_factor
        >>> Z = torch.randn(6, 2, dtype=torch.float64)
        >>> torch.allclose(cholesky_qr_factor(Z), qr_factor(Z))
        True
    """
    p = Z.shape[-1]
    identity = torch.eye(p, dtype=Z.dtype, device=Z.device)
    eps = torch.finfo(Z.dtype).eps
    for shift in (4 * eps, 0):
        gram = Z.mH @ Z
        if shift:
            trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1).detach()
            gram = gram + (shift * trace)[..., None, None] * identity
        Z = triangular_quotient(Z, gram)
    return Z


def triangular_quotient(Z: Tensor, gram: Tensor) -> Tensor:
    """``Z R^-1`` with ``R^H R`` the Gram matrix; NaN where that is not positive definite."""
    factor = torch.linalg.cholesky_ex(gram)
    failed = (factor.info != 0)[..., None, None]  # rank deficient: NaN, not nonsense
    R = torch.where(failed, torch.nan, factor.L).mH
    return torch.linalg.solve_triangular(R, Z, upper=True, left=False)


@kernel_op("polar_factor", "(Tensor Z) -> (Tensor, Tensor, Tensor, Tensor)", fake=pairs_fake)
def _polar(Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W = U V^H of Z = U diag(s) V^H, then U, s and V for the backward pass."""
    bad = ~Z.isfinite().flatten(-2).all(-1)[..., None, None]
    some = bool(bad.any())
    U, s, Vh = torch.linalg.svd(torch.where(bad, 0, Z) if some else Z, full_matrices=False)
    W = torch.where(bad, torch.nan, U @ Vh) if some else U @ Vh
    kept = U if keeps_left(*Z.shape[-2:]) else U.new_empty(*U.shape[:-2], 0, U.shape[-1])
    return W, kept, s, Vh.mH


@kernel_op(
    "polar_factor_backward",
    "(Tensor grad, Tensor W, Tensor U, Tensor s, Tensor V, Tensor Z) -> Tensor[]",
    fake=lambda grad, W, U, s, V, Z: [Z.new_empty(Z.shape)],
)
def _polar_backward(
    grad: Tensor, W: Tensor, U: Tensor, s: Tensor, V: Tensor, Z: Tensor
) -> list[Tensor]:
    return [polar_gradient(grad, W, U, s, V)]


_polar_factor = differentiable(_polar, _polar_backward, name="polar_factor", keep_result=True)


@guarded
def polar_factor(Z: Tensor) -> Tensor:
    """The matrix with orthonormal columns nearest to `Z` in the Frobenius norm.

    ``Z = W P`` with P positive semidefinite; W is computed from the singular value decomposition,
    its derivative in closed form, so that it is finite at repeated singular values (every
    orthonormal Z has them): ``dW = W Omega + (I - W W^H) dZ P^-1`` where
    ``P Omega + Omega P = 2 skew(W^H dZ)``.

    Args:
        Z: Matrices of full column rank, shape ``(..., n, p)``, n >= p.

    Returns:
        W, shape ``(..., n, p)``, orthonormal columns; NaN where Z is not finite.

    Raises:
        ShapeError: If n < p.
        DoubleBackwardError: In a second derivative.
        ForwardModeError: In forward mode.

    Example:
        >>> import torch
        >>> from stiefel.geometry import polar_factor
        >>> Z = torch.tensor([[3.0, 0.0], [0.0, 0.5], [0.0, 0.0]], dtype=torch.float64)
        >>> torch.allclose(polar_factor(Z), torch.eye(3, 2, dtype=torch.float64))
        True
    """
    return _polar_factor(Z)
