"""The three side conditions of the convergence theorem, and what breaks which."""

import math

import pytest
import torch

from stiefel.diagnostics import SideConditions
from stiefel.errors import ConfigurationError, ShapeError
from stiefel.parametrizations import CWY, HouseholderProduct

NAMES = ["step identity", "orthogonal steps", "non-decreasing norms"]


def _train(chart, dtype=torch.float64, steps=200, rate=lambda k: k**-0.5, noted=None, **options):
    """SGD on -tr(T^H Q) with noise; the report of the conditions, noted against `noted`."""
    draws = torch.Generator().manual_seed(0)
    V, *phases = (
        torch.randn(original.shape, generator=draws, dtype=original.dtype)
        for original in _originals(chart, dtype)
    )
    V.requires_grad_()
    target = torch.randn(chart.shape, dtype=dtype, generator=draws)
    optimizer = torch.optim.SGD([V], lr=1.0, **options)
    conditions = SideConditions(noted) if noted else SideConditions()
    for k in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate(k)
        noise = torch.randn(chart.shape, dtype=dtype, generator=draws)
        optimizer.zero_grad()
        (-((target + noise / 2).conj() * chart(V, *phases)).sum().real).backward()
        before, gradient = V.detach().clone(), V.grad.clone()
        optimizer.step()
        conditions.note(k, [before], [gradient], [V.detach()])
    assert conditions.steps == steps
    return conditions.report()


def _originals(chart, dtype):
    originals = chart.empty_originals(dtype)
    return (originals,) if isinstance(originals, torch.Tensor) else originals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "chart", [CWY(6), CWY(8, 3), CWY(5, batch=(3,)), HouseholderProduct(6, reflections=2)], ids=repr
)
def test_plain_sgd_keeps_all_three(chart, dtype) -> None:
    report = _train(chart, dtype)
    assert report.ok, str(report)
    assert [finding.name for finding in report.findings] == NAMES
    if dtype == torch.float64:
        assert [finding.bound for finding in report.findings] == [1e-10, 1e-10, 1e-12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("options", "broken"),
    [
        ({"rate": lambda k: 0.1}, NAMES[:1]),
        ({"momentum": 0.9}, NAMES[:2]),
        ({"weight_decay": 0.02}, NAMES),
    ],
    ids=["constant step", "momentum", "weight decay"],
)
def test_controls_break_exactly_what_they_should(options, broken, dtype) -> None:
    report = _train(CWY(6), dtype, **options)
    assert [finding.name for finding in report.failures] == broken
    assert "Broken at" in report.failures[0].meaning


def test_another_schedule_is_held_to_its_own_rate() -> None:
    rate = lambda k: 0.3 / k  # noqa: E731
    assert _train(CWY(6), rate=rate, noted=rate).ok
    assert not _train(CWY(6), rate=rate).ok


def test_small_steps_are_not_condemned_for_rounding() -> None:
    """Steps of 1e-9 |v|: storing v alone leaves a relative error of 1e-7 in them."""
    assert _train(CWY(6), rate=lambda k: 1e-9, noted=lambda k: 1e-9).ok


def test_the_step_of_the_worst_residual_is_named() -> None:
    V = torch.eye(3, dtype=torch.float64)
    g = V.roll(1, 0)
    conditions = SideConditions(lambda k: 0.1)
    for k, factor in enumerate([1.0, 1.0, 1.5, 1.2, 1.0], start=1):
        conditions.note(k, [V], [g], [V - 0.1 * factor * g])
    finding = conditions.report()["step identity"]
    assert finding.measured == pytest.approx(1 / 3)
    assert "Broken at 2 of 5 steps, worst at step 3" in finding.meaning


def test_nan_breaks_all() -> None:
    V = torch.ones(3, 2)
    conditions = SideConditions()
    conditions.note(1, [V], [V * math.nan], [V * math.nan])
    conditions.note(2, [V], [V * 0], [V])
    assert [finding.name for finding in conditions.report().failures] == NAMES


def test_nothing_noted_is_not_ok() -> None:
    report = SideConditions().report()
    assert not report.ok
    assert "call note" in report.skipped[0]


def test_refusals() -> None:
    V = torch.ones(3, 2)
    conditions = SideConditions()
    with pytest.raises(ConfigurationError, match="k = 1, 2"):
        conditions.note(0, [V], [V], [V])
    with pytest.raises(ConfigurationError, match="positive rate"):
        SideConditions(lambda k: 0.0).note(1, [V], [V], [V])
    with pytest.raises(ShapeError, match="as many"):
        conditions.note(1, [V], [], [V])
    with pytest.raises(ShapeError, match="one shape"):
        conditions.note(1, [V], [V.T], [V])
