"""Command line of the benchmarks: ``python -m benchmarks NAME [--quick] [--json FILE]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.harness import Section, Settings

__all__ = ["NAMES", "main", "run"]

#: Every benchmark is a module of this package with a docstring and ``sections(settings)``.
NAMES = (
    "build_square",
    "build_tall",
    "build_rollout",
    "charts",
    "chart_table",
    "batches",
    "tall_memory",
    "step",
    "rollout",
    "recurrent",
    "doubling",
    "asrnn",
    "adapter",
    "orders",
    "optimality",
    "monitor",
)
#: Those that draw their curves with ``--picture``.
_DRAWN = ("optimality",)


def _question(name: str) -> str:
    doc = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    return doc.strip().splitlines()[0]


def _line(described: dict[str, Any]) -> str:
    """The machine and the versions in one line."""
    return ", ".join(f"{key} {value}" for key, value in {**described, **report.versions()}.items())


def _markdown(sections: Sequence[Section], settings: Settings) -> str:
    """The tables of a run for a page of the documentation, with the machine below them."""
    tables = [f"**{s.title[0].upper()}{s.title[1:]}**\n\n{report.table(s.rows)}" for s in sections]
    return "\n\n".join([*tables, f"*{_line(report.machine(settings.device))}*"])


def run(name: str, settings: Settings) -> tuple[dict[str, Any], list[Section]]:
    """Runs one benchmark and prints its tables as they come.

    Args:
        name: One of `NAMES`.
        settings: Device, repeats, sizes.

    Returns:
        The record for JSON, and the sections.
    """
    module = importlib.import_module(f"benchmarks.{name}")
    described = {**report.machine(settings.device), "clock": settings.clock}
    print(f"## {name}: {_question(name)}")
    print(_line(described))
    torch.manual_seed(0)
    sections = []
    for section in module.sections(settings):
        sections.append(section)
        print(f"\n### {section.title}\n\n{report.table(section.rows)}\n")
        for line in report.goal_lines(section.goals):
            print(line)
        sys.stdout.flush()
    print()
    return report.record(name, _question(name), sections, settings), sections


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*NAMES, "all"], help="which benchmark to run")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and leave")
    parser.add_argument("--repeats", type=int, help="timed calls of every case (default 15)")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per case (default 10)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, three repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="also write the tables between the marks of this benchmark in a Markdown file",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help=f"also draw the curves ({', '.join(_DRAWN)}); needs matplotlib",
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "process"],
        help="process: CPU time instead of wall time, for a crowded machine; with --threads 1",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is not met")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after the program's name; those of the process by default.

    Returns:
        The exit code: 1 with ``--check`` when a goal is not met, else 0.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        for name in NAMES:
            print(f"{name:<14} {_question(name)}")
        return 0
    if options.name is None:
        parser.error(f"name a benchmark: {', '.join(NAMES)} or all (or use --list)")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    if options.clock == "process" and (options.device == "cuda" or torch.get_num_threads() > 1):
        parser.error("--clock process counts the CPU time of all threads: use --threads 1")
    if options.write is not None and options.name == "all":
        parser.error("--write puts one benchmark's tables into a file: name the benchmark")
    if options.picture is not None and options.name not in _DRAWN:
        parser.error(f"--picture: only {', '.join(_DRAWN)} draws curves")
    settings = Settings(
        device=options.device,
        repeats=options.repeats or (3 if options.quick else 15),
        budget=options.budget,
        quick=options.quick,
        clock=options.clock,
        picture=options.picture,
    )
    names = NAMES if options.name == "all" else (options.name,)
    records = []
    missed = 0
    for name in names:
        recorded, sections = run(name, settings)
        records.append(recorded)
        if options.write is not None:
            report.write(options.write, name, _markdown(sections, settings))
        missed += sum(goal.met is False for section in sections for goal in section.goals)
    if options.json is not None:
        content = records if options.name == "all" else records[0]
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(f"goals not met: {missed}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
