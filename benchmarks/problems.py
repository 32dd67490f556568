"""Problems on the Stiefel manifold whose minimum is known: principal components, Procrustes,
Brockett's function, and joint diagonalisation.

All are float64, with value, gradient and Hessian-vector product in closed form, so that every
method is given the same arithmetic. Spectra are those that are stated: A = Q D Q^T with a Haar Q,
not Q D Q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel.geometry import euclidean_hessian, haar, tangent_projection

__all__ = [
    "KnownMinimum",
    "brockett",
    "joint_diagonalisation",
    "principal_components",
    "problems",
    "procrustes",
]


@dataclass(frozen=True)
class KnownMinimum:
    """A function on St(n, p) with its global minimum.

    Attributes:
        name: One word.
        title: With sizes.
        start: The point from which every method starts, ``(n, p)``.
        value_and_gradient: Takes X and gives f as a 0-d tensor and the ambient gradient.
        hessian: Takes X and u and gives the derivative of the ambient gradient along u.
        minimum: The least value of f.
        minimiser: A point where f has it.
        curvature: The largest eigenvalue, by modulus, of the Riemannian Hessian there: gradient
            descent is stable for rates below 2/curvature.
    """

    name: str
    title: str
    start: Tensor
    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]]
    hessian: Callable[[Tensor, Tensor], Tensor]
    minimum: float
    minimiser: Tensor
    curvature: float

    def gap(self, X: Tensor) -> float:
        """``(f(X) - minimum)/|minimum|``, cut off at zero."""
        f = float(self.value_and_gradient(X)[0])
        return max(f - self.minimum, 0.0) / abs(self.minimum) if f == f else float("nan")


def _largest_curvature(
    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    hessian: Callable[[Tensor, Tensor], Tensor],
    X: Tensor,
) -> float:
    """Power iterations on the Riemannian Hessian of the Euclidean metric."""
    G = value_and_gradient(X)[1]
    draw = torch.Generator().manual_seed(0)
    u = tangent_projection(X, torch.randn(X.shape, dtype=X.dtype, generator=draw).to(X.device))
    size = X.new_ones(())
    for _ in range(30):
        u = u / u.norm()
        u = euclidean_hessian(X, G, hessian(X, u), u)
        size = u.norm()
    return float(size)


def _with(
    name: str,
    title: str,
    start: Tensor,
    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]],
    hessian: Callable[[Tensor, Tensor], Tensor],
    minimum: float,
    minimiser: Tensor,
) -> KnownMinimum:
    curvature = _largest_curvature(value_and_gradient, hessian, minimiser)
    return KnownMinimum(
        name, title, start, value_and_gradient, hessian, minimum, minimiser, curvature
    )


def _haar(n: int, p: int, device: str, draw: torch.Generator) -> Tensor:
    return haar(n, p, dtype=torch.float64, generator=draw).to(device)


def principal_components(
    n: int, p: int, condition: float, device: str, draw: torch.Generator
) -> KnownMinimum:
    """``f(X) = -tr(X^T A X)/2``, A = Q D Q^T, D from 1 to 1/condition in equal ratios.

    Args:
        n: Rows.
        p: Columns.
        condition: Of A.
        device: Where.
        draw: Source of randomness, on the CPU.
    """
    Q = _haar(n, n, device, draw)
    D = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64).to(
        device
    )
    A = (Q * D) @ Q.mT

    def value_and_gradient(X: Tensor) -> tuple[Tensor, Tensor]:
        AX = A @ X
        return -(X * AX).sum() / 2, -AX

    title = f"principal components, {n} x {p}, condition {condition:g}"
    minimum = -float(D[:p].sum()) / 2
    start = _haar(n, p, device, draw)
    return _with("pca", title, start, value_and_gradient, lambda X, u: -(A @ u), minimum, Q[:, :p])


def procrustes(n: int, device: str, draw: torch.Generator) -> KnownMinimum:
    """``f(X) = |A X - B|^2/2`` over O(n), A and B Gaussian; the start has the minimiser's sign.

    The minimum is ``(|A|^2 + |B|^2)/2 - |A^T B|_*``, at the polar factor of A^T B.

    Args:
        n: Size.
        device: Where.
        draw: Source of randomness, on the CPU.
    """
    A, B = (torch.randn(n, n, dtype=torch.float64, generator=draw).to(device) for _ in range(2))
    U, s, Vh = torch.linalg.svd(A.mT @ B)
    best = U @ Vh
    start = _haar(n, n, device, draw)
    if float(torch.linalg.det(start) * torch.linalg.det(best)) < 0:
        start[-1] *= -1

    def value_and_gradient(X: Tensor) -> tuple[Tensor, Tensor]:
        R = A @ X - B
        return R.square().sum() / 2, A.mT @ R

    minimum = float((A.square().sum() + B.square().sum()) / 2 - s.sum())
    title = f"Procrustes over O({n})"
    return _with(
        "procrustes",
        title,
        start,
        value_and_gradient,
        lambda X, u: A.mT @ (A @ u),
        minimum,
        best,
    )


def brockett(n: int, p: int, device: str, draw: torch.Generator) -> KnownMinimum:
    """``f(X) = tr(X^T A X N)/2``, A = Q diag(1 ... n) Q^T, N = diag(p ... 1).

    The minimum pairs the smallest eigenvalue with the largest weight.

    Args:
        n: Rows.
        p: Columns.
        device: Where.
        draw: Source of randomness, on the CPU.
    """
    Q = _haar(n, n, device, draw)
    D = torch.arange(1, n + 1, dtype=torch.float64, device=device)
    N = torch.arange(p, 0, -1, dtype=torch.float64, device=device)
    A = (Q * D) @ Q.mT

    def value_and_gradient(X: Tensor) -> tuple[Tensor, Tensor]:
        G = (A @ X) * N
        return (X * G).sum() / 2, G

    minimum = float((D[:p] * N).sum()) / 2
    title = f"Brockett's function, {n} x {p}"
    start = _haar(n, p, device, draw)
    return _with(
        "brockett", title, start, value_and_gradient, lambda X, u: (A @ u) * N, minimum, Q[:, :p]
    )


def joint_diagonalisation(n: int, count: int, device: str, draw: torch.Generator) -> KnownMinimum:
    """``f(X) = -sum_k |diag(X^T A_k X)|^2/2``, A_k = Q D_k Q^T with one planted Q, D_k Gaussian.

    The minimum is ``-sum_k |D_k|^2/2``, at Q.

    Args:
        n: Size.
        count: Number of matrices.
        device: Where.
        draw: Source of randomness, on the CPU.
    """
    Q = _haar(n, n, device, draw)
    D = torch.randn(count, n, dtype=torch.float64, generator=draw).to(device)
    A = (Q * D[:, None]) @ Q.mT

    def value_and_gradient(X: Tensor) -> tuple[Tensor, Tensor]:
        AX = A @ X
        d = (X * AX).sum(-2, keepdim=True)
        return -d.square().sum() / 2, -2 * (AX * d).sum(0)

    def hessian(X: Tensor, u: Tensor) -> Tensor:
        AX, Au = A @ X, A @ u
        d = (X * AX).sum(-2, keepdim=True)
        change = 2 * (u * AX).sum(-2, keepdim=True)
        return -2 * (Au * d + AX * change).sum(0)

    minimum = -float(D.square().sum()) / 2
    title = f"joint diagonalisation of {count} matrices, {n} x {n}"
    start = _haar(n, n, device, draw)
    return _with("diagonalisation", title, start, value_and_gradient, hessian, minimum, Q)


def problems(quick: bool, device: str) -> list[KnownMinimum]:
    """The four problems of the benchmark.

    Args:
        quick: Tiny sizes.
        device: Where.
    """
    draw = torch.Generator().manual_seed(0)
    if quick:
        return [
            principal_components(12, 8, 10, device, draw),
            procrustes(8, device, draw),
            brockett(8, 3, device, draw),
            joint_diagonalisation(6, 3, device, draw),
        ]
    return [
        principal_components(500, 375, 1000, device, draw),
        procrustes(500, device, draw),
        brockett(200, 200, device, draw),
        joint_diagonalisation(100, 10, device, draw),
    ]
