"""A run that is killed and resumed ends on the very numbers of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stiefel.experiments.callbacks import AtomicCheckpointIO
from stiefel.experiments.folder import RunFolder, atomic_path
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.methods import fitting
from tests.small_runs import interrupted_at, results, run

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--hidden", "16", "--delay", "5", "--evaluation-sequences", "64", "--threads", "1"]
SHORT = [*TINY, "--iterations", "12", "--checkpoint-every", "4"]


@pytest.mark.parametrize(
    ("method", "step"), [*((name, 10) for name in fitting("sequence")), ("cwy", 8)]
)
def test_interrupted_and_resumed_is_uninterrupted(method: str, step: int, tmp_path: Path) -> None:
    """Stopped at step 10, two steps past a checkpoint, and at step 8, right after one."""
    words = ("copying", "--method", method, *SHORT)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with interrupted_at(step):
        run(*words, "--output", tmp_path / "parts")
    assert not (tmp_path / "parts" / "summary.json").exists()
    torch.manual_seed(12345)  # what the process drew in between is of no consequence
    assert run(*words, "--output", tmp_path / "parts", "--resume") == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@pytest.mark.parametrize("method", ["lstm", "rgd-c-c"])
def test_a_finished_run_shows_its_table_again(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gates have no orthogonality error: their summary has null, and is whole."""
    words = ("copying", "--method", method, *SHORT, "--output", tmp_path / "run")
    assert run(*words) == 0
    first = capsys.readouterr().out.splitlines()[-6:]
    assert run(*words, "--resume") == 0
    assert capsys.readouterr().out.splitlines()[-6:] == first


@pytest.mark.parametrize("method", ["cwy", "rgd-c-c"])
def test_killed_and_resumed_is_uninterrupted(method: str, tmp_path: Path) -> None:
    words = ["copying", "--method", method, *TINY, "--iterations", "300"]
    words += ["--checkpoint-every", "20"]
    command = [sys.executable, "-m", "stiefel.cli", "train", *words]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--output", str(killed)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            rows = read_metrics(killed / "metrics.csv")
            if rows and rows[-1]["step"] >= 50:
                break
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    done = torch.load(killed / "checkpoint.ckpt", weights_only=True)["global_step"]
    assert 40 <= done < 300
    assert run(*words, "--output", killed, "--resume") == 0
    assert run(*words, "--output", tmp_path / "whole") == 0
    assert results(killed) == results(tmp_path / "whole")


def test_resume_takes_the_options_of_the_run(tmp_path: Path) -> None:
    words = ("copying", "--method", "rgd-e-qr", "--seed", 3, *SHORT)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with interrupted_at(5):
        run(*words, "--output", tmp_path / "parts")
    assert run("copying", "--resume", "--output", tmp_path / "parts") == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_resume_with_other_options_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run("copying", *SHORT, "--output", folder) == 0
    before = results(folder)
    capsys.readouterr()
    for words in (["--method", "rgd-c-c"], ["--seed", 1], ["--lr", 0.5], ["--hidden", 8]):
        assert run("copying", *words, "--output", folder, "--resume") == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert words[0].strip("-") in printed
        assert str(words[1]) in printed
    assert results(folder) == before


def test_a_finished_run_resumes_to_its_table_or_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, longer = tmp_path / "run", tmp_path / "longer"
    assert run("copying", *SHORT, "--output", folder) == 0
    before = (folder / "summary.json").read_text()
    capsys.readouterr()
    assert run("copying", "--output", folder, "--resume") == 0
    assert (folder / "summary.json").read_text() == before
    assert "orthogonality error" in capsys.readouterr().out
    assert run("copying", "--output", folder, "--resume", "--iterations", 20) == 0
    assert run("copying", *SHORT, "--iterations", 20, "--output", longer) == 0
    assert results(folder)["weights"] == results(longer)["weights"]
    assert results(folder)["summary"] == results(longer)["summary"]


def test_resume_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    words = ("copying", *SHORT)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with interrupted_at(2):
        run(*words, "--output", tmp_path / "parts")
    assert not (tmp_path / "parts" / "checkpoint.ckpt").exists()
    assert run(*words, "--output", tmp_path / "parts", "--resume") == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_a_write_that_is_cut_short_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("whole")

    def cut_short() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("ha")
            assert path.read_text() == "whole"
            raise KeyError

    with pytest.raises(KeyError):
        cut_short()
    assert path.read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_process_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    program = f"""
import os, signal, torch
from stiefel.experiments.folder import atomic_path
from pathlib import Path
with atomic_path(Path({str(path)!r})) as temporary:
    temporary.write_bytes(b"half a checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".checkpoint.ckpt.*.part"))) == 1
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}
    AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 2}
    with RunFolder(tmp_path).locked():  # the next run in the folder
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.ckpt"]


def test_a_metrics_row_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("copying", *SHORT, "--output", folder) == 0
    whole = read_metrics(folder / "metrics.csv")
    with (folder / "metrics.csv").open("a") as file:
        file.write("13,0.5,0.")
    assert read_metrics(folder / "metrics.csv") == whole
