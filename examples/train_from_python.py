"""What ``stiefel train copying`` does, from Python: two methods, and a comparison of their runs.

Run it with ``python examples/train_from_python.py`` in an environment with the extra
``stiefel[experiments]``. It leaves a folder for each method under ``runs/example``.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import sys
from pathlib import Path

from stiefel.experiments.options import TrainOptions
from stiefel.experiments.training import train


def main(output: Path = Path("runs/example"), iterations: int = 300) -> dict[str, float]:
    """Trains two methods on a short copying task.

    Args:
        output: Where the run folders go; each must be new.
        iterations: Training steps.

    Returns:
        The loss of each method, as a share of the baseline.
    """
    shares = {}
    for method in ("cwy", "rgd-c-c"):
        options = TrainOptions(
            "copying",
            method=method,
            delay=30,
            hidden=64,
            iterations=iterations,
            output=str(output / method),
        )
        summary = train(options)
        shares[method] = summary["loss"] / summary["baseline"]
    for method, share in shares.items():
        print(f"{method}: {share:.1%} of the loss without memory")
    return shares


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/example"))
