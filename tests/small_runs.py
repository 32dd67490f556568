"""Tiny runs of the command, and how their errors must read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stiefel.cli import main

TINY = ["--hidden", "8", "--delay", "3", "--evaluation-sequences", "16", "--batch-size", "6"]
TINY += ["--iterations", "6", "--checkpoint-every", "2", "--threads", "1"]


def run(*words: object) -> int:
    return main(["train", *map(str, words)])


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder, but for the events that TensorBoard adds to."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def one_line(captured: pytest.CaptureFixture[str], *parts: str) -> None:
    printed = captured.readouterr()
    assert printed.err.startswith("stiefel: error: ")
    assert printed.err.count("\n") == 1
    for part in parts:
        assert part in printed.err
