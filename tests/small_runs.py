"""Tiny runs of the command, whole and interrupted, and how their errors must read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stiefel.cli import main
from stiefel.experiments.callbacks import Checkpointer
from stiefel.experiments.logs import read_metrics

TINY = ["--hidden", "8", "--delay", "3", "--evaluation-sequences", "16", "--batch-size", "6"]
TINY += ["--iterations", "6", "--checkpoint-every", "2", "--threads", "1"]


def run(*words: object) -> int:
    return main(["train", *map(str, words)])


class _Stop(Exception):
    pass


@contextlib.contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Ends the run inside in the middle of a step, after its checkpoint if there is one."""
    saving = Checkpointer.on_train_batch_end

    def stop(self, trainer, *rest) -> None:
        saving(self, trainer, *rest)
        if trainer.global_step == step:
            raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_batch_end", stop)
        with pytest.raises(_Stop):
            yield


def weights(folder: Path) -> dict[str, bytes]:
    """The numbers in the checkpoint of a run."""
    state = torch.load(folder / "checkpoint.ckpt", weights_only=True)["state_dict"]
    return {name: value.numpy().tobytes() for name, value in state.items()}


def results(folder: Path) -> dict:
    """All that a run measured, without its times, and its weights."""
    found = json.loads((folder / "summary.json").read_text())
    rows = read_metrics(folder / "metrics.csv")
    return {
        "summary": {name: value for name, value in found.items() if name != "seconds"},
        "rows": [{k: repr(v) for k, v in row.items() if k != "seconds"} for row in rows],  # NaN too
        "weights": weights(folder),
    }


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder, but for the events that TensorBoard adds to."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def one_line(captured: pytest.CaptureFixture[str], *parts: str) -> None:
    printed = captured.readouterr()
    assert printed.err.startswith("stiefel: error: ")
    assert printed.err.count("\n") == 1
    for part in parts:
        assert part in printed.err
