"""Recurrent networks trained by two processes: one set of weights at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stiefel
from tests.registry import NETWORKS

NAMES = [
    *("orthogonal-rnn-modrelu", "asrnn", "asrnn-free", "nnrnn"),
    *("irnn", "lstm", "gru", "unitary", "urnn"),
]


def train_together(rank: int, path: str, queue: Any) -> None:
    """Two steps on sequences that differ between the processes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    agree = {}
    for name in NAMES:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(NETWORKS[name].model("cwy"))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.manual_seed(rank + 1)
        optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 4, 3, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        moved = all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        total = torch.stack([p.detach().abs().sum() for p in model.parameters()])
        gathered = [torch.zeros_like(total) for _ in range(2)]
        dist.all_gather(gathered, total)
        agree[name] = moved and bool(torch.equal(*gathered))
    if rank == 0:
        queue.put(agree)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ddp_on_two_gloo_processes(tmp_path: Path) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train_together, (str(tmp_path / "store"), queue), nprocs=2)
    assert queue.get() == dict.fromkeys(NAMES, True)
