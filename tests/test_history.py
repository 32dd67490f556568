"""What ``stiefel diagnose`` says of the record of a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from stiefel.diagnostics import CSVLogger, Verdict
from stiefel.experiments.history import History


def history(folder: Path, norms: np.ndarray, *, planned: int = 400, noise: float = 0.0) -> History:
    """What is read of a record with a gradient norm a step."""
    logger = CSVLogger(folder / "stationarity.csv")
    for step, norm in enumerate(norms, 1):
        logger.log({"step": step, "model/euclidean_norm": float(norm)})
    found = History.read(logger.path, noise or math.nan, 0.95, planned)
    assert found is not None
    return found


def test_a_rise_at_the_beginning_of_the_run_is_no_divergence(tmp_path: Path) -> None:
    norms = np.exp(np.linspace(0, 2, 100) + 0.01 * np.sin(np.arange(100)))
    early = history(tmp_path / "early", norms, planned=1000)
    assert early.judgement.verdict is Verdict.TOO_EARLY
    assert "in the first 10% of the training, as many do" in early.said
    assert history(tmp_path / "late", norms, planned=200).judgement.verdict is Verdict.DIVERGING


def test_what_to_do_is_said_in_options_of_the_command(tmp_path: Path) -> None:
    """Whatever the verdict, nobody at a command line is sent to a function of Python."""
    k = np.arange(1, 201)
    wave = np.exp(0.05 * np.sin(7 * k))
    cases = {
        "floor": (wave, 1.0, "--batch-size", "half of this or more is noise"),
        "flat": (wave, 0.0, "--batch-size", "it is flat"),
        "few": (wave[:6], 0.0, "--monitor-every", "at least 8"),
        "rise": (wave * k, 0.0, "--lr-orthogonal", "it rises"),
        "lost": (np.where(k < 150, wave, math.nan), 0.0, "--lr-orthogonal", "the record ends in"),
    }
    for name, (norms, noise, option, grounds) in cases.items():
        found = history(tmp_path / name, norms, planned=200, noise=noise)
        assert grounds in found.said, name
        assert option in found.said, name
        for word in ("squared_norm_estimate", "noise_floor=", "window,", "another window", "()"):
            assert word not in found.said, name
        assert found.judgement.explanation in found.said
        assert found.judgement.explanation.endswith(found.judgement.advice)


def test_a_record_without_constrained_weights_is_judged_by_all_gradients(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "stationarity.csv")
    for k in range(1, 101):
        words = "the model has no constrained weight"
        logger.log({"step": k, "model/total_norm": 1 / k, "model/missing": words})
    found = History.read(logger.path, math.nan, 0.95, 100)
    assert found is not None
    assert not found.constrained
    assert found.judgement.verdict is Verdict.DECREASING
    assert found.values[1] == 0.25
