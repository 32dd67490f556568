"""The runs of `stiefel.experiments.theorem4`: two problems, and SGD on the vectors of a chart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stiefel.diagnostics import Report, SideConditions
from stiefel.geometry import euclidean_gradient
from stiefel.parametrizations import CWY, TCWY

__all__ = ["PROBLEMS", "Costs", "Records", "one_thread", "recorded_steps", "run_sgd"]

#: The two costs, in the order of the leading dimension of every batch.
PROBLEMS = ("quadratic", "procrustes")

_PER_DECADE = 64


def theorem_rate(k: int) -> float:
    """The step of the theorem."""
    return k**-0.5


@dataclass(frozen=True)
class Costs:
    """f = tr(R X^T M X) - 2 tr(C^T X) + const: both problems, in the leading dimension.

    Quadratic tr(B X^T A X): M = A, R = B, C = 0. Procrustes |A X - B|^2: M = A^T A, R = I,
    C = A^T B. A and B have spectral norm 1, and M, R are symmetric.
    """

    M: Tensor
    R: Tensor
    C: Tensor

    @classmethod
    def draw(cls, n: int, p: int, generator: torch.Generator) -> Costs:
        """Random A and B of both."""

        def matrix(rows: int, columns: int, symmetric: bool = False) -> Tensor:
            Z = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            Z = (Z + Z.mT) / 2 if symmetric else Z
            return Z / torch.linalg.matrix_norm(Z, 2)

        A, B = matrix(n, n, symmetric=True), matrix(p, p, symmetric=True)
        Z, Y = matrix(n, n), matrix(n, p)
        M = torch.stack([A, Z.mT @ Z])
        R = torch.stack([B, torch.eye(p, dtype=torch.float64)])
        C = torch.stack([torch.zeros(n, p, dtype=torch.float64), Z.mT @ Y])
        return cls(M[:, None], R[:, None], C[:, None])

    def gradient(self, X: Tensor) -> Tensor:
        """df/dX of points ``(2, seeds, n, p)``."""
        return 2 * (self.M @ X @ self.R - self.C)


@dataclass(frozen=True)
class Records:
    """What is kept of the runs of one chart."""

    squares: Tensor  # s_k of every step, (steps, 2, seeds)
    point: Tensor  # at the recorded steps, (records, 2, seeds)
    ratios: Tensor  # at the recorded steps, (records, 2)
    conditions: Report


def run_sgd(
    name: str,
    size: tuple[int, int, int],
    steps: int,
    *,
    noise: float,
    seed: int,
    rate: Callable[[int], float] = theorem_rate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Records:
    """SGD on V, both problems and all seeds as one batch; size is (seeds, n, p).

    The seeds differ in their gradient noise; the problem and the first V are the same, for the
    theorem takes the mean over the noise only.
    """
    seeds, n, p = size
    draws = torch.Generator().manual_seed(seed)
    costs = Costs.draw(n, p, draws)
    batch = (len(PROBLEMS), seeds)
    chart = CWY(n, p, batch=batch) if name == "cwy" else TCWY(n, p, batch=batch)
    V = torch.randn(n, p, generator=draws, dtype=torch.float64)
    V = (V / V.norm(dim=0)).expand(*batch, n, p).clone().requires_grad_()
    first = V.detach().norm(dim=-2)
    optimizer = torch.optim.SGD([V], lr=1.0, momentum=momentum, weight_decay=weight_decay)
    conditions = SideConditions()
    recorded = set(recorded_steps(steps))
    squares = torch.empty(steps, *batch, dtype=torch.float64)
    point, ratios = [], []
    for k in range(1, steps + 1):
        X = chart(V)
        G = costs.gradient(X.detach())
        noisy = G + noise * torch.randn(X.shape, generator=draws, dtype=torch.float64)
        (true,) = torch.autograd.grad(X, V, G, retain_graph=True)
        (V.grad,) = torch.autograd.grad(X, V, noisy)
        before = V.detach().clone()
        squares[k - 1] = true.square().sum((-2, -1))
        if k in recorded:
            point.append(euclidean_gradient(X.detach(), G).square().sum((-2, -1)))
            ratios.append((before.norm(dim=-2) / first).amin((-2, -1)))
        optimizer.param_groups[0]["lr"] = rate(k)
        optimizer.step()
        conditions.note(k, [before], [V.grad], [V.detach()])
    return Records(squares, torch.stack(point), torch.stack(ratios), conditions.report())


def recorded_steps(steps: int) -> list[int]:
    """Steps evenly spaced in log k, 64 a decade where there are as many, the last included."""
    count = int(_PER_DECADE * np.log10(steps)) + 1
    return sorted({*np.geomspace(1, steps, count).round().astype(int).tolist(), steps})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The matrices are small: a second thread waits more than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
