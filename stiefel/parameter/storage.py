"""How a constrained weight is stored: a torch parametrization that never loses its manifold.

`module.parametrizations.weight` is a `ConstraintList` of two links, a chart and a view; its
originals are what an optimizer sees. It is an ordinary torch ``ParametrizationList`` with what
torch leaves to nobody: the manifold of a Riemannian leaf survives conversions and loading, an
off-manifold or foreign checkpoint is refused, and assigning to ``module.weight`` is exact.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel import geometry
from stiefel.errors import DtypeError, NonFiniteError, RebaseError, RepresentationError
from stiefel.geometry.determinant import determinant_sign
from stiefel.manifolds import ManifoldParameter, restore_manifold
from stiefel.numerics import compute_dtype, tolerance
from stiefel.operators import Dense, Operator
from stiefel.parameter.riemannian import Riemannian
from stiefel.parameter.views import MatrixView, View
from stiefel.parametrizations import Parametrization

__all__ = ["ConstraintList", "install", "nearest", "sign_of_determinant", "storage_of", "uninstall"]


@torch.no_grad()
def nearest(X: Tensor) -> tuple[Tensor, float]:
    """The nearest matrices with orthonormal columns, and how far they are.

    A matrix that is on the manifold within `stiefel.tolerance` is returned as it is.

    Args:
        X: Matrices, shape ``(..., n, p)``.

    Returns:
        The points, and the Frobenius norm of the whole move.

    Raises:
        NonFiniteError: If `X` has a NaN or an infinity.
    """
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("expected finite entries, got NaN or infinity in the weight")
    residual = geometry.orthonormality_residual(X)
    if residual.numel() == 0 or float(residual.max()) <= tolerance(X.dtype, *X.shape[-2:]):
        return X, 0.0
    point = geometry.polar_factor(X)
    return point, float(torch.linalg.vector_norm((point - X).to(compute_dtype(X.dtype))))


def sign_of_determinant(X: Tensor) -> Tensor | None:
    """Signs of the determinants of real square matrices, shape ``(...)``; None for others."""
    if X.is_complex() or X.shape[-1] != X.shape[-2]:
        return None
    if X.shape[-1] == 0:
        return X.new_ones(X.shape[:-2])
    sign = determinant_sign(X)
    return torch.where(sign < 0, -torch.ones_like(sign), torch.ones_like(sign))


class ConstraintList(parametrize.ParametrizationList):
    """The storage of one constrained weight: ``weight = view(chart(*originals))``.

    Args:
        chart: The chart.
        view: The view.
        originals: What the optimizer trains: parameters, or tensors for a weight that is a buffer.
        determinant: +1 or -1 where the user fixed the component, else None.
        projected_distance: How far the value given at registration was from the manifold.
    """

    def __init__(
        self,
        chart: Parametrization,
        view: View,
        originals: tuple[Tensor, ...],
        *,
        determinant: int | None = None,
        projected_distance: float = 0.0,
    ) -> None:
        nn.ModuleList.__init__(self, [chart, view])  # the parent's __init__ would project again
        self.unsafe = True
        self.is_tensor = len(originals) == 1
        self.ntensors = len(originals)
        self.determinant = determinant
        self.projected_distance = projected_distance
        self._attached: tuple[int, weakref.ref[Any]] | None = None
        self._forwards = 0
        for key, original in zip(self.original_names, originals, strict=True):
            if isinstance(original, nn.Parameter):
                self.register_parameter(key, original)
            else:
                self.register_buffer(key, original)

    @property
    def original_names(self) -> list[str]:
        """``["original"]``, or ``["original0", "original1", ...]``."""
        return ["original"] if self.is_tensor else [f"original{i}" for i in range(self.ntensors)]

    @property
    def originals(self) -> tuple[Tensor, ...]:
        """The coordinates, in the order in which the chart takes them."""
        return tuple(getattr(self, key) for key in self.original_names)

    @property
    def chart(self) -> Parametrization:
        """The first link."""
        return self[0]  # pyright: ignore[reportReturnType]

    @property
    def view(self) -> View:
        """The second link."""
        return self[1]  # pyright: ignore[reportReturnType]

    def point(self) -> Tensor:
        """The point ``(*batch, n, p)``, differentiable, in the dtype of the emitted weight."""
        return self.chart(*self.originals)

    @torch.no_grad()
    def exact_point(self) -> Tensor:
        """The point in float32 or better, detached, however it is emitted."""
        emitted = self.chart.weight_dtype
        self.chart.weight_dtype = compute_dtype(self.originals[0].dtype)
        try:
            return self.point().detach().as_subclass(Tensor)
        finally:
            self.chart.weight_dtype = emitted

    @property
    def attached(self) -> bool:
        """Whether a living optimizer keeps the rebase schedule; a copy starts without one."""
        return self._attached is not None and self.is_attached_to(self._attached[1]())

    def is_attached_to(self, optimizer: Any) -> bool:
        """Whether this optimizer keeps the rebase schedule."""
        if optimizer is None or self._attached is None or self._attached[0] != id(self):
            return False
        return self._attached[1]() is optimizer

    def attach(self, optimizer: Any) -> None:
        """Notes that an optimizer keeps the rebase schedule."""
        self._attached = (id(self), weakref.ref(optimizer))

    def forward(self) -> Tensor:
        """The tensor that the module uses."""
        if self.chart.rebase_every is not None and not self.attached:
            self._count_unattended_forward()
        return self.view(self.point())

    def operator(self) -> Operator:
        """The weight as a matrix-free operator."""
        if type(self.view) is MatrixView:
            operator = self.chart.operator(*self.originals)
            return operator.mT if self.view.transposed else operator
        return Dense(self.forward())

    def _count_unattended_forward(self) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        self._forwards += 1
        every = self.chart.rebase_every
        if every is not None and self._forwards == every + 1:
            raise RebaseError(
                f"chart {self.chart.name!r} wants a new base every {every} optimizer steps, but "
                "no optimizer takes care of it: make the optimizer with stiefel.optim.build(model,"
                " ...), or call stiefel.attach(model, optimizer). This is raised once"
            )

    # -- writing --------------------------------------------------------------------------------
    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Stores a weight: what ``module.weight = value`` calls.

        Args:
            value: Tensor of the weight's shape; projected when it is off the manifold.

        Raises:
            ShapeError: If the shape differs.
            NonFiniteError: If `value` has a NaN or an infinity.
            RepresentationError: If the chart cannot hold the value; nothing is changed then.
        """
        self.assign(self.view.right_inverse(value.detach().to(self.originals[0].device)))

    @torch.no_grad()
    def assign(self, X: Tensor) -> None:
        """Stores a point ``(*batch, n, p)``; all or nothing (see `right_inverse`)."""
        original = self.originals[0]
        if X.is_complex() and not original.is_complex():
            raise DtypeError(
                f"expected a real value for a weight of dtype {original.dtype}, got {X.dtype}"
            )
        point, distance = nearest(X.to(compute_dtype(original.dtype)))
        coordinates = coordinates_of(self.chart, point, self.determinant)
        for target, new in zip(self.originals, coordinates, strict=True):
            target.copy_(new)
        self.projected_distance = distance

    # -- surviving conversions and checkpoints --------------------------------------------------
    def _restore(self) -> None:
        chart = self.chart
        if isinstance(chart, Riemannian) and isinstance(self.original, nn.Parameter):
            restore_manifold(self.original, chart.manifold)

    def _polish(self) -> None:
        """Projects a Riemannian leaf that carries the rounding of a lower precision."""
        leaf = self.originals[0]
        if isinstance(self.chart, Riemannian) and not leaf.is_meta:
            with torch.no_grad():
                X = leaf.detach()
                if leaf.numel() and bool(torch.isfinite(X).all()):
                    leaf.copy_(nearest(X)[0])

    def _apply(self, fn: Any, recurse: bool = True) -> ConstraintList:
        """Keeps the manifold through ``.to()``, ``.to("meta")`` and both conversion flags."""
        before = self.originals[0].dtype
        super()._apply(fn, recurse)
        self._restore()
        if self.originals[0].dtype != before:
            self._polish()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and prefix[:-1] in metadata:
            metadata[prefix[:-1]]["chart"] = self.chart.name

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuses checkpoints of another chart or off the manifold, before anything is copied."""
        complaint = self._complaint(state_dict, prefix, local_metadata)
        if complaint is not None:
            error_msgs.append(f"{prefix[:-1]}: {complaint}")
            for key, kept in self.chart.state_dict(prefix=f"{prefix}0.").items():
                if key in state_dict:
                    state_dict[key] = kept  # torch goes on to the chart, whose buffers stay too
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._restore()
        self._polish()

    def _complaint(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> str | None:
        saved = metadata.get("chart", self.chart.name)
        if saved != self.chart.name:
            return (
                f"the checkpoint holds coordinates of chart {saved!r}, the model has chart "
                f"{self.chart.name!r}. Call stiefel.convert(model, via={saved!r}) first, load, "
                "and convert back"
            )
        found = [state_dict.get(prefix + name) for name in self.original_names]
        loaded = [t for t in found if isinstance(t, Tensor) and not t.is_meta]
        if len(loaded) == len(found):
            wrong = self.chart.complaint(loaded) or self._wrong_component(state_dict, prefix)
            if wrong is not None:
                return wrong
        if not isinstance(self.chart, Riemannian) or not loaded:
            return None
        X, leaf = loaded[0], self.originals[0]
        if X.shape != leaf.shape or X.numel() == 0:
            return None  # torch reports a wrong shape
        bound = max(tolerance(t.dtype, *X.shape[-2:]) for t in (X, leaf))
        residual = float(geometry.orthonormality_residual(X).max())
        if residual <= bound:
            return None
        return (
            f"the checkpoint is off the manifold: the largest entry of |X^H X - I| is "
            f"{residual:.2e}, the tolerance is {bound:.2e}. Project it with "
            "stiefel.geometry.polar_factor before loading, or load it into the plain module and "
            "call stiefel.orthogonal after that"
        )

    def _wrong_component(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Whether a checkpoint would undo ``determinant=``."""
        if self.determinant is None:
            return None
        flip, ours = state_dict.get(prefix + "0.flip"), getattr(self.chart, "flip", None)
        if ours is not None and flip is not None:
            other = flip.shape == ours.shape and bool((flip.to(ours) != ours).any())
        else:
            X = state_dict[prefix + "original"]
            sign = sign_of_determinant(X) if isinstance(self.chart, Riemannian) else None
            other = sign is not None and bool((sign != self.determinant).any())
        if not other:
            return None
        return (
            f"the checkpoint has determinant {-self.determinant:+d} and the weight was made with "
            f"determinant={self.determinant:+d}: make it with the other sign, or without"
        )


def coordinates_of(
    chart: Parametrization, point: Tensor, determinant: int | None = None
) -> tuple[Tensor, ...]:
    """The coordinates of a point; the chart's component is set to the point's.

    Args:
        chart: The chart; its component is as before if an error is raised.
        point: A point ``(*batch, n, p)``.
        determinant: +1 or -1 if the user fixed it.

    Returns:
        The originals.

    Raises:
        RepresentationError: If the chart cannot represent the point.
    """
    sign = sign_of_determinant(point)
    if determinant is not None and sign is not None and bool((sign != determinant).any()):
        raise RepresentationError(
            f"the value has determinant {-determinant:+d} and determinant={determinant:+d} is "
            "asked for: negate one of its rows, or leave determinant= out"
        )
    buffers = {key: value.clone() for key, value in chart.named_buffers()}
    try:
        if sign is not None:
            chart.set_determinant(sign)
        obstacle = chart.obstacle(point)
        if obstacle is not None:
            raise RepresentationError(obstacle)
        coordinates = chart.right_inverse(point)
    except Exception:
        for key, value in chart.named_buffers():
            value.copy_(buffers[key])
        raise
    return (coordinates,) if isinstance(coordinates, Tensor) else tuple(coordinates)


def make_leaves(
    chart: Parametrization, coordinates: tuple[Tensor, ...], like: Tensor
) -> tuple[Tensor, ...]:
    """Wraps coordinates as what `like` is: trainable or frozen parameters, or buffers."""
    dtype = like.dtype
    leaves = []
    for tensor in coordinates:
        kind = dtype if tensor.is_complex() == dtype.is_complex else dtype.to_real()
        tensor = tensor.detach().to(kind).clone(memory_format=torch.contiguous_format)
        if isinstance(like, nn.Parameter):
            if isinstance(chart, Riemannian):
                tensor = ManifoldParameter(tensor, chart.manifold, like.requires_grad, check=False)
            else:
                tensor = nn.Parameter(tensor, like.requires_grad)
        leaves.append(tensor)
    return tuple(leaves)


def storage_of(module: nn.Module, name: str) -> ConstraintList | None:
    """The storage of a constrained weight, or None if it is not one of ours."""
    if not parametrize.is_parametrized(module, name):
        return None
    storage = module.parametrizations[name]  # pyright: ignore
    return storage if isinstance(storage, ConstraintList) else None


def install(module: nn.Module, name: str, storage: ConstraintList) -> None:
    """Makes ``module.name`` read from `storage`."""
    if not parametrize.is_parametrized(module, name):
        parametrize.register_parametrization(module, name, nn.Identity())
    storage.train(module.training)
    module.parametrizations[name] = storage  # pyright: ignore


def uninstall(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Makes ``module.name`` the plain parameter or buffer `tensor` again."""
    if parametrize.is_parametrized(module, name):
        plain = parametrize.ParametrizationList([nn.Identity()], tensor)
        module.parametrizations[name] = plain  # pyright: ignore
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    else:
        setattr(module, name, tensor)
