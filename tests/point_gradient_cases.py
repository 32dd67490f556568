"""A constrained layer and a comparison that the tests of `point_gradients` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stiefel

VIAS = ["cwy", "riemannian"]


def linear(via="cwy", n=6, p=6, dtype=torch.float64, **options) -> Any:
    layer = nn.Linear(p, n, bias=False, dtype=dtype)
    return stiefel.orthogonal(layer, via=via, init="haar", **options)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
