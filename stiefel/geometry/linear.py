"""Adjoints, sums with products, and linear systems that are right in batches; no host reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.numerics import in_transform

__all__ = [
    "add_product",
    "add_product_",
    "adjoint",
    "divide_by_triangle",
    "inverse",
    "inverse_near_identity",
    "matrix_exponential",
    "plus_product",
    "readable",
    "saturated",
    "solve",
]

#: Batched LU on the CPU is trusted up to this size. With torch 2.13 and MKL it returns wrong
#: factors, without an error, for batches of matrices larger than about 128 once
#: `torch.set_num_threads` has been called; single matrices are right at any size.
_TRUSTED = 64
#: How many factors (I + E^(2^k)) stand for (I - E)^-1 where they suffice; with more of them a
#: factorisation is as fast.
_FACTORS = (3, 4)
#: Rows of a batch of matrices from which that is faster.
_MANY = 128
#: Columns from which a triangular factor is divided by in blocks, and how wide those are.
_BLOCKED, _WIDTH = 384, 64


def adjoint(A: Tensor, out: Tensor | None = None) -> Tensor:
    """A^H, contiguous: sums with it are several times faster than with a view.

    A new tensor, never A itself, or in the memory of `out`.
    """
    if out is None:
        transposed = A.mT.clone(memory_format=torch.contiguous_format)
    else:
        transposed = out.copy_(A.mT)
    return transposed.conj_physical_() if A.is_complex() else transposed


def saturated(A: Tensor, most: float) -> Tensor:
    """A with entries (real and imaginary parts) of at most `most`; NaN where they are infinite."""
    parts = torch.view_as_real(A.resolve_conj()) if A.is_complex() else A
    parts = parts.clamp(-most, most) + (parts - parts)
    return torch.view_as_complex(parts) if A.is_complex() else parts


def add_product_(C: Tensor, A: Tensor, B: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """C <- beta C + alpha A B in place, without a temporary for matrices or one batch of them."""
    if C.ndim == 2:
        return C.addmm_(A, B, beta=beta, alpha=alpha)
    if C.ndim == 3:
        return C.baddbmm_(A, B, beta=beta, alpha=alpha)
    return C.mul_(beta).add_(A @ B, alpha=alpha)


def add_product(C: Tensor, A: Tensor, B: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta C + alpha A B, for matrices or one batch of them."""
    function = torch.addmm if C.ndim == 2 else torch.baddbmm
    return function(C, A, B, beta=beta, alpha=alpha)


def plus_product(Z: Tensor, X: Tensor, K: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta Z + alpha X K`` in one pass, for ``(..., n, p)`` and ``(..., p, p)``."""
    if Z.ndim <= 3:
        return add_product(Z, X, K, beta=beta, alpha=alpha)
    Z3, X3, K3 = (A.reshape(-1, *A.shape[-2:]) for A in (Z, X, K))
    return torch.baddbmm(Z3, X3, K3, beta=beta, alpha=alpha).reshape(Z.shape)


def divide_by_triangle(U: Tensor, S: Tensor) -> Tensor:
    """``U S^-1`` for upper triangular S, contiguous; what is below its diagonal is not read.

    A large matrix takes block columns, ``Y_j = (U_j - Y_1..j-1 S_1..j-1,j) S_jj^-1``: nearly all
    of it is products. The inverses of the blocks S_jj must be harmless, as those of compact-WY
    factors are, whose entries are at most 2.

    Args:
        U: Shape ``(..., n, L)``.
        S: Shape ``(..., L, L)``.
    """
    if U.ndim > 2 or U.shape[-1] < _BLOCKED:
        return torch.linalg.solve_triangular(S, U, upper=True, left=False).contiguous()
    Y = torch.empty_like(U, memory_format=torch.contiguous_format)
    eye = torch.eye(_WIDTH, dtype=U.dtype, device=U.device)
    for start in range(0, U.shape[-1], _WIDTH):
        stop = min(start + _WIDTH, U.shape[-1])
        block = U[:, start:stop]
        if start:
            block = torch.addmm(block, Y[:, :start], S[:start, start:stop], alpha=-1)
        small = eye[: stop - start, : stop - start]
        inverse = torch.linalg.solve_triangular(S[start:stop, start:stop], small, upper=True)
        torch.mm(block, inverse, out=Y[:, start:stop])
    return Y


def matrix_exponential(A: Tensor) -> Tensor:
    """e^A of any square matrices, shape ``(..., k, k)``, to rounding.

    With torch 2.13 `torch.linalg.matrix_exp` takes too low a degree for a single float64 matrix
    of norm 0.01 to 0.1, an error of 2e-10; in a batch it is right. A zero matrix makes a batch.
    """
    if A.shape[:-2].numel() != 1:
        return torch.linalg.matrix_exp(A)
    pair = torch.stack([A.reshape(A.shape[-2:]), torch.zeros_like(A.reshape(A.shape[-2:]))])
    return torch.linalg.matrix_exp(pair)[0].reshape(A.shape)


def readable(A: Tensor) -> bool:
    """Whether the host may read a number of A for nothing: on the CPU, eagerly, unbatched."""
    return (
        A.device.type == "cpu"
        and type(A) is Tensor
        and not torch.compiler.is_compiling()
        and not in_transform(A)
    )


def _each(function: Callable[..., Tensor], M: Tensor, *rest: Tensor) -> Tensor:
    """Applies `function` to a batch: at once where that is right, matrix by matrix elsewhere."""
    if M.ndim == 2 or M.device.type != "cpu" or M.shape[-1] <= _TRUSTED or M.numel() == 0:
        return function(M, *rest)
    flat = [A.flatten(0, -3).unbind(0) for A in (M, *rest)]
    results = [function(*matrices) for matrices in zip(*flat, strict=True)]
    return torch.stack(results).unflatten(0, M.shape[:-2])


def inverse(M: Tensor) -> Tensor:
    """Inverses of well-conditioned matrices, shape ``(..., k, k)``.

    Products with an inverse are several times faster than `torch.linalg.solve` on many small
    matrices, and as accurate where the Hermitian part of M is at least the identity.
    """
    return _each(lambda A: torch.linalg.inv_ex(A).inverse, M)


def solve(M: Tensor, B: Tensor) -> Tensor:
    """``M^-1 B`` for matrices ``(..., k, k)`` and right-hand sides ``(..., k, m)``."""
    return _each(lambda A, b: torch.linalg.solve_ex(A, b).result, M, B)


def inverse_near_identity(E: Tensor) -> Tensor:
    """``(I - E)^-1`` for matrices ``(..., k, k)`` such that the Hermitian part of I - E is >= I.

    Where norms are small and can be read for nothing it is the product
    ``(I + E)(I + E^2)(I + E^4) ...`` with three or four factors, as many as leave nothing in the
    working precision: batched products take a third of the time of batched factorisations. The
    rest after m factors is ``(I - E)^-1 E^(2^m)``, of norm ``|E^2|_F^(2^(m-1))`` at most. Else it
    is `inverse`, and for few small matrices. In a batch each matrix is decided on by itself.
    """
    few = E.shape[:-1].numel() < _MANY
    if few or not readable(E) or E.requires_grad or E.numel() == 0:
        return _inverse_of_rest(E)
    square = E @ E
    rest = torch.linalg.vector_norm(square, dim=(-2, -1))
    enough = torch.finfo(E.dtype).eps / 8
    bounds = [enough ** (0.5 ** (factors - 1)) for factors in _FACTORS]
    kind = sum((~(rest <= bound)).int() for bound in bounds)
    assert isinstance(kind, Tensor)
    low, high = (int(number) for number in kind.aminmax())
    if low == high:
        return _inverse_by(low, E, square)
    result = torch.empty_like(E)
    for some in range(low, high + 1):
        chosen = kind == some
        result[chosen] = _inverse_by(some, E[chosen], square[chosen])
    return result


def _inverse_of_rest(E: Tensor) -> Tensor:
    return inverse(torch.eye(E.shape[-1], dtype=E.dtype, device=E.device) - E)


def _inverse_by(kind: int, E: Tensor, power: Tensor) -> Tensor:
    """(I - E)^-1 by the number of factors of that kind, else by a factorisation; power is E^2."""
    if kind == len(_FACTORS):
        return _inverse_of_rest(E)
    product = plus_product(power, E, power).add_(E)  # (I + E)(I + E^2) - I
    for _ in range(_FACTORS[kind] - 2):
        power = power @ power
        product = plus_product(product, product, power).add_(power)
    product.diagonal(dim1=-2, dim2=-1).add_(1)
    return product
