"""The names of the figures in a row of the monitor: keys of a record, columns of a CSV file.

A row has the key `STEP`, and for every constrained weight and for the model the keys
``"<path>/<name>"`` that `column` makes. Who writes a row and who reads one take the names from
here. Names of the first group are fields of `Feasibility` and `Stationarity`.
"""

from __future__ import annotations

__all__ = ["MODEL", "STEP", "column", "is_column"]

STEP = "step"
#: The path under which the figures of all weights together stand.
MODEL = "model"

# fields of Feasibility and Stationarity that are read by name
MAX_RESIDUAL = "max_residual"
FROBENIUS_RESIDUAL = "frobenius_residual"
EUCLIDEAN_NORM = "euclidean_norm"
GRADIENT_NORM = "gradient_norm"
RELATIVE = "relative"
COORDINATE_NORM_SQUARED = "coordinate_norm_squared"

# of a monitored step
DRIFT_PER_STEP = "drift_per_step"
TOTAL_NORM = "total_norm"
DIFFERENTIAL_SMALLEST = "differential_smallest"
DIFFERENTIAL_LARGEST = "differential_largest"
DIFFERENTIAL_RANK = "differential_rank"
DIFFERENTIAL_DIMENSION = "differential_dimension"

# of an estimate without noise
SQUARED_GRADIENT = "squared_gradient"
SQUARED_GRADIENT_LOW = "squared_gradient_low"
SQUARED_GRADIENT_HIGH = "squared_gradient_high"
NOISE_FLOOR = "noise_floor"

# words
MISSING = "missing"
WARNING = "warning"


def column(path: str, name: str) -> str:
    """The key of a figure of a weight, or of `MODEL`."""
    return f"{path}/{name}"


def is_column(key: str, name: str) -> bool:
    """Whether a key is that figure of any weight, or of the model."""
    return key.endswith(f"/{name}")
