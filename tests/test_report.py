"""Reports: verdicts, what they say, when they raise, and what they draw."""

from __future__ import annotations

import math

import pytest

from stiefel.diagnostics import Curve, Finding, Report
from stiefel.errors import ConfigurationError, DiagnosisError

GOOD = Finding("residual", 1e-14, "<=", 1e-12, "it is off the manifold.")
BAD = Finding("order", 1.0, ">=", 1.9, "it is no retraction.")


@pytest.mark.parametrize(
    ("measured", "sense", "ok"),
    [(1.0, "<=", True), (1.1, "<=", False), (1.0, ">=", True), (0.9, ">=", False)],
)
def test_a_bound_is_kept_or_not(measured: float, sense: str, ok: bool) -> None:
    assert Finding("f", measured, sense, 1.0, "").ok is ok


@pytest.mark.parametrize("sense", ["<=", ">="])
def test_nan_keeps_no_bound(sense: str) -> None:
    assert not Finding("f", math.nan, sense, 1.0, "").ok


def test_a_good_report_returns_itself() -> None:
    report = Report("mine", (GOOD,))
    assert report.ok
    assert report.raise_for_failures() is report
    assert "all ok" in str(report)
    assert GOOD.meaning not in str(report)


def test_a_bad_report_raises_what_it_says() -> None:
    report = Report("mine", (GOOD, BAD), skipped=("order of the logarithm: there is none",))
    assert not report.ok
    assert report.failures == (BAD,)
    with pytest.raises(DiagnosisError) as caught:
        report.raise_for_failures()
    assert str(caught.value) == str(report)
    for text in ("mine", "WRONG", BAD.meaning, "order of the logarithm: there is none"):
        assert text in str(report)


def test_a_report_of_nothing_is_not_ok() -> None:
    report = Report("mine", (), skipped=("all of it",))
    assert not report.ok
    assert "nothing could be checked" in str(report)
    with pytest.raises(DiagnosisError):
        report.raise_for_failures()


def test_findings_are_found_by_name() -> None:
    report = Report("mine", (GOOD, BAD))
    assert report["order"] is BAD
    with pytest.raises(KeyError, match="residual"):
        report["slope"]


def test_the_picture_has_each_curve_and_its_slope(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    curve = Curve("error", (1e-3, 1e-2, 1e-1), (0.0, 1e-4, 1e-2), order=2)
    figure = Report("mine", (GOOD,), (curve,)).draw(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    line, slope = figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [1e-3, 1e-2, 1e-1]
    assert slope.get_ydata()[-1] == pytest.approx(1e-2)
    assert slope.get_ydata()[0] == pytest.approx(1e-6)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no curves"):
        Report("mine", (GOOD,)).draw()
