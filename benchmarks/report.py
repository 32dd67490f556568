"""What a run leaves: a plain-text table, and JSON with versions and the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, Section, Settings, Verdict

__all__ = ["goal_lines", "machine", "record", "table", "versions", "write"]

_PACKAGES = ("torch", "geoopt", "geotorch", "pymanopt", "numpy", "scipy", "stiefel")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages compared; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    """Returns the processor's model name, or the architecture where none is told."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(device: str) -> dict[str, Any]:
    """Describes the machine without naming it.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        Processor model, cores, threads that torch uses, system, and the accelerator if used.
    """
    described: dict[str, Any] = {
        "processor": _cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if device == "cuda":
        described["accelerator"] = torch.cuda.get_device_name()
        described["cuda"] = torch.version.cuda
    return described


def _number(value: float) -> str:
    """Three digits, without an exponent for large numbers."""
    return f"{value:,.3g}" if value < 999.5 else f"{value:,.0f}"


def _cell(column: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column == "repeats":
        return str(int(value))
    if column == "residual":
        return f"{value:.1e}"
    return _number(value)


def table(rows: Sequence[Row]) -> str:
    """Renders rows as a Markdown table that also reads well as plain text.

    Args:
        rows: Lines; the columns are those of the lines together, in order of appearance.

    Returns:
        The table, without a trailing newline.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    body = [[row.name, *(_cell(name, row.values.get(name)) for name in columns)] for row in rows]
    for row, cells in zip(rows, body, strict=True):
        if row.note:
            cells[1:2] = [row.note] if columns else []
    lines = [["case", *columns], *body]
    widths = [max(3, *(len(line[k]) for line in lines)) for k in range(len(columns) + 1)]
    worded = [any(isinstance(row.values.get(name), str) for row in rows) for name in ["", *columns]]
    worded[0] = True
    rule = [
        "-" * w if words else "-" * (w - 1) + ":" for w, words in zip(widths, worded, strict=True)
    ]

    def join(cells: list[str]) -> str:
        padded = [
            cell.ljust(w) if words else cell.rjust(w)
            for cell, w, words in zip(cells, widths, worded, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([join(lines[0]), join(rule), *(join(line) for line in lines[1:])])


def goal_lines(goals: Sequence[Verdict]) -> list[str]:
    """Renders verdicts, one line each, in words."""
    lines = []
    for goal in goals:
        word = {True: "met", False: "NOT MET", None: f"not judged, {goal.note}"}[goal.met]
        value = "-" if goal.value is None else _number(goal.value)
        lines.append(f"goal: {goal.text}: {value} (bound {_number(goal.bound)}): {word}")
    return lines


def write(file: Path, name: str, text: str) -> None:
    """Puts text between the marks of a benchmark in a Markdown file.

    Args:
        file: It has the lines ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.
        name: Of the benchmark.
        text: What comes between them.

    Raises:
        ValueError: If the marks are not there; the file is left as it is.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    content = file.read_text()
    if begin not in content or end not in content:
        raise ValueError(f"{file}: expected the lines {begin.strip()} and {end.strip()} in it")
    head, rest = content.split(begin, 1)
    tail = rest.split(end, 1)[1]
    file.write_text(f"{head}{begin}{text.strip()}\n{end}{tail}")


def record(name: str, question: str, sections: list[Section], settings: Settings) -> dict[str, Any]:
    """Collects everything that a reader of the numbers needs, ready for JSON.

    Args:
        name: Of the benchmark.
        question: What it asks.
        sections: Its results.
        settings: How it was run.

    Returns:
        A dictionary of plain values.
    """
    return {
        "benchmark": name,
        "question": question,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k != "picture"},
        "versions": versions(),
        "machine": machine(settings.device),
        "sections": [dataclasses.asdict(section) for section in sections],
    }
