"""Everything that the laws run over. A new piece is a line here and one file in the library.

Wide matrices exist above the charts only: `tests/contracts/test_door.py` holds every ``via`` to the
transpose of its tall twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stiefel import geometry
from stiefel.geometry.rotations import rotation_count
from stiefel.manifolds import Stiefel
from stiefel.models import ASRNN, GRU, IRNN, LSTM, NNRNN, OrthogonalRNN, PlainRNN, SequenceModel
from stiefel.models.activations import NONLINEARITIES
from stiefel.operators import CompactWY, Dense, FourierReflections, Operator, Rotations
from stiefel.optim import (
    POGO,
    RGD,
    Landing,
    RGDAdam,
    RiemannianAdam,
    RiemannianOptimizer,
    StiefelMuon,
)
from stiefel.parametrizations import CHARTS as CHARTS_BY_NAME
from stiefel.parametrizations import Parametrization

# ---------------------------------------------------------------------------------- sizes
#: (batch, n, p): square, tall, p = 1, n = 1, batched.
SHAPES: list[tuple[tuple[int, ...], int, int]] = [
    ((), 6, 6),
    ((), 7, 3),
    ((), 5, 1),
    ((), 1, 1),
    ((2, 3), 6, 2),
    ((2,), 4, 4),
]
DTYPES = [torch.float32, torch.float64, torch.complex128]
DOUBLE = [torch.float64, torch.complex128]

# ------------------------------------------------------------------------------- geometry
METRICS = {
    "canonical": (geometry.canonical_inner, geometry.canonical_gradient),
    "euclidean": (geometry.euclidean_inner, geometry.euclidean_gradient),
}


@dataclass(frozen=True)
class RetractionCase:
    """A retraction and the order of its distance to each metric's exponential.

    ``special_order`` holds where the two metrics share their geodesics: square matrices, and real
    unit vectors (a complex one turns in its own phase, which the metrics weigh differently);
    ``orders[metric]`` elsewhere.
    """

    name: str
    orders: dict[str, int]
    special_order: int


RETRACTIONS = [
    RetractionCase("cayley", {"canonical": 3, "euclidean": 2}, 3),
    RetractionCase("polar", {"canonical": 2, "euclidean": 3}, 3),
    RetractionCase("qr", {"canonical": 2, "euclidean": 2}, 2),
    RetractionCase("cholesky_qr", {"canonical": 2, "euclidean": 2}, 2),
]

#: ``transport(X, u, z)``: z carried to the point that the named retraction takes u to.
TRANSPORTS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    **{
        f"projection-{name}": (
            name,
            lambda X, u, z, R=retraction: geometry.projection_transport(R(X, u), z),
        )
        for name, retraction in geometry.RETRACTIONS.items()
    },
    "cayley": ("cayley", geometry.cayley_transport),
}

# ------------------------------------------------------------------------------ manifolds
MANIFOLDS = [
    Stiefel(inner, retraction) for inner in METRICS for retraction in [*geometry.RETRACTIONS, "exp"]
]

# --------------------------------------------------------------------------------- charts
SQUARE = [shape for shape in SHAPES if shape[1] == shape[2]]
TALL = [shape for shape in SHAPES if shape[1] > shape[2]]
#: Shapes of at least three rows, for ``negative=3``.
FIXED = [((), 6, 6), ((), 3, 3), ((2,), 4, 4)]
#: Shapes where two reflections are few (the operator is not dense), four are neither few nor all.
FEW = [((), 7, 7), ((2,), 5, 5), ((), 7, 3)]
#: Square shapes for layers of rotations: full, few, and butterflies.
LAYERED = [((), 6, 6), ((), 7, 7), ((), 2, 2), ((), 1, 1), ((2,), 4, 4), ((2, 3), 3, 3)]
LAYERED_FEW = [((), 7, 7), ((2,), 4, 4)]
BUTTERFLIES = [((), 8, 8), ((2,), 4, 4), ((), 1, 1)]


@dataclass(frozen=True)
class ChartCase:
    """A chart with its options, and the shapes and dtypes that it claims.

    ``onto``: every matrix of the right determinant is reached, not products of few factors only.
    ``almost``: all but a null set; special points may be refused, with a reason.
    ``inverts``: the chart finds coordinates of a given point at all.
    ``component``: `set_determinant` chooses the component of a real square weight.
    ``carries``: which of an optimizer's moments a rebase carries into the new coordinates, sums of
    gradients (``linear``) and of their squares (``squared``); the others are reset.
    """

    name: str
    shapes: list[tuple[tuple[int, ...], int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)
    onto: bool = True
    almost: bool = False
    inverts: bool = True
    component: bool = True
    carries: tuple[str, ...] = ("linear", "squared")

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}{value}" for key, value in self.options.items())])

    def make(self, shape: tuple[tuple[int, ...], int, int]) -> Parametrization:
        """The chart for one (batch, n, p)."""
        batch, n, p = shape
        return CHARTS_BY_NAME[self.name](n, p, batch=batch, **self.options)

    @property
    def batched(self) -> bool:
        """Whether the chart takes batches of matrices."""
        return CHARTS_BY_NAME[self.name].batched


CHARTS = [
    ChartCase("cwy", SHAPES),
    ChartCase("cwy", FEW, {"reflections": 2}, onto=False),
    ChartCase("cwy", FEW, {"reflections": 4}, onto=False),
    ChartCase("tcwy", [*TALL, ((), 9, 3)]),
    ChartCase("householder", [*SHAPES, ((), 7, 3), ((), 9, 3)]),
    ChartCase(
        "urnn",
        [((), n, n) for n in (1, 6, 7, 8)],
        dtypes=[torch.complex64, torch.complex128],
        onto=False,
        inverts=False,
    ),
    ChartCase("householder", FEW, {"reflections": 2}, onto=False),
    ChartCase("cayley", SQUARE, onto=False, almost=True),
    ChartCase("cayley", FIXED, {"negative": 3}, onto=False, almost=True, component=False),
    ChartCase("cayley", SQUARE, {"rebase_every": 5}, carries=()),
    ChartCase("matrix_exp", SHAPES, carries=()),
    ChartCase("matrix_exp", SQUARE, {"base": "identity"}),
    ChartCase("matrix_exp", [((), 7, 3), ((2,), 5, 1)], {"base": "identity"}, onto=False),
    ChartCase("matrix_exp", FEW, {"rebase_every": 2, "project_every": 2}, carries=()),
    ChartCase("own", SHAPES, component=False, carries=("linear",)),
    ChartCase("own", TALL, {"center": True}, onto=False, component=False, carries=("linear",)),
    ChartCase("polar", [*SHAPES, ((), 9, 2)], component=False, carries=("linear",)),
    ChartCase("polar", SHAPES, {"method": "exact"}, component=False, carries=("linear",)),
    ChartCase("givens", LAYERED),
    ChartCase("givens", LAYERED_FEW, {"layers": 2}, onto=False, inverts=False),
    ChartCase("givens", BUTTERFLIES, {"style": "fft"}, onto=False, inverts=False),
]

# ----------------------------------------------------------------------------- optimizers
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
    only. ``unmended``: where steps end off the manifold and are mended, a manifold for
    ``skip_nonfinite=True``, which mends nothing.
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
    unmended: Stiefel | None = None


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
            unmended=Stiefel("euclidean", "cayley", tolerance=1e-2),
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


# ------------------------------------------------------------------------------ operators
def random_angles(
    batch: tuple[int, ...],
    n: int,
    layers: int,
    style: str,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Angles of layers of rotations, and phases for a complex dtype."""
    count = rotation_count(n, layers, style)
    sizes = [count, count, n] if dtype.is_complex else [count]
    return [torch.randn(*batch, k, dtype=dtype.to_real(), device=device) for k in sizes]


#: ``make(dtype, device)`` gives an operator of some (batch, n, p).
OPERATORS: dict[str, Callable[[torch.dtype, torch.device], Operator]] = {
    "dense": lambda dtype, device: Dense(torch.randn(2, 5, 3, dtype=dtype, device=device)),
    **{
        f"compact-wy-{columns}{'-flipped' if flipped else ''}": (
            lambda dtype, device, p=columns, f=flipped: CompactWY(
                torch.randn(2, 5, 2, dtype=dtype, device=device),
                torch.randn(2, 5, 2, dtype=dtype, device=device),
                columns=p,
                flip=torch.tensor([1, -1], dtype=torch.int8, device=device) if f else None,
            )
        )
        for columns, flipped in [(5, False), (5, True), (3, False)]
    },
    "fourier-reflections": lambda dtype, device: FourierReflections(
        torch.polar(torch.ones(5, 3), torch.randn(5, 3)).to(device, dtype),
        torch.nn.functional.normalize(torch.randn(5, 2, dtype=dtype, device=device), dim=0),
        torch.randperm(5).to(device),
    ),
    **{
        f"rotations-{style}-{layers}": (
            lambda dtype, device, n=n, layers=layers, style=style, batch=batch: Rotations(
                n,
                *random_angles(batch, n, layers, style, dtype, device),
                layers=layers,
                style=style,
                flip=torch.tensor([1, -1], dtype=torch.int8, device=device) if batch else None,
            )
        )
        for batch, n, layers, style in [((2,), 5, 3, "tunable"), ((), 8, 2, "fft")]
    },
}
#: Dtypes of the operators that do not take all of them.
OPERATOR_DTYPES = {"fourier-reflections": [torch.complex128]}


# --------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class NetworkCase:
    """A recurrent network of 3 inputs and 8 hidden units.

    ``make(via, **options)``: in float64 unless told otherwise; ``constraints``: constrained weights
    of a layer and direction; ``published``: parameters of a layer of K inputs and N hidden units.
    """

    make: Callable[..., Any]
    constraints: int
    published: Callable[[int, int], int]

    def model(self, via: str) -> nn.Module:
        """Two layers and a head."""
        return SequenceModel(self.make(via, num_layers=2), 2)

    def sample(self) -> Tensor:
        """An input, `(T, B, K)`."""
        return torch.randn(5, 4, 3, dtype=torch.float64)


def _network(kind: type[nn.Module], *, takes_via: bool = True, **fixed: Any) -> Callable[..., Any]:
    def make(via: str, *sizes: int, **options: Any) -> nn.Module:
        trained = {"via": via} if takes_via else {}
        return kind(*(sizes or (3, 8)), **{"dtype": torch.float64, **fixed, **trained, **options})

    return make


#: Recurrent networks, with the numbers that their papers count.
NETWORKS: dict[str, NetworkCase] = {
    **{
        f"orthogonal-rnn-{nonlinearity}": NetworkCase(
            _network(OrthogonalRNN, nonlinearity=nonlinearity),
            1,
            lambda K, N: N * (N - 1) // 2 + N * K + N,
        )
        for nonlinearity in NONLINEARITIES
    },
    "asrnn": NetworkCase(_network(ASRNN), 2, lambda K, N: N * (N - 1) + N * K + 2 * N),
    "asrnn-free": NetworkCase(
        _network(ASRNN, recurrent="free"),
        1,
        lambda K, N: N * N + N * (N - 1) // 2 + N * K + 2 * N,
    ),
    "nnrnn": NetworkCase(_network(NNRNN), 1, lambda K, N: N * (N - 1) + N * K + 2 * N - N // 2),
    "nnrnn-triangle": NetworkCase(
        _network(NNRNN, mask="triangle"), 1, lambda K, N: N * (N - 1) + N * K + 2 * N
    ),
    "plain-rnn": NetworkCase(
        _network(PlainRNN, takes_via=False), 0, lambda K, N: N * N + N * K + N
    ),
    "irnn": NetworkCase(
        _network(IRNN, takes_via=False, input_std=0.5), 0, lambda K, N: N * N + N * K + N
    ),
    "lstm": NetworkCase(
        _network(LSTM, takes_via=False, forget_bias=1.0), 0, lambda K, N: 4 * N * (N + K) + 8 * N
    ),
    "gru": NetworkCase(_network(GRU, takes_via=False), 0, lambda K, N: 3 * N * (N + K) + 6 * N),
}
#: ``make(via)``: a float64 model whose square weights are trained that way; with an input for it.
MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], Tensor]]] = {
    name: (case.model, case.sample) for name, case in NETWORKS.items() if case.constraints
}
#: Ways to train a square weight.
SQUARE_VIAS = [
    *("cwy", "householder", "matrix_exp", "exprnn", "dtriv", "cayley", "scornn"),
    *("own", "polar", "givens", "rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr"),
]
