"""``stiefel diagnose``: looks into a run that was left in a folder, or runs an experiment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from stiefel.errors import ConfigurationError
from stiefel.experiments import theorem4_page
from stiefel.experiments.diagnosis import json_value, measure
from stiefel.experiments.diagnosis_answers import answers
from stiefel.experiments.diagnosis_page import draw_diagnosis, save
from stiefel.experiments.diagnosis_tables import print_diagnosis, write
from stiefel.experiments.folder import atomic_path, new_folder
from stiefel.experiments.options import DiagnoseOptions
from stiefel.experiments.saved import SavedRun
from stiefel.experiments.theorem4 import theorem4
from stiefel.experiments.training import torch_threads

__all__ = ["diagnose"]

_SAMPLES, _CONFIDENCE = 16, 0.95
_STEPS, _SEEDS = 20_000, 5


def diagnose(options: DiagnoseOptions, console: Console | None = None) -> dict[str, Any]:
    """Diagnoses, prints what was found, and leaves ``diagnosis.png`` and ``diagnosis.json``.

    Nothing else in a run folder is touched, and whoever trains there is not disturbed.

    Args:
        options: What to diagnose.
        console: Where tables go; standard output if None.

    Returns:
        The content of ``diagnosis.json``.

    Raises:
        ConfigurationError: If there is no run to diagnose, or `output` cannot be written.
        DataError: If a file of the run is damaged.
    """
    console = console or Console()
    if options.run is None:
        return _theorem4(options, console)
    return _run(options, options.run, console)


def _run(options: DiagnoseOptions, path: str, console: Console) -> dict[str, Any]:
    run = SavedRun.read(path, data_dir=options.data_dir)
    folder = run.folder.path if options.output is None else Path(options.output)
    with _writable(folder), torch_threads(options.threads or run.options.threads):
        found = measure(
            run,
            samples=options.samples or _SAMPLES,
            seed=options.seed,
            confidence=options.confidence or _CONFIDENCE,
        )
        content = {**found.as_json(), "answers": answers(found)}
        _write(folder, draw_diagnosis(found), content)
    print_diagnosis(console, found)
    _print_paths(console, folder)
    return content


def _theorem4(options: DiagnoseOptions, console: Console) -> dict[str, Any]:
    """Theorem 4 on two problems in two charts, and three controls that break its conditions."""
    steps, seeds = options.steps or _STEPS, options.seeds or _SEEDS
    folder = new_folder("theorem4") if options.output is None else Path(options.output)
    with _writable(folder):
        write(console, f"theorem 4, {steps:,} steps, {seeds} seeds (minutes for 20,000 steps)")
        found = theorem4(steps, seeds, seed=options.seed or 0)
        content = json_value({"experiment": "theorem4", **found.summary()})
        _write(folder, theorem4_page.draw(found), content)
    for run in found.trajectories[:: len(found.trajectories) // 2]:
        write(console, f"{run.chart}, {run.conditions}\n")
    write(console, str(found))
    _print_paths(console, folder)
    return content


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Makes the folder if need be, and takes an empty one back if the block does not end well.

    Raises:
        ConfigurationError: If nothing can be written there, before the block or in it.
    """
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            if not there:
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        raise ConfigurationError(
            f"the diagnosis cannot be written to {folder} ({error.strerror or error}); name "
            "another folder with --output"
        ) from error


def _write(folder: Path, page: Figure, content: dict[str, Any]) -> None:
    """Writes the page and the numbers, each whole or not at all."""
    save(page, folder / "diagnosis.png")
    with atomic_path(folder / "diagnosis.json") as path:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _print_paths(console: Console, folder: Path) -> None:
    write(console, f"figures: {folder / 'diagnosis.png'}\nnumbers: {folder / 'diagnosis.json'}")
