"""The optimality benchmark: its problems, its clock, its verdicts, its picture."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks import optimality
from benchmarks.__main__ import main
from benchmarks.contestants import contestants
from benchmarks.harness import Settings
from benchmarks.problems import problems
from benchmarks.traces import Finished, Trace
from stiefel.geometry import haar, polar_factor
from stiefel.optim import hessian_vector_product, minimize
from stiefel.optim.solvers import SOLVERS

pytestmark = pytest.mark.usefixtures("one_thread")

PROBLEMS = problems(quick=True, device="cpu")
QUICK = Settings(quick=True)
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)


@each_problem
def test_gradient_and_hessian_are_those_of_the_value(problem):
    X = problem.start.clone().requires_grad_()
    f, G = problem.value_and_gradient(X)
    (g,) = torch.autograd.grad(f, X, create_graph=True)
    u = torch.randn_like(problem.start)
    (D,) = torch.autograd.grad((g * u).sum(), X)
    torch.testing.assert_close(g, G, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(D, problem.hessian(problem.start, u), rtol=1e-11, atol=1e-11)


@each_problem
def test_the_minimum_is_one(problem):
    """At the minimiser the gap is rounding, the Hessian positive, and no point lies below."""
    n, p = problem.start.shape
    assert problem.gap(problem.minimiser) < 1e-14
    assert problem.gap(problem.start) > 1e-2
    for _ in range(20):
        X = haar(n, p, dtype=torch.float64)
        assert float(problem.value_and_gradient(X)[0]) > problem.minimum
        u = torch.randn_like(X)
        H = hessian_vector_product(lambda X: problem.value_and_gradient(X)[0], problem.minimiser, u)
        assert (H * u).sum() > -1e-9 * problem.curvature
        assert H.norm() <= 1.01 * problem.curvature * u.norm()


def test_the_spectrum_of_the_principal_components_is_the_stated_one():
    problem = PROBLEMS[0]
    n, p = problem.start.shape
    A = -torch.stack(
        [problem.hessian(problem.start, e[:, None])[:, 0] for e in torch.eye(n).double()]
    )
    values = torch.linalg.eigvalsh(A)
    assert math.isclose(float(values[-1] / values[0]), 10, rel_tol=1e-10)
    assert math.isclose(-float(values[-p:].sum()) / 2, problem.minimum, rel_tol=1e-12)


@each_problem
@pytest.mark.parametrize("method", SOLVERS)
def test_minimize_reaches_the_gap(problem, method):
    result = minimize(problem.value_and_gradient, problem.start, gradient=True, method=method)
    assert result.success
    assert problem.gap(result.x) < 1e-10


def test_the_clock_stands_still_while_points_are_measured():
    trace = Trace(PROBLEMS[0], QUICK, limit=10.0)
    trace.start()
    measure = trace._measure

    def slowly(X):
        time.sleep(0.2)
        return measure(X)

    trace._measure = slowly
    time.sleep(0.05)
    trace.mark(PROBLEMS[0].start)
    trace.mark(PROBLEMS[0].start)
    assert trace.iterations == 2
    assert 0.05 <= trace.seconds[-1] < 0.2


def test_points_off_the_manifold_are_moved_first():
    """Without that they would lie below the minimum."""
    problem = PROBLEMS[0]
    trace = Trace(problem, QUICK, limit=10.0)
    trace.start()
    X = 1.1 * problem.start
    trace.mark(X)
    assert trace.moved == 1
    assert trace.residual > 0.1
    assert math.isclose(trace.gaps[-1], problem.gap(polar_factor(X)), rel_tol=1e-9)


def test_runs_end_at_the_limit_at_the_minimum_and_where_they_diverge():
    problem = PROBLEMS[0]
    late = Trace(problem, QUICK, limit=0.01)
    late.start()
    time.sleep(0.02)
    with pytest.raises(Finished):
        late.check()
    with pytest.raises(Finished):
        late.mark(problem.start)
    assert len(late.gaps) == 2
    there = Trace(problem, QUICK, limit=10.0)
    there.start()
    with pytest.raises(Finished):
        there.mark(problem.minimiser)
    lost = Trace(problem, QUICK, limit=10.0)
    lost.start()
    with pytest.raises(Finished):
        lost.mark(problem.start * math.nan)
    assert lost.note == "diverged"
    assert len(lost.gaps) == 1


def _trace(*pairs: tuple[float, float]) -> Trace:
    trace = Trace(PROBLEMS[0], QUICK, limit=1.0)
    trace.seconds, trace.gaps = [t for t, _ in pairs], [gap for _, gap in pairs]
    return trace


def test_who_is_ahead():
    ours = _trace((0, 1.0), (1, 1e-4), (2, 1e-11))
    slower, quicker = _trace((0, 1.0), (3, 1e-12)), _trace((0, 1.0), (1.5, 1e-12))
    assert (ours.reached(1e-2), ours.reached(1e-12), ours.at(1.5)) == (1, None, 1e-4)
    results = {"ours": ("", ours), "peer": ("", slower)}
    assert optimality._ahead(results, {"ours"}, 1e-10) == (2, 1e10)
    results["other"] = ("", quicker)
    assert optimality._ahead(results, {"ours"}, 1e-10) == (2, 1e-2)
    assert optimality._ahead(results, {"ours"}, 1e-14) == (math.inf, 0.0)
    assert optimality._ahead({"ours": ("", ours)}, {"ours"}, 1e-10) == (2, None)


def test_every_solver_and_the_peers_take_part():
    names = {contestant.name for contestant in contestants()}
    assert {f"minimize, {method}" for method in SOLVERS} <= names
    assert {"RGD", "RGDAdam", "RiemannianAdam", "Landing", "POGO", "StiefelMuon"} <= names
    assert {"geoopt RiemannianSGD", "pymanopt trust region"} <= names


def test_an_absent_peer_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.optimality.present", lambda c: c.package != "pymanopt")
    section, results = optimality._section(PROBLEMS[2], QUICK)
    notes = {row.name: row.note for row in section.rows}
    assert "pip install '.[benchmarks]'" in notes["pymanopt trust region"]
    assert "pymanopt trust region" not in results
    assert results["RGD"][0].startswith("lr ")


def test_the_picture_is_written(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="draws: pip install '.[benchmarks]'")
    file = tmp_path / "curves.png"
    curves = {
        problem.title: {name: ("", _trace((1e-3, 1.0), (1e-2, 1e-6))) for name in ("RGD", "mine")}
        for problem in PROBLEMS
    }
    optimality.draw(curves, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_only_benchmarks_with_curves_draw(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["orders", "--picture", "curves.png"])
    assert "optimality" in capsys.readouterr().err
