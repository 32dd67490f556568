"""What `stiefel` is compared with: other libraries, and the textbook forms of its own formulae."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal as torch_orthogonal

__all__ = [
    "CayleySolve",
    "cayley_dense",
    "cayley_linear",
    "cayley_stacked",
    "eigh_linear",
    "geotorch_linear",
    "loop_linear",
    "reflect",
    "tame_proxy",
    "torch_batch",
    "torch_linear",
]


class CayleySolve(nn.Module):
    """The Cayley map Q = (I + A)^-1 (I - A), A skew, by `torch.linalg.solve` under autograd."""

    def forward(self, original: Tensor) -> Tensor:
        """Maps a square matrix, read above its diagonal, to an orthogonal one.

        Args:
            original: ``(n, n)``.

        Returns:
            ``(n, n)``.
        """
        upper = original.triu(1)
        skew = upper - upper.mT
        eye = torch.eye(original.shape[-1], dtype=original.dtype, device=original.device)
        return torch.linalg.solve(eye + skew, eye - skew)


def _linear(n: int, p: int, device: str) -> nn.Linear:
    """A layer whose weight is an (n, p) matrix."""
    return nn.Linear(p, n, bias=False, device=device)


def _randomise(layer: nn.Module) -> None:
    """Gives skew coordinates the spread 1/sqrt(n): angles of order one, as in training."""
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.copy_(torch.randn_like(leaf) / leaf.shape[-1] ** 0.5)


def cayley_linear(n: int, device: str) -> nn.Linear:
    """Returns a layer with an (n, n) weight made by `CayleySolve` from a random argument."""
    layer = _linear(n, n, device)
    parametrize.register_parametrization(layer, "weight", CayleySolve(), unsafe=True)
    _randomise(layer)
    return layer


def torch_linear(n: int, p: int, orthogonal_map: str, device: str) -> nn.Module:
    """Returns a layer with an (n, p) weight made by torch's own `orthogonal`.

    Args:
        n: Rows.
        p: Columns.
        orthogonal_map: ``"matrix_exp"`` or ``"householder"``.
        device: Where.
    """
    layer = torch_orthogonal(_linear(n, p, device), orthogonal_map=orthogonal_map)
    if orthogonal_map == "matrix_exp":
        _randomise(layer)
    return layer


def geotorch_linear(n: int, p: int, device: str) -> nn.Module:
    """Returns a layer with an (n, p) weight made by geotorch's `orthogonal`."""
    geotorch = importlib.import_module("geotorch")
    layer = _linear(n, p, device)
    geotorch.orthogonal(layer, "weight")
    _randomise(layer)
    return layer


def reflect(v: Tensor, b: Tensor) -> Tensor:
    """Applies the ordered product of reflections H(v_1) ... H(v_L) to a few columns.

    H(v) = I - 2 v v^T / |v|^2; the last reflection acts first.

    Args:
        v: ``(n, L)``, a vector a column.
        b: ``(n, k)``.

    Returns:
        ``(n, k)``.
    """
    for vector in reversed(v.unbind(-1)):
        b = b - (2 / vector.dot(vector)) * torch.outer(vector, vector @ b)
    return b


def cayley_stacked(x: Tensor, u: Tensor) -> Tensor:
    """The Cayley retraction with a 2p x 2p system, the usual low-rank form.

    With P = u - X (X^T u) / 2, U = [P, X], V = [X, -P] and A = U V^T:
    R(u) = X + U (I - V^T U / 2)^-1 V^T X.

    Args:
        x: Points ``(..., n, p)``.
        u: Tangent vectors ``(..., n, p)``.

    Returns:
        ``(..., n, p)``.
    """
    half = u - x @ (x.mT @ u) / 2
    left, right = torch.cat((half, x), -1), torch.cat((x, -half), -1)
    eye = torch.eye(left.shape[-1], dtype=x.dtype, device=x.device)
    return x + left @ torch.linalg.solve(eye - right.mT @ left / 2, right.mT @ x)


def cayley_dense(x: Tensor, u: Tensor) -> Tensor:
    """The Cayley retraction with an n x n system: R(u) = (I - A/2)^-1 (I + A/2) X.

    A = P X^T - X P^T with P = u - X (X^T u) / 2.

    Args:
        x: Points ``(..., n, p)``.
        u: Tangent vectors ``(..., n, p)``.

    Returns:
        ``(..., n, p)``.
    """
    half = u - x @ (x.mT @ u) / 2
    skew = half @ x.mT
    skew = skew - skew.mT
    eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye - skew / 2, x + skew @ x / 2)


class LoopHouseholder(nn.Module):
    """H(v_1) ... H(v_L) as a loop of rank-one updates under autograd, the textbook HR."""

    def forward(self, original: Tensor) -> Tensor:
        """Multiplies the reflections one by one; autograd keeps every partial product.

        Args:
            original: Reflection vectors ``(n, L)``.

        Returns:
            ``(n, n)``.
        """
        n = original.shape[-2]
        Q = torch.eye(n, dtype=original.dtype, device=original.device)
        units = original / torch.linalg.vector_norm(original, dim=-2, keepdim=True)
        for u in reversed(units.unbind(-1)):
            Q = torch.addr(Q, u, u @ Q, alpha=-2)
        return Q


def loop_linear(n: int, device: str) -> nn.Linear:
    """Returns a layer with an (n, n) weight made by `LoopHouseholder` from Gaussian vectors."""
    layer = _linear(n, n, device)
    parametrize.register_parametrization(layer, "weight", LoopHouseholder(), unsafe=True)
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.normal_()
    return layer


class EighOrthonormal(nn.Module):
    """Z (Z^T Z)^(-1/2) by `torch.linalg.eigh` under autograd."""

    def forward(self, original: Tensor) -> Tensor:
        """Maps a matrix of full column rank to its polar factor.

        Args:
            original: ``(n, p)``.

        Returns:
            ``(n, p)``.
        """
        values, vectors = torch.linalg.eigh(original.mT @ original)
        return original @ (vectors * values.rsqrt()) @ vectors.mT


def eigh_linear(n: int, device: str) -> nn.Linear:
    """Returns a layer with an (n, n) weight made by `EighOrthonormal` from a `tame_proxy`."""
    layer = _linear(n, n, device)
    parametrize.register_parametrization(layer, "weight", EighOrthonormal(), unsafe=True)
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.copy_(tame_proxy(n, device))
    return layer


def tame_proxy(n: int, device: str) -> Tensor:
    """Returns a random (n, n) matrix with singular values between 1/2 and 3/2.

    From a square Gaussian proxy the eigen route under autograd is off the manifold by 1e-3 and
    more in float32, too far to be timed.
    """
    U, V = (torch.linalg.qr(torch.randn(n, n, device=device)).Q for _ in range(2))
    return U * torch.linspace(0.5, 1.5, n, device=device) @ V


class _Batch(nn.Module):
    """A module whose weight is a batch of matrices."""

    def __init__(self, shape: tuple[int, ...], device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, device=device))


def torch_batch(shape: tuple[int, ...], orthogonal_map: str, device: str) -> nn.Module:
    """Returns a module with a batch of matrices made by torch's own `orthogonal`.

    Args:
        shape: ``(count, n, p)``.
        orthogonal_map: ``"matrix_exp"``, ``"cayley"`` or ``"householder"``.
        device: Where.
    """
    return torch_orthogonal(_Batch(shape, device), orthogonal_map=orthogonal_map)
