"""`orthogonal`: the one function that constrains a weight."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from stiefel import geometry
from stiefel.errors import (
    ConfigurationError,
    DtypeError,
    NonFiniteError,
    RepresentationError,
    did_you_mean,
    naming,
)
from stiefel.init import Initializer, fill_, initializer
from stiefel.numerics import compute_dtype, tolerance
from stiefel.parameter.constraint import check_module
from stiefel.parameter.points import coordinates_of, make_leaves, nearest, sign_of_determinant
from stiefel.parameter.storage import ConstraintList, install, storage_of
from stiefel.parameter.via import make_chart, via_names
from stiefel.parameter.views import View, make_view
from stiefel.parametrizations import Parametrization

__all__ = ["orthogonal"]

_Module = TypeVar("_Module", bound=nn.Module)


def orthogonal(
    module: _Module,
    name: str = "weight",
    *,
    via: str | Parametrization = "cwy",
    init: str | Initializer | None = None,
    determinant: int | None = None,
    view: str | tuple[str, float] | View | None = None,
    weight_dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> _Module:
    """Constrains ``module.name`` to have orthonormal columns (rows, if it is wide).

    Afterwards ``module.name`` is the constrained weight, and what an optimizer trains is in
    ``module.parameters()`` as before. The current value is kept where the chart can represent it,
    and projected to the nearest point when it is off the manifold
    (`Constraint.projected_distance` says how far); where the chart cannot, the chart's own start
    is taken, with one warning. A weight that is constrained already goes on from its point, with
    its view. The parameters are new objects: tie weights, and make the optimizer, afterwards.

    Args:
        module: A module with a matrix, matrices ``(..., n, p)``, or a convolution kernel.
        name: Name of that weight.
        via: How it is trained: a chart (a name of `stiefel.parametrizations.CHARTS`, such as
            ``"cwy"``, ``"tcwy"``, ``"matrix_exp"``, ``"cayley"``), ``"riemannian"``, a short form
            (``"rgd-c-c"``, ``"rgd-e-qr"``, ``"exprnn"``, ``"dtriv"``, ``"scornn"``, ...; an unknown
            name lists them all), or a chart made by hand.
        init: None keeps the current value as said above; ``"keep"`` raises where that is not
            possible; ``"chart"`` takes the chart's own start; a name of
            `stiefel.init.INITIALIZERS` (``"haar"``, ``"henaff"``, ...) or a callable
            (``stiefel.init.haar_``, ``torch.nn.init.orthogonal_``) sets a new value.
        determinant: +1 or -1 fixes the component of a real square weight; None takes today's.
        view: How the tensor is a matrix: ``"matrix"``, ``"convolution"``,
            ``("convolution", scale)``, ``("blocks", count)`` or a `View`; None chooses by module.
        weight_dtype: Dtype of the emitted weight; the stored dtype by default.
        generator: Source of randomness of `init` and of the chart's own start.
        **options: Options of the chart, such as ``reflections=`` of ``"cwy"``,
            ``rebase_every=`` of ``"matrix_exp"`` or ``retraction=`` of ``"riemannian"``.

    Returns:
        The module, changed in place.

    Raises:
        UnknownNameError: If `via`, `init` or `view` is none of the valid names.
        ConfigurationError: If options do not go together, or the weight does not exist.
        ShapeError: If the weight is not a matrix.
        RepresentationError: If ``init="keep"`` and the chart cannot represent the value.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(64, 64), via="cwy")
        >>> W = layer.weight
        >>> bool((W.mT @ W - torch.eye(64)).abs().max() < stiefel.tolerance(W.dtype, 64, 64))
        True
    """
    check_module(module)
    tensor, old, dtype = _current(module, name)
    chart, the_view = _chart_and_view(module, name, tensor, via, view, weight_dtype, options)
    _check(chart, determinant, the_view.matrix_shape, tensor)
    with torch.no_grad():
        coordinates, distance = _starting_coordinates(
            chart, the_view, tensor, init, determinant, generator
        )
    leaves = make_leaves(chart, coordinates, old, dtype)
    storage = ConstraintList(
        chart, the_view, leaves, determinant=determinant, projected_distance=distance
    )
    install(module, name, storage)
    return module


def _current(module: nn.Module, name: str) -> tuple[Tensor, Tensor, torch.dtype]:
    """The weight's value, a tensor that is a parameter and trained or not, the stored dtype."""
    if parametrize.is_parametrized(module, name):
        storage = storage_of(module, name)
        if storage is None:
            raise ConfigurationError(
                f"{name!r} is already parametrized by another library: call torch.nn.utils."
                f"parametrize.remove_parametrizations(module, {name!r}) first"
            )
        return storage.view(storage.exact_point()), storage.originals[0], storage.dtype
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is None:
        raise ConfigurationError(_missing(module, name))
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise ConfigurationError(
            f"the weight {name!r} of {type(module).__name__} has no shape yet: run the model once "
            "on a batch, which makes it, and call stiefel.orthogonal after that"
        )
    return tensor.detach(), tensor, tensor.dtype


def _missing(module: nn.Module, name: str) -> str:
    """Why there is no such weight, and which are there."""
    kind = type(module).__name__
    if name in via_names():
        return (
            f"{kind} has no weight {name!r}, which is a way to train one: call "
            f"stiefel.orthogonal(module, via={name!r}); the second argument is the weight's name"
        )
    if isinstance(getattr(module, str(name), None), Tensor):
        return (
            f"{name!r} of {kind} is no parameter: it is computed from others, by "
            "torch.nn.utils.weight_norm or spectral_norm or by hand. Undo that first, for "
            "instance with torch.nn.utils.remove_weight_norm(module)"
        )
    lazy = (UninitializedParameter, UninitializedBuffer)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    found = [key for key, value in tensors if not isinstance(value, lazy) and value.ndim > 1]
    own = [key for key in found if "." not in key]
    remedy = "Call stiefel.orthogonal on the submodule that holds it"
    if own:
        remedy = "Give the name of the one that is meant as the second argument"
    listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    return (
        f"{kind} has no weight {name!r} of its own; matrices in it: {listed or 'none'}. "
        f"{remedy}.{did_you_mean(name, own)}"
    )


def _chart_and_view(
    module: nn.Module,
    name: str,
    tensor: Tensor,
    via: str | Parametrization,
    view: str | tuple[str, float] | View | None,
    weight_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> tuple[Parametrization, View]:
    """What the arguments of `orthogonal` ask for; what is not said stays as it was."""
    storage = storage_of(module, name)
    if storage is not None:
        view = storage.view if view is None else view
        weight_dtype = storage.chart.weight_dtype if weight_dtype is None else weight_dtype
    with naming(f"{name!r} of {type(module).__name__}"):
        the_view = make_view(view, module, tensor.shape)
        compute_dtype(tensor.dtype)  # refuses integers
    chart = make_chart(via, the_view.matrix_shape, options, tensor.device)
    chart.weight_dtype = weight_dtype
    return chart, the_view


def _check(
    chart: Parametrization, determinant: int | None, shape: tuple[int, ...], tensor: Tensor
) -> None:
    emitted = chart.weight_dtype or tensor.dtype
    if not isinstance(emitted, torch.dtype):
        raise DtypeError(
            f"expected weight_dtype= to be a torch.dtype, such as torch.float32, got {emitted!r}"
        )
    tolerance(emitted, *shape[-2:])  # refuses what is too coarse to be orthonormal
    if compute_dtype(emitted).is_complex != tensor.is_complex():
        raise DtypeError(
            f"expected weight_dtype= to be {'complex' if tensor.is_complex() else 'real'}, as the "
            f"weight of {tensor.dtype} is, got {emitted}"
        )
    if tensor.is_complex() and not chart.complex:
        raise DtypeError(
            f"{chart.label} has no complex form, got a weight of {tensor.dtype}: "
            "via='cwy', 'matrix_exp' and 'polar' have one"
        )
    if determinant is None:
        return
    if type(determinant) is not int or determinant not in (-1, 1):
        raise ConfigurationError(
            f"expected determinant= to be +1 or -1, or None for that of the current value, got "
            f"{determinant!r}"
        )
    if shape[-1] != shape[-2] or tensor.is_complex():
        raise ConfigurationError(
            f"determinant= is for real square weights, got a matrix of shape {shape} and dtype "
            f"{tensor.dtype}: leave it out, that manifold is connected"
        )
    if chart.fixed_determinant not in (None, determinant):
        raise ConfigurationError(
            f"determinant={determinant:+d} disagrees with the options of {chart.label}, "
            f"which fix the determinant {chart.fixed_determinant:+d}: leave one of them out"
        )


def _starting_coordinates(
    chart: Parametrization,
    view: View,
    tensor: Tensor,
    init: str | Initializer | None,
    determinant: int | None,
    generator: torch.Generator | None,
) -> tuple[tuple[Tensor, ...], float]:
    """Coordinates of the current value, of a new one, or of the chart's own start."""
    if tensor.is_meta:
        empty = chart.empty_originals(tensor.dtype, tensor.device)
        return (empty,) if isinstance(empty, Tensor) else tuple(empty), 0.0
    X = view.right_inverse(tensor.detach()).to(compute_dtype(tensor.dtype))
    if init not in (None, "keep", "chart"):
        real_square = chart.n == chart.p and not X.is_complex()
        fixed = chart.fixed_determinant if real_square else None
        wanted = fixed if determinant is None else determinant
        X = _initialized(initializer(init, ("keep", "chart")), X, wanted, generator)
    if init != "chart":
        try:
            point, distance = nearest(X)
            coordinates = coordinates_of(chart, point, determinant)
            return coordinates, distance if init in (None, "keep") else 0.0
        except (RepresentationError, NonFiniteError) as error:
            if init is not None:
                raise RepresentationError(
                    f"{chart.label} cannot hold the value that init= asks for: {error}"
                ) from error
            warnings.warn(
                f"stiefel.orthogonal: {chart.label} cannot keep the current value, it "
                f"takes its own start instead. Reason: {error}. To choose the start, pass init= "
                "(init='haar', or init='orthogonalize' for the nearest with determinant=); to be "
                "told by an error, init='keep'",
                UserWarning,
                stacklevel=3,
            )
    sign = sign_of_determinant(torch.nan_to_num(X))
    if sign is not None and (init is None or determinant is not None):
        chart.set_determinant(sign if determinant is None else torch.full_like(sign, determinant))
    if not chart.inverts:
        originals = chart.starting_originals(X.dtype, X.device, generator)
        return (originals,) if isinstance(originals, Tensor) else originals, 0.0
    point = chart.start(X.dtype, X.device, generator)
    if determinant is not None:
        point = geometry.with_determinant(point, determinant)
    return coordinates_of(chart, point, determinant), 0.0


def _initialized(
    init: Initializer, X: Tensor, determinant: int | None, generator: torch.Generator | None
) -> Tensor:
    """A new value; the determinant is put right where the initialiser does not know of it."""
    value = X.clone(memory_format=torch.contiguous_format)
    passed = fill_(value, init, generator=generator, determinant=determinant)
    if determinant is not None and "determinant" not in passed:
        value = geometry.with_determinant(nearest(value)[0], determinant)
    return value
