"""Riemannian optimizers, with the manifolds and the laws that they claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stiefel.manifolds import Stiefel
from stiefel.optim import (
    POGO,
    RGD,
    Landing,
    RGDAdam,
    RiemannianAdam,
    RiemannianOptimizer,
    StiefelMuon,
)
from tests.registry.geometry import MANIFOLDS, METRICS

#: The paper's RGD-C-C, RGD-C-QR, RGD-E-C and RGD-E-QR.
RGD_MANIFOLDS = [Stiefel(inner, retraction) for inner in METRICS for retraction in ("cayley", "qr")]


@dataclass(frozen=True)
class OptimizerCase:
    """A Riemannian optimizer with options, and the manifolds on which they make sense.

    ``rate`` and ``decay``: the learning rate, and its factor from step to step, at which 300 steps
    find the smallest eigenvalues 1, 2, 3 of eight to 1e-6 (steps that do not shrink with the
    gradient need a rate that does). ``feasible``: 10,000 noisy float32 steps keep the point on the
    manifold within 1e-5 without any help. ``tangent``: the states of kind "point" are tangent.
    ``attains``: those steps take the point to a hundredth of the bound that it reports, or further
    (steps that are always short do not). ``costly``: why those 10,000 steps run with ``--runslow``
    only.
    """

    name: str
    kind: type[RiemannianOptimizer]
    options: dict[str, Any]
    manifolds: list[Stiefel]
    rate: float = 0.08
    decay: float = 1.0
    feasible: bool = True
    tangent: bool = True
    attains: bool = True
    costly: str = ""


_EIGENVALUES = "eigenvalues in float64 at every step: a minute or more"
_CAYLEY_MANIFOLDS = [manifold for manifold in MANIFOLDS if manifold.retraction == "cayley"]
_ADAM_MANIFOLDS = [
    *RGD_MANIFOLDS,
    *(Stiefel("euclidean", retraction) for retraction in ("cholesky_qr", "polar", "exp")),
]
_NEAR = [
    OptimizerCase("landing", Landing, {}, [Stiefel(tolerance=0.5)], 0.16, feasible=False),
    OptimizerCase(
        "landing-nesterov",
        Landing,
        {"momentum": 0.9, "nesterov": True, "attraction": 2.0},
        [Stiefel(tolerance=0.5)],
        rate=0.016,
        feasible=False,
        tangent=False,
    ),
    OptimizerCase(
        "pogo", POGO, {}, [Stiefel(tolerance=0.05)], rate=0.16, feasible=False, attains=False
    ),
    OptimizerCase(
        "pogo-momentum",
        POGO,
        {"momentum": 0.9, "dampening": 0.1, "corrections": 2},
        [Stiefel(tolerance=0.05)],
        rate=0.016,
        feasible=False,
        attains=False,
        tangent=False,
    ),
    OptimizerCase(
        "pogo-adam",
        POGO,
        {"base": "adam"},
        [Stiefel(tolerance=0.05)],
        rate=0.3,
        decay=0.99,
        feasible=False,
        attains=False,
        tangent=False,
    ),
    OptimizerCase(
        "pogo-feasible", POGO, {"corrections": 3, "max_step": 0.1}, [Stiefel()], rate=0.16
    ),
]
_MUON = [
    OptimizerCase(
        "muon", StiefelMuon, {}, RGD_MANIFOLDS[::3], rate=0.1, decay=0.95, costly=_EIGENVALUES
    ),
    OptimizerCase(
        "muon-nesterov",
        StiefelMuon,
        {"momentum": 0.9, "nesterov": True, "iterations": 4},
        [Stiefel("euclidean", "polar")],
        rate=0.1,
        decay=0.95,
        costly=_EIGENVALUES,
    ),
    OptimizerCase(
        "muon-projected",
        StiefelMuon,
        {"momentum": 0.5, "direction": "projected"},
        RGD_MANIFOLDS[:1],
        rate=0.1,
        decay=0.95,
        costly=_EIGENVALUES,
    ),
]
OPTIMIZERS = [
    OptimizerCase("rgd", RGD, {}, MANIFOLDS),
    OptimizerCase("rgd-momentum", RGD, {"momentum": 0.9}, RGD_MANIFOLDS, rate=0.008),
    OptimizerCase(
        "rgd-nesterov", RGD, {"momentum": 0.9, "nesterov": True}, RGD_MANIFOLDS, rate=0.008
    ),
    OptimizerCase(
        "rgd-cayley-transport",
        RGD,
        {"momentum": 0.9, "dampening": 0.1, "transport": "cayley"},
        _CAYLEY_MANIFOLDS,
        rate=0.008,
    ),
    OptimizerCase("rgd-adam", RGDAdam, {}, _CAYLEY_MANIFOLDS, rate=0.5, tangent=False),
    OptimizerCase(
        "rgd-adam-amsgrad",
        RGDAdam,
        {"amsgrad": True},
        _CAYLEY_MANIFOLDS,
        rate=0.5,
        tangent=False,
    ),
    *(
        OptimizerCase(
            f"rgd-adam-{sweeps}-sweeps",
            RGDAdam,
            {"iterations": sweeps},
            _CAYLEY_MANIFOLDS,
            rate=0.5,
            feasible=False,  # the sweeps end near the Cayley step
            tangent=False,
        )
        for sweeps in (2, 5)
    ),
    OptimizerCase("riemannian-adam", RiemannianAdam, {}, _ADAM_MANIFOLDS, rate=0.4, decay=0.99),
    OptimizerCase(
        "riemannian-adam-amsgrad",
        RiemannianAdam,
        {"amsgrad": True, "betas": (0.9, 0.99)},
        [Stiefel("euclidean", "qr")],
        rate=0.4,
        decay=0.99,
    ),
    OptimizerCase(
        "riemannian-adam-cayley-transport",
        RiemannianAdam,
        {"transport": "cayley"},
        _CAYLEY_MANIFOLDS,
        rate=0.4,
        decay=0.99,
    ),
    *_NEAR,
    *_MUON,
]

#: Every retraction of every optimizer once.
BY_RETRACTION = [
    (case, manifold)
    for case in OPTIMIZERS
    for manifold in {(m.retraction, m.tolerance): m for m in reversed(case.manifolds)}.values()
]
