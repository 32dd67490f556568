"""Names of ways to train a weight, and the charts that they make."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from stiefel.errors import ConfigurationError, ShapeError, StiefelError, did_you_mean, unknown
from stiefel.parameter.riemannian import Riemannian
from stiefel.parametrizations import CHARTS, Parametrization
from stiefel.parametrizations.options import chart_label

__all__ = ["NAMED_OPTIMIZERS", "SHORT_FORMS", "check_via", "make_chart", "via_names"]


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

#: Short forms that name an optimizer, which `stiefel.optim.build` takes where no other is named,
#: and its class.
NAMED_OPTIMIZERS = {
    "rgd-adam": "RGDAdam",
    "landing": "Landing",
    "pogo": "POGO",
    "stiefel-muon": "StiefelMuon",
}

#: Arguments of a chart that the door gives by itself.
_GIVEN = ("self", "n", "p", "batch", "device")


def via_names() -> list[str]:
    """Every name that ``via=`` takes."""
    return sorted([*CHARTS, "riemannian", *SHORT_FORMS])


def check_via(via: object) -> None:
    """Raises an error if `via` is neither a name nor a chart made by hand.

    Raises:
        UnknownNameError: If it is another name.
        ConfigurationError: If it is the class of a chart.
    """
    if isinstance(via, Parametrization):
        return
    if isinstance(via, type) and issubclass(via, Parametrization):
        raise ConfigurationError(
            f"expected a name or a chart made by hand, got the class {via.__name__}: use via="
            f"{via.name!r}, or {via.__name__}(n, p) for one weight of that size"
        )
    if not isinstance(via, str) or via not in via_names():
        raise unknown("via", via, via_names())


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
                f"{(*via.batch, via.n, via.p)}: make it with {type(via).__name__}({n}, {p}"
                f"{f', batch={tuple(batch)}' if batch else ''}), or use via={via.name!r}"
            )
        return copy.deepcopy(via).to(device)  # the user's object may serve several weights
    check_via(via)
    charts: dict[str, type[Parametrization]] = {**CHARTS, "riemannian": Riemannian}
    name, implied = SHORT_FORMS.get(via, (via, {}))
    chart = charts[name]
    _check_options(via, chart, implied, options)
    given = {key: value(n) if callable(value) else value for key, value in implied.items()}
    if chart is Riemannian:
        given["device"] = device
    said, label = (None if via == name else via), chart_label(name, via)
    try:
        made = chart.called(said, n, p, batch=tuple(batch), **given, **options).to(device)
    except StiefelError as error:
        if label not in str(error):  # geometry and manifolds know no charts
            error.args = (f"{label}: {error}",)
        raise
    except TypeError as error:
        if not options:
            raise
        came = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigurationError(
            f"{label}: expected options that it understands, got {came}, one of "
            f"them of the wrong type ({error}): see stiefel.parametrizations for what they may be"
        ) from error
    if isinstance(made, Riemannian) and via in NAMED_OPTIMIZERS:
        made.made_for = via
    return made


def _check_options(
    via: str, chart: type[Parametrization], implied: dict[str, Any], options: dict[str, Any]
) -> None:
    """Refuses options that the chart has not, or that the short form decides by its name."""
    accepted = [k for k in inspect.signature(chart.__init__).parameters if k not in _GIVEN]
    extra = sorted(set(options) - set(accepted))
    chart_said = f"via={via!r}" if via == chart.name else f"via={via!r} (chart {chart.name!r})"
    if extra:
        free = [key for key in accepted if key not in implied]
        raise ConfigurationError(
            f"{chart_said} has no option {', '.join(map(repr, extra))}: its options are "
            f"{', '.join(free) or 'none'}.{did_you_mean(extra[0], free)}"
        )
    clash = sorted(set(implied) & set(options))
    if clash:
        raise ConfigurationError(
            f"the short form {via!r} already says {', '.join(clash)}, got a value for it: leave "
            f"it out, or use via={chart.name!r} to choose"
        )
