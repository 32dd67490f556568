"""Loggers of the monitor: whole lines, growing columns, resuming, TensorBoard."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stiefel.diagnostics import CSVLogger, DictLogger, TensorBoardLogger
from stiefel.errors import ConfigurationError, DataError

ROOT = Path(__file__).resolve().parents[1]


def test_columns_grow_and_nothing_is_lost(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "deep" / "figures.csv")
    rows = [
        {"step": 1, "a": 0.1, "b": 1},
        {"step": 50, "a": math.nan, "c": 1e-300},
        {"step": 100, "c": -math.inf, "weight/missing": 'two,\n"lines"'},
    ]
    for row in rows:
        logger.log(row)
    assert logger.path.read_text().splitlines()[0] == "step,a,b,c,weight/missing"
    first, second, third = CSVLogger.read(logger.path)
    assert first == {"step": 1, "a": 0.1, "b": 1.0}
    assert second["step"] == 50
    assert math.isnan(second["a"])
    assert second["c"] == 1e-300
    assert third == {"step": 100, "c": -math.inf, "weight/missing": 'two, "lines"'}
    assert [path.name for path in logger.path.parent.iterdir()] == ["figures.csv"]


def test_doubles_survive_the_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "figures.csv")
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308]
    for step, value in enumerate(values):
        logger.log({"step": step, "a": value})
    assert [row["a"] for row in CSVLogger.read(logger.path)] == values


def test_a_line_torn_within_a_letter(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    CSVLogger(path).log({"step": 1, "weight/missing": "é"})
    with path.open("ab") as file:
        file.write("2,é".encode()[:-1])
    CSVLogger(path, resume=True).log({"step": 2, "weight/missing": "è"})
    assert [row["weight/missing"] for row in CSVLogger.read(path)] == ["é", "è"]


def test_steps_and_figures_as_tensors_are_read_again(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "figures.csv")
    logger.log({"step": torch.tensor(1), "a": torch.tensor(0.5)})
    logger.log({"step": 2.0, "a": 0.25})
    assert CSVLogger.read(logger.path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25}]
    for row in ({"a": 1.0}, {"step": -1}, {"step": 1.5}, {"step": math.nan}, {"step": "x"}):
        with pytest.raises(ConfigurationError, match="a step 0, 1, 2"):
            logger.log(row)


def test_a_second_logger_of_a_new_file_does_not_drop_what_the_first_wrote(tmp_path: Path) -> None:
    first, second = (CSVLogger(tmp_path / "figures.csv") for _ in range(2))
    first.log({"step": 1, "a": 1.0})
    first.log({"step": 2, "a": 2.0})
    with pytest.raises(ConfigurationError, match="another logger or process"):
        second.log({"step": 1, "b": 1.0})
    assert len(CSVLogger.read(first.path)) == 2


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    path.write_text("mine\n")
    with pytest.raises(ConfigurationError, match="resume=True"):
        CSVLogger(path)
    assert path.read_text() == "mine\n"


def test_resuming_drops_what_is_logged_again_and_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    logger = CSVLogger(path)
    for step in (1, 50, 100, 150):
        logger.log({"step": step, "a": float(step)})
    logger.log({"step": 100, "noise": 1.0})
    with path.open("a") as file:
        file.write("200,2")  # a line that a full disk cut
    resumed = CSVLogger(path, resume=True)
    resumed.log({"step": 100, "a": -1.0})
    resumed.log({"step": 150, "a": -2.0})
    assert CSVLogger.read(path) == [
        {"step": 1, "a": 1.0},
        {"step": 50, "a": 50.0},
        {"step": 100, "noise": 1.0},
        {"step": 100, "a": -1.0},
        {"step": 150, "a": -2.0},
    ]


def test_resuming_without_a_file_begins_one(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "figures.csv", resume=True)
    logger.log({"step": 3, "a": 1.0})
    assert CSVLogger.read(logger.path) == [{"step": 3, "a": 1.0}]


@pytest.mark.parametrize(
    "text", ["loss\n1.0\n", "step,a\n1,2,3\n", "step,a\nx,1\n", "step,a\n,1\n"]
)
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.csv"
    path.write_text(text)
    logger = CSVLogger(path, resume=True)
    with pytest.raises(DataError, match=r"figures\.csv, line 2"):
        logger.log({"step": 1, "a": 1.0})
    assert path.read_text() == text


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    code = (
        "import sys\n"
        "from stiefel.diagnostics import CSVLogger\n"
        f"logger, step = CSVLogger({str(path)!r}), 0\n"
        "while True:\n"
        "    step += 1\n"
        "    row = {'step': step} | {f'figure {i}': step + i / 7 for i in range(200)}\n"
        "    logger.log(row | {f'new {step // 40}': 1.0})\n"  # columns grow all the time
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 400_000:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert path.read_bytes().endswith(b"\n")
    rows = CSVLogger.read(path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["figure 199"] == row["step"] + 199 / 7 for row in rows)


def test_a_dictionary_by_figure() -> None:
    logger = DictLogger()
    logger.log({"step": 1, "a": 1.0, "b": 2.0})
    logger.log({"step": 5, "a": 3.0, "word": "said"})
    assert logger.series == {"a": {1: 1.0, 5: 3.0}, "b": {1: 2.0}, "word": {5: "said"}}


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_scalars_and_words(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log({"step": 1, "model/a": 0.5, "weight/missing": "frozen"})
    twin = pickle.loads(pickle.dumps(copy.deepcopy(logger)))
    logger.log({"step": 50, "model/a": 0.25})
    logger.close()
    time.sleep(1.1)  # a file of events is named by the second
    twin.log({"step": 100, "model/a": 0.125})
    twin.close()
    assert sorted(_scalars(tmp_path)["model/a"]) == [(1, 0.5), (50, 0.25), (100, 0.125)]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_takes_a_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        logger = TensorBoardLogger(writer)
        logger.log({"step": 7, "a": 1})
    assert logger.folder == str(tmp_path)
    assert _scalars(tmp_path) == {"a": [(7, 1.0)]}


def test_tensorboard_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install \"stiefel\[experiments\]\""):
        TensorBoardLogger("anywhere")
