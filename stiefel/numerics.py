"""Floating point: tolerances, working dtypes, and guards against reduced precision.

`tolerance` is the only source of bounds on orthonormality for checks, loading, tests and docs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import DtypeError

__all__ = [
    "complex_dtype",
    "compute_dtype",
    "double_dtype",
    "full_precision",
    "in_double",
    "in_transform",
    "plain",
    "real_dtype",
    "tolerance",
]

#: Bound on max |X^H X - I| for n = 1; it grows like max(n, p)^(1/4).
_BASE_TOLERANCE = {
    torch.float64: 4e-13,
    torch.float32: 3e-6,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}
_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the real part: ``complex128 -> float64``, real dtypes unchanged."""
    return _REAL.get(dtype, dtype)


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the complex dtype of such parts: ``float64 -> complex128``, 16 bits ``complex64``."""
    if dtype.is_complex:
        return dtype
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def double_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of 64-bit parts: ``complex128`` for complex dtypes, else ``float64``."""
    return torch.complex128 if dtype.is_complex else torch.float64


def plain(X: Tensor) -> Tensor:
    """X as a `torch.Tensor` without its class (a parameter's, a manifold's) and without its graph.

    The numbers are shared, not copied.
    """
    return X.detach().as_subclass(Tensor)


def in_double(X: Tensor) -> Tensor:
    """X in float64, or complex128 where it is complex, without its class and graph, to measure it.

    A lazy conjugate is carried out, so that `torch.view_as_real` and NumPy take the result.

    Args:
        X: A tensor of any class, dtype and shape.

    Returns:
        A plain tensor on the same device. Numbers in double precision are shared, not copied.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.numerics import in_double
        >>> X = in_double(stiefel.ManifoldParameter(torch.eye(3, 2)))
        >>> type(X).__name__, X.dtype, X.requires_grad
        ('Tensor', torch.float64, False)
    """
    return plain(X).to(double_dtype(X.dtype)).resolve_conj()


def in_transform(X: Tensor) -> bool:
    """Whether X stands for numbers inside a transform of `torch.func` (vmap, grad, jvp, ...).

    The host must not read such a number (vmap refuses it, or it is one of many), and gradients of
    it pass no hook. torch unwraps them for debuggers only, and gives any other tensor back itself;
    nothing is done with what is unwrapped here.
    """
    return torch.func.debug_unwrap(X, recurse=False) is not X


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which geometry is computed: float32 or better.

    Raises:
        DtypeError: If `dtype` is neither floating point nor complex.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(
            f"expected a floating point or complex dtype, got {dtype}: convert the tensor first, "
            "for instance with .to(torch.float32)"
        )
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def tolerance(dtype: torch.dtype, n: int, p: int) -> float:
    """Bound on the largest entry of |X^H X - I| for an (n, p) matrix with orthonormal columns.

    The bound is ``base(dtype) * max(n, p)^(1/4)``: for a 64 x 16 matrix 8.5e-6 in float32 and
    1.1e-12 in float64. In the 16-bit formats it is the rounding of a weight, not of arithmetic,
    which is done in float32.

    Args:
        dtype: Dtype of the matrix, real or complex.
        n: Rows.
        p: Columns.

    Returns:
        The bound, a Python float.

    Raises:
        DtypeError: If `dtype` is neither floating point nor complex.

    Example:
        >>> import torch, stiefel
        >>> f"{stiefel.tolerance(torch.float32, 64, 16):.1e}"
        '8.5e-06'
    """
    compute_dtype(dtype)
    base = _BASE_TOLERANCE.get(real_dtype(dtype))
    if base is None:
        raise DtypeError(
            f"no tolerance is defined for {dtype}: expected one of float64, float32, bfloat16, "
            "float16, complex128, complex64"
        )
    return base * max(n, p, 1) ** 0.25


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Runs a block, or a decorated function, in full precision.

    Autocast is switched off on the CPU and on CUDA, and float32 matrix products are computed in
    float32: reduced precision would turn errors of 1e-7 into errors of 1e-3. Both of torch's
    settings are understood, ``torch.set_float32_matmul_precision`` and
    ``torch.backends.*.fp32_precision``, and restored on exit. Under `torch.compile` the setting of
    the moment of compilation holds and only autocast is switched off.
    """
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if not torch.compiler.is_compiling():
            try:
                before = torch.get_float32_matmul_precision()
            except RuntimeError:  # the newer settings are in use; torch refuses to mix the two
                stack.enter_context(_ieee_products())
            else:
                if before != "highest":
                    torch.set_float32_matmul_precision("highest")
                    stack.callback(torch.set_float32_matmul_precision, before)
        yield


@contextlib.contextmanager
def _ieee_products() -> Iterator[None]:
    """Sets ``fp32_precision`` of the matrix products to ``"ieee"``, where it is anything else.

    The general setting comes first: a backend that inherits it follows, and is left inheriting.
    """
    holders: tuple[Any, ...] = (
        torch.backends,
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,  # pyright: ignore[reportAttributeAccessIssue]
    )
    saved = []
    for holder in holders:
        value = holder.fp32_precision
        if value not in ("ieee", "none"):
            saved.append((holder, value))
            holder.fp32_precision = "ieee"
    try:
        yield
    finally:
        for holder, value in saved:
            holder.fp32_precision = value
