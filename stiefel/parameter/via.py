"""Names of ways to train a weight, and the charts that they make."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from stiefel.errors import ConfigurationError, ShapeError, unknown
from stiefel.parameter.riemannian import Riemannian
from stiefel.parametrizations import CHARTS, Parametrization

__all__ = ["SHORT_FORMS", "make_chart", "via_names"]


def _half(n: int) -> int:
    """Half of n signs, so that D splits no plane of rotation.

    init="henaff", "cayley" and "torus" turn the planes (0, 1), (2, 3), ...; where D splits one, or
    negates a last coordinate that does not turn, the Cayley map does not reach them. An odd n has
    an odd number of signs: its determinant is -1 and the last row of those starts is negated.
    """
    return 2 * (n // 4) + n % 2 if n > 1 else 0


#: Names from the papers: a chart and options that the name implies; an option may be a function of
#: the number of rows. For the manifold RGD-{inner product}-{retraction}, and the manifolds that the
#: optimizers of those names need.
SHORT_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "exprnn": ("matrix_exp", {"base": "identity"}),
    "dtriv": ("matrix_exp", {"rebase_every": 100, "project_every": 100}),
    "dtriv-inf": ("matrix_exp", {}),
    "rgd-c-c": ("riemannian", {"inner": "canonical", "retraction": "cayley"}),
    "rgd-e-c": ("riemannian", {"inner": "euclidean", "retraction": "cayley"}),
    "rgd-c-qr": ("riemannian", {"inner": "canonical", "retraction": "qr"}),
    "rgd-e-qr": ("riemannian", {"inner": "euclidean", "retraction": "qr"}),
    "rgd-adam": ("riemannian", {"inner": "euclidean", "retraction": "cayley"}),
    "landing": ("riemannian", {"inner": "euclidean", "tolerance": 0.5}),
    "pogo": ("riemannian", {"inner": "euclidean", "tolerance": 0.05}),
    "stiefel-muon": ("riemannian", {"inner": "euclidean", "retraction": "polar"}),
    "hr": ("householder", {}),
    "scornn": ("cayley", {"negative": _half}),
    "eurnn": ("givens", {}),
}

#: Short forms that name an optimizer: `stiefel.optim.build` takes it where no other is named.
_OPTIMIZERS = ("rgd-adam", "landing", "pogo", "stiefel-muon")

#: Arguments of a chart that the door gives by itself.
_GIVEN = ("self", "n", "p", "batch", "device")


def via_names() -> list[str]:
    """Every name that ``via=`` takes."""
    return sorted([*CHARTS, "riemannian", *SHORT_FORMS])


def make_chart(
    via: str | Parametrization,
    shape: Sequence[int],
    options: dict[str, Any],
    device: torch.device | str | None = None,
) -> Parametrization:
    """Makes the chart for points of a shape.

    Args:
        via: A name, or a chart made by hand.
        shape: Shape ``(*batch, n, p)`` of the point.
        options: The chart's own options.
        device: Where the weight lives.

    Returns:
        The chart.

    Raises:
        UnknownNameError: If the name is unknown; the message lists the valid ones.
        ConfigurationError: If the chart has no such option.
        ShapeError: If a chart made by hand is for another shape.
    """
    *batch, n, p = shape
    if isinstance(via, Parametrization):
        if options:
            raise ConfigurationError(
                f"expected no options beside a chart made by hand, got {sorted(options)}: give "
                f"them to {type(via).__name__}"
            )
        if (*via.batch, via.n, via.p) != tuple(shape):
            raise ShapeError(
                f"expected a chart for points of shape {tuple(shape)}, got one for "
                f"{(*via.batch, via.n, via.p)}"
            )
        return copy.deepcopy(via).to(device)  # the user's object may serve several weights
    short = via
    if via in SHORT_FORMS:
        via, implied = SHORT_FORMS[via]
        clash = sorted(set(implied) & set(options))
        if clash:
            raise ConfigurationError(
                f"the short form {short!r} already says {clash}: use via={via!r} to choose them"
            )
        given = {key: value(n) if callable(value) else value for key, value in implied.items()}
        options = {**given, **options}
    charts: dict[str, type[Parametrization]] = {**CHARTS, "riemannian": Riemannian}
    if via not in charts:
        raise unknown("via", via, via_names())
    chart = charts[via]
    accepted = [k for k in inspect.signature(chart.__init__).parameters if k not in _GIVEN]
    extra = sorted(set(options) - set(accepted))
    if extra:
        raise ConfigurationError(
            f"via={via!r} has no option {', '.join(map(repr, extra))}: its options are "
            f"{', '.join(accepted) or 'none'}"
        )
    if chart is Riemannian:
        options = {**options, "device": device}
    made = chart(n, p, batch=tuple(batch), **options).to(device)
    if isinstance(made, Riemannian) and short in _OPTIMIZERS:
        made.made_for = short
    return made
