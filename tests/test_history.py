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
