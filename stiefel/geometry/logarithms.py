"""Logarithms of unitary matrices and in the canonical metric, in float64, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, overload

import scipy.linalg
import torch
from torch import Tensor

from stiefel.errors import RepresentationError, ShapeError
from stiefel.geometry.guard import check_point_shape
from stiefel.geometry.linear import matrix_exponential
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


def _each(function: Callable[..., tuple[Tensor, float]], *batches: Tensor) -> tuple[Tensor, Tensor]:
    """Applies a function to the matrices of equal batches, one after another.

    Args:
        function: Returns a matrix of the same shape and a residual.
        *batches: Shape ``(..., n, p)``.

    Returns:
        The matrices, shape ``(..., n, p)``, and the residuals in float64, shape ``(...)``.
    """
    first = batches[0]
    residuals = torch.zeros(first.shape[:-2], dtype=torch.float64)
    if first.numel() == 0:
        return torch.zeros_like(first), residuals.to(first.device)
    flat = [X.reshape(-1, *X.shape[-2:]).cpu() for X in batches]
    results = [function(*matrices) for matrices in zip(*flat, strict=True)]
    matrices = torch.stack([matrix for matrix, _ in results]).reshape(first.shape)
    residuals = residuals.new_tensor([residual for _, residual in results]).reshape(residuals.shape)
    return matrices.to(first.device), residuals.to(first.device)


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


def _one_unitary_checked(Q: Tensor) -> tuple[Tensor, float]:
    """The logarithm of Q and the largest entry of exp(A) - Q."""
    A = _one_unitary(Q)
    return A, float((matrix_exponential(A) - Q).abs().amax())


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
    return _each(_one_unitary_checked, _double(Q))[0].to(compute_dtype(Q.dtype))


def frame_basis(B: Tensor, X: Tensor) -> Tensor:
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


def refuse(n: int, p: int, residual: float) -> None:
    """Raises unless the residual of a logarithm is small."""
    if not residual <= _FAILED:
        raise RepresentationError(
            f"the logarithm of a {n} x {p} matrix did not converge (residual {residual:.1e}, "
            f"at most {_FAILED:.0e} is accepted): it is too far from the base. Move the base to "
            "it, or take a point between them and go in two steps"
        )


def canonical_frame(B: Tensor, X: Tensor) -> tuple[Tensor, float]:
    p = B.shape[-1]
    Q = frame_basis(B, X)
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
        V[:, p:] = V[:, p:] @ matrix_exponential(-step * C)
        previous, A = C, _one_unitary(V)
    residual = float(A[p:, p:].abs().amax())
    A[p:, p:] = 0
    ours = torch.cat([B, Q], dim=-1) @ matrix_exponential(A)[:, :p]
    residual = max(residual, float((ours - X).abs().amax()))
    refuse(X.shape[-2], p, residual)
    return B @ A[:p, :p] + Q @ A[p:, :p], residual


def logarithm(
    one: Callable[[Tensor, Tensor], tuple[Tensor, float]], B: Tensor, X: Tensor
) -> tuple[Tensor, Tensor]:
    """A logarithm of frames, matrix by matrix; all metrics share that of square matrices.

    Args:
        one: Takes a base and a point, n > p, in float64; returns the vector and its residual.
        B: Points, shape ``(..., n, p)``.
        X: Points of the same shape.

    Returns:
        Tangent vectors at B and residuals, shape ``(...)``.
    """
    check_point_shape(X)
    if B.shape != X.shape:
        raise ShapeError(f"expected points of one shape, got {tuple(B.shape)} and {tuple(X.shape)}")
    base, point = _double(B), _double(X)
    if X.shape[-1] == X.shape[-2]:
        A, residual = _each(_one_unitary_checked, base.mH @ point)
        u = base @ A
    else:
        u, residual = _each(one, base, point)
    return u.to(compute_dtype(X.dtype)), residual


@overload
def canonical_logarithm(
    B: Tensor, X: Tensor, *, return_residual: Literal[False] = False
) -> Tensor: ...
@overload
def canonical_logarithm(
    B: Tensor, X: Tensor, *, return_residual: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@torch.no_grad()
@full_precision()
def canonical_logarithm(
    B: Tensor, X: Tensor, *, return_residual: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The inverse of `canonical_exponential`: a tangent vector u at B with exp_B(u) = X.

    Zimmermann's iteration (SIAM J. Matrix Anal. Appl. 38 (2017)): with [B, Q] a basis of the span
    of B and X, complete ``[B, Q]^H X`` to a unitary V and rotate its last columns by ``exp(-C)``,
    C the last block of log V, until C vanishes; far from B the steps are longer, as in the method
    of Barzilai and Borwein. Square matrices: ``B log(B^H X)``.

    Args:
        B: Points, shape ``(..., n, p)``.
        X: Points of the same shape.
        return_residual: Also return the residual: the largest entry of ``exp_B(u) - X`` and of
            the block C that should vanish.

    Returns:
        Tangent vectors at B, same shape, in float32 or better; computed in float64, without a
        gradient. With `return_residual` also the residuals in float64, shape ``(...)``.

    Raises:
        ShapeError: If the shapes differ or n < p.
        RepresentationError: If the iteration does not converge: X is too far from B. The message
            states the residual.

    Example:
        >>> import torch
        >>> from stiefel.geometry import canonical_exponential, canonical_logarithm, haar
        >>> B, X = torch.eye(7, 3, dtype=torch.float64), haar(7, 3, dtype=torch.float64)
        >>> u, residual = canonical_logarithm(B, X, return_residual=True)
        >>> torch.allclose(canonical_exponential(B, u), X)
        True
        >>> bool(residual < 1e-9)
        True
    """
    u, residual = logarithm(canonical_frame, B, X)
    return (u, residual) if return_residual else u
