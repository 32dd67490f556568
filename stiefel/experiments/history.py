"""What ``stiefel train --monitor-every`` recorded, and what it says about convergence."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from pathlib import Path

from stiefel.diagnostics import CSVLogger, Judgement, Verdict, columns, judge_rate
from stiefel.diagnostics.columns import MODEL, STEP, column
from stiefel.diagnostics.judgements import Advice
from stiefel.errors import DataError

__all__ = ["History", "read_record"]

_CONSTRAINED, _ALL = column(MODEL, columns.EUCLIDEAN_NORM), column(MODEL, columns.TOTAL_NORM)
_FEASIBLE, _MISSING = column(MODEL, columns.MAX_RESIDUAL), column(MODEL, columns.MISSING)

#: What to do on the command line, for what a caller from Python is told.
_ADVICE: dict[str, str] = {
    Advice.BELOW_NOISE: (
        "What is below it stands in the answer on stationary; more --samples of stiefel diagnose "
        "see further, and a larger --batch-size of stiefel train has less noise"
    ),
    Advice.UNKNOWN_NOISE: (
        "that is a plateau of the loss, or the noise of a batch: the noise of stiefel train with "
        "a larger --batch-size is smaller, a plateau is not"
    ),
    Advice.FEW_RECORDS: (
        "go on with stiefel train --resume and more --iterations, or train with a smaller "
        "--monitor-every"
    ),
    Advice.LONG_STEP: "train with a lower --lr or --lr-orthogonal",
    Advice.OVERFLOW: "train with a lower --lr or --lr-orthogonal",
}


@dataclasses.dataclass(frozen=True)
class History:
    """Squared gradient norms along training, of the batches trained on.

    Attributes:
        steps: Training steps.
        values: |grad|^2 at each of them; not finite where the gradient was not.
        noise_floor: What the noise of a batch alone gives; None where it was not estimated.
        judgement: The slope and the verdict.
        figure: Whose |grad| it is: ``"model/euclidean_norm"``, over all constrained weights in the
            Euclidean metric, or ``"model/total_norm"`` of a model without any, over all that is
            trained.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    noise_floor: float | None
    judgement: Judgement
    figure: str = _CONSTRAINED

    @classmethod
    def read(
        cls, path: Path, noise: float, confidence: float, planned: int | None
    ) -> History | None:
        """Reads ``stationarity.csv``.

        Args:
            path: The file.
            noise: Expected |noise|^2 of the gradient of one batch; NaN where it is not known.
            confidence: Confidence of the verdict.
            planned: Steps of the whole run.

        Returns:
            The history; None where the file is absent or has no gradients.

        Raises:
            DataError: If the file is damaged.
        """
        rows = read_record(path)
        plain = not any(name in row for row in rows for name in (_CONSTRAINED, _FEASIBLE))
        figure = _ALL if plain else _CONSTRAINED
        pairs = [
            (int(row[STEP]), float(row[figure]) ** 2)
            for row in rows
            if isinstance(row.get(figure), float) and (plain or _MISSING not in row)
        ]
        if not pairs:
            return None
        steps, values = zip(*pairs, strict=True)
        floor = noise if math.isfinite(noise) else None
        if any(a >= b for a, b in itertools.pairwise((0, *steps))):
            raise DataError(
                f"{path}: expected steps from 1 on that increase from row to row; delete the rows "
                "that do not, or delete the file and go on without the rows so far"
            )
        found = judge_rate(steps, values, noise_floor=floor, confidence=confidence, planned=planned)
        advice = _ADVICE.get(found.advice, found.advice)
        return cls(steps, values, floor, found.advising(advice), figure)

    @property
    def constrained(self) -> bool:
        """Whether it is the gradient of constrained weights."""
        return self.figure == _CONSTRAINED

    @property
    def said(self) -> str:
        """The verdict in words."""
        found = self.judgement
        sure = f" (confidence {100 * found.confidence:.3g} %)"
        sure = "" if found.verdict is Verdict.TOO_EARLY else sure
        return f"{found.verdict.value}{sure}: {found.explanation}"


def read_record(path: Path) -> list[dict[str, float | int | str]]:
    """Reads the rows of a ``stationarity.csv``; none where it is absent.

    Raises:
        DataError: If it is damaged.
    """
    try:
        return CSVLogger.read(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path}: damaged ({error}); repair or delete the bad rows, or delete the file and go "
            "on without the rows so far"
        ) from error
