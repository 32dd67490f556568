"""Checks of optimizers: ours pass, geoopt's and torch's are condemned for what is wrong there."""

from __future__ import annotations

import geoopt
import pytest
import torch

import stiefel
from stiefel.diagnostics import check_optimizer
from stiefel.diagnostics.checks.optimizer_trial import Trial
from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.optim import RGD, RiemannianOptimizer
from stiefel.optim.batches import Proposal
from tests.registry import OPTIMIZERS, RGD_MANIFOLDS

CASES = [(case, manifold) for case in OPTIMIZERS for manifold in case.manifolds]
SOME = [
    *((case, case.manifolds[0]) for case in OPTIMIZERS),
    *((OPTIMIZERS[0], manifold) for manifold in RGD_MANIFOLDS[1:]),
]


def over(cases):
    ids = [f"{c.name}-{m.metric}-{m.retraction}" for c, m in cases]
    return pytest.mark.parametrize(("case", "manifold"), cases, ids=ids)


def failures(*args, **kwargs):
    return {finding.name for finding in check_optimizer(*args, **kwargs).failures}


# ------------------------------------------------------------------------------ what is right
@over(SOME)
def test_optimizers_of_the_registry_pass(case, manifold):
    report = check_optimizer(case.kind, manifold, options=case.options, steps=50)
    assert report.ok, str(report)
    names = {finding.name for finding in report.findings}
    assert {"constraint", "maximize ascends", "ordinary parameters (adam)"} <= names
    keeps = any(word in case.name for word in ("momentum", "adam", "nesterov", "transport"))
    assert ("state does not grow" in names) >= keeps
    if case.tangent and keeps:
        assert "momentum is tangent" in names
    if case.kind is RGD:
        assert "order of the first step" in names
        assert len(report.curves) == 1


@pytest.mark.slow
@over(CASES)
def test_optimizers_of_the_registry_pass_on_every_manifold(case, manifold):
    """Run with ``--runslow``."""
    for shape in [(7, 3), (4, 4), (2, 5, 1)]:
        report = check_optimizer(case.kind, manifold, options=case.options, shape=shape)
        assert report.ok, (shape, str(report))


@pytest.mark.parametrize("seed", range(4))
def test_points_that_drift_are_held_within_the_bound_of_whoever_measures_them(seed):
    """Two sweeps drift; the step loop sees it in float32, the check in float64."""
    report = check_optimizer(
        stiefel.optim.RGDAdam,
        options={"iterations": 2},
        shape=(2, 5, 1),
        generator=torch.Generator().manual_seed(seed),
    )
    assert report.ok, str(report)


def test_averages_in_the_surrounding_space_are_said():
    report = check_optimizer(stiefel.optim.RGDAdam, steps=5)
    assert any("by design" in reason for reason in report.skipped)
    strict = check_optimizer(stiefel.optim.RGDAdam, steps=5, ambient_state=False)
    assert [finding.name for finding in strict.failures] == ["momentum is tangent"]


class Surrounding(torch.optim.Optimizer):
    """Heavy ball of a stranger: the average of ambient gradients, projected when it steps."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for leaf in self.param_groups[0]["params"]:
            average = self.state[leaf].setdefault("average", torch.zeros_like(leaf.data))
            average.mul_(0.5).add_(leaf.grad)
            u = leaf.manifold.egrad2rgrad(leaf, average)
            leaf.copy_(leaf.manifold.retr(leaf, -self.param_groups[0]["lr"] * u))


class Said(Surrounding):
    ambient_state = True


def test_an_optimizer_of_another_author_says_it_too():
    assert failures(Surrounding, steps=5) == {"momentum is tangent"}
    report = check_optimizer(Said, steps=5)
    assert report.ok, str(report)
    assert any("by design" in reason for reason in report.skipped)
    assert failures(Said, steps=5, ambient_state=False) == {"momentum is tangent"}


def test_the_registry_says_the_same():
    assert all(case.tangent or case.kind.ambient_state for case in OPTIMIZERS)
    assert any(case.kind.ambient_state for case in OPTIMIZERS)


def test_functions_that_make_optimizers_and_manifolds_of_others():
    report = check_optimizer(
        lambda params, lr, **options: RGD(params, lr, momentum=0.5, **options),
        geoopt.Sphere(),
        shape=(4, 3),
        steps=20,
    )
    assert report.ok, str(report)


def test_the_same_numbers_come_each_time():
    first, second = (str(check_optimizer(RGD, steps=5)) for _ in range(2))
    assert first == second
    other = str(check_optimizer(RGD, steps=5, generator=torch.Generator().manual_seed(3)))
    assert other != first


# ------------------------------------------------------------------------------ what is wrong
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_lost_constraint_is_found(kind):
    report = check_optimizer(kind, steps=20)
    assert not report["constraint"].ok
    assert "the constraint is lost" in report["constraint"].meaning
    assert "stiefel.optim.build" in report["constraint"].meaning
    assert not report["tangency of the first step"].ok
    assert not report["points stay on the manifold (float64)"].ok


def test_an_ordinary_optimizer_is_told_what_it_goes_along():
    report = check_optimizer(torch.optim.SGD, steps=5)
    assert "along the raw gradient" in report["error of the first step"].meaning


def test_a_leaf_that_loses_its_class_is_a_lost_constraint():
    class Losing(RGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for leaf in group["params"]:
                    leaf.__class__ = torch.nn.Parameter

    report = check_optimizer(Losing, steps=3)
    assert report["constraint"].measured == float("inf")


def test_geoopts_momentum_on_its_canonical_manifold_is_condemned():
    report = check_optimizer(
        geoopt.optim.RiemannianSGD,
        geoopt.CanonicalStiefel(),
        options={"momentum": 0.9, "stabilize": 1},
        ordinary="sgd",
        steps=5,
    )
    failed = {finding.name: finding for finding in report.failures}
    assert set(failed) == {
        "order of the first step",
        "error of the first step",
        "gradients are not written to",
        "state does not grow",
        "ordinary parameters (sgd)",
    }
    assert failed["order of the first step"].measured == pytest.approx(1, abs=0.05)
    assert "check_retraction" in failed["error of the first step"].meaning
    assert failed["state does not grow"].measured > 10
    assert "applied twice it must be itself" in failed["state does not grow"].meaning


def test_geoopts_retraction_alone_is_seen_in_the_first_step():
    assert failures(geoopt.optim.RiemannianSGD, geoopt.CanonicalStiefel(), steps=5) == {
        "order of the first step",
        "error of the first step",
        "gradients are not written to",
    }


def test_geoopts_momentum_starts_from_the_raw_gradient():
    options = {"momentum": 0.9}
    report = check_optimizer(
        geoopt.optim.RiemannianSGD, geoopt.EuclideanStiefel(), options=options, steps=5
    )
    assert not report["order of the first step"].ok
    assert "momentum that starts from the raw gradient" in report["error of the first step"].meaning
    plain = failures(geoopt.optim.RiemannianSGD, geoopt.EuclideanStiefel(), steps=5)
    assert plain == {"gradients are not written to"}


def test_geoopts_adam_ignores_maximize():
    report = check_optimizer(geoopt.optim.RiemannianAdam, geoopt.EuclideanStiefel(), steps=5)
    assert not report["maximize ascends"].ok
    assert "accepted and ignored" in report["maximize ascends"].meaning


class Momentum(RiemannianOptimizer):
    """Heavy ball, with a mistake chosen by name."""

    mistake = ""

    def __init__(self, params, lr, *, momentum=0.9, maximize=False):
        super().__init__(params, {"lr": lr, "momentum": momentum, "maximize": maximize})

    def _state_kinds(self, group):
        return {"m": "point"}

    def _propose(self, batch):
        manifold, X, G = batch.manifold, batch.points, batch.gradients
        gradient = manifold.egrad2rgrad(X, G)
        if self.mistake == "other metric":
            gradient = stiefel.Stiefel("euclidean").egrad2rgrad(X, G)
        if self.mistake == "up":
            gradient = -gradient
        m = gradient
        if self.mistake == "raw start" and not batch.state:
            m = G
        if batch.state:
            m = batch.group["momentum"] * batch.state["m"] + gradient
        Y, carried = manifold.retr_transp(X, batch.rate * manifold.proju(X, m), m)
        if self.mistake == "not carried":
            carried = m
        if self.mistake == "raw start" and not batch.state:
            carried = m
        if self.mistake == "growing":
            carried = 1.2 * carried
        if self.mistake == "moving":
            Y = manifold.retr(Y, 1e-6 * manifold.proju(Y, torch.ones_like(Y)))
        return Proposal(Y, {"m": carried})


@pytest.mark.parametrize(
    ("mistake", "names", "said"),
    [
        ("", set(), ""),
        ("not carried", {"momentum is tangent"}, "transport it with the point"),
        ("raw start", {"momentum is tangent"}, "start it from the Riemannian gradient"),
        ("growing", {"state does not grow"}, "multiplied by more than one"),
        (
            "other metric",
            {"order of the first step", "error of the first step"},
            "the gradient in the euclidean metric",
        ),
        (
            "up",
            {"descent of the first step", "error of the first step", "maximize ascends"},
            "does not go down",
        ),
        ("moving", {"a zero gradient moves nothing"}, "no momentum"),
    ],
)
def test_planted_mistakes_are_found_named_and_explained(mistake, names, said):
    kind = type("Momentum", (Momentum,), {"mistake": mistake})
    report = check_optimizer(kind, stiefel.Stiefel("canonical", "cayley"), steps=10)
    failed = {finding.name: finding for finding in report.failures}
    assert names <= set(failed)
    if mistake not in ("moving", "raw start"):
        assert names == set(failed), str(report)
    assert not names or any(said in finding.meaning for finding in failed.values())


def test_steps_without_a_retraction_leave_the_manifold():
    class Straight(RGD):
        def _propose(self, batch):
            gradient = batch.manifold.egrad2rgrad(batch.points, batch.gradients)
            return Proposal(batch.points + batch.rate * gradient, {})

        def _on_manifold(self, batches, proposals, lost):
            return proposals

    report = check_optimizer(Straight, steps=20)
    assert report["error of the first step"].ok
    assert not report["points stay on the manifold (float32)"].ok
    assert "Retract tangent vectors" in report["points stay on the manifold (float32)"].meaning


def test_a_step_that_raises_is_told():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no gradient today")

    report = check_optimizer(Broken)
    assert not report.ok
    assert "no gradient today" in report.failures[0].meaning


# --------------------------------------------------------------------------- wrong arguments
def test_errors_teach():
    leaf = stiefel.ManifoldParameter(torch.eye(3))
    for call, error, match in [
        (lambda: check_optimizer(RGD([leaf], lr=0.1)), ConfigurationError, "give the class"),
        (lambda: check_optimizer("rgd"), ConfigurationError, "got str"),
        (lambda: check_optimizer(RGD, "stiefel"), ConfigurationError, "expected a manifold"),
        (lambda: check_optimizer(RGD, shape=(3, 5)), ConfigurationError, "n >= p"),
        (lambda: check_optimizer(RGD, options={"lr": 1}), ConfigurationError, "leave lr out"),
        (lambda: check_optimizer(RGD, ordinary="sdg"), UnknownNameError, "Did you mean 'sgd'"),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_a_complex_point_is_measured_with_its_imaginary_part():
    generator = torch.Generator().manual_seed(0)
    trial = Trial(RGD, {}, stiefel.Stiefel(), (5, 2), generator)
    X = stiefel.geometry.haar(5, 2, dtype=torch.complex128, generator=generator)
    assert trial.off(stiefel.ManifoldParameter(X, trial.manifold)) < 1e-12
