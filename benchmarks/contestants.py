"""The methods that minimise the problems of `benchmarks.problems`, ours and the peers'.

All get the same start and the same closed-form value, gradient and Hessian-vector product. Rates
are tuned: of the few candidates of a method the one that gets farthest in a short run is run.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import geoopt
import numpy
import torch
from torch import Tensor

from benchmarks.harness import installed
from benchmarks.problems import KnownMinimum
from benchmarks.traces import Trace
from stiefel.manifolds import ManifoldParameter, Stiefel
from stiefel.optim import POGO, RGD, Landing, RGDAdam, RiemannianAdam, StiefelMuon, minimize
from stiefel.optim.solvers import SOLVERS

__all__ = ["Contestant", "contestants", "present"]

Runner = Callable[[KnownMinimum, Trace], None]

_STEPS = 10**9
#: Rates of gradient descent in units of 1/curvature, and of the methods that normalise.
_RELATIVE = (0.25, 1.0, 1.9)
_WITH_MOMENTUM = (0.1, 0.5)
_NORMALISED = (1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Contestant:
    """A method.

    Attributes:
        name: Unique.
        ours: Whether it is of `stiefel`.
        candidates: Takes a problem and gives runners by the label of their rate.
        package: What must be installed.
        solver: Whether it is a method of `minimize`.
    """

    name: str
    ours: bool
    candidates: Callable[[KnownMinimum], Mapping[str, Runner]]
    package: str = "stiefel"
    solver: bool = False


def _solver(method: str) -> Runner:
    """`minimize` with its own stopping rule."""

    def run(problem: KnownMinimum, trace: Trace) -> None:
        def hessian(X: Tensor, u: Tensor) -> Tensor:
            trace.check()
            return problem.hessian(X, u)

        options: dict[str, Any] = {"hessian": hessian} if method == "trust-region" else {}
        started = False

        def callback(state: Any) -> None:
            nonlocal started
            if started:
                trace.mark(state.x)
            started = True

        trace.start()
        result = minimize(
            problem.value_and_gradient,
            problem.start,
            gradient=True,
            method=method,
            max_iterations=_STEPS,
            callback=callback,
            **options,
        )
        trace.finish(result.x)
        trace.note = result.message.split(":")[0]

    return run


def _descend(make: Callable[[list[Any]], Any], manifold: Any) -> Runner:
    """Deterministic steps of a torch optimizer with the full gradient."""

    def run(problem: KnownMinimum, trace: Trace) -> None:
        point = problem.start.clone()
        if isinstance(manifold, Stiefel):
            leaf: Any = ManifoldParameter(point, manifold)
        else:
            leaf = geoopt.ManifoldParameter(point, manifold=manifold)
        optimizer = make([leaf])
        trace.start()
        while True:
            leaf.grad = problem.value_and_gradient(leaf.detach())[1]
            optimizer.step()
            trace.mark(leaf.detach().as_subclass(Tensor))

    return run


def _rates(
    kind: Callable[..., Any],
    manifold: Any,
    *,
    descent: bool,
    momentum: bool = False,
    halved: bool = False,
) -> Callable[[KnownMinimum], Mapping[str, Runner]]:
    """Candidates of an optimizer: its rates, and momentum 0.9 with smaller ones.

    With `halved` the rates of tall points are doubled: the method steps along half the gradient.
    """

    def candidates(problem: KnownMinimum) -> Mapping[str, Runner]:
        grid: list[dict[str, float]] = []
        if descent:
            n, p = problem.start.shape
            unit = (2 if halved and n > p else 1) / problem.curvature
            grid += [{"lr": r * unit} for r in _RELATIVE]
        else:
            grid += [{"lr": r} for r in _NORMALISED]
        if momentum:
            grid += [{"lr": r / problem.curvature, "momentum": 0.9} for r in _WITH_MOMENTUM]
        return {
            ", ".join(f"{key} {value:.2g}" for key, value in choice.items()): _descend(
                lambda leaves, choice=choice: kind(leaves, **choice), manifold
            )
            for choice in grid
        }

    return candidates


def _first_order() -> list[Contestant]:
    """Our optimizers as deterministic methods."""
    cholesky, cayley = Stiefel("euclidean", "cholesky_qr"), Stiefel("euclidean", "cayley")
    near = Stiefel("euclidean", tolerance=0.5)
    candidates = {
        RGD: _rates(RGD, cholesky, descent=True, momentum=True),
        RGDAdam: _rates(RGDAdam, cayley, descent=False),
        RiemannianAdam: _rates(RiemannianAdam, cholesky, descent=False),
        Landing: _rates(Landing, near, descent=True, halved=True),
        POGO: _rates(POGO, near, descent=True, halved=True),
        StiefelMuon: _rates(StiefelMuon, Stiefel("euclidean", "polar"), descent=False),
    }
    return [Contestant(kind.__name__, True, choices) for kind, choices in candidates.items()]


def _limit_numpy_threads() -> None:
    """Gives numpy's BLAS as many threads as torch has; `torch.set_num_threads` leaves it alone."""
    folder = Path(numpy.__file__).parent.parent / "numpy.libs"
    for library in folder.glob("libscipy_openblas64*"):
        setter = getattr(ctypes.CDLL(str(library)), "scipy_openblas_set_num_threads64_", None)
        if setter is not None:
            setter(torch.get_num_threads())


def _pymanopt(kind: str, retraction: str) -> Runner:
    """pymanopt on numpy arrays, with gradient and Hessian by hand and nothing computed twice."""

    def run(problem: KnownMinimum, trace: Trace) -> None:
        pymanopt = importlib.import_module("pymanopt")
        _limit_numpy_threads()
        manifold = pymanopt.manifolds.Stiefel(*problem.start.shape, retraction=retraction)
        last: list[Any] = [None, None]

        def both(X: numpy.ndarray) -> tuple[Tensor, Tensor]:
            if last[0] is not X:
                last[:] = X, problem.value_and_gradient(torch.from_numpy(X))
            return last[1]

        @pymanopt.function.numpy(manifold)
        def cost(X: numpy.ndarray) -> float:
            trace.check()
            return float(both(X)[0])

        @pymanopt.function.numpy(manifold)
        def gradient(X: numpy.ndarray) -> numpy.ndarray:
            if X is not first:
                trace.mark(torch.from_numpy(X))
            return both(X)[1].numpy()

        @pymanopt.function.numpy(manifold)
        def hessian(X: numpy.ndarray, u: numpy.ndarray) -> numpy.ndarray:
            trace.check()
            return problem.hessian(torch.from_numpy(X), torch.from_numpy(u)).numpy()

        task = pymanopt.Problem(
            manifold, cost, euclidean_gradient=gradient, euclidean_hessian=hessian
        )
        first = problem.start.clone().numpy()
        scale = float(problem.value_and_gradient(problem.start)[1].norm())
        optimizer = getattr(pymanopt.optimizers, kind)(
            max_time=1e9,
            max_iterations=_STEPS,
            max_cost_evaluations=_STEPS,
            min_gradient_norm=1e-8 * scale,
            min_step_size=1e-300,
            verbosity=0,
        )
        trace.start()
        result = optimizer.run(task, initial_point=first)
        trace.finish(torch.from_numpy(result.point))
        trace.note = result.stopping_criterion.split(" after")[0].split("- ")[-1]

    return run


def contestants() -> list[Contestant]:
    """Every method, ours first."""

    def single(runner: Runner) -> Callable[[KnownMinimum], Mapping[str, Runner]]:
        return lambda problem: {"": runner}

    euclidean = geoopt.EuclideanStiefel()
    sgd = _rates(geoopt.optim.RiemannianSGD, euclidean, descent=True, momentum=True)
    adam = _rates(geoopt.optim.RiemannianAdam, euclidean, descent=False)
    ours = [
        Contestant(f"minimize, {method}", True, single(_solver(method)), solver=True)
        for method in SOLVERS
    ]
    peers = [
        Contestant("geoopt RiemannianSGD", False, sgd, "geoopt"),
        Contestant("geoopt RiemannianAdam", False, adam, "geoopt"),
        Contestant(
            "pymanopt conjugate gradient",
            False,
            single(_pymanopt("ConjugateGradient", "qr")),
            "pymanopt",
        ),
        Contestant(
            "pymanopt trust region", False, single(_pymanopt("TrustRegions", "polar")), "pymanopt"
        ),
    ]
    return [*ours, *_first_order(), *peers]


def present(contestant: Contestant) -> bool:
    """Whether its package can be imported."""
    return contestant.package == "stiefel" or installed(contestant.package)
