"""What `stiefel diagnose` refuses: one line that teaches, status 2, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from stiefel.cli import main
from stiefel.experiments.folder import atomic_path
from tests.small_diagnoses import OUTPUTS, copy, diagnose, numbers, train_tiny
from tests.small_runs import files, one_line

ROOT = Path(__file__).resolve().parent.parent
GARBAGE = b"\x00\xff\xfe not what was written"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nobody writes into."""
    return train_tiny(tmp_path_factory.mktemp("finished"), "cwy")


@pytest.fixture
def finished(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return copy(pristine, tmp_path / "run")


def refused(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: object
) -> Callable[..., None]:
    """Diagnoses, and returns the check of the one line; no file may have changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert diagnose(*words) == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return lambda *parts: one_line(capsys, *map(str, parts))


# ------------------------------------------------------------------------------ what is named


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere"
    refused(capsys, tmp_path, path)(path, "no such file or folder", "stiefel train")


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    refused(capsys, tmp_path, tmp_path)(tmp_path, "no run folder", "config.yaml", "checkpoint.ckpt")
    refused(capsys, tmp_path, tmp_path / "notes.txt")("notes.txt", "is no checkpoint")


@pytest.mark.parametrize("name", ["metrics.csv", "config.yaml", "summary.json"])
def test_another_file_of_the_run(
    finished: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, finished, finished / name)(finished / name, "is no checkpoint", "expected")


def test_a_checkpoint_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = finished.parent / "alone"
    alone.mkdir()
    (alone / "checkpoint.ckpt").write_bytes((finished / "checkpoint.ckpt").read_bytes())
    for path in (alone, alone / "checkpoint.ckpt"):
        check = refused(capsys, alone, path)
        check(alone / "config.yaml", "no such file", "which model and task", "run folder")


def test_a_run_before_its_first_checkpoint(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "checkpoint.ckpt").unlink()
    check = refused(capsys, finished, finished)
    check(finished / "checkpoint.ckpt", "no weights to diagnose yet", "--checkpoint-every")


# ------------------------------------------------------------------------------- damaged files


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def one_bit_changed(content: bytes) -> bytes:
    at = content.index(b"data/0") + 200
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [truncated, one_bit_changed, lambda content: b"", lambda content: GARBAGE]
)
def test_a_damaged_checkpoint(
    finished: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    checkpoint = finished / "checkpoint.ckpt"
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    refused(capsys, finished, finished)("checkpoint damaged", checkpoint)
    refused(capsys, finished, checkpoint)("checkpoint damaged", checkpoint)


def test_a_checkpoint_of_another_kind(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"global_step": 6}, finished / "checkpoint.ckpt")
    refused(capsys, finished, finished)("checkpoint damaged", "it has no state_dict")
    content = torch.load(finished / "checkpoint.ckpt", weights_only=True)
    keys = ("state_dict", "optimizer_states", "loops", "callbacks", "rng_state")
    torch.save(content | dict.fromkeys(keys, 3), finished / "checkpoint.ckpt")
    refused(capsys, finished, finished)("do not fit the options", "side by side")


@pytest.mark.parametrize("change", [{"hidden": 9}, {"method": "rgd-c-c", "reflections": None}])
def test_the_checkpoint_of_another_run(
    finished: Path, capsys: pytest.CaptureFixture[str], change: dict
) -> None:
    config = finished / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **change}))
    check = refused(capsys, finished, finished)
    check(finished / "checkpoint.ckpt", "do not fit the options", config, "side by side")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"task: [copying\nmethod: {", ["not the options of a run"]),
        (b"- copying\n", ["not the options of a run"]),
        (b"task: copying\nflavour: sour\n", ["not the options of a run", "flavour"]),
        (b"task: copying\nhidden: many\n", ["hidden: expected int | None, got 'many'"]),
        (b"task: copying\nlr: fast\n", ["lr: expected float | None, got 'fast'"]),
        (b"task: 3\n", ["task: expected str, got 3"]),
        (GARBAGE, ["not the options of a run"]),
        (b"", ["not the options of a run"]),
    ],
)
def test_a_damaged_configuration(
    finished: Path, capsys: pytest.CaptureFixture[str], content: bytes, parts: list[str]
) -> None:
    (finished / "config.yaml").write_bytes(content)
    refused(capsys, finished, finished)(finished / "config.yaml", *parts)


@pytest.mark.parametrize("name", ["metrics.csv", "stationarity.csv"])
@pytest.mark.parametrize("content", [GARBAGE + b"\n" + GARBAGE + b"\n", b"step,a\n1,2,3,4\n"])
def test_a_damaged_record(
    finished: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (finished / name).write_bytes(content)
    refused(capsys, finished, finished)(finished / name, "delete")
    (finished / name).unlink()
    assert diagnose(finished, "--output", finished.parent / "out") == 0


@pytest.mark.parametrize("steps", [(1, 3, 3, 5), (1, 5, 3, 7), (0, 1, 2, 3)])
def test_a_record_whose_steps_do_not_increase(
    finished: Path, capsys: pytest.CaptureFixture[str], steps: tuple[int, ...]
) -> None:
    lines = ["step,model/euclidean_norm", *(f"{step},0.5" for step in steps)]
    (finished / "stationarity.csv").write_text("\n".join(lines) + "\n")
    refused(capsys, finished, finished)(finished / "stationarity.csv", "increase", "delete")


# ------------------------------------------------------------------------------------- options

WORDS = [
    ([], ["expected a run folder", "got neither", "stiefel diagnose RUN"]),
    (["RUN", "--experiment", "theorem4"], ["got both"]),
    (["--experiment", "theorem5"], ["unknown experiment 'theorem5'", "theorem4"]),
    (["RUN", "--samples", "0"], ["--samples", "from 4 to 4096", "got '0'"]),
    (["RUN", "--samples", "3"], ["--samples", "from 4 to 4096", "got '3'"]),
    (["RUN", "--samples", "100000000000"], ["--samples", "from 4 to 4096", "got '100000000000'"]),
    (["RUN", "--samples", "few"], ["--samples", "whole number", "'few'"]),
    (["RUN", "--seed", "-1"], ["--seed", "at least 0", "'-1'"]),
    (["RUN", "--threads", "0"], ["--threads", "from 1 to 1024", "'0'"]),
    (["RUN", "--threads", "1000000"], ["--threads", "from 1 to 1024", "'1000000'"]),
    (["RUN", "--confidence", "1"], ["--confidence", "between 0 and 1", "1.0"]),
    (["RUN", "--confidence", "nan"], ["--confidence", "'nan'"]),
    (["RUN", "--steps", "500"], ["--steps", "no option of the diagnosis of runs"]),
    (["--experiment", "theorem4", "--samples", "8"], ["--samples", "no option", "experiments"]),
    (["--experiment", "theorem4", "--steps", "399"], ["steps >= 400", "steps=399"]),
    (["RUN", "RUN"], ["unrecognized"]),
    (["RUN", "--method", "cwy"], ["unrecognized", "--method"]),
    (["RUN", "--output", "/proc/nowhere"], ["cannot be written", "/proc/nowhere", "--output"]),
    (["RUN", "--output", "/dev/null/x"], ["cannot be written", "/dev/null/x", "--output"]),
]


@pytest.mark.parametrize(("words", "parts"), WORDS, ids=[" ".join(words) for words, _ in WORDS])
def test_wrong_words(
    pristine: Path,
    words: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(pristine)
    capsys.readouterr()
    try:
        status = main(["diagnose", *(str(pristine) if word == "RUN" else word for word in words)])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    one_line(capsys, *parts)
    assert files(pristine) == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# ------------------------------------------------------------------------- whole files, or none


def test_a_disk_that_fails_leaves_what_was_there(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OUTPUTS:
        (finished / name).write_bytes(b"before")

    def full(self, *rest, **options) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    check = refused(capsys, finished, finished)
    check("cannot be written", finished, "No space left on device", "--output")


@pytest.mark.parametrize("damage", ["checkpoint.ckpt", "config.yaml"])
def test_a_file_that_may_not_be_read(
    finished: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (finished / damage).unlink()
    (finished / damage).mkdir()
    assert diagnose(finished) == 2
    one_line(capsys, damage)


def test_two_at_once_leave_whole_files(finished: Path) -> None:
    """And a third writes the same page again and again meanwhile, as any process may."""
    words = [sys.executable, "-m", "stiefel.cli", "diagnose", str(finished), "--samples", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    seen = 0
    page = finished / "diagnosis.png"
    while any(process.poll() is None for process in both):
        with atomic_path(page) as path:
            path.write_bytes(b"\x89PNG whole")
        content = page.read_bytes()
        assert content == b"\x89PNG whole" or content.endswith(b"IEND\xaeB`\x82")
        seen += content != b"\x89PNG whole"
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
    assert not list(finished.glob(".*.part"))
    assert json.loads((finished / "diagnosis.json").read_text()) == numbers(finished)
