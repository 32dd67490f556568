"""Slopes of errors against step lengths."""

from __future__ import annotations

import math

import pytest

from stiefel.diagnostics.checks.slopes import STEPS, fitted_order, order_finding
from stiefel.errors import ConfigurationError, ShapeError

FLOOR = 1e-15


def rounded(error, t):
    """An error with rounding of the size of the floor, of changing sign."""
    return abs(error + FLOOR * math.sin(1e6 * t))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_order_is_found_between_rounding_and_higher_terms(order):
    errors = [rounded(0.3 * t**order + 5 * t ** (order + 1), t) for t in STEPS]
    assert abs(fitted_order(STEPS, errors, FLOOR) - order) < 0.1


def test_a_small_term_of_first_order_shows():
    """At 1e-5 t + t^2 the slope at large steps is 2, and the order is 1."""
    errors = [rounded(1e-4 * t + t**2, t) for t in STEPS]
    assert fitted_order(STEPS, errors, FLOOR) < 1.5


def test_the_order_of_steps_does_not_matter():
    errors = [t**2 for t in STEPS]
    assert fitted_order(STEPS[::-1], errors[::-1], FLOOR) == pytest.approx(2)


def test_rounding_has_no_order_and_keeps_every_law():
    errors = [rounded(0, t) for t in STEPS]
    assert math.isnan(fitted_order(STEPS, errors, FLOOR))
    finding = order_finding("law", STEPS, errors, FLOOR, order=3, meaning="")
    assert finding.ok
    assert finding.measured == math.inf


def test_an_error_that_falls_to_rounding_at_once_has_a_high_order():
    """Such as that of a map that is exact inside its domain and clipped outside."""
    assert fitted_order(STEPS, [0.16, 0.05] + [0.0] * (len(STEPS) - 2), FLOOR) > 10
    barely = [20 * FLOOR, 15 * FLOOR] + [8 * FLOOR] * (len(STEPS) - 2)
    assert math.isnan(fitted_order(STEPS, barely, FLOOR))


def test_a_constant_error_has_order_zero():
    finding = order_finding("law", STEPS, [1e-3] * len(STEPS), FLOOR, order=1, meaning="wrong")
    assert abs(finding.measured) < 1e-6
    assert not finding.ok


def test_what_is_not_finite_never_passes_unless_the_step_left_the_domain():
    errors = [t**2 for t in STEPS]
    assert fitted_order(STEPS, [math.inf, math.nan, *errors[2:]], FLOOR) == pytest.approx(2)
    assert fitted_order(STEPS, [*errors[:-1], math.nan], FLOOR) == -math.inf
    assert fitted_order(STEPS, [math.nan] * len(STEPS), FLOOR) == -math.inf


def test_wrong_input_is_refused():
    with pytest.raises(ShapeError, match="one error for each step"):
        fitted_order(STEPS, [1.0], FLOOR)
    with pytest.raises(ConfigurationError, match="three or more"):
        fitted_order([0.1, 0.01], [1.0, 0.1], FLOOR)
    with pytest.raises(ConfigurationError, match="positive floor"):
        fitted_order(STEPS, [1.0] * len(STEPS), 0.0)
    with pytest.raises(ConfigurationError, match="positive"):
        fitted_order([0.1, 0.01, 0.0], [1.0] * 3, FLOOR)
