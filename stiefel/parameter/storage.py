"""How a constrained weight is stored: a torch parametrization that never loses its manifold.

`module.parametrizations.weight` is a `ConstraintList` of two links, a chart and a view; its
originals are what an optimizer sees. It is an ordinary torch ``ParametrizationList`` with what
torch leaves to nobody: the manifold of a Riemannian leaf survives conversions and loading, an
off-manifold or foreign checkpoint is refused, and assigning to ``module.weight`` is exact.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel.errors import ConfigurationError, DtypeError, RebaseError
from stiefel.manifolds import restore_manifold
from stiefel.numerics import compute_dtype, plain
from stiefel.operators import Dense, Operator
from stiefel.parameter.checkpoints import complaint, path_of
from stiefel.parameter.points import coordinates_of, nearest
from stiefel.parameter.riemannian import Riemannian
from stiefel.parameter.views import MatrixView, View
from stiefel.parametrizations import Parametrization

__all__ = ["ConstraintList", "install", "storage_of", "uninstall"]

#: Called with a storage and the point that it has just formed.
Watcher = Callable[["ConstraintList", Tensor], None]


class ConstraintList(parametrize.ParametrizationList):
    """The storage of one constrained weight: ``weight = view(chart(*originals))``.

    Args:
        chart: The chart.
        view: The view.
        originals: What the optimizer trains: parameters, or tensors for a weight that is a buffer.
        determinant: +1 or -1 where the user fixed the component, else None.
        projected_distance: How far the value given at registration was from the manifold.
    """

    #: What is about this object and not its weight; copies and replicas start without (`_OWN`).
    _watchers: tuple[Watcher, ...] = ()
    _attached: weakref.ref[Any] | None = None  # the optimizer that keeps the rebase schedule
    _OWN = ("_watchers", "_attached")

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

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the point as it is stored: complex where real coordinates mean such a point."""
        return self.chart.point_dtype(self.originals)

    def point(self) -> Tensor:
        """The point ``(*batch, n, p)``, differentiable, in the dtype of the emitted weight."""
        X = self.chart(*self.originals)
        if not torch.compiler.is_compiling():
            for watcher in self._watchers:
                watcher(self, X)
        return X

    @torch.no_grad()
    def exact_point(self) -> Tensor:
        """The point in float32 or better, detached, however it is emitted."""
        emitted = self.chart.weight_dtype
        self.chart.weight_dtype = compute_dtype(self.dtype)
        try:
            return plain(self.point())
        finally:
            self.chart.weight_dtype = emitted

    @property
    def attached(self) -> bool:
        """Whether a living optimizer keeps the rebase schedule; a copy starts without one."""
        return self._attached is not None and self._attached() is not None

    def is_attached_to(self, optimizer: Any) -> bool:
        """Whether this optimizer keeps the rebase schedule."""
        return (
            optimizer is not None and self._attached is not None and self._attached() is optimizer
        )

    def attach(self, optimizer: Any) -> None:
        """Notes that an optimizer keeps the rebase schedule."""
        self._attached = weakref.ref(optimizer)

    def forward(self) -> Tensor:
        """The tensor that the module uses."""
        if self.chart.rebase_every is not None and not self.attached:
            self._count_unattended_forward()
        return self.view(self.point())

    def operator(self) -> Operator:
        """The weight as a matrix-free operator; the dense one inside `watched`."""
        if type(self.view) is MatrixView:
            dense = self.is_watched
            operator = Dense(self.point()) if dense else self.chart.operator(*self.originals)
            return operator.mT if self.view.transposed else operator
        return Dense(self.forward())

    @property
    def is_watched(self) -> bool:
        """Whether a block of `watched` is open."""
        return bool(self._watchers)

    @contextlib.contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Calls ``watcher(self, X)`` whenever the point X is formed inside the block.

        So that it is formed, `operator` is the dense weight there. Blocks nest, and may end in any
        order. Copies and replicas made inside the block are not watched.
        """
        self._watchers = (*self._watchers, watcher)
        try:
            yield
        finally:
            left = list(self._watchers)
            left.remove(watcher)
            if left:
                self._watchers = tuple(left)
            else:
                del self._watchers

    def _count_unattended_forward(self) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        self._forwards += 1
        every = self.chart.rebase_every
        if every is not None and self._forwards == every + 1:
            raise RebaseError(
                f"{self.chart.label} wants a new base every {every} optimizer steps, but "
                "no optimizer takes care of it: make the optimizer with stiefel.optim.build(model,"
                " ...), or call stiefel.attach(model, optimizer). This is raised once"
            )

    def append(self, module: nn.Module) -> ConstraintList:
        """Refuses a further parametrization: it would take the weight off the manifold."""
        raise ConfigurationError(
            f"the weight is constrained by {self.chart.label}: {type(module).__name__} on "
            "top of it would undo that. Call stiefel.release first, or apply it to what the "
            "module computes"
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
        check_tensor(value)
        self.assign(self.view.right_inverse(value.detach().to(self.originals[0].device)))

    @torch.no_grad()
    def assign(self, X: Tensor) -> None:
        """Stores a point ``(*batch, n, p)``; all or nothing (see `right_inverse`)."""
        if self.originals[0].is_meta:
            raise ConfigurationError(
                "expected a weight with numbers, got one on the meta device: load a checkpoint "
                "with assign=True, or call model.to_empty(device=...) first"
            )
        if X.is_complex() and not self.dtype.is_complex:
            raise DtypeError(
                f"expected a real value for a weight of dtype {self.dtype}, got {X.dtype}: make "
                "the module complex before it is constrained, or give a real value"
            )
        point, distance = nearest(X.to(compute_dtype(self.dtype)))
        coordinates = coordinates_of(self.chart, point, self.determinant)
        for target, new in zip(self.originals, coordinates, strict=True):
            target.copy_(new)
        self.projected_distance = distance

    # -- surviving copies, conversions and checkpoints ------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """What `copy` and `pickle` take: all but what is about this object alone."""
        return {name: value for name, value in self.__dict__.items() if name not in self._OWN}

    def _replicate_for_data_parallel(self) -> Any:
        """A replica of `torch.nn.DataParallel`, which torch copies without asking for the state."""
        replica = super()._replicate_for_data_parallel()
        for name in self._OWN:
            replica.__dict__.pop(name, None)
        return replica

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
                    leaf.copy_(nearest(X, self.chart.tolerance_for(X.dtype))[0])

    def _apply(self, fn: Any, recurse: bool = True) -> ConstraintList:
        """Keeps the manifold through ``.to()``, ``.to("meta")`` and both conversion flags.

        Real coordinates of a complex weight stay real in ``.to(torch.complex128)``.

        Raises:
            DtypeError: If a complex weight is to become real.
        """
        before = self.originals[0].dtype
        super()._apply(_within_kind(fn) if self.dtype.is_complex else fn, recurse)
        self._restore()
        if self.originals[0].dtype != before:
            self._polish()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and prefix[:-1] in metadata:
            metadata[prefix[:-1]].update(chart=self.chart.name, meaning=self.chart.meaning())

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
        originals = dict(zip(self.original_names, self.originals, strict=True))
        wrong = complaint(
            self.chart, originals, self.determinant, state_dict, prefix, local_metadata
        )
        if wrong is not None:
            error_msgs.append(f"{path_of(prefix)}: {wrong}")
            self._keep_chart(state_dict, prefix)
            return
        before = len(missing_keys) + len(error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if len(missing_keys) + len(error_msgs) > before:  # coordinates belong to their chart
            self._keep_chart(state_dict, prefix)
        self._restore()
        self._polish()

    def _keep_chart(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Lets torch, which goes on to the chart, find the buffers there that it has now."""
        for key, kept in self.chart.state_dict(prefix=f"{prefix}0.").items():
            if key in state_dict:
                state_dict[key] = kept


def check_tensor(value: object) -> None:
    """Raises an error if what should be the value of a weight is no tensor, or has no numbers."""
    if isinstance(value, Tensor) and value.is_meta:
        raise ConfigurationError(
            "expected a value with numbers, got a tensor on the meta device: make it on a device "
            "that has storage, such as device='cpu'"
        )
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"expected a tensor as the value of a constrained weight, got {type(value).__name__}: "
            "convert it with torch.as_tensor, or call stiefel.release to have a plain weight"
        )


def _within_kind(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A conversion of what a complex weight consists of: real stays real, complex complex."""

    def convert(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        if tensor.is_complex() and not new.is_complex():
            raise DtypeError(
                f"expected a complex dtype for a complex weight, got {new.dtype}: without the "
                "imaginary part it is off its manifold. .half(), .float() and .double() leave "
                "complex tensors alone"
            )
        if new.is_complex() and not tensor.is_complex():
            return new.real.contiguous()
        return new

    return convert


def storage_of(module: nn.Module, name: str) -> ConstraintList | None:
    """The storage of a constrained weight, or None if it is not one of ours."""
    if not parametrize.is_parametrized(module, name):
        return None
    parametrizations: Any = module.parametrizations
    storage = parametrizations[name]
    return storage if isinstance(storage, ConstraintList) else None


def install(module: nn.Module, name: str, storage: ConstraintList) -> None:
    """Makes ``module.name`` read from `storage`."""
    if not parametrize.is_parametrized(module, name):
        parametrize.register_parametrization(module, name, nn.Identity())
    storage.train(module.training)
    parametrizations: Any = module.parametrizations
    parametrizations[name] = storage


def uninstall(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Makes ``module.name`` the plain parameter or buffer `tensor` again."""
    if parametrize.is_parametrized(module, name):
        parametrizations: Any = module.parametrizations
        parametrizations[name] = parametrize.ParametrizationList([nn.Identity()], tensor)
        kind = type(module)  # torch takes the property off it, and deep copies share it
        own = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        mine: Any = type(kind.__name__, kind.__bases__, own)
        module.__class__ = mine
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    else:
        setattr(module, name, tensor)
