"""Random reflection vectors, for the tests of products of reflections."""

from __future__ import annotations

import torch

REAL, COMPLEX = torch.float64, torch.complex128


def vectors(n, L, dtype, *batch):
    """Gaussian reflection vectors and, for complex ones, phases."""
    V = torch.randn(*batch, n, L, dtype=dtype)
    return (V, 6 * torch.rand(*batch, L).double()) if dtype.is_complex else (V, None)
