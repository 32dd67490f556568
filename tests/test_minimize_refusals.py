"""`stiefel.optim.minimize`: bad starts, functions, options, and how their errors read."""

from __future__ import annotations

import geoopt
import pytest
import torch

import stiefel
from stiefel import geometry
from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    OffManifoldError,
    ShapeError,
    UnknownNameError,
)
from stiefel.optim import minimize

D = torch.float64


def f(X):
    return X.square().sum(-1)[0]


@pytest.fixture
def X0():
    return geometry.haar(5, 2, dtype=D)


def test_names(X0):
    with pytest.raises(UnknownNameError, match="Did you mean 'lbfgs'"):
        minimize(f, X0, method="lbfg")
    with pytest.raises(UnknownNameError, match=r"option of 'lbfgs'.*Did you mean 'memory'"):
        minimize(f, X0, method="lbfgs", memroy=3)
    with pytest.raises(UnknownNameError, match="step"):
        minimize(f, X0, step="big")
    with pytest.raises(UnknownNameError, match="rule"):
        minimize(f, X0, method="conjugate-gradient", rule="fletcher")
    with pytest.raises(UnknownNameError, match="line search"):
        minimize(f, X0, method="lbfgs", line_search="exact")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("barzilai-borwein", {"memory": 1.0}, "memory < 1"),
        ("barzilai-borwein", {"window": 0}, "window >= 1"),
        ("lbfgs", {"memory": 0}, "memory >= 1"),
        ("lbfgs", {"curvature": 1.5}, "curvature < 1"),
        ("conjugate-gradient", {"curvature": 1e-9}, "decrease < curvature"),
        ("lbfgs", {"tol": -1.0}, "tol >= 0"),
        ("lbfgs", {"tol": float("nan")}, "tol >= 0"),
        ("lbfgs", {"max_seconds": -1}, "max_seconds >= 0"),
    ],
)
def test_values_out_of_range(X0, method, options, message):
    with pytest.raises(ConfigurationError, match=message):
        minimize(f, X0, method=method, **options)


def test_starts(X0):
    with pytest.raises(OffManifoldError, match=r"X0: .*projx"):
        minimize(f, 2 * X0)
    with pytest.raises(OffManifoldError, match=r"X0\[1\]"):
        minimize(lambda X, Y: f(X) + f(Y), [X0, 2 * X0])
    with pytest.raises(OffManifoldError, match=r"Sphere.*projx"):
        minimize(lambda x: x.sum(), torch.ones(3, dtype=D), manifold=geoopt.Sphere())
    with pytest.raises(ShapeError, match="n >= p"):
        minimize(f, X0.mT)
    with pytest.raises(ShapeError, match="manifold='euclidean'"):
        minimize(f, torch.ones(3, dtype=D))
    with pytest.raises(DtypeError, match="float16"):
        minimize(f, torch.eye(3, 2, dtype=torch.float16))
    with pytest.raises(ConfigurationError, match="got float"):
        minimize(f, 1.0)
    with pytest.raises(ConfigurationError, match="at least one"):
        minimize(f, [])


def test_manifolds(X0):
    with pytest.raises(ConfigurationError, match="each of the 1 starts, got 2"):
        minimize(f, X0, manifold=[None, None])
    with pytest.raises(ConfigurationError, match="got 'sphere'"):
        minimize(f, X0, manifold="sphere")
    with pytest.raises(ConfigurationError, match="leave manifold= out"):
        minimize(f, stiefel.ManifoldParameter(X0), manifold="euclidean")


def test_functions(X0):
    with pytest.raises(ShapeError, match=r"one number, got a tensor of shape \(5,\)"):
        minimize(lambda X: X.sum(-1), X0)
    with pytest.raises(DtypeError, match="complex"):
        minimize(lambda X: X.sum(), geometry.haar(5, 2, dtype=torch.complex128))
    with pytest.raises(ConfigurationError, match="differentiable torch operations"):
        minimize(lambda X: X.detach().sum(), X0)
    with pytest.raises(ConfigurationError, match="differentiable torch operations"):
        minimize(lambda X: float(X.detach().sum()), X0)
    with pytest.raises(ConfigurationError, match="got NoneType"):
        minimize(lambda X: None, X0)
    with pytest.raises(ConfigurationError, match="gradient=True"):
        minimize(lambda X: (f(X), X), X0)


def test_gradients(X0):
    with pytest.raises(ConfigurationError, match=r"\(value, gradient\)"):
        minimize(f, X0, gradient=True)
    with pytest.raises(ShapeError, match=r"gradient 0 of shape \(5, 2\), got \(2, 5\)"):
        minimize(f, X0, gradient=lambda X: X.mT)
    with pytest.raises(DtypeError, match="gradient 0"):
        minimize(f, X0, gradient=lambda X: X.float())
    with pytest.raises(ConfigurationError, match="expected 1 gradients"):
        minimize(f, X0, gradient=lambda X: [X, X])


def test_a_start_where_f_is_not_finite(X0):
    with pytest.raises(NonFiniteError, match="f = nan"):
        minimize(lambda X: f(X) * float("nan"), X0)
    with pytest.raises(NonFiniteError, match="gradient"):
        minimize(lambda x: x.sqrt().sum(), torch.zeros(3, dtype=D), manifold="euclidean")


def test_what_the_function_raises_comes_through(X0):
    def broken(X):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        minimize(broken, X0)
