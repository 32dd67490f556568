"""``stiefel train --monitor-every``: rows of figures that a kill and a resumption do not change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stiefel.diagnostics import CSVLogger
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.methods import METHODS as METHODS_OF
from stiefel.experiments.methods import fitting
from tests.small_runs import TINY, files, interrupted_at, one_line, run, weights

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINED = ["cwy", "rgd-c-c", "dtriv"]
METHODS = [*CONSTRAINED, "lstm"]


def record(folder: Path) -> list[dict]:
    return CSVLogger.read(folder / "stationarity.csv")


@pytest.mark.parametrize("method", CONSTRAINED)
def test_rows_have_the_figures_of_every_weight(method: str, tmp_path: Path) -> None:
    words = ("--method", method, "--monitor-every", 2)
    assert run("copying", *TINY, *words, "--output", tmp_path) == 0
    rows = record(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 4, 6]
    names = {name.rpartition("/")[0] for name in rows[-1] if "/" in name}
    assert names == {"model", "model.rnn.layers.0.recurrent.weight"}
    for row in rows:
        assert 0 < row["model/relative"] <= 1
        assert row["model/euclidean_norm"] > 0
        assert row["model/max_residual"] < 1e-5
        assert row["model/total_norm"] > row["model/euclidean_norm"]


@pytest.mark.parametrize(
    ("task", "method"),
    [
        *(("copying", name) for name in fitting("sequence") if not METHODS_OF[name].constrained),
        *(("moving-digits", name) for name in ("convlstm", "zeros", "orth-init")),
    ],
)
def test_a_method_without_constrained_weights_has_the_norm_of_all_gradients(
    task: str, method: str, tmp_path: Path
) -> None:
    words = ["--hidden", 4, "--batch-size", 2, "--iterations", 3, "--monitor-every", 1]
    words += ["--evaluation-sequences", 2, "--threads", 1, "--output", tmp_path]
    small = ["--frames", 3, "--frame-size", 16] if task == "moving-digits" else ["--delay", 3]
    assert run(task, "--method", method, *words, *small) == 0
    rows = record(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["model/total_norm"] > 0 for row in rows)
    assert "model/euclidean_norm" not in rows[0]


def test_without_it_there_is_no_file_and_nothing_else_changes(tmp_path: Path) -> None:
    for name, words in (("with", ("--monitor-every", 3)), ("without", ())):
        assert run("copying", *TINY, *words, "--output", tmp_path / name) == 0
    assert set(files(tmp_path / "with")) - set(files(tmp_path / "without")) == {"stationarity.csv"}
    ours, theirs = (read_metrics(tmp_path / name / "metrics.csv") for name in ("with", "without"))
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)  # up to the order of sums


@pytest.mark.parametrize(("method", "step"), [*((name, 5) for name in METHODS), ("cwy", 4)])
def test_interrupted_and_resumed_is_uninterrupted(method: str, step: int, tmp_path: Path) -> None:
    """Stopped at step 5, past the checkpoint of step 4, and at step 4, right after it."""
    words = ("copying", "--method", method, *TINY, "--iterations", 9, "--monitor-every", 1)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with interrupted_at(step):
        run(*words, "--output", tmp_path / "parts")
    assert [row["step"] for row in record(tmp_path / "parts")] == list(range(1, step + 1))
    assert run("copying", "--output", tmp_path / "parts", "--resume") == 0
    assert record(tmp_path / "parts") == record(tmp_path / "whole")
    assert len(record(tmp_path / "whole")) == 9
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_killed_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    words = ["copying", *TINY, "--iterations", "100", "--checkpoint-every", "20"]
    words += ["--monitor-every", "1"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "stiefel.cli", "train", *words, "--output", str(killed)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            rows = record(killed)
            if rows and rows[-1]["step"] >= 30:
                break
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (killed / "summary.json").exists()
    assert run(*words, "--output", killed, "--resume") == 0
    assert run(*words, "--output", tmp_path / "whole") == 0
    assert record(killed) == record(tmp_path / "whole")
    assert [row["step"] for row in record(killed)] == list(range(1, 101))


def test_a_run_may_be_resumed_with_and_without(tmp_path: Path) -> None:
    assert run("copying", *TINY, "--output", tmp_path) == 0
    words = ("copying", "--resume", "--output", tmp_path)
    assert run(*words, "--iterations", 9, "--monitor-every", 3) == 0
    assert [row["step"] for row in record(tmp_path)] == [9]
    assert run(*words, "--iterations", 12) == 0  # as before
    assert [row["step"] for row in record(tmp_path)] == [9, 12]
    assert run(*words, "--iterations", 15, "--monitor-every", 0) == 0
    assert [row["step"] for row in record(tmp_path)] == [9, 12]
    assert json.loads((tmp_path / "summary.json").read_text())["iterations"] == 15


@pytest.mark.parametrize("content", [b"\x00\xff\xfe\n\xff\n", b"step,a\n1,2,3,4\n", b"a\n1\n"])
def test_a_damaged_record_stops_a_resumption_before_it_begins(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("copying", *TINY, "--monitor-every", 2, "--output", tmp_path) == 0
    (tmp_path / "stationarity.csv").write_bytes(content)
    before = files(tmp_path)
    capsys.readouterr()
    assert run("copying", "--resume", "--iterations", 9, "--output", tmp_path) == 2
    one_line(capsys, str(tmp_path / "stationarity.csv"), "delete")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--monitor-every", "-1"], ["--monitor-every", "at least 0", "'-1'"]),
        (["--monitor-every", "often"], ["--monitor-every", "whole number", "'often'"]),
    ],
)
def test_wrong_words(
    words: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run("copying", *TINY, *words, "--output", tmp_path / "run")
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    one_line(capsys, *parts)
    assert not (tmp_path / "run").exists()
