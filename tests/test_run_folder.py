"""The folder of a run: one process at a time, and damaged files that cost nothing but a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stiefel.errors import ConfigurationError, DataError
from stiefel.experiments.callbacks import Checkpointer
from stiefel.experiments.folder import RunFolder, atomic_path
from stiefel.experiments.logs import COLUMNS, read_metrics
from tests.small_runs import TINY, files, interrupted_at, one_line, run

ROOT = Path(__file__).resolve().parent.parent
DAMAGE = b"\x00\xff\xfe not what was written"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run("copying", *TINY, "--output", folder) == 0
    return files(folder)


@pytest.fixture
def finished(pristine: dict[str, bytes], tmp_path: Path) -> Path:
    """A copy of a finished run."""
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    for name, content in pristine.items():
        (folder / name).write_bytes(content)
    return folder


# -------------------------------------------------------------------------- damaged files


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def one_byte_changed(content: bytes) -> bytes:
    """A bit of a stored weight: the archive still opens, only its sum is wrong."""
    at = content.index(b"data/0") + 200
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [truncated, one_byte_changed, lambda content: b"", lambda content: DAMAGE]
)
def test_a_damaged_checkpoint_costs_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    checkpoint = finished / "checkpoint.ckpt"
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    before = files(finished)
    assert run("copying", "--output", finished, "--resume", "--iterations", 9) == 2
    one_line(capsys, "checkpoint damaged", str(checkpoint), "--output")
    assert files(finished) == before


def test_a_file_of_another_kind_is_no_checkpoint(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"global_step": 6}, finished / "checkpoint.ckpt")
    before = files(finished)
    assert run("copying", "--output", finished, "--resume", "--iterations", 9) == 2
    one_line(capsys, "checkpoint damaged", "it has no state_dict")
    assert files(finished) == before


def test_a_finished_run_without_its_checkpoint_is_kept(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "checkpoint.ckpt").unlink()
    before = files(finished)
    assert run("copying", "--output", finished, "--resume", "--iterations", 9) == 2
    one_line(capsys, "checkpoint.ckpt", "cannot be continued")
    assert files(finished) == before


@pytest.mark.parametrize("iterations", [3, 4])
def test_fewer_steps_than_are_done_change_nothing(
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    iterations: int,
) -> None:
    folder = finished.parent / "interrupted"
    with interrupted_at(5):
        run("copying", *TINY, "--output", folder)
    before = files(folder)
    assert ".lock" not in before
    capsys.readouterr()
    assert run("copying", "--output", folder, "--resume", "--iterations", iterations) == 2
    one_line(capsys, f"--iterations {iterations}", "already past that (step 4)")
    assert files(folder) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", b"{"),
        ("summary.json", b"{}"),
        ("summary.json", b"[1]"),
        ("summary.json", DAMAGE),
        ("metrics.csv", DAMAGE + b"\n" + DAMAGE + b"\n"),
        ("metrics.csv", ",".join(COLUMNS).encode() + b"\n1,half,,,,,\n"),
        ("metrics.csv", ",".join(COLUMNS).encode() + b"\n1,2,3,4,5,6,7,8\n"),
        ("metrics.csv", ",".join(COLUMNS).encode() + b"\n,2\n"),
        ("config.yaml", b"task: [copying\nmethod: {"),
        ("config.yaml", b"- copying\n- cwy\n"),
        ("config.yaml", b"task: copying\nflavour: sour\n"),
        ("config.yaml", DAMAGE),
    ],
)
def test_damaged_files_are_one_line_and_status_2(
    finished: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (finished / name).write_bytes(content)
    before = files(finished)
    assert run("copying", "--output", finished, "--resume", "--iterations", 9) == 2
    one_line(capsys, str(finished / name), "delete")
    assert files(finished) == before


def test_what_the_error_of_a_damaged_summary_says_to_do_works(
    finished: Path, pristine: dict[str, bytes]
) -> None:
    (finished / "summary.json").unlink()
    assert run("copying", "--output", finished, "--resume") == 0
    ours, theirs = (
        json.loads(x) for x in (files(finished)["summary.json"], pristine["summary.json"])
    )
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_the_error_of_bad_metrics_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(",".join(COLUMNS) + "\n1,0.5,,,,,\n2,half,,,,,\n")
    with pytest.raises(DataError, match=r"line 3.*half"):
        read_metrics(path)


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize("output", ["/proc/nowhere/run", "/dev/null/run", "n" * 300])
def test_a_folder_that_cannot_be_made(
    output: str,
    resume: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("copying", *TINY, "--output", output, *resume) == 2
    one_line(capsys, output)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self, *rest) -> None:
        raise OSError(28, "No space left on device", "checkpoint.ckpt")

    monkeypatch.setattr(Checkpointer, "on_train_batch_end", full)
    assert run("copying", *TINY, "--output", tmp_path / "run") == 2
    one_line(capsys, "No space left on device", "--output")


# -------------------------------------------------------------------- one run at a time

HOLD = """
import sys, time
from stiefel.experiments.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is training in ``run``."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_folder_belongs_to_one_process_until_it_is_killed(
    holder: subprocess.Popen[str],
    finished: Path,
    pristine: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (TINY, ["--resume", "--iterations", 8]):
        assert run("copying", *words, "--output", finished) == 2
        one_line(capsys, str(finished), f"process {holder.pid} on", "another folder")
        assert files(finished) == {**pristine, ".lock": (finished / ".lock").read_bytes()}
    # what is finished can be looked at all the same
    assert run("copying", "--resume", "--output", finished) == 0
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    (finished / ".checkpoint.ckpt.1-00000000.part").write_bytes(b"half")
    assert run("copying", "--resume", "--iterations", 8, "--output", finished) == 0
    assert set(files(finished)) == set(pristine)


def test_of_many_that_want_a_folder_at_once_one_has_it(tmp_path: Path) -> None:
    """A lock file that its holder removes must not let two in: entered again and again."""
    folder, inside, most, entered, refused = RunFolder(tmp_path), [], [], [], []

    def enter() -> None:
        for _ in range(200):
            try:
                with folder.locked():
                    inside.append(0)
                    most.append(len(inside))
                    entered.append(0)
                    inside.pop()
            except ConfigurationError:
                refused.append(0)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) + len(refused) == 800
    assert entered
    assert max(most) == 1
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_path(path) as outer:
        outer.write_text("outer")
        with atomic_path(path) as inner:
            assert inner != outer
            inner.write_text("inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert list(tmp_path.iterdir()) == [path]


def test_runs_without_a_name_that_begin_together_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stiefel.experiments.options import TrainOptions

    monkeypatch.chdir(tmp_path)
    paths = {RunFolder.of(TrainOptions("copying")).path for _ in range(3)}
    assert len(paths) == 3
