"""How long does one Riemannian step take, and one retraction?

The first studies time ``optimizer.step()`` with the gradient given: the optimizers of `stiefel`
beside geoopt's SGD on its canonical and Euclidean manifolds and its canonical Adam. Many small
matrices come as separate parameters, as in a model, and once as one batched parameter. The last
studies time retractions alone: the Cayley map as p x p, 2p x 2p and n x n systems (the same point
in three ways, checked against the n x n form in float64), Cholesky-QR, QR and polar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import geoopt
import torch
from torch import Tensor

from benchmarks.harness import (
    Case,
    Goal,
    IncorrectError,
    Section,
    Settings,
    Study,
    measure,
    require,
)
from benchmarks.peers import cayley_dense, cayley_stacked
from benchmarks.weights import PEER_BOUND
from stiefel.geometry import (
    cayley_retraction,
    cholesky_qr_retraction,
    haar,
    orthonormality_residual,
    polar_retraction,
    qr_retraction,
    random_tangent,
)
from stiefel.manifolds import ManifoldParameter, Stiefel
from stiefel.numerics import tolerance
from stiefel.optim import RGD

__all__ = ["sections"]

_LR = 0.01
_OURS = "stiefel RGD-C-C"
_GEOOPT = "geoopt SGD, canonical"
#: Largest distance to the dense Cayley step computed in float64.
_ORACLE_BOUND = 2e-5

Leaf = torch.nn.Parameter | Tensor


def _canonical_direction(x: Tensor, g: Tensor) -> Tensor:
    """Returns -lr times the canonical gradient g - x g^T x."""
    return -_LR * (g - x @ (g.mT @ x))


def _dense_step(x: Tensor, g: Tensor) -> Tensor:
    """One step of RGD-C-C in float64 by an n x n system."""
    x, g = x.double(), g.double()
    return cayley_dense(x, _canonical_direction(x, g))


def _step_case(
    name: str,
    leaves: Sequence[Leaf],
    optimizer: torch.optim.Optimizer,
    *,
    ours: bool = False,
    oracle: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Case:
    """Makes the case of one optimizer step over parameters of one shape."""
    shape = leaves[0].shape

    def refresh() -> None:
        noise = torch.randn(len(leaves), *shape, device=leaves[0].device)
        for leaf, gradient in zip(leaves, noise.unbind(), strict=True):
            leaf.grad = gradient.contiguous()

    def check() -> float:
        leaf = leaves[-1]
        assert leaf.grad is not None
        before, gradient = leaf.detach().clone(), leaf.grad.detach().clone()
        optimizer.step()
        if oracle is not None:
            distance = (leaf.detach().double() - oracle(before, gradient)).abs().max().item()
            require("distance to the dense step", distance, _ORACLE_BOUND)
        if bool((leaf.detach() == before).all()):
            raise IncorrectError("the step did not move the point")
        residual = max(float(orthonormality_residual(x.detach()).max()) for x in leaves)
        bound = tolerance(leaf.dtype, shape[-2], shape[-1]) if ours else PEER_BOUND
        require("orthonormality residual", residual, bound)
        return residual

    return Case(name, optimizer.step, refresh, check)


def _points(count: int, shape: tuple[int, ...], device: str) -> list[Tensor]:
    """Returns Haar points; `shape` may start with a batch."""
    *batch, n, p = shape
    return [haar(n, p, batch=tuple(batch), dtype=torch.float32).to(device) for _ in range(count)]


def _ours(name: str, points: list[Tensor], inner: str, retraction: str) -> Case:
    manifold = Stiefel(inner=inner, retraction=retraction)
    leaves = [ManifoldParameter(x.clone(), manifold) for x in points]
    optimizer = RGD(leaves, lr=_LR)
    oracle = _dense_step if (inner, retraction) == ("canonical", "cayley") else None
    return _step_case(name, leaves, optimizer, ours=True, oracle=oracle)


def _geoopt(name: str, points: list[Tensor], manifold: geoopt.Manifold, adam: bool) -> Case:
    leaves = [geoopt.ManifoldParameter(x.clone(), manifold) for x in points]
    kind = geoopt.optim.RiemannianAdam if adam else geoopt.optim.RiemannianSGD
    return _step_case(name, leaves, kind(leaves, lr=_LR))


def _optimizers(count: int, shape: tuple[int, ...], settings: Settings, goal: float) -> Section:
    """Times all optimizers on `count` parameters of one shape."""
    points = _points(count, shape, settings.device)
    canonical, euclidean = geoopt.CanonicalStiefel(), geoopt.EuclideanStiefel()
    cases = [
        _ours(_OURS, points, "canonical", "cayley"),
        _ours("stiefel RGD-E-C", points, "euclidean", "cayley"),
        _ours("stiefel RGD-C-QR", points, "canonical", "qr"),
        _ours("stiefel RGD-C, cholesky_qr", points, "canonical", "cholesky_qr"),
        _geoopt(_GEOOPT, points, canonical, adam=False),
        _geoopt("geoopt Adam, canonical", points, canonical, adam=True),
        _geoopt("geoopt SGD, Euclidean (QR)", points, euclidean, adam=False),
    ]
    sizes = " x ".join(map(str, shape))
    goals = []
    if goal:
        text = f"RGD-C-C at {count} x ({sizes}) at least {goal:g} times faster than geoopt's SGD"
        goals = [Goal(text, _OURS, _GEOOPT, at_least=goal)]
    title = f"one optimizer step, {count} parameter(s) of {sizes}, float32"
    return measure(Study(title, cases, _GEOOPT, goals), settings)


def _retractions(shape: tuple[int, ...], settings: Settings) -> Section:
    """Times retractions alone, at fixed points with a fresh tangent vector each time."""
    (x,) = _points(1, shape, settings.device)
    n, p = shape[-2:]
    state = {"u": x}

    def refresh() -> None:
        u = random_tangent(x)
        state["u"] = 0.5 * u / u.flatten(-2).norm(dim=-1)[..., None, None]

    def case(name: str, retraction: Callable[[Tensor, Tensor], Tensor], cayley: bool) -> Case:
        def check() -> float:
            y = retraction(x, state["u"])
            if cayley:
                dense = cayley_dense(x.double(), state["u"].double())
                require("distance to the n x n form", (y - dense).abs().max().item(), _ORACLE_BOUND)
            residual = float(orthonormality_residual(y).max())
            ours = name.startswith("stiefel")
            bound = tolerance(y.dtype, n, p) if ours else PEER_BOUND
            require("orthonormality residual", residual, bound)
            return residual

        return Case(name, lambda: retraction(x, state["u"]), refresh, check)

    reference = "Cayley, 2p x 2p system"
    cases = [
        case("stiefel cayley, p x p system", cayley_retraction, True),
        case(reference, cayley_stacked, True),
        case("Cayley, n x n system", cayley_dense, True),
        case("stiefel cholesky_qr", cholesky_qr_retraction, False),
        case("stiefel qr", qr_retraction, False),
        case("stiefel polar", polar_retraction, False),
    ]
    sizes = " x ".join(map(str, shape))
    return measure(Study(f"retractions of {sizes}, float32", cases, reference), settings)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields its tables.

    Args:
        settings: Device, repeats, sizes.
    """
    if settings.quick:
        yield _optimizers(3, (12, 4), settings, 1)
        yield _retractions((3, 12, 4), settings)
        return
    yield _optimizers(1, (1024, 128), settings, 8)
    yield _optimizers(1000, (32, 16), settings, 5)
    yield _optimizers(1, (1000, 32, 16), settings, 0)
    yield _optimizers(20, (225, 25), settings, 0)
    yield _optimizers(1, (1024, 1024), settings, 0)
    for shape in [(1000, 32, 16), (1024, 128), (1024, 512), (1024, 1024)]:
        yield _retractions(shape, settings)
