"""Is the implementation right, is the weight on the manifold, is training at a stationary point?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stiefel.diagnostics.checks.gradient import check_gradient
from stiefel.diagnostics.checks.hessian import check_hessian
from stiefel.diagnostics.checks.manifold import check_manifold
from stiefel.diagnostics.checks.optimizer import check_optimizer
from stiefel.diagnostics.checks.parametrization import check_parametrization
from stiefel.diagnostics.checks.retraction import check_retraction
from stiefel.diagnostics.checks.transport import check_transport
from stiefel.diagnostics.differential import ChartDifferential, chart_differential
from stiefel.diagnostics.feasibility import Feasibility, feasibility
from stiefel.diagnostics.gradient_noise import NormEstimate, gradient_noise, squared_norm_estimate
from stiefel.diagnostics.judgements import Judgement, Verdict
from stiefel.diagnostics.loggers import CSVLogger, DictLogger, TensorBoardLogger
from stiefel.diagnostics.monitor import StationarityMonitor
from stiefel.diagnostics.monitor_report import MonitorReport
from stiefel.diagnostics.point_gradients import PointGradient, PointGradients, point_gradients
from stiefel.diagnostics.rates import RateFit, fit_rate, judge_rate
from stiefel.diagnostics.report import Curve, Finding, Report
from stiefel.diagnostics.side_conditions import SideConditions
from stiefel.diagnostics.stationarity import (
    Stationarity,
    stationarity,
    stationarity_at,
    total_stationarity,
)

if TYPE_CHECKING:
    from stiefel.diagnostics.loggers.lightning import LightningCallback as LightningCallback

# Checks of one's own parts.
__all__ = [
    "Curve",
    "Finding",
    "Report",
    "check_gradient",
    "check_hessian",
    "check_manifold",
    "check_optimizer",
    "check_parametrization",
    "check_retraction",
    "check_transport",
]
# Weights and their gradients.
__all__ += [
    "ChartDifferential",
    "Feasibility",
    "PointGradient",
    "PointGradients",
    "Stationarity",
    "chart_differential",
    "feasibility",
    "point_gradients",
    "stationarity",
    "stationarity_at",
    "total_stationarity",
]
# Noise and rates.
__all__ += [
    "Judgement",
    "NormEstimate",
    "RateFit",
    "SideConditions",
    "Verdict",
    "fit_rate",
    "gradient_noise",
    "judge_rate",
    "squared_norm_estimate",
]
# Training loops.
__all__ += [
    "CSVLogger",
    "DictLogger",
    "MonitorReport",
    "StationarityMonitor",
    "TensorBoardLogger",
]


def __getattr__(name: str) -> Any:
    """Loads Lightning when `LightningCallback` is asked for, and not before."""
    if name == "LightningCallback":
        from stiefel.diagnostics.loggers.lightning import LightningCallback

        return LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "LightningCallback"]
