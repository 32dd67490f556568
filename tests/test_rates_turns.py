"""Verdicts on planted records that turn: a rise is divergence where it lasts to the end."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.signal import lfilter

from stiefel.diagnostics import Verdict, judge_rate

SEEDS = 20
DECREASING, DIVERGING = Verdict.DECREASING, Verdict.DIVERGING
EARLY, FLOOR = Verdict.TOO_EARLY, Verdict.NOISE_FLOOR


def _noise(seed: int, count: int) -> np.ndarray:
    """Noise of standard deviation 0.2 and lag-1 correlation 0.5."""
    shocks = np.random.default_rng(seed).standard_normal(count + 100) * 0.2 * math.sqrt(0.75)
    return np.asarray(lfilter([1.0], [1.0, -0.5], shocks))[100:]


def _peaked(count: int, peak: float, sign: float = 1.0) -> np.ndarray:
    """log y: up by 3 to the peak, a share of the record, and down by 4 from there."""
    t = np.arange(1, count + 1) / count
    return sign * np.where(t < peak, 3 * t / peak, 3 - 4 * (t - peak) / (1 - peak))


def _verdicts(log_y: np.ndarray, seeds: int = SEEDS, **options) -> Counter[Verdict]:
    count = len(log_y)
    k = np.arange(1, count + 1)
    return Counter(
        judge_rate(k, np.exp(log_y + _noise(seed, count)), **options).verdict
        for seed in range(seeds)
    )


def test_an_early_rise_is_never_divergence_however_long_one_waits() -> None:
    """The first tenth rises; judged after every ten records, 200 in all."""
    log_y = _peaked(200, 0.1)
    for count in range(10, 201, 10):
        found = _verdicts(log_y[:count])
        assert found[DIVERGING] == 0, count
        if count >= 100:
            assert found[DECREASING] >= 18, count


def test_an_early_rise_of_many_records_is_known_by_the_length_of_the_training() -> None:
    log_y = _peaked(2000, 0.1)
    assert _verdicts(log_y[:180])[DIVERGING] == SEEDS  # it may as well be one
    for count in (60, 120, 180, 240):
        assert _verdicts(log_y[:count], planned=2000)[DIVERGING] == 0
    rising = np.linspace(0, 8, 500)
    assert _verdicts(rising, planned=2000)[DIVERGING] == SEEDS  # a quarter of it
    said = judge_rate(range(1, 181), np.exp(log_y[:180]), planned=2000).explanation
    assert "it rises, in the first 9% of the training" in said
    values = [*np.exp(log_y[:177]), *[math.nan] * 3]
    assert judge_rate(range(1, 181), values, planned=2000).verdict is DIVERGING


@pytest.mark.parametrize("count", [16, 31, 45])
def test_a_rise_of_few_records_is_too_early(count: int) -> None:
    assert _verdicts(np.linspace(0, 5, count))[EARLY] == SEEDS
    said = judge_rate(range(1, count + 1), np.exp(np.linspace(0, 5, count))).explanation
    assert "points are too few to call a rise divergence" in said


@pytest.mark.parametrize("count", [64, 100, 400])
def test_a_rise_throughout_is_divergence(count: int) -> None:
    assert _verdicts(np.linspace(0, 5, count))[DIVERGING] >= 19


@pytest.mark.parametrize("count", [16, 32, 64, 100, 400])
def test_flat_noise_is_rarely_divergence(count: int) -> None:
    found = _verdicts(np.zeros(count), seeds=100)
    assert found[DIVERGING] <= 9
    assert found[DECREASING] <= 9


@pytest.mark.parametrize("peak", [0.55, 0.65, 0.75, 0.85])
def test_a_rise_and_a_fall_in_the_window_are_judged_by_the_fall(peak: float) -> None:
    log_y = _peaked(400, peak)
    assert _verdicts(log_y)[DECREASING] >= 19
    for count in (32, 64, 100):
        assert _verdicts(_peaked(count, peak))[DIVERGING] == 0


def test_a_rise_that_has_ended_in_a_plateau_is_judged_by_the_plateau() -> None:
    t = np.arange(1, 401) / 400
    found = _verdicts(np.minimum(5 * t / 0.75, 5.0))
    assert found[DIVERGING] <= 2
    found = _verdicts(np.minimum(5 * t / 0.75, 5.0), noise_floor=math.exp(5.0))
    assert found[FLOOR] >= 18


@pytest.mark.parametrize("peak", [0.65, 0.75])
def test_a_fall_and_a_lasting_rise_are_divergence(peak: float) -> None:
    log_y = _peaked(400, peak, -1.0)
    assert _verdicts(log_y)[DIVERGING] >= 19
    k = np.arange(1, 401)
    found = judge_rate(k, np.exp(log_y + _noise(0, 400)))
    assert found.fit is not None
    assert 200 <= found.fit.window[0] == pytest.approx(400 * peak, abs=41)
    assert found.explanation.startswith("it fell until step ")


@pytest.mark.parametrize("slope", [-1.0, -0.2, 0.0, 0.6])
def test_a_straight_record_has_no_turn(slope: float) -> None:
    k = np.arange(1, 401)
    records = (np.exp(slope * np.log(k) + _noise(seed, 400)) for seed in range(100))
    turned = ["until step" in judge_rate(k, values).explanation for values in records]
    assert sum(turned) <= 5


def test_the_window_is_where_a_turn_is_looked_for() -> None:
    log_y = _peaked(400, 0.3)
    k = range(1, 401)
    assert judge_rate(k, np.exp(log_y), window=(1, 400)).verdict is DECREASING
    assert judge_rate(k, np.exp(log_y), window=(1, 119)).verdict is DIVERGING
