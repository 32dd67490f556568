"""How long does one Riemannian step take, and one retraction?

The first studies time ``optimizer.step()`` with the gradient given: the optimizers of `stiefel`
beside geoopt's SGD on its canonical and Euclidean manifolds and its canonical Adam. Many small
matrices come as separate parameters, as in a model, and once as one batched parameter; gathering
them, all checks and writing them back are part of a step. Optimizers that are made of products
alone are set against the time of one product of two 1024 x 1024 matrices into memory that is
there. The last studies time retractions alone: the Cayley map as p x p, 2p x 2p and n x n systems
(the same point in three ways, checked against the n x n form in float64), Cholesky-QR, QR and
polar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from stiefel.optim import (
    POGO,
    RGD,
    Landing,
    RGDAdam,
    RiemannianAdam,
    RiemannianOptimizer,
    StiefelMuon,
)

__all__ = ["sections"]

_LR = 0.01
_OURS = "stiefel RGD-C-C"
_OURS_CHOLESKY = "stiefel RGD-C, cholesky_qr"
_OURS_ADAM = "stiefel RGDAdam"
_LANDING = "stiefel Landing"
_POGO = "stiefel POGO"
_GEOOPT = "geoopt SGD, canonical"
_GEOOPT_ADAM = "geoopt Adam, canonical"
_PRODUCT = "one product"
#: The fastest of ours for many small matrices that stay on the manifold; Landing is faster still.
_FASTEST, _FASTEST_ADAM = _OURS, _OURS_ADAM
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
    bound: float = PEER_BOUND,
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
        require("orthonormality residual", residual, bound)
        return residual

    return Case(name, optimizer.step, refresh, check)


def _points(count: int, shape: tuple[int, ...], device: str) -> list[Tensor]:
    """Returns Haar points; `shape` may start with a batch."""
    *batch, n, p = shape
    return [haar(n, p, batch=tuple(batch), dtype=torch.float32).to(device) for _ in range(count)]


def _ours(
    name: str,
    points: list[Tensor],
    inner: str = "canonical",
    retraction: str = "cayley",
    kind: Callable[..., RiemannianOptimizer] = RGD,
    near: float | None = None,
    **options: Any,
) -> Case:
    """A case of one of our optimizers; `near` is the tolerance of those that stay near."""
    manifold = Stiefel(inner=inner, retraction=retraction, tolerance=near)
    leaves = [ManifoldParameter(x.clone(), manifold) for x in points]
    optimizer = kind(leaves, lr=_LR, **options)
    plain = kind is RGD and not options and (inner, retraction) == ("canonical", "cayley")
    oracle = _dense_step if plain else None
    bound = manifold.tolerance_for(points[0].dtype, *points[0].shape[-2:])
    return _step_case(name, leaves, optimizer, bound=bound, oracle=oracle)


def _geoopt(
    name: str, points: list[Tensor], manifold: geoopt.Manifold, *, adam: bool, momentum: float = 0
) -> Case:
    leaves = [geoopt.ManifoldParameter(x.clone(), manifold) for x in points]
    if adam:
        return _step_case(name, leaves, geoopt.optim.RiemannianAdam(leaves, lr=_LR))
    optimizer = geoopt.optim.RiemannianSGD(leaves, lr=_LR, momentum=momentum)
    return _step_case(name, leaves, optimizer)


def _product(n: int, device: str) -> Case:
    """Two n x n float32 matrices multiplied into memory that was allocated before."""
    state = {"A": torch.empty(0), "B": torch.empty(0)}
    out = torch.empty(n, n, device=device)

    def refresh() -> None:
        state["A"], state["B"] = torch.randn(2, n, n, device=device).unbind()

    return Case(_PRODUCT, lambda: torch.mm(state["A"], state["B"], out=out), refresh)


@dataclass(frozen=True)
class _Asked:
    """Least speed-ups over geoopt's canonical SGD and Adam; 0 where nothing is asked.

    Attributes:
        cayley: Of RGD-C-C over the SGD.
        fastest: Of the fastest of ours over the SGD.
        adam: Of RGDAdam over the Adam.
        fastest_adam: Of the fastest of ours over the Adam.
        products: Most products of a step of Landing and of POGO.
    """

    cayley: float = 0
    fastest: float = 0
    adam: float = 0
    fastest_adam: float = 0
    products: float = 0


def _goals(sizes: str, asked: _Asked) -> list[Goal]:
    faster = [
        ("RGD-C-C", _OURS, _GEOOPT, asked.cayley),
        ("RGD-C-C, our fastest,", _FASTEST, _GEOOPT, asked.fastest),
        ("RGDAdam", _OURS_ADAM, _GEOOPT_ADAM, asked.adam),
        ("RGDAdam, our fastest adaptive one,", _FASTEST_ADAM, _GEOOPT_ADAM, asked.fastest_adam),
    ]
    goals = [
        Goal(f"{ours} at {sizes} at least {goal:g} times faster than {peer}", mine, peer, goal)
        for ours, mine, peer, goal in faster
        if goal
    ]
    if asked.products:
        goals += [
            Goal(
                f"{name} at {sizes} at most {asked.products:g} products",
                name,
                _PRODUCT,
                at_most=asked.products,
            )
            for name in (_LANDING, _POGO)
        ]
    return goals


def _optimizers(
    count: int, shape: tuple[int, ...], settings: Settings, asked: _Asked = _Asked()
) -> Section:
    """Times all optimizers on `count` parameters of one shape."""
    points = _points(count, shape, settings.device)
    canonical, euclidean = geoopt.CanonicalStiefel(), geoopt.EuclideanStiefel()
    cases = [
        _ours(_OURS, points),
        _ours("stiefel RGD-E-C", points, "euclidean"),
        _ours("stiefel RGD-C-QR", points, retraction="qr"),
        _ours(_OURS_CHOLESKY, points, retraction="cholesky_qr"),
        _ours("stiefel RGD-C-C, momentum", points, momentum=0.9),
        _ours(_OURS_ADAM, points, kind=RGDAdam),
        _ours("stiefel RiemannianAdam", points, kind=RiemannianAdam),
        _ours(_LANDING, points, kind=Landing, near=0.5),
        _ours(_POGO, points, kind=POGO, near=0.05),
        _ours("stiefel StiefelMuon", points, kind=StiefelMuon),
        _geoopt(_GEOOPT, points, canonical, adam=False),
        _geoopt("geoopt SGD, canonical, momentum", points, canonical, adam=False, momentum=0.9),
        _geoopt(_GEOOPT_ADAM, points, canonical, adam=True),
        _geoopt("geoopt SGD, Euclidean (QR)", points, euclidean, adam=False),
    ]
    if asked.products:
        cases.append(_product(shape[-1], settings.device))
    sizes = f"{count} x ({' x '.join(map(str, shape))})"
    title = f"one optimizer step, {count} parameter(s) of {' x '.join(map(str, shape))}, float32"
    return measure(Study(title, cases, _GEOOPT, _goals(sizes, asked)), settings)


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
        yield _optimizers(3, (12, 4), settings, _Asked(1, 1, 1, 1))
        yield _optimizers(1, (8, 8), settings, _Asked(products=5))
        yield _retractions((3, 12, 4), settings)
        return
    yield _optimizers(1, (1024, 128), settings, _Asked(cayley=8))
    yield _optimizers(1000, (32, 16), settings, _Asked(9, 12, 12, 15))
    yield _optimizers(1, (1000, 32, 16), settings)
    yield _optimizers(20, (225, 25), settings)
    yield _optimizers(1, (1024, 1024), settings, _Asked(products=5))
    for shape in [(1000, 32, 16), (1024, 128), (1024, 512), (1024, 1024)]:
        yield _retractions(shape, settings)
