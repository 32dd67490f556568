"""The flags, keys and files that scripts rely on keep their names."""

from __future__ import annotations

import re

import pytest

from stiefel.cli import main
from stiefel.experiments.methods import METHODS
from stiefel.experiments.tasks import TASKS

FLAGS = [
    *("--method", "--delay", "--hidden", "--reflections", "--iterations", "--epochs"),
    *("--batch-size", "--lr", "--lr-orthogonal", "--seed", "--output", "--resume", "--data-dir"),
    *("--devices", "--precision", "--config", "--print_config", "--monitor-every"),
    *("--frames", "--frame-size", "--digits", "--source", "--evaluation-sequences"),
]
DIAGNOSE_FLAGS = [
    *("--experiment", "--samples", "--confidence", "--threads", "--data-dir", "--steps", "--seeds"),
    *("--seed", "--output"),
]
SUMMARY = {"loss", "baseline", "accuracy", "orthogonality_error", "seconds"}


def help_of(command: str) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    return text.getvalue()


@pytest.fixture(scope="module")
def help_text() -> str:
    return help_of("train")


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_there_and_explained(help_text: str, flag: str) -> None:
    assert re.search(rf"^  {flag}\b[^\n]*(\n\s+|  )\w", help_text, re.MULTILINE), flag


def test_flags_of_diagnose_are_there_and_explained() -> None:
    text = help_of("diagnose")
    for flag in DIAGNOSE_FLAGS:
        assert re.search(rf"^  {flag}\b[^\n]*(\n\s+|  )\w", text, re.MULTILINE), flag
    assert "RUN " in text
    assert "theorem4" in text


@pytest.mark.parametrize("name", [*METHODS, *TASKS])
def test_help_names_every_method_and_task(help_text: str, name: str) -> None:
    assert re.search(rf"(^|\s){re.escape(name)}(,|\s|$)", help_text)


def test_methods_and_tasks() -> None:
    rgd = ["rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr"]
    charts = ["cwy", "tcwy", "hr", "exprnn", "dtriv", "dtriv-inf", "scornn", "own", "eurnn", "urnn"]
    others = ["rgd-adam", "riemannian-adam", "landing", "pogo", "stiefel-muon"]
    models = ["asrnn", "nnrnn", "irnn", "rnn-orth", "rnn", "lstm", "gru"]
    frames = ["convlstm", "zeros", "glorot-init", "orth-init"]
    assert list(METHODS) == [*charts, *rgd, *others, "unconstrained", *models, *frames, "frozen"]
    assert list(TASKS) == ["copying", "smnist", "pmnist", "moving-digits"]


def test_summary_keys() -> None:
    from stiefel.experiments.report import SUMMARY_KEYS

    assert set(SUMMARY_KEYS) == SUMMARY


def test_help_of_diagnose_names_what_it_writes() -> None:
    text = " ".join(help_of("diagnose").split())
    assert "changes nothing" not in text
    for words in ("diagnosis.png", "diagnosis.json", "into the run folder", "--output DIR"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "unknown", "near"),
    [
        (["train", "copying", "--iter", "3"], "--iter", "--iterations"),
        (["train", "copying", "--hiddn=3"], "--hiddn", "--hidden"),
        (["train", "copying", "--lr_orthogonal", "3"], "--lr_orthogonal", "--lr-orthogonal"),
        (["train", "copying", "--resum"], "--resum", "--resume"),
        (["diagnose", "run", "--conf", "0.9"], "--conf", "--confidence"),
    ],
)
def test_an_option_is_its_whole_name_and_the_nearest_is_named(
    words: list[str], unknown: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("stiefel: error: unrecognized arguments: ")
    assert f"for {unknown} did you mean {near}?" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("late", [["--iterations", "3"], ["--iterations=3", "--resume"]], ids=str)
@pytest.mark.parametrize("early", [[], ["--itertions", "3"]], ids=str)
def test_an_option_after_two_dashes_is_said_to_be_none(
    early: list[str], late: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "copying", *early, "--", *late])
    said = capsys.readouterr().err
    assert "; --iterations is no option after --: write it before" in said
    meant = ["; for --itertions did you mean --iterations?"] if early else []
    assert [f";{part}" for part in said.split(" (see")[0].split(";")[2:]] == meant
    assert said.count("\n") == 1


def test_a_word_like_no_option_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "copying", "--zzz", "3"])
    assert "did you mean" not in capsys.readouterr().err
