"""Proxies and the polar factors of them, for the tests of own and polar."""

from __future__ import annotations

import pytest
import torch

from stiefel.geometry import gram_polar_factor, haar, newton_schulz_factor, polar_factor

REAL, COMPLEX = torch.float64, torch.complex128
FACTORS = [gram_polar_factor, newton_schulz_factor, polar_factor]
each_factor = pytest.mark.parametrize("factor", FACTORS, ids=lambda f: f.__name__)
#: Those that promise a weight for every proxy at any scale.
each_safe = pytest.mark.parametrize("factor", FACTORS[:2], ids=lambda f: f.__name__)


def with_values(n, s, dtype=REAL):
    """A square or tall matrix with singular values s and random directions."""
    p = len(s)
    return haar(n, p, dtype=dtype) * s.to(dtype) @ haar(p, dtype=dtype).mH


def value_and_gradient(factor, Z, G):
    Z = Z.detach().clone().requires_grad_()
    W = factor(Z)
    return W.detach(), torch.autograd.grad(W, Z, G)[0]
