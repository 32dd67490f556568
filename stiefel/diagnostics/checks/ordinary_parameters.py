"""Does an optimizer of points step the ordinary parameters beside them as torch's would?"""

from __future__ import annotations

import inspect

import torch
from torch import nn

from stiefel.diagnostics.checks.optimizer_trial import Trial
from stiefel.diagnostics.checks.report_builder import ReportBuilder
from stiefel.errors import ConfigurationError
from stiefel.optim import RiemannianOptimizer

__all__ = ["TORCH_OPTIMIZERS", "note_ordinary"]

TORCH_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def note_ordinary(builder: ReportBuilder, trial: Trial, lr: float, claim: str, asked: bool) -> None:
    """Ordinary parameters against torch's optimizer with the options of the group."""
    start = torch.randn(4, 2, dtype=torch.float64, generator=trial.generator)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    leaf = trial.leaf()
    kind = trial.kind
    accepts = "euclidean" in inspect.signature(kind).parameters
    if not accepts and not asked:
        return
    if not accepts and isinstance(kind, type) and issubclass(kind, RiemannianOptimizer):
        raise ConfigurationError(f"{kind.__name__} has no argument euclidean=")
    if accepts:
        groups = [{"params": [leaf]}, {"params": [ours], "weight_decay": 0.01}]
        optimizer = trial.make(groups, lr, euclidean=claim)
    else:
        optimizer = trial.make([{"params": [leaf]}, {"params": [ours]}], lr)
    group = optimizer.param_groups[1]
    known = inspect.signature(TORCH_OPTIMIZERS[claim]).parameters
    same = {key: group[key] for key in group if key in known and key != "params"}
    twin = TORCH_OPTIMIZERS[claim]([theirs], **same)
    worst = 0.0
    for _ in range(5):
        leaf.grad = trial.noise(torch.float64)
        ours.grad = torch.randn(4, 2, dtype=torch.float64, generator=trial.generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        twin.step()
        worst = max(worst, float((ours.detach() - theirs.detach()).abs().max()))
    builder.note(
        f"ordinary parameters ({claim})",
        worst,
        "<=",
        1e-12,
        f"five steps of an ordinary parameter differ from those of torch's "
        f"{TORCH_OPTIMIZERS[claim].__name__} with the same options: a recipe that is moved over "
        "trains the rest of the model in another way.",
    )
