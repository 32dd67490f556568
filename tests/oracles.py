"""The slow obvious computation, in float64, that several tests compare with."""

from __future__ import annotations

import torch


def skew_exponential_oracle(A):
    """exp(A) = V exp(-i l) V^H of the Hermitian i A."""
    angles, V = torch.linalg.eigh(1j * A.to(torch.complex128))
    E = (V * torch.exp(-1j * angles)[..., None, :]) @ V.mH
    return E if A.is_complex() else E.real
