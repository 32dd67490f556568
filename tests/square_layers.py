"""Constrained square layers, and a chart with a base, for the contracts of conversion."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import stiefel
from stiefel.parametrizations import CWY


class RightTranslated(CWY):
    """A chart with a base, for these tests: X = B Q(V), B moved into by every rebase."""

    has_base = True
    base: Tensor

    def __init__(self, n, *, rebase_every=2):
        super().__init__(n)
        self.rebase_every = rebase_every
        self.register_buffer("base", torch.eye(n, dtype=torch.float64))

    def forward(self, *originals: Tensor) -> Tensor:
        return self.base @ super().forward(*originals)

    def right_inverse(self, X: Tensor) -> Tensor:
        return super().right_inverse(self.base.mT @ X)  # pyright: ignore[reportReturnType]

    def rebase(self, originals):
        Q = super().forward(*originals).detach()
        home = super().right_inverse(torch.diag(torch.tensor([1.0, 1, 1, -1]).double() ** 2))
        self.base.copy_(self.base @ Q)
        return (home,), lambda i, key, moment: moment / 2


def square(via="cwy", n=4, **options):
    return stiefel.orthogonal(nn.Linear(n, n, dtype=torch.float64), via=via, **options)
