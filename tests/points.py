"""Points, tangent and normal vectors for the laws."""

from __future__ import annotations

import torch

from stiefel import geometry
from stiefel.numerics import tolerance


def sample(shape, dtype, device, scale=1.0):
    """A point, a tangent vector of Frobenius norm about `scale`, and a normal matrix."""
    batch, n, p = shape
    X = geometry.haar(n, p, batch, dtype=dtype, device=device)
    u = geometry.random_tangent(X)
    u = scale * u / torch.linalg.matrix_norm(u, keepdim=True).clamp_min(1e-30)
    S = torch.randn(*batch, p, p, dtype=dtype, device=device)
    return X, u, X @ (S + S.mH)


def eye_like(X):
    return torch.eye(X.shape[-2], dtype=X.dtype, device=X.device)


def wide_bound(X):
    """Rounding bound for entries of size one."""
    return tolerance(X.dtype, *X.shape[-2:])
