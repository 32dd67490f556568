"""The benchmark harness, and every benchmark at tiny sizes."""

from __future__ import annotations

import importlib
import json
import platform
import time
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.__main__ import NAMES, main
from benchmarks.costs import FRAMES
from benchmarks.harness import (
    Absent,
    Case,
    Goal,
    IncorrectError,
    Row,
    Section,
    Settings,
    Study,
    Verdict,
    installed,
    measure,
    ratio,
    require,
)
from benchmarks.peers import cayley_dense, cayley_stacked, reflect
from stiefel.geometry import haar, random_tangent

FAST = Settings(repeats=3)


def wait(seconds: float):
    """Returns a callable that takes at least this long."""
    return lambda: time.sleep(seconds)


def number(row: Row, column: str) -> float:
    """Returns a value that must be there."""
    value = row.values[column]
    assert value is not None
    return value


def study(*goals: Goal, cases: list[Case | Absent] | None = None) -> Study:
    """A study of a quick and a slow case, 1 ms and 30 ms."""
    both: list[Case | Absent] = [Case("quick", wait(1e-3)), Case("slow", wait(3e-2))]
    return Study("sleeping", both if cases is None else cases, "slow", goals)


def test_times_medians_and_ratio():
    section = measure(study(), FAST)
    quick, slow = section.rows
    assert 1.0 <= number(quick, "min ms") <= number(quick, "median ms")
    assert number(slow, "median ms") >= 30.0
    assert number(slow, "x reference") == 1.0
    assert number(quick, "x reference") < 1.0
    assert number(quick, "repeats") == 3


def test_ratio_is_the_median_over_common_rounds():
    assert ratio([2.0, 4.0, 100.0], [1.0, 1.0]) == 3.0


def test_goals_are_met_missed_or_open():
    goals = [
        Goal("quick is faster", "quick", "slow", at_least=1),
        Goal("slow is faster", "slow", "quick", at_least=1),
        Goal("quick takes less", "quick", "slow", at_most=1),
        Goal("slow takes less", "slow", "quick", at_most=1),
        Goal("on a GPU", "quick", "slow", at_least=1, device="cuda"),
    ]
    met = [verdict.met for verdict in measure(study(*goals), FAST).goals]
    assert met == [True, False, True, False, None]
    open_goals = measure(study(*goals), Settings(repeats=1, quick=True)).goals
    assert all(verdict.met is None and verdict.value is not None for verdict in open_goals)


def test_process_clock_does_not_count_waiting():
    section = measure(study(), Settings(repeats=3, clock="process"))
    assert number(section.rows[1], "median ms") < 15.0


def test_process_clock_needs_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(SystemExit) as error:
        main(["orders", "--clock", "process"])
    assert error.value.code == 2


def test_goal_needs_exactly_one_bound():
    with pytest.raises(ValueError, match="either at_least or at_most"):
        Goal("none", "quick", "slow")
    with pytest.raises(ValueError, match="either at_least or at_most"):
        Goal("both", "quick", "slow", at_least=1, at_most=2)


def test_inputs_are_refreshed_before_every_call_and_checked_first():
    events: list[str] = []
    case = Case(
        "case",
        lambda: events.append("run"),
        lambda: events.append("refresh"),
        lambda: events.append("check"),
    )
    measure(Study("order", [case], "case"), Settings(repeats=2))
    assert events[:2] == ["refresh", "check"]
    rest = events[2:]
    assert rest[::2] == ["refresh"] * (len(rest) // 2)
    assert rest[1::2] == ["run"] * (len(rest) // 2)


def test_rounds_are_interleaved():
    calls: list[str] = []

    def long(name: str):
        def run() -> None:
            calls.append(name)
            time.sleep(0.06)

        return run

    cases = [Case("a", long("a")), Case("b", long("b"))]
    measure(Study("turns", cases, "a"), Settings(repeats=4))
    assert calls == ["a", "b"] + ["a", "b", "b", "a"] * 2


def test_a_slow_case_sits_out_after_its_budget():
    cases: list[Case | Absent] = [Case("quick", lambda: None), Case("slow", wait(6e-2))]
    section = measure(study(cases=cases), Settings(repeats=8, budget=0.05))
    assert [row.values["repeats"] for row in section.rows] == [8, 3]


def test_a_wrong_result_is_never_timed():
    def check() -> float:
        require("residual", 1.0, 1e-6)
        return 1.0

    case = Case("wrong", lambda: pytest.fail("was timed"), check=check)
    with pytest.raises(IncorrectError, match=r"title: wrong: residual: expected .* 1.0e-06"):
        measure(Study("title", [case], "wrong"), FAST)
    with pytest.raises(IncorrectError):
        require("residual", float("nan"), 1.0)


def test_unknown_case_names_are_refused():
    with pytest.raises(ValueError, match="no case named 'fast'"):
        measure(study(Goal("typo", "fast", "slow", at_least=1)), FAST)


def test_absent_peer_says_how_to_install_it():
    assert not installed("no_such_package_at_all")
    cases: list[Case | Absent] = [Absent("peer", "geotorch"), Case("slow", wait(1e-4))]
    section = measure(study(Goal("a", "slow", "peer", at_least=1), cases=cases), FAST)
    assert section.goals[0].met is None
    text = report.table(section.rows)
    assert "pip install '.[benchmarks]'" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_table_aligns_and_rounds():
    rows = [Row("a", {"median ms": 1234.5, "repeats": 3, "residual": 1.234e-7}), Row("b", {})]
    lines = report.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["a", "1,234", "3", "1.2e-07"]


def test_tables_are_written_between_the_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    report.write(page, "a", "| new |")
    assert page.read_text() == "before\n<!-- a: begin -->\n| new |\n<!-- a: end -->\nafter\n"
    with pytest.raises(ValueError, match="expected the lines <!-- b: begin -->"):
        report.write(page, "b", "lost")
    assert "new" in page.read_text()


def test_words_and_numbers_share_a_table():
    lines = report.table([Row("a", {"covers": "all", "ms": 1.5, "saved": None})]).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["a", "all", "1.5", ""]
    assert lines[1].split("|")[2].strip(" -") == ""
    assert lines[1].split("|")[3].endswith(": ")


def test_goal_lines():
    lines = report.goal_lines([Verdict("x", 2.0, 3.0, False), Verdict("y", None, 1.0, None, "no")])
    assert lines == ["goal: x: 2 (bound 3): NOT MET", "goal: y: - (bound 1): not judged, no"]


def test_record_is_plain_json_without_host_or_path():
    section = Section("t", [Row("a", {"median ms": 1.0})], [Verdict("x", 2.0, 3.0, False)])
    text = json.dumps(report.record("name", "why?", [section], FAST), allow_nan=False)
    assert "torch" in json.loads(text)["versions"]
    assert json.loads(text)["machine"]["threads"] == torch.get_num_threads()
    assert not platform.node() or platform.node() not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(("n", "m"), [(1024, 128), (200, 200), (17, 1), (30_000, 50)])
def test_the_paper_orders_the_methods_by_flops(n: int, m: int):
    counts = [cost.count(n, m) for cost in FRAMES if cost.count is not None]
    assert [cost.name for cost in FRAMES][-1] == "RGD-E-C"  # its first term is not known
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts) == 5


def test_forms_of_the_cayley_retraction_agree():
    x = haar(9, 3, batch=(2,), dtype=torch.float64)
    u = random_tangent(x)
    torch.testing.assert_close(cayley_stacked(x, u), cayley_dense(x, u), rtol=0, atol=1e-12)


def test_reflect_is_the_ordered_product():
    v = torch.randn(5, 3, dtype=torch.float64)
    product = torch.eye(5, dtype=torch.float64)
    for w in v.unbind(-1):
        product = product @ (torch.eye(5) - 2 * torch.outer(w, w) / w.dot(w)).double()
    torch.testing.assert_close(reflect(v, torch.eye(5).double()), product, rtol=0, atol=1e-12)


@pytest.fixture
def one_thread():
    """Tiny matrices gain nothing from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "result.json"
    assert main([name, "--quick", "--repeats", "1", "--json", str(file), "--check"]) == 0
    result = json.loads(file.read_text())
    assert result["benchmark"] == name
    assert result["settings"]["quick"] is True
    assert all(section["rows"] for section in result["sections"])
    printed = capsys.readouterr().out
    assert "goals not met: 0" in printed
    assert result["question"] in printed


def test_every_benchmark_asks_a_question():
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        assert module.__doc__ is not None
        assert module.__doc__.splitlines()[0].endswith("?")


def test_list_names_all(capsys: pytest.CaptureFixture[str]):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)


def test_check_fails_on_a_missed_goal(monkeypatch: pytest.MonkeyPatch):
    def sections(settings: Settings):
        yield Section("t", [Row("a", {"median ms": 1.0})], [Verdict("x", 2.0, 3.0, False)])

    monkeypatch.setattr("benchmarks.orders.sections", sections)
    assert main(["orders"]) == 0
    assert main(["orders", "--check"]) == 1


BAD = ["", "unknown", "orders --repeats 0", "orders --threads 0", "orders --clock hand"]


@pytest.mark.parametrize("words", BAD)
def test_bad_command_lines_exit_with_usage(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        main(words.split())
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err
