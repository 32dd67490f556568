"""Recurrences with everything that they can have, run by `rollout` and by a loop over steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel import geometry
from stiefel.models import rollout
from stiefel.operators import CompactWY

FORMS = ("dense", "compact", "compact-flipped")


def sigma(name: str, z: Tensor, beta: Tensor | None) -> Tensor:
    """The nonlinearities once more, from their definitions."""
    if name == "modrelu":
        assert beta is not None
        size = z.abs() + beta
        return torch.where(size > 0, z.sign() * size, torch.zeros_like(z))
    if name == "leaky_relu":
        return torch.where(z > 0, z, 0.1 * z)
    return {"abs": torch.abs, "relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}[
        name
    ](z)


@dataclass
class Case:
    """A recurrence with everything that it can have; None where it has not."""

    x: Tensor
    kernel: Tensor
    vectors: Tensor  # (H, H) for the dense form: the matrix; (H, L): reflections
    form: str
    nonlinearity: str
    bias: Tensor | None = None
    beta: Tensor | None = None
    h0: Tensor | None = None
    lengths: Tensor | None = None
    reverse: bool = False

    def recurrent(self) -> Tensor | CompactWY:
        if self.form == "dense":
            return self.vectors
        U = self.vectors / self.vectors.norm(dim=0)
        S = 0.5 * torch.eye(U.shape[1]).to(U) + torch.triu(U.mT @ U, 1)
        Y = torch.linalg.solve(S.mT, U.mT).mT  # Q = I - Y U^T
        flip = self.vectors.new_tensor(-1.0) if self.form == "compact-flipped" else None
        return CompactWY(U, Y, flip=flip)

    def leaves(self) -> list[Tensor]:
        every = (self.x, self.kernel, self.vectors, self.bias, self.beta, self.h0)
        return [leaf for leaf in every if leaf is not None and leaf.requires_grad]

    def run(self) -> tuple[Tensor, Tensor]:
        return rollout(
            self.x,
            self.kernel,
            self.recurrent(),
            nonlinearity=self.nonlinearity,
            bias=self.bias,
            beta=self.beta,
            h0=self.h0,
            lengths=self.lengths,
            reverse=self.reverse,
        )

    def loop(self) -> tuple[Tensor, Tensor]:
        """One sequence and one step at a time."""
        recurrent = self.recurrent()
        Q = recurrent if isinstance(recurrent, Tensor) else recurrent.to_dense()
        length, batch, _ = self.x.shape
        rows: list[list[Tensor]] = []
        ends = []
        for i in range(batch):
            steps = length if self.lengths is None else int(self.lengths[i])
            zero = Q.new_zeros(len(Q))
            h = zero if self.h0 is None else self.h0[i]
            row = [zero] * length
            for t in reversed(range(steps)) if self.reverse else range(steps):
                z = Q @ h + self.kernel @ self.x[t, i]
                h = sigma(self.nonlinearity, z if self.bias is None else z + self.bias, self.beta)
                row[t] = h
            rows.append(row)
            ends.append(h)
        return torch.stack([torch.stack(row) for row in rows], dim=1), torch.stack(ends)


def make(
    form: str,
    nonlinearity: str,
    device: torch.device | str = "cpu",
    *,
    T: int = 11,
    B: int = 3,
    K: int = 4,
    H: int = 7,
    bias: bool = False,
    h0: bool = False,
    lengths: bool = False,
    reverse: bool = False,
) -> Case:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        tensor = torch.randn(*shape, dtype=torch.float64, device=device) * scale
        return tensor.requires_grad_()

    if form == "dense":
        vectors = geometry.haar(H, H, dtype=torch.float64, device=device).requires_grad_()
    else:
        vectors = draw(H, 3)
    return Case(
        draw(T, B, K),
        draw(H, K),
        vectors,
        form,
        nonlinearity,
        bias=draw(H) if bias else None,
        beta=draw(H, scale=0.3) if nonlinearity == "modrelu" else None,
        h0=draw(B, H) if h0 else None,
        lengths=torch.tensor([T, 1, T // 2 + 1][:B], device=device) if lengths else None,
        reverse=reverse,
    )
