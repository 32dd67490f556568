"""Checks of gradients and Hessians: right ones pass, wrong ones are found and explained."""

from __future__ import annotations

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import check_gradient, check_hessian
from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    OffManifoldError,
    ShapeError,
)
from stiefel.geometry import haar
from tests.registry import DOUBLE, SHAPES

METRICS = [stiefel.Stiefel(inner) for inner in ("canonical", "euclidean")]
metrics = pytest.mark.parametrize("manifold", METRICS, ids=lambda m: m.metric)


class Quartic:
    """f(X) = Re <X, A X> + Re <B, X> + sum |x|^4, its gradient, and the derivative of that."""

    def __init__(self, shape, dtype=torch.float64):
        batch, n, p = shape
        A = torch.randn(*batch, n, n, dtype=dtype)
        self.A, self.B = A + A.mH, torch.randn(*batch, n, p, dtype=dtype)
        self.X = haar(n, p, batch, dtype=dtype)

    def __call__(self, X):
        square = X.abs().square() if X.is_complex() else X.square()
        return (X.conj() * (self.A @ X) + self.B.conj() * X).real.sum() + square.square().sum()

    def gradient(self, X):
        return 2 * self.A @ X + self.B + 4 * X.abs().square() * X

    def second(self, X, u):
        return 2 * self.A @ u + 12 * X.square() * u


TALL = ((), 7, 3)
BALL = geoopt.PoincareBall(torch.tensor(1.0, dtype=torch.float64))


# ------------------------------------------------------------------------------ what is right
@metrics
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_right_gradients_pass(manifold, dtype):
    for shape in SHAPES:
        f = Quartic(shape, dtype)
        for gradient in (None, f.gradient):
            report = check_gradient(f, f.X, manifold=manifold, gradient=gradient)
            assert report.ok, (shape, str(report))
            assert len(report.findings) == 3
            if dtype.is_complex or shape[1:] != (1, 1):  # there every tangent vector is zero
                assert 1.9 < report["order of the first-order model"].measured < 3.1
            assert len(report.curves) == 1


@metrics
@pytest.mark.parametrize("dtype", DOUBLE, ids=str)
def test_right_hessians_pass(manifold, dtype):
    for shape in [((), 6, 6), ((), 7, 3), ((2,), 5, 1)]:
        f = Quartic(shape, dtype)
        for hessian in ("autograd", "differences"):
            report = check_hessian(f, f.X, manifold=manifold, hessian=hessian)
            assert report.ok, (shape, str(report))
            assert len(report.findings) == 7
    assert len(report.curves) == 2


@metrics
def test_a_users_own_hessian_passes(manifold):
    f = Quartic(TALL)

    def riemannian(X, u):
        return manifold.ehess2rhess(X, f.gradient(X), f.second(X, u), u)

    assert check_hessian(f, f.X, manifold=manifold, hessian=f.second).ok
    assert check_hessian(f, f.X, manifold=manifold, riemannian_hessian=riemannian).ok


def test_points_come_as_tensors_parameters_constraints_and_lists():
    f = Quartic(TALL)
    leaf = stiefel.ManifoldParameter(f.X.clone(), stiefel.Stiefel("canonical", "qr"))
    assert "canonical" in check_gradient(f, leaf).raise_for_failures().subject
    layer = nn.Linear(3, 7, dtype=torch.float64)
    for via in ("cwy", "rgd-e-qr"):
        stiefel.orthogonal(layer, via=via)
        (constraint,) = stiefel.constraints(layer)
        assert check_gradient(f, constraint).ok

    def pair(X, y):
        return f(X) + (f.B[:, 0] @ X @ y) * y.square().sum()

    y = torch.randn(3, dtype=torch.float64)
    report = check_gradient(pair, [leaf, y], manifold=[None, "euclidean"])
    assert report.ok, str(report)
    assert report["error of the slope of X[1]"].ok
    assert check_hessian(pair, (f.X, y), manifold=[stiefel.Stiefel(), "euclidean"]).ok


def test_single_precision_points_are_checked_in_double():
    f = Quartic(TALL)
    report = check_gradient(f, f.X.float(), gradient=f.gradient)
    assert report.ok, str(report)
    assert not report.skipped
    assert report["error of the slope"].measured < 1e-9


def test_a_cost_in_single_precision_is_checked_there_and_said():
    f = Quartic(TALL, torch.float32)
    report = check_gradient(f, f.X, gradient=f.gradient)
    assert report.ok, str(report)
    assert "float32 only" in report.skipped[0]
    wrong = check_gradient(f, f.X, gradient=lambda X: 1.05 * f.gradient(X))
    assert [finding.name for finding in wrong.failures] == [
        "order of the first-order model",
        "error of the slope",
    ]
    assert check_hessian(f, f.X).ok


@pytest.mark.parametrize(
    "manifold",
    [geoopt.EuclideanStiefel(), geoopt.Sphere(), BALL],
    ids=str,
)
def test_manifolds_of_geoopt(manifold):
    shape = (6, 3) if manifold.ndim == 2 else (1, 3)
    X = manifold.random(*shape, dtype=torch.float64)
    C = torch.randn(X.shape, dtype=torch.float64)
    report = check_gradient(lambda X: (C * X).sum() + (X**3).sum(), X, manifold=manifold)
    assert report.ok, str(report)


def test_a_wrong_retraction_is_not_taken_for_a_wrong_gradient():
    f = Quartic(TALL)
    assert check_gradient(f, f.X, manifold=geoopt.CanonicalStiefel()).ok


def test_the_same_numbers_come_each_time():
    f = Quartic(TALL)
    assert str(check_gradient(f, f.X)) == str(check_gradient(f, f.X))
    torch.manual_seed(1)
    other = check_gradient(f, f.X, generator=torch.Generator().manual_seed(3))
    assert other["error of the slope"] != check_gradient(f, f.X)["error of the slope"]


# ------------------------------------------------------------------------------ what is wrong
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda f, X: f.gradient(X) / 2, "2 times as fast"),
        (lambda f, X: 1.001 * f.gradient(X), "0.999 times as fast"),
        (lambda f, X: -f.gradient(X), "the sign is wrong."),
        (lambda f, X: -2 * f.gradient(X), "the sign is wrong, and a factor 0.5"),
        (lambda f, X: f.gradient(X) - f.B, "a term is missing or wrong"),
        (lambda f, X: 0 * X, "zero along every direction"),
    ],
)
def test_wrong_gradients_are_found_and_explained(wrong, said):
    f = Quartic(TALL)
    report = check_gradient(f, f.X, gradient=lambda X: wrong(f, X))
    for name in ("order of the first-order model", "error of the slope"):
        assert not report[name].ok
        assert said in report[name].meaning
    assert report["order of the first-order model"].measured == pytest.approx(1, abs=0.05)
    with pytest.raises(AssertionError, match="WRONG"):
        report.raise_for_failures()


def test_the_right_half_of_a_complex_gradient_is_not_enough():
    f = Quartic(TALL, torch.complex128)
    assert not check_gradient(f, f.X, gradient=lambda X: f.gradient(X).conj()).ok


def test_riemannian_gradients_that_are_not_tangent_or_of_another_metric():
    f = Quartic(TALL)
    manifold = stiefel.Stiefel("canonical")

    def check(gradient):
        return check_gradient(f, f.X, manifold=manifold, riemannian_gradient=gradient)

    assert check(lambda X: manifold.egrad2rgrad(X, f.gradient(X))).ok
    euclidean = check(lambda X: manifold.proju(X, f.gradient(X)))
    assert "another metric" in euclidean["error of the slope"].meaning
    assert not euclidean["error of the slope"].ok
    raw = check_gradient(f, f.X, riemannian_gradient=f.gradient)
    assert [finding.name for finding in raw.failures] == ["tangency of the gradient"]
    assert "normal to the manifold" in raw.failures[0].meaning


def test_the_point_whose_gradient_is_wrong_is_named():
    f, g = Quartic(TALL), Quartic(((), 4, 4))

    def wrong(X, Y):
        return f.gradient(X), -g.gradient(Y)

    report = check_gradient(lambda X, Y: f(X) + g(Y), [f.X, g.X], gradient=wrong)
    assert [finding.name for finding in report.failures] == [
        "order of the first-order model of X[1]",
        "error of the slope of X[1]",
    ]


@metrics
@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (lambda H, X, u: 2 * H, ["order", "error"]),
        (lambda H, X, u: -H, ["order", "error"]),
        (lambda H, X, u: H + u, ["order", "error"]),
        (lambda H, X, u: H + X, ["linearity", "tangency"]),
        (lambda H, X, u: H * (1 + u.abs().max()), ["order", "error", "symmetry", "linearity"]),
    ],
)
def test_wrong_hessians_are_found(manifold, wrong, names):
    f = Quartic(TALL)

    def riemannian(X, u):
        right = manifold.ehess2rhess(X, f.gradient(X), f.second(X, u), u)
        return wrong(right, X, u)

    report = check_hessian(f, f.X, manifold=manifold, riemannian_hessian=riemannian)
    failed = {finding.name for finding in report.failures}
    full = {
        "order": "order of the second-order model",
        "error": "error of the curvature",
        **{word: f"{word} of the Hessian" for word in ("symmetry", "linearity", "tangency")},
    }
    assert {full[name] for name in names} <= failed
    assert report["error of the slope"].ok


def test_a_hessian_without_the_bend_of_the_manifold():
    """Proj(D^2 f[u]) lacks - u sym(X^H G): symmetric in one metric, and wrong in both."""
    f = Quartic(TALL)
    for manifold in METRICS:
        report = check_hessian(
            f,
            f.X,
            manifold=manifold,
            riemannian_hessian=lambda X, u, m=manifold: m.proju(X, f.second(X, u)),
        )
        failed = report["order of the second-order model"]
        assert failed.measured == pytest.approx(2, abs=0.1)
        assert "a term is missing" in failed.meaning
        assert report["symmetry of the Hessian"].ok == (manifold.metric == "euclidean")


def test_a_manifold_without_geodesics_says_so():
    class NoGeodesics(geoopt.EuclideanStiefel):
        def expmap(self, x, u):
            raise NotImplementedError

    f = Quartic(TALL)
    report = check_hessian(f, f.X, manifold=NoGeodesics(), hessian="differences")
    assert "no expmap" in report.skipped[0]
    assert [finding.name for finding in report.findings] == [
        f"{word} of the Hessian" for word in ("symmetry", "linearity", "tangency")
    ]


# ----------------------------------------------------------------------------------- models
class HalfBackward(torch.autograd.Function):
    """The identity, with a backward that loses half of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


class Lossy(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, HalfBackward.apply(self.weight), self.bias)


def model_of(second=nn.Linear, dtype=torch.float64):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), second(6, 3), nn.Linear(3, 1)).to(dtype)
    stiefel.orthogonal(model[0], via="cwy")
    stiefel.orthogonal(model[2], via="rgd-c-c")
    x = torch.randn(5, 6, dtype=dtype)
    return model, lambda: model(x).square().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_models_pass_and_are_left_as_they_were(dtype):
    model, cost = model_of(dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_gradient(cost, model=model)
    assert report.ok, str(report)
    assert len(report.findings) == 4
    assert bool(report.skipped) == (dtype == torch.float32)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_weight_of_a_model_whose_gradient_is_wrong_is_named():
    model, cost = model_of(Lossy)
    report = check_gradient(cost, model=model)
    assert {finding.name.split(" of ")[-1] for finding in report.failures} == {
        "2.weight (riemannian)"
    }
    assert "2 times as fast" in report.failures[0].meaning


def test_a_weight_that_the_cost_does_not_see_is_said():
    model, _ = model_of()
    report = check_gradient(lambda: model[0](torch.ones(6).double()).sum(), model=model)
    assert report.ok
    assert "2.weight: it gets no gradient" in report.skipped[0]


# --------------------------------------------------------------------------- wrong arguments
def test_errors_teach():
    f = Quartic(TALL)
    cases = [
        (ConfigurationError, "a point", lambda: check_gradient(f)),
        (ConfigurationError, "a function of the point", lambda: check_gradient(3.0, f.X)),
        (ConfigurationError, "directions >= 1", lambda: check_gradient(f, f.X, directions=0)),
        (ConfigurationError, "directions >= 2", lambda: check_hessian(f, f.X, directions=1)),
        (
            ConfigurationError,
            "got both",
            lambda: check_gradient(f, f.X, gradient=f.gradient, riemannian_gradient=f.gradient),
        ),
        (
            ConfigurationError,
            "know their manifolds",
            lambda: check_gradient(f, model=model_of()[0], gradient=f.gradient),
        ),
        (
            ConfigurationError,
            "constrained weights",
            lambda: check_gradient(lambda: 0.0, model=nn.Linear(2, 2)),
        ),
        (OffManifoldError, "X: expected orthonormal", lambda: check_gradient(f, 2 * f.X)),
        (ShapeError, "one number", lambda: check_gradient(lambda X: X, f.X)),
        (
            ShapeError,
            "vectors of the shapes",
            lambda: check_gradient(f, f.X, riemannian_gradient=lambda X: X.mT),
        ),
        (
            ShapeError,
            "takes no argument",
            lambda: check_gradient(lambda: 0.0, model=model_of()[0]),
        ),
        (NonFiniteError, "finite cost", lambda: check_gradient(lambda X: (X / 0).sum(), f.X)),
        (
            DtypeError,
            "float32 or better",
            lambda: check_gradient(f, model=model_of(dtype=torch.bfloat16)[0]),
        ),
        (
            ConfigurationError,
            "draws random numbers",
            lambda: check_gradient(lambda X: (X * torch.rand_like(X)).sum(), f.X),
        ),
    ]
    for error, match, call in cases:
        with pytest.raises(error, match=match):
            call()
