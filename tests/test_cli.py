"""``stiefel train`` end to end: every method, the run folder, configuration files, bad input."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from stiefel.cli import main
from stiefel.experiments.logs import COLUMNS, read_metrics
from stiefel.experiments.methods import METHODS, fitting
from stiefel.experiments.options import TrainOptions, make_task, resolve
from stiefel.experiments.recipes import RECIPES

TINY = ["--hidden", "16", "--delay", "5", "--iterations", "5", "--evaluation-sequences", "64"]
RECURRENT = fitting("sequence")
CONSTRAINED = [name for name in RECURRENT if METHODS[name].constrained]


def run(*words: object) -> int:
    return main(["train", *map(str, words)])


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny run of every method."""
    root = tmp_path_factory.mktemp("runs")
    for name in RECURRENT:
        assert run("copying", "--method", name, *TINY, "--output", root / name) == 0
    return {name: root / name for name in RECURRENT}


# ------------------------------------------------------------------------------ the folder


@pytest.mark.parametrize("method", RECURRENT)
def test_a_run_leaves_its_folder(runs: dict[str, Path], method: str) -> None:
    folder = runs[method]
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.yaml", "versions.json", "metrics.csv", "checkpoint.ckpt", "loss.png"),
        *("summary.json", "tensorboard"),
    }
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    rows = read_metrics(folder / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert set(rows[-1]) == set(COLUMNS)


@pytest.mark.parametrize("method", RECURRENT)
def test_the_summary(runs: dict[str, Path], method: str) -> None:
    found = summary(runs[method])
    assert found["task"] == "copying"
    assert found["method"] == method
    assert found["iterations"] == 5
    assert found["baseline"] == pytest.approx(10 * torch.log(torch.tensor(8.0)).item() / 25)
    assert 0 < found["loss"] < 10
    assert 0 <= found["accuracy"] <= 1
    assert found["seconds"] > 0
    last = read_metrics(runs[method] / "metrics.csv")[-1]
    assert last["evaluation_loss"] == found["loss"]
    if METHODS[method].rate == "main":  # gates have no weight to measure
        assert found["orthogonality_error"] is None
        assert math.isnan(last["orthogonality_error"])
    else:
        assert last["orthogonality_error"] == found["orthogonality_error"]


@pytest.mark.parametrize("method", CONSTRAINED)
def test_constrained_methods_stay_orthogonal_and_move(runs: dict[str, Path], method: str) -> None:
    error = summary(runs[method])["orthogonality_error"]
    assert error < 1e-5 or METHODS[method].near
    assert error < 0.5
    assert summary(runs[method])["loss"] != summary(runs["frozen"])["loss"]


def test_unconstrained_leaves_the_orthogonal_matrices_and_frozen_does_not(
    runs: dict[str, Path],
) -> None:
    assert summary(runs["unconstrained"])["orthogonality_error"] > 1e-4
    errors = [row["orthogonality_error"] for row in read_metrics(runs["frozen"] / "metrics.csv")]
    assert max(errors) < 1e-6
    assert len(set(errors)) == 1


def test_all_methods_start_from_the_same_loss(runs: dict[str, Path]) -> None:
    same = [name for name in RECURRENT if METHODS[name].cell == "orthogonal_rnn"]
    first = [read_metrics(runs[name] / "metrics.csv")[0]["loss"] for name in same]
    assert first == pytest.approx([first[0]] * len(first), rel=1e-4)


def test_both_metrics_take_the_same_steps_on_a_square_matrix(runs: dict[str, Path]) -> None:
    for retraction in ("c", "qr"):
        ours, theirs = (summary(runs[f"rgd-{metric}-{retraction}"]) for metric in "ce")
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_the_last_thing_printed_is_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("copying", *TINY, "--output", tmp_path / "run") == 0
    printed = capsys.readouterr()
    lines = printed.out.rstrip().splitlines()
    assert printed.err == ""
    found = summary(tmp_path / "run")
    assert f"{found['loss'] / found['baseline']:.2%} of the baseline" in lines[-6]
    for heading in ("loss", "baseline", "accuracy", "orthogonality error", "seconds"):
        assert heading in lines[-4]
    assert f"{found['loss']:.4g}" in lines[-2]
    assert f"{found['accuracy']:.2%}" in lines[-2]


# ----------------------------------------------------------------------- options and rules


def test_the_same_words_give_the_same_numbers(runs: dict[str, Path], tmp_path: Path) -> None:
    assert run("copying", *TINY, "--output", tmp_path / "again") == 0
    ours, theirs = summary(tmp_path / "again"), summary(runs["cwy"])
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
    assert run("copying", *TINY, "--seed", 1, "--output", tmp_path / "other") == 0
    assert summary(tmp_path / "other")["loss"] != theirs["loss"]


def test_the_resolved_configuration_runs_again(runs: dict[str, Path], tmp_path: Path) -> None:
    config = runs["rgd-c-qr"] / "config.yaml"
    values = yaml.safe_load(config.read_text())
    assert values["lr"] == 1e-3
    assert values["lr_orthogonal"] == pytest.approx(0.1 / (10 * np.log(8)))
    assert run("--config", config, "--output", tmp_path / "run") == 0
    assert summary(tmp_path / "run")["loss"] == summary(runs["rgd-c-qr"])["loss"]
    # a word on the command line goes before the file
    assert run("--config", config, "--iterations", 2, "--output", tmp_path / "short") == 0
    assert summary(tmp_path / "short")["iterations"] == 2


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("copying", "--delay", 7, "--method", "rgd-c-c", "--print_config")
    assert ended.value.code == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["delay"], values["method"], values["hidden"]) == (7, "rgd-c-c", None)


@pytest.mark.parametrize("task", ["copying"])
@pytest.mark.parametrize("method", RECURRENT)
def test_the_rule_of_learning_rates(task: str, method: str) -> None:
    options = TrainOptions(task, method=method, delay=100)
    made = make_task(options)
    found, lr = resolve(options, made), RECIPES[task].lr
    assert found.lr == lr
    canonical = 100 * lr / (made.baseline * made.length)
    expected = {
        **dict.fromkeys(METHODS, lr / 10),
        **dict.fromkeys(("frozen", "lstm", "gru")),
        **dict.fromkeys(("rgd-c-c", "rgd-c-qr"), canonical),
        **dict.fromkeys(("rgd-e-c", "rgd-e-qr", "landing", "pogo"), 2 * canonical),
        **dict.fromkeys(("rgd-adam", "riemannian-adam"), 128 * lr / 10),
        "stiefel-muon": 128**0.5 * lr / 10,
    }
    assert found.lr_orthogonal == pytest.approx(expected[method])


def test_reflections_and_precision(tmp_path: Path) -> None:
    few = tmp_path / "few"
    assert run("copying", *TINY, "--reflections", 4, "--output", few) == 0
    state = torch.load(few / "checkpoint.ckpt", weights_only=True)["state_dict"]
    (shape,) = (value.shape for name, value in state.items() if name.endswith("original"))
    assert shape == (16, 4)
    double = tmp_path / "double"
    assert run("copying", *TINY, "--precision", 64, "--output", double) == 0
    assert summary(double)["orthogonality_error"] < 1e-12
    mixed = tmp_path / "mixed"
    words = ("--method", "rgd-c-qr", "--precision", "bf16-mixed")
    assert run("copying", *TINY, *words, "--output", mixed) == 0
    assert summary(mixed)["orthogonality_error"] < 1e-5


def test_a_run_without_a_name_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("copying", *TINY, "--method", "frozen") == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert all(name.startswith("copying-frozen-2") for name in names)


def test_smnist_from_a_folder(tmp_path: Path, data_dir: Path) -> None:
    words = ("--hidden", 8, "--iterations", 2, "--batch-size", 4, "--data-dir", data_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "stiefel.experiments.tasks.pixel_mnist.load_mnist", lambda folder: _first(folder)
        )
        assert run("pmnist", *words, "--output", tmp_path / "run") == 0
    found = summary(tmp_path / "run")
    assert found["baseline"] == pytest.approx(2.302585)
    assert found["iterations"] == 2


def _first(folder: Path):
    from stiefel.experiments.mnist_files import Mnist, load_mnist

    return Mnist(*(array[:40] for array in load_mnist(folder)))


# ------------------------------------------------------------------------------- bad input


BAD = [
    (["copying", "--method", "cwi"], ["unknown method 'cwi'", ", ".join(sorted(METHODS))]),
    (["copyin"], ["unknown task 'copyin'", "copying, moving-digits, pmnist, smnist"]),
    (["copying", "--method", "convlstm"], ["does not fit copying", *fitting("sequence")]),
    (["moving-digits", "--method", "urnn"], ["does not fit moving-digits", *fitting("frames")]),
    (["moving-digits", "--reflections", "4"], ["--reflections", "moving-digits", "leave it out"]),
    (["moving-digits", "--frame-size", "28"], ["frame size of 16, 32, 64", "28"]),
    (["moving-digits", "--frames", "2"], ["at least 3 frames", "got 2"]),
    (["moving-digits", "--source", "kth"], ["source", "mnist, shapes"]),
    (["moving-digits", "--source", "shapes", "--data-dir", "x"], ["no data_dir", "generated"]),
    (["moving-digits", "--data-dir", "/nowhere"], ["train-images", "/nowhere"]),
    (["moving-digits", "--delay", "5"], ["--delay", "copying task only"]),
    (["smnist", "--digits", "5"], ["--digits", "moving-digits task only"]),
    (["smnist", "--evaluation-sequences", "5"], ["copying and moving-digits tasks only"]),
    ([], ["which task?", "copying"]),
    (["copying", "--delay", "0"], ["--delay", "at least 1", "'0'"]),
    (["copying", "--delay", "many"], ["--delay", "whole number", "'many'"]),
    (["copying", "--hidden", "-3"], ["--hidden", "'-3'"]),
    (["copying", "--lr", "fast"], ["--lr", "a number of at least 0", "'fast'"]),
    (["copying", "--lr", "nan"], ["--lr", "'nan'"]),
    (["copying", "--seed", "-1"], ["--seed", "'-1'"]),
    (["copying", "--layout", "mine"], ["layout", "expRNN, scoRNN"]),
    (["copying", "--precision", "8"], ["unknown precision '8'", "16-mixed"]),
    (["copying", "--devices", "tpu"], ["--devices 'tpu'", "cpu:2"]),
    (["copying", "--devices", "cuda:64"], ["--devices cuda:64", "CUDA devices"]),
    (["copying", "--devices", "cpu:300"], ["--devices 300", "128 sequences"]),
    (["copying", "--epochs", "2"], ["--epochs", "--iterations"]),
    (["copying", "--reflections", "129"], ["--reflections", "between 1", "128", "129"]),
    (["copying", "--method", "rgd-c-c", "--reflections", "4"], ["--reflections", "cwy"]),
    (["copying", "--method", "frozen", "--lr-orthogonal", "1"], ["--lr-orthogonal", "frozen"]),
    (["copying", "--resume"], ["--resume", "--output DIR"]),
    (["copying", "--bogus", "1"], ["unrecognized", "--bogus"]),
    (["copying", "--config", "nowhere.yaml"], ["--config", "nowhere.yaml"]),
    (["smnist", "--data-dir", "/nowhere", "--epochs", "1"], ["train-images", "/nowhere"]),
    (["smnist", "--delay", "5"], ["--delay", "copying task only"]),
]


@pytest.mark.parametrize(("words", "expected"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_status_2(
    words: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = run(*words)
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.startswith("stiefel: error: ")
    assert printed.err.count("\n") == 1
    assert all(part in printed.err for part in expected)
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def test_iterations_and_epochs_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("copying", "--iterations", 3, "--epochs", 3) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", "unconstrained", "--lr", 1e38, "--iterations", 20)
    assert run("copying", *TINY, *words, "--output", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "loss is nan" in error or "not finite" in error
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_folder_with_a_run_is_not_written_over(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = summary(runs["cwy"])
    assert run("copying", *TINY, "--output", runs["cwy"]) == 2
    assert "finished run" in capsys.readouterr().err
    assert summary(runs["cwy"]) == before
    (tmp_path / "config.yaml").write_text((runs["cwy"] / "config.yaml").read_text())
    assert run("copying", *TINY, "--output", tmp_path) == 2
    assert "--resume" in capsys.readouterr().err


def test_without_the_extra_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = "stiefel.cli.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == "lightning" else object())
    assert run("copying") == 2
    error = capsys.readouterr().err
    assert "lightning" in error
    assert 'pip install "stiefel[experiments]"' in error
    assert error.count("\n") == 1


def test_bad_input_of_the_process_has_no_traceback() -> None:
    command = [sys.executable, "-m", "stiefel.cli", "train", "copying", "--method", "cwi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "cwy" in done.stderr


# -------------------------------------------------------------------------------- examples


def load_example(name: str):
    path = Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"
    return runpy.run_path(str(path), run_name="example")


def test_example_swap_by_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {
        via: load_example("swap_by_one_word")["train"](via, 100) for via in ("cwy", "rgd-c-c")
    }
    assert max(losses.values()) < 0.5 * torch.log(torch.tensor(4.0)).item()
    assert capsys.readouterr().out.count("largest entry") == 2


def test_example_train_from_python(tmp_path: Path) -> None:
    shares = load_example("train_from_python")["main"](tmp_path, 10)
    assert set(shares) == {"cwy", "rgd-c-c"}
    assert (tmp_path / "cwy" / "summary.json").exists()


def test_example_copying_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--delay 5 --hidden 16 --steps 2 --batch 4 --model asrnn nnrnn --via exprnn rgd-c-c"
    shares = load_example("copying_memory")["main"](options.split())
    assert set(shares) == {(m, v) for m in ("asrnn", "nnrnn") for v in ("exprnn", "rgd-c-c")}
    assert capsys.readouterr().out.count("%") == 4


# ------------------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cwy", "rgd-e-qr"])
def test_two_processes_train_as_one(method: str, tmp_path: Path) -> None:
    words = ["copying", "--method", method, *TINY, "--batch-size", "33", "--threads", "1"]
    command = [sys.executable, "-m", "stiefel.cli", "train", *words]
    command += ["--devices", "cpu:2", "--output", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("orthogonality error") == 1
    assert run(*words, "--output", tmp_path / "one") == 0
    two, one = (read_metrics(tmp_path / name / "metrics.csv") for name in ("two", "one"))
    for ours, theirs in zip(two, one, strict=True):
        for name in ("loss", "accuracy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    assert summary(tmp_path / "two")["loss"] == pytest.approx(
        summary(tmp_path / "one")["loss"], rel=1e-4
    )
