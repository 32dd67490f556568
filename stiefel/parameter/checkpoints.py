"""What a checkpoint must be to be loaded into a constrained weight."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from stiefel import geometry
from stiefel.numerics import tolerance
from stiefel.parameter.points import sign_of_determinant
from stiefel.parameter.riemannian import Riemannian
from stiefel.parametrizations import Parametrization

__all__ = ["complaint", "path_of"]


def path_of(prefix: str) -> str:
    """The dotted name of a weight in the model, of the prefix of its storage's keys.

    Example:
        >>> from stiefel.parameter.checkpoints import path_of
        >>> path_of("encoder.layers.0.parametrizations.weight.")
        'encoder.layers.0.weight'
    """
    owner, _, name = prefix[:-1].rpartition("parametrizations.")
    return owner + name


def complaint(
    chart: Parametrization,
    originals: dict[str, Tensor],
    determinant: int | None,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> str | None:
    """Why a checkpoint must not be loaded, and what to do; None if it may.

    Args:
        chart: The chart that would read it.
        originals: The originals that are there now, by name.
        determinant: +1 or -1 where the user fixed the component.
        state_dict: The checkpoint.
        prefix: Of the storage's keys in it.
        metadata: What torch saved beside it, if that is still there.
    """
    if "version" in metadata and "chart" not in metadata:  # ours say which chart it is
        return (
            "the checkpoint was saved by another parametrization: that of torch, "
            "torch.nn.utils.parametrizations.orthogonal, has keys of the same names and other "
            "coordinates. Load it into the module that it came from, call "
            "torch.nn.utils.parametrize.remove_parametrizations, and then stiefel.orthogonal"
        )
    saved = metadata.get("chart", chart.name)
    if saved != chart.name:
        return _foreign(saved, chart.label)
    wrong = _other_options(chart, metadata)
    if wrong is not None:
        return wrong
    found = [state_dict.get(prefix + name) for name in originals]
    loaded = [t for t in found if isinstance(t, Tensor) and not t.is_meta]
    shapes = [t.shape for t in originals.values()]
    if not loaded or [t.shape for t in loaded] != shapes or loaded[0].numel() == 0:
        return None  # torch reports what is missing or has another shape
    wrong = _other_kind(loaded, originals)
    if wrong is not None:
        return wrong
    X, leaf = loaded[0], next(iter(originals.values()))
    bound = max(tolerance(t.dtype, chart.n, chart.p) for t in (X, leaf))
    if isinstance(chart, Riemannian):
        wrong = _off_manifold("checkpoint", X, max(bound, chart.tolerance_for(X.dtype)))
    elif "chart" not in metadata and _is_a_point(chart, X, bound):
        return _foreign("riemannian", chart.label)
    else:
        wrong = (
            _incomplete(chart, state_dict, prefix)
            or _not_finite(chart, loaded)
            or chart.complaint(loaded)
            or _base(chart, state_dict, prefix)
        )
    return wrong or _component(chart, loaded, determinant, state_dict, prefix)


def _other_options(chart: Parametrization, metadata: dict[str, Any]) -> str | None:
    """Whether the checkpoint was made with options that give its coordinates another meaning."""
    ours = chart.meaning()
    saved = {key: metadata.get("meaning", {}).get(key, value) for key, value in ours.items()}
    other = [key for key in ours if saved[key] != ours[key]]
    if not other:
        return None
    return (
        f"the checkpoint holds coordinates of {chart.label} with {_said(saved, other)}, "
        f"the model has it with {_said(ours, other)}: they mean another weight there. Make "
        "the model with the same options, load, and call stiefel.convert"
    )


def _other_kind(loaded: list[Tensor], originals: dict[str, Tensor]) -> str | None:
    """Whether whole numbers, or complex ones for real coordinates, would be cast in silence."""
    for tensor, ours in zip(loaded, originals.values(), strict=True):
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if whole or (tensor.is_complex() and not ours.is_complex()):
            return (
                f"the checkpoint has entries of {tensor.dtype}, the model has {ours.dtype}, which "
                "cannot hold them. Load it into a module of the dtype that it was saved from"
            )
    return None


def _said(options: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={options[key]!r}" for key in keys)


def _incomplete(chart: Parametrization, state_dict: dict[str, Any], prefix: str) -> str | None:
    """Which buffers of the chart are missing, without which the run does not go on as it was."""
    lost = [
        f"{prefix}0.{key}"
        for key, buffer in chart._buffers.items()
        if buffer is not None
        and key not in chart._non_persistent_buffers_set
        and f"{prefix}0.{key}" not in state_dict
    ]
    if not lost:
        return None
    return (
        f"the checkpoint has coordinates of {chart.label} and no {', '.join(lost)}: without "
        "it they mean another weight, or are rebased at another time. Save all of "
        "model.state_dict()"
    )


def _not_finite(chart: Parametrization, loaded: list[Tensor]) -> str | None:
    if all(bool(tensor.isfinite().all()) for tensor in loaded):
        return None
    return (
        f"the checkpoint has a NaN or an infinity in the coordinates of {chart.label}: the "
        "run that saved it had diverged. Load an earlier one"
    )


def _is_a_point(chart: Parametrization, X: Tensor, bound: float) -> bool:
    """Whether what should be coordinates is a point instead."""
    if chart.proxy or chart.p == 1 or X.shape != chart.shape:
        return False
    return float(geometry.orthonormality_residual(X).max()) <= bound


def _off_manifold(what: str, X: Tensor, bound: float) -> str | None:
    residual = float(geometry.orthonormality_residual(X).max())
    if residual <= bound:
        return None
    if not bool(X.isfinite().all()):
        return (
            f"the {what} has a NaN or an infinity: the run that saved it had diverged. Load an "
            "earlier one"
        )
    return (
        f"the {what} is off the manifold: the largest entry of |X^H X - I| is {residual:.2e}, the "
        f"tolerance is {bound:.2e}. Project it with stiefel.geometry.polar_factor before loading, "
        "or load it into the plain module and call stiefel.orthogonal after that"
    )


def _base(chart: Parametrization, state_dict: dict[str, Any], prefix: str) -> str | None:
    """What is wrong with a chart's base in a checkpoint."""
    saved, ours = state_dict.get(prefix + "0.base"), getattr(chart, "base", None)
    if not isinstance(saved, Tensor) or not isinstance(ours, Tensor) or saved.shape != ours.shape:
        return None
    if saved.is_meta or saved.numel() == 0:
        return None
    return _off_manifold("base in the checkpoint", saved, tolerance(saved.dtype, chart.n, chart.p))


def _foreign(saved: str, ours: str) -> str:
    return (
        f"the checkpoint holds coordinates of chart {saved!r}, the model has {ours}. Call "
        f"stiefel.convert(model, via={saved!r}) first, load, and convert back"
    )


def _component(
    chart: Parametrization,
    loaded: list[Tensor],
    determinant: int | None,
    state_dict: dict[str, Any],
    prefix: str,
) -> str | None:
    """Whether a checkpoint would undo ``determinant=``: reads the weight that it describes."""
    if determinant is None:
        return None
    twin = copy.deepcopy(chart)
    for key, buffer in twin._buffers.items():
        saved = state_dict.get(f"{prefix}0.{key}")
        if isinstance(saved, Tensor) and buffer is not None and saved.shape == buffer.shape:
            twin._buffers[key] = saved.to(loaded[0].device)
    with torch.no_grad():
        sign = sign_of_determinant(twin(*loaded))
    if sign is None or bool((sign == determinant).all()):
        return None
    return (
        f"the checkpoint has determinant {-determinant:+d} and the weight was made with "
        f"determinant={determinant:+d}: make it with the other sign, or without"
    )
