"""Theorem 4 of the CWY paper: SGD with step k^(-1/2) goes to a stationary point, as seen.

The full run, 20,000 steps and 5 seeds, is marked slow: ``pytest --runslow tests/test_theorem4.py``.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from stiefel.errors import ConfigurationError
from stiefel.experiments.theorem4 import Theorem4, theorem4
from stiefel.experiments.theorem4_page import draw
from stiefel.experiments.theorem4_runs import PROBLEMS, Costs


@pytest.fixture(scope="module")
def result() -> Theorem4:
    return theorem4(steps=1_000, seeds=5, control_steps=200)


def _check(result: Theorem4) -> None:
    assert [(run.chart, run.problem) for run in result.trajectories] == [
        (chart, problem) for chart in ("cwy", "tcwy") for problem in PROBLEMS
    ]
    for run in result.trajectories:
        assert run.minimum_fit.slope <= -0.45
        assert run.windowed_fit.slope <= -0.45
        assert run.conditions.ok
        assert min(run.norm_ratio) >= 1
        assert run.ok
        first, last = run.minimum_fit.window
        assert last == result.steps
        assert first <= 1.1 * result.steps / 100
    broken = {control.name: control.broken for control in result.controls}
    assert broken == {
        "constant step": ("step identity",),
        "momentum": ("step identity", "orthogonal steps"),
        "weight decay": ("step identity", "orthogonal steps", "non-decreasing norms"),
    }
    assert result.ok


def test_the_theorem_is_seen(result) -> None:
    _check(result)


@pytest.mark.slow
def test_the_theorem_is_seen_over_20_000_steps() -> None:
    _check(theorem4())


def test_the_point_gradient_falls_as_well(result) -> None:
    """The coordinate gradient could shrink by growing |v| alone; here the point goes, too."""
    for run in result.trajectories:
        assert run.point[-1] < 0.1 * run.point[0]
        assert max(run.norm_ratio) < 10


def test_curves_are_consistent(result) -> None:
    for run in result.trajectories:
        assert run.steps[0] == 1
        assert run.steps[-1] == result.steps
        assert all(a >= b for a, b in zip(run.minimum, run.minimum[1:], strict=False))
        assert all(least <= s for least, s in zip(run.minimum, run.coordinate, strict=True))
        assert all(least <= s for least, s in zip(run.minimum, run.windowed, strict=True))
        assert run.windowed[0] == pytest.approx(run.coordinate[0])


@pytest.mark.parametrize("p", [4, 7])
def test_both_costs_are_those_of_the_page(p: int) -> None:
    """Their gradients, against autograd of tr(B X^T A X) and |A X - B|^2."""
    n = 7
    draws = torch.Generator().manual_seed(0)
    costs = Costs.draw(n, p, draws)
    draws = torch.Generator().manual_seed(0)

    def matrix(*size: int, symmetric: bool = False) -> torch.Tensor:
        Z = torch.randn(*size, dtype=torch.float64, generator=draws)
        Z = (Z + Z.mT) / 2 if symmetric else Z
        return Z / torch.linalg.svdvals(Z).max()

    A, B = matrix(n, n, symmetric=True), matrix(p, p, symmetric=True)
    Z, Y = matrix(n, n), matrix(n, p)
    X = torch.randn(2, 1, n, p, dtype=torch.float64, requires_grad=True)
    f = torch.trace(B @ X[0, 0].mT @ A @ X[0, 0]) + (Z @ X[1, 0] - Y).square().sum()
    f.backward()
    torch.testing.assert_close(costs.gradient(X.detach()), X.grad)


def test_repeats_exactly_and_depends_on_the_seed() -> None:
    options = {"steps": 400, "seeds": 2, "n": 4, "p": 2, "control_steps": 2}
    first, again = theorem4(**options), theorem4(**options)
    assert first.trajectories == again.trajectories
    assert first.trajectories != theorem4(seed=1, **options).trajectories


def test_tables_and_summary_are_plain(result) -> None:
    rows = result.table()
    assert [row["chart"] for row in rows] == ["cwy", "cwy", "tcwy", "tcwy"]
    assert rows[0]["slope of the minimum"] == round(result.trajectories[0].minimum_fit.slope, 3)
    assert [row["control"] for row in result.control_table()] == [c.name for c in result.controls]
    summary = json.loads(json.dumps(result.summary()))
    assert summary["ok"] is True
    assert "as the theorem says" in str(result)
    assert math.isfinite(summary["seconds"])


def test_a_trajectory_that_does_not_fall_is_not_ok(result) -> None:
    run = result.trajectories[0]
    slow = replace(run.minimum_fit, slope=-0.4)
    assert not replace(run, minimum_fit=slow).ok
    assert not replace(run, windowed_fit=slow).ok
    assert not replace(run, norm_ratio=(1.0, 0.9)).ok
    assert not replace(run, conditions=result.controls[0].report).ok
    mixed = replace(result, trajectories=(replace(run, minimum_fit=slow),))
    assert not mixed.ok
    assert "NOT as the theorem says" in str(mixed)
    assert not replace(result.controls[0], expected=("orthogonal steps",)).ok


def test_the_page_is_drawn(result, tmp_path) -> None:
    figure = draw(result, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    titles = [ax.get_title() for ax in figure.axes]
    assert "squared gradient with respect to the point" in titles
    assert len(titles) == 6


@pytest.mark.parametrize("options", [{"steps": 100}, {"seeds": 0}, {"p": 10}, {"control_steps": 0}])
def test_refusals(options) -> None:
    with pytest.raises(ConfigurationError, match="two decades"):
        theorem4(**options)
