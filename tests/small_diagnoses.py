"""Tiny runs for the tests of ``stiefel diagnose``, and what it must leave alone."""

from __future__ import annotations

import json
from pathlib import Path

from stiefel.cli import main
from tests.small_runs import TINY, files, run

MONITORED = ("cwy", "rgd-c-c")
OUTPUTS = {"diagnosis.png", "diagnosis.json"}


def train_tiny(root: Path, method: str, *words: object) -> Path:
    """A run of six steps in ``root/method``; its record has a row a step where it can."""
    record = ("--monitor-every", 1) if method in MONITORED else ()
    assert (
        run("copying", "--method", method, *TINY, *record, *words, "--output", root / method) == 0
    )
    return root / method


def diagnose(*words: object) -> int:
    """The exit status of ``stiefel diagnose``; four batches unless said otherwise."""
    return main(["diagnose", "--samples", "4", *map(str, words)])


def numbers(folder: Path) -> dict:
    """What ``diagnosis.json`` holds, which is JSON in the narrow sense."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads((folder / "diagnosis.json").read_text(), parse_constant=refuse)


def others(folder: Path) -> dict[str, bytes]:
    """The files of a run, without those of its diagnosis."""
    return {name: content for name, content in files(folder).items() if name not in OUTPUTS}


def copy(source: Path, target: Path) -> Path:
    """A copy of the files of a run."""
    target.mkdir(parents=True)
    for name, content in files(source).items():
        (target / name).write_bytes(content)
    return target
