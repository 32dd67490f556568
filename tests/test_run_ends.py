"""How a run ends: its environment, weights that are not finite, divergence, several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stiefel.experiments.callbacks import Checkpointer
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.tasks import Copying
from tests.small_runs import TINY, files, one_line, run

ROOT = Path(__file__).resolve().parent.parent


def test_a_run_leaves_the_environment_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    assert run("copying", *TINY, "--output", tmp_path / "run") == 0
    assert dict(os.environ) == before
    assert run("copying", *TINY, "--output", tmp_path / "run") == 2
    assert dict(os.environ) == before


# ------------------------------------------------------------------------ numbers gone wrong


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights go wrong in step 4, whose loss is still finite and which would be saved."""
    saving = Checkpointer.on_train_batch_end

    def spoil(self, trainer, module, *rest) -> None:
        if trainer.global_step == 4:
            with torch.no_grad():
                next(module.model.parameters()).fill_(torch.inf)
        saving(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpointer, "on_train_batch_end", spoil)
    folder = tmp_path / "run"
    assert run("copying", *TINY, "--output", folder) == 1
    one_line(capsys, "not finite at step 4", "--lr")
    saved = torch.load(folder / "checkpoint.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert all(bool(value.isfinite().all()) for value in saved["state_dict"].values())
    assert not (folder / "summary.json").exists()


def test_a_last_step_that_spoils_the_weights_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only measured training loss, of the start, is finite: the evaluation is not."""
    folder = tmp_path / "run"
    words = ("--method", "unconstrained", "--lr", 1e38, "--iterations", 1)
    assert run("copying", *TINY, *words, "--output", folder) == 1
    one_line(capsys, "the evaluation loss is", "at step 1", "--lr")
    assert set(files(folder)) == {"config.yaml", "versions.json"}


def test_a_loss_that_has_grown_is_called_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", "frozen", "--output", tmp_path / "wild")
    assert run("copying", *TINY, *words, "--lr", 1e6) == 0
    assert "training diverged: the loss rose from 3.3" in capsys.readouterr().out
    assert run("copying", "--resume", "--output", tmp_path / "wild") == 0
    assert "training diverged" in capsys.readouterr().out
    assert run("copying", *TINY, "--method", "frozen", "--output", tmp_path / "tame") == 0
    assert "diverged" not in capsys.readouterr().out


# ------------------------------------------------------------------------------ processes

RECORDED = """
import os, sys, torch
from stiefel.cli import main
from stiefel.experiments.tasks import Copying

train_batch, evaluation_batches = Copying.train_batch, Copying.evaluation_batches
seen = {"training": [], "evaluation": []}

def training(self, *words, **options):
    batch = train_batch(self, *words, **options)
    seen["training"].append(tuple(batch))
    return batch

def evaluation(self, *words, **options):
    for batch in evaluation_batches(self, *words, **options):
        seen["evaluation"].append(tuple(batch))
        yield batch

Copying.train_batch, Copying.evaluation_batches = training, evaluation
status = main(sys.argv[2:])
torch.save(seen, os.path.join(sys.argv[1], "seen-%s.pt" % os.environ.get("LOCAL_RANK", "0")))
sys.exit(status)
"""


def test_two_processes_share_the_data_of_one(tmp_path: Path) -> None:
    """Bit for bit the same sequences; losses up to the order of sums."""
    script = tmp_path / "record.py"
    script.write_text(RECORDED)
    words = ["train", "copying", *TINY, "--batch-size", "7"]  # which two do not share evenly
    two, one = tmp_path / "two", tmp_path / "one"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, tmp_path, *words, "--devices", "cpu:2", "--output", two],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("orthogonality error") == 1
    assert not (two / ".lock").exists()
    assert run(*words[1:], "--devices", "cpu", "--output", one) == 0
    assert set(files(two)) == set(files(one))

    ours = [torch.load(tmp_path / f"seen-{rank}.pt", weights_only=True) for rank in (0, 1)]
    task, options = Copying(delay=3, evaluation_sequences=16), {"seed": 0}
    whole = [task.train_batch(step, 7, **options) for step in range(6)]
    # the loop fetches a batch ahead, to know whether there is one
    assert all(len(process["training"]) in (6, 7) for process in ours)
    _same_rows([process["training"][:6] for process in ours], whole)
    _same_rows(
        [process["evaluation"] for process in ours],
        list(task.evaluation_batches(250, **options)),
    )

    for here, there in zip(
        read_metrics(two / "metrics.csv"), read_metrics(one / "metrics.csv"), strict=True
    ):
        for name in ("loss", "accuracy"):
            assert here[name] == pytest.approx(there[name], rel=1e-4)
    here, there = (json.loads((folder / "summary.json").read_text()) for folder in (two, one))
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
    for name in ("task", "method", "seed", "iterations", "baseline"):
        assert here[name] == there[name]


def _same_rows(shares: list[list[tuple]], whole: list[tuple]) -> None:
    """Row k of a whole batch is the next row of process k mod 2."""
    for first, second, (inputs, targets, rows) in zip(*shares, whole, strict=True):
        assert first[2] == second[2] == rows
        for index, expected in ((0, inputs), (1, targets)):
            assert torch.equal(first[index], expected[:, 0::2])
            assert torch.equal(second[index], expected[:, 1::2])
