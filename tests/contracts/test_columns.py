"""The names of the monitor's figures, on which scripts and files rely, are defined in one place."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import stiefel
from stiefel.diagnostics import Feasibility, Stationarity, StationarityMonitor, columns
from tests.monitored_runs import layers, loss_of, sgd, step

NAMES = {name: value for name, value in vars(columns).items() if name.isupper()}
ROOT = Path(stiefel.__file__).parent
READERS = ["monitor.py", "monitor_rows.py", "monitor_report.py", "../experiments/history.py"]


def test_the_names_are_these() -> None:
    assert set(NAMES.values()) == {
        *("step", "model", "max_residual", "frobenius_residual", "euclidean_norm"),
        *("gradient_norm", "relative", "drift_per_step", "total_norm", "differential_smallest"),
        *("differential_largest", "differential_rank", "differential_dimension", "noise_floor"),
        *("squared_gradient", "squared_gradient_low", "squared_gradient_high"),
        *("coordinate_norm_squared", "missing", "warning"),
    }
    assert columns.column("a.weight", columns.RELATIVE) == "a.weight/relative"


def test_names_of_fields_are_those_of_fields() -> None:
    fields = {
        field.name for kind in (Feasibility, Stationarity) for field in dataclasses.fields(kind)
    }
    for name in ("MAX_RESIDUAL", "FROBENIUS_RESIDUAL", "EUCLIDEAN_NORM", "GRADIENT_NORM"):
        assert NAMES[name] in fields
    assert {columns.RELATIVE, columns.COORDINATE_NORM_SQUARED, columns.MISSING} <= fields


@pytest.mark.parametrize("name", READERS)
def test_no_other_file_spells_a_key_out(name: str) -> None:
    tree = ast.parse((ROOT / "diagnostics" / name).read_text())
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    own = {value for value in NAMES.values() if "_" in value}
    for node in texts:
        if isinstance(node.value, str) and node not in prose:
            key = node.value.rpartition("/")[2]
            assert not ("/" in node.value and key in NAMES.values()), node.value
            assert node.value not in own - {"noise_floor"}, node.value  # an option has that name


def test_what_is_written_is_read_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOTAL_NORM", "NOISE_FLOOR", "SQUARED_GRADIENT", "DIFFERENTIAL_LARGEST"):
        monkeypatch.setattr(columns, name, NAMES[name] + "_renamed")
    model = layers()
    optimizer, monitor = sgd(model), StationarityMonitor(model, 1, differential_every=1)
    for seed in range(10):
        with monitor:
            step(model, optimizer, seed)
    monitor.measure_noise([lambda s=s: loss_of(model, s) for s in range(8)])
    keys = {key for row in monitor.records for key in row}
    assert {"model/total_norm_renamed", "model/noise_floor_renamed"} <= keys
    assert not {"model/total_norm", "model/noise_floor"} & keys
    printed = str(monitor.report())
    assert "without the noise, at step 10" in printed
    assert "differential_every= is None" not in printed
