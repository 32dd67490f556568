"""Logarithms: the inverse of the exponentials, in float64, one matrix at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import scipy.linalg
import torch
from torch import Tensor

from stiefel.errors import RepresentationError, ShapeError
from stiefel.geometry.guard import check_point_shape
from stiefel.geometry.polish import polish
from stiefel.numerics import compute_dtype, double_dtype, full_precision

__all__ = ["canonical_logarithm", "unitary_logarithm"]

#: Iterations of the logarithm of a frame, and the size of its correction at which it ends.
_ITERATIONS, _CONVERGED = 300, 1e-14
#: Longest step of that iteration, in units of its first.
_LONGEST = 30.0
#: Residual of a logarithm above which it is refused.
_FAILED = 1e-9


def _double(X: Tensor) -> Tensor:
    """X in float64, moved to the manifold as far as its own precision had left it."""
    return polish(X.detach().to(double_dtype(X.dtype)), 3)


def _each(function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Applies a function to the matrices of equal batches, one after another."""
    shape = batches[0].shape
    if batches[0].numel() == 0:
        return torch.zeros_like(batches[0])
    flat = [X.reshape(-1, *X.shape[-2:]).cpu() for X in batches]
    results = torch.stack([function(*matrices) for matrices in zip(*flat, strict=True)])
    return results.reshape(shape).to(batches[0].device)


def _real_angles(T: Tensor) -> Tensor:
    """The logarithm of a real quasi-triangular orthogonal T, which is block diagonal.

    A block of two rotates by atan2; eigenvalues -1, of which there is an even number, are paired
    and turn by pi.
    """
    n = T.shape[-1]
    below = T.diagonal(-1).tolist()
    A, negative, k = torch.zeros_like(T), [], 0
    while k < n:
        if k + 1 < n and below[k] != 0:
            sine = float(T[k + 1, k] - T[k, k + 1]) / 2
            cosine = float(T[k, k] + T[k + 1, k + 1]) / 2
            A[k + 1, k] = math.atan2(sine, cosine)
            k += 2
            continue
        if T[k, k] < 0:
            negative.append(k)
        k += 1
    if len(negative) % 2:
        raise RepresentationError(
            "a real matrix of determinant -1 has no skew logarithm: negate one of its rows, or "
            "use a base of determinant -1"
        )
    for i, j in zip(negative[::2], negative[1::2], strict=True):
        A[j, i] = math.pi
    return A - A.mT


def _one_unitary(Q: Tensor) -> Tensor:
    if Q.is_complex():
        T, Z = (torch.from_numpy(F) for F in scipy.linalg.schur(Q.numpy(), output="complex"))
        A = (Z * (1j * T.diagonal().angle())) @ Z.mH
    else:
        T, Z = (torch.from_numpy(F) for F in scipy.linalg.schur(Q.numpy(), output="real"))
        A = Z @ _real_angles(T) @ Z.mT
    return (A - A.mH) / 2


@torch.no_grad()
@full_precision()
def unitary_logarithm(Q: Tensor) -> Tensor:
    """The principal logarithm of orthogonal or unitary matrices: skew, angles in [-pi, pi].

    Q is normal, so its Schur form is (block) diagonal, ``Q = Z T Z^H`` and ``A = Z log(T) Z^H``.
    A real matrix with eigenvalues -1 has many logarithms; they are paired, one of them results.

    Args:
        Q: Shape ``(..., n, n)``; computed in float64.

    Returns:
        A with exp(A) = Q, same shape, in float32 or better.

    Raises:
        ShapeError: If the matrices are not square.
        RepresentationError: If a real matrix has determinant -1.

    Example:
        >>> import torch
        >>> from stiefel.geometry import unitary_logarithm
        >>> unitary_logarithm(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64))
        tensor([[ 0.0000, -1.5708],
                [ 1.5708,  0.0000]], dtype=torch.float64)
    """
    check_point_shape(Q)
    if Q.shape[-1] != Q.shape[-2]:
        raise ShapeError(f"expected square matrices, got {tuple(Q.shape)}")
    return _each(_one_unitary, _double(Q)).to(compute_dtype(Q.dtype))


def _basis(B: Tensor, X: Tensor) -> Tensor:
    """Orthonormal columns, orthogonal to B, whose span with B holds X: n x min(p, n - p)."""
    n, p = B.shape
    U = torch.linalg.svd(X - B @ (B.mH @ X), full_matrices=False).U
    return torch.linalg.qr(torch.cat([B, U[:, : min(p, n - p)]], dim=-1)).Q[:, p:]


def _completed(M: Tensor, R: Tensor) -> Tensor:
    """A square matrix with first columns [M; R], determinant 1 if real, near the identity.

    Among the completions the one is taken whose last block is nearest to positive semidefinite.
    """
    p = M.shape[-1]
    first = torch.cat([M, R])
    rest = torch.linalg.qr(first, mode="complete").Q[:, p:]
    U, _, Wh = torch.linalg.svd(rest[p:])
    V = torch.cat([first, rest @ (Wh.mH @ U.mH)], dim=-1)
    if not V.is_complex() and bool(torch.linalg.det(V) < 0):
        last = U[:, -1:]  # the direction of the smallest singular value
        V[:, p:] -= 2 * V[:, p:] @ last @ last.mT
    return V


def _one_frame(B: Tensor, X: Tensor) -> Tensor:
    p = B.shape[-1]
    Q = _basis(B, X)
    V = _completed(B.mH @ X, Q.mH @ X)
    step, previous = 1.0, None
    A = _one_unitary(V)
    for _ in range(_ITERATIONS):
        C = A[p:, p:]
        if float(C.abs().amax()) <= _CONVERGED:
            break
        if previous is not None:
            change = float((previous.conj() * (previous - C)).sum().real)
            size = float(previous.abs().square().sum())
            step = min(max(step * size / change, 1.0), _LONGEST) if change > 0 else 1.0
        V[:, p:] = V[:, p:] @ torch.linalg.matrix_exp(-step * C)
        previous, A = C, _one_unitary(V)
    residual = float(A[p:, p:].abs().amax())
    A[p:, p:] = 0
    ours = torch.cat([B, Q], dim=-1) @ torch.linalg.matrix_exp(A)[:, :p]
    residual = max(residual, float((ours - X).abs().amax()))
    if not residual <= _FAILED:
        raise RepresentationError(
            f"the logarithm of a {X.shape[-2]} x {p} matrix did not converge (residual "
            f"{residual:.1e}): it is too far from the base. Move the base to it"
        )
    return B @ A[:p, :p] + Q @ A[p:, :p]


@torch.no_grad()
@full_precision()
def canonical_logarithm(B: Tensor, X: Tensor) -> Tensor:
    """The inverse of `canonical_exponential`: a tangent vector u at B with exp_B(u) = X.

    Zimmermann's iteration (SIAM J. Matrix Anal. Appl. 38 (2017)): with [B, Q] a basis of the span
    of B and X, complete ``[B, Q]^H X`` to a unitary V and rotate its last columns by ``exp(-C)``,
    C the last block of log V, until C vanishes; far from B the steps are longer, as in the method
    of Barzilai and Borwein. Square matrices: ``B log(B^H X)``.

    Args:
        B: Points, shape ``(..., n, p)``.
        X: Points of the same shape.

    Returns:
        Tangent vectors at B, same shape, in float32 or better; computed in float64.

    Raises:
        ShapeError: If the shapes differ or n < p.
        RepresentationError: If the iteration does not converge: X is too far from B.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_exponential, canonical_logarithm, haar
        >>> B, X = torch.eye(7, 3, dtype=torch.float64), haar(7, 3, dtype=torch.float64)
        >>> u = canonical_logarithm(B, X)
        >>> torch.allclose(canonical_exponential(B, u), X)
        True
    """
    check_point_shape(X)
    if B.shape != X.shape:
        raise ShapeError(f"expected points of one shape, got {tuple(B.shape)} and {tuple(X.shape)}")
    base, point = _double(B), _double(X)
    if X.shape[-1] == X.shape[-2]:
        u = base @ _each(_one_unitary, base.mH @ point)
    else:
        u = _each(_one_frame, base, point)
    return u.to(compute_dtype(X.dtype))
