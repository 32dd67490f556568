"""Log-log slopes of planted records, and the verdicts on them."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from stiefel.diagnostics import Verdict, fit_rate, judge_rate
from stiefel.errors import ConfigurationError, DataError, ShapeError

EVERY = np.arange(50, 20_001, 50)


def _noise(draws, count: int, correlation: float, size: float = 1.0) -> np.ndarray:
    """Stationary noise of standard deviation `size` with that lag-1 correlation."""
    shocks = draws.standard_normal(count + 300) * size * math.sqrt(1 - correlation**2)
    return np.asarray(lfilter([1.0], [1.0, -correlation], shocks))[300:]


def _planted(slope: float, noise: np.ndarray, steps=EVERY) -> np.ndarray:
    return 3 * steps**slope * np.exp(noise)


@pytest.mark.parametrize(
    ("steps", "window", "correlation"),
    [
        (EVERY, None, 0.0),
        (EVERY, None, 0.5),
        (EVERY, None, 0.8),
        (np.arange(1, 701), (10, 700), 0.9),
        (np.geomspace(100, 20_000, 150), (200, 20_000), 0.7),
        (np.arange(1, 33), None, 0.0),
    ],
    ids=lambda value: str(value) if np.ndim(value) == 0 else f"{len(value)}",
)
def test_the_interval_covers_under_correlated_noise(steps, window, correlation) -> None:
    draws = np.random.default_rng(5)
    hits = 0
    for _ in range(1000):
        values = _planted(-0.6, _noise(draws, len(steps), correlation, 0.3), steps)
        fit = fit_rate(steps, values, window=window)
        hits += fit.low <= -0.6 <= fit.high
    assert 0.93 <= hits / 1000 <= 0.97


def test_plain_least_squares_would_not_cover() -> None:
    """The planted noise is the kind that fools an interval for independent residuals."""
    draws = np.random.default_rng(6)
    x = np.log(np.arange(10, 1001))
    run = x - x.mean()
    hits = 0
    for _ in range(300):
        y = -0.6 * x + _noise(draws, len(x), 0.9, 0.3)
        slope = run @ y / (run @ run)
        residual = y - y.mean() - slope * run
        error = math.sqrt(residual @ residual / (len(x) - 2) / (run @ run))
        hits += abs(slope + 0.6) <= 1.96 * error
    assert hits / 300 < 0.5


def test_the_default_window_is_the_last_half() -> None:
    values = np.where(EVERY < 10_000, 1.0, EVERY**-1.5)
    fit = fit_rate(EVERY, values)
    assert fit.slope == pytest.approx(-1.5, abs=1e-9)
    assert fit.window == (10_000, 20_000)
    assert fit.count == 201
    early = fit_rate(EVERY, values, window=(50, 9_000))
    assert early.slope == pytest.approx(0.0, abs=1e-9)


def test_a_bend_widens_the_interval() -> None:
    straight, bent = EVERY**-0.5, EVERY**-0.5 + 0.004
    window = (200, 20_000)
    assert fit_rate(EVERY, straight, window=window).standard_error == 0
    fit = fit_rate(EVERY, bent, window=window)
    assert fit.high - fit.low > 0.03


def test_values_without_a_logarithm_are_left_out() -> None:
    values = np.array(EVERY**-0.5)
    values[::3] = math.nan
    values[1::3] = 0.0
    fit = fit_rate(EVERY, values)
    assert fit.slope == pytest.approx(-0.5, abs=1e-9)
    assert fit.count < 70


def test_refusals_of_fits() -> None:
    with pytest.raises(DataError, match="at least 8"):
        fit_rate([1, 2, 3], [1, 2, 3])
    with pytest.raises(DataError, match="at least 8"):
        fit_rate([], [])
    with pytest.raises(ShapeError, match="one value a step"):
        fit_rate([1, 2, 3], [1, 2])
    with pytest.raises(DataError, match="count steps from one"):
        fit_rate(range(20), range(20))
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        fit_rate(EVERY, EVERY, confidence=95)


# ---------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("slope", "options", "verdict", "words"),
    [
        (-1.2, {}, Verdict.DECREASING, "at least like"),
        (-1.2, {"noise_floor": 1e-9}, Verdict.DECREASING, "at least like"),
        (0.0, {}, Verdict.NOISE_FLOOR, "flat"),
        (0.0, {"noise_floor": 3.0}, Verdict.NOISE_FLOOR, "half of this or more is noise"),
        (0.0, {"noise_floor": 0.03}, Verdict.TOO_EARLY, "above the noise"),
        (0.6, {}, Verdict.DIVERGING, "rises"),
        (-0.3, {}, Verdict.TOO_EARLY, "more slowly"),
    ],
)
def test_planted_verdicts(slope, options, verdict, words) -> None:
    draws = np.random.default_rng(7)
    right = 0
    for _ in range(100):
        values = _planted(slope, _noise(draws, len(EVERY), 0.5, 0.05))
        judgement = judge_rate(EVERY, values, **options)
        if judgement.verdict is verdict:
            right += 1
            assert words in judgement.explanation
            assert (judgement.confidence >= 0.95) == (verdict is not Verdict.TOO_EARLY)
    assert right >= 90


@pytest.mark.parametrize("slope", [-0.45, 0.0])
def test_wrong_verdicts_are_as_rare_as_the_confidence_says(slope) -> None:
    """At the border of a verdict it is given in one case of twenty."""
    draws = np.random.default_rng(8)
    wrong = 0
    for _ in range(1000):
        verdict = judge_rate(EVERY, _planted(slope, _noise(draws, len(EVERY), 0.6, 0.2))).verdict
        wrong += verdict is (Verdict.DECREASING if slope < 0 else Verdict.DIVERGING)
    assert 0.03 <= wrong / 1000 <= 0.07


def test_noise_that_hides_the_slope_is_too_early() -> None:
    draws = np.random.default_rng(9)
    judgement = judge_rate(EVERY, _planted(-0.5, _noise(draws, len(EVERY), 0.9, 2.0)))
    assert judgement.verdict is Verdict.TOO_EARLY
    assert "train longer" in judgement.explanation


@pytest.mark.parametrize(
    ("values", "verdict", "words"),
    [
        ([], Verdict.TOO_EARLY, "empty"),
        ([1.0, 0.5], Verdict.TOO_EARLY, "record more often"),
        ([math.nan] * 40, Verdict.TOO_EARLY, "every value is NaN"),
        ([0.0] * 40, Verdict.TOO_EARLY, "no gradient reaches"),
        ([2.0] * 40, Verdict.TOO_EARLY, "nothing moves"),
        ([1.0] * 30 + [math.nan] * 10, Verdict.DIVERGING, "from step 31 on"),
        ([1.0] * 39 + [math.inf], Verdict.DIVERGING, "from step 40 on"),
        ([1.0] * 30 + [0.0] * 10, Verdict.DECREASING, "stationary to rounding"),
        ([1 / k for k in range(1, 40)] + [math.nan], Verdict.DECREASING, "at least like"),
    ],
)
def test_records_that_are_no_lines(values, verdict, words) -> None:
    judgement = judge_rate(range(1, len(values) + 1), values)
    assert judgement.verdict is verdict
    assert words in judgement.explanation
    assert words in str(judgement)


def test_a_record_of_one_length_only() -> None:
    with pytest.raises(ShapeError):
        judge_rate([1, 2], [1.0])
    with pytest.raises(ConfigurationError, match="negative"):
        judge_rate(EVERY, EVERY, required=0.5)
