"""`Constraint` and `constraints`: what every floor above asks about a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel.errors import ConfigurationError, LostManifoldError, ShapeError, naming
from stiefel.manifolds import GeooptManifoldParameter, Manifold, Stiefel, is_stiefel
from stiefel.numerics import plain
from stiefel.operators import Dense, Operator
from stiefel.parameter.points import nearest
from stiefel.parameter.riemannian import Riemannian
from stiefel.parameter.storage import ConstraintList, check_tensor, storage_of, uninstall

__all__ = ["Constraint", "constraints", "operator"]


@dataclass(frozen=True)
class Constraint:
    """One constrained weight of a model, however it is trained.

    Attributes:
        module: The module that holds the weight; the first one of a tied weight.
        name: Its name there.
        owners: Every (module, name) of a tied weight; ``(module, name)`` is the first.
        path: The dotted name within the model that was asked, such as ``"layers.0.weight"``.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4), via="cwy")
        >>> (constraint,) = stiefel.constraints(layer)
        >>> constraint.via, constraint.path, tuple(constraint.point.shape), len(constraint.leaves)
        ('cwy', 'weight', (4, 4), 1)
        >>> constraint.assign(torch.eye(4))
        >>> bool((layer.weight - torch.eye(4)).abs().max() < 1e-5)
        True
    """

    module: nn.Module
    name: str
    owners: tuple[tuple[nn.Module, str], ...]
    path: str
    _storage: ConstraintList | None = field(repr=False, default=None)

    @property
    def storage(self) -> ConstraintList | None:
        """The parametrization that stores the weight; None for a bare ManifoldParameter."""
        return self._storage

    @property
    def via(self) -> str:
        """Name of the chart, ``"riemannian"`` for the identity and for bare points."""
        return "riemannian" if self._storage is None else self._storage.chart.name

    @property
    def is_riemannian(self) -> bool:
        """Whether the leaf is the point itself, moved by a Riemannian optimizer."""
        return self._storage is None or isinstance(self._storage.chart, Riemannian)

    @property
    def made_for(self) -> str | None:
        """The optimizer that the short form of `stiefel.orthogonal` named; None otherwise."""
        chart = None if self._storage is None else self._storage.chart
        return chart.made_for if isinstance(chart, Riemannian) else None

    @property
    def manifold(self) -> Manifold:
        """The manifold of the point; the canonical Stiefel manifold for charts."""
        if self._storage is None:
            return self.leaves[0].manifold  # pyright: ignore[reportAttributeAccessIssue]
        chart = self._storage.chart
        return chart.manifold if isinstance(chart, Riemannian) else Stiefel()

    @property
    def leaves(self) -> list[Tensor]:
        """What an optimizer sees: the coordinates, or the point."""
        if self._storage is None:
            return [self.module._parameters[self.name]]  # pyright: ignore[reportReturnType]
        return list(self._storage.originals)

    @property
    def point(self) -> Tensor:
        """The point ``(*batch, n, p)``, n >= p, detached."""
        with torch.no_grad():
            X = self.leaves[0] if self._storage is None else self._storage.point()
            return plain(X)

    @property
    def projected_distance(self) -> float:
        """How far (Frobenius norm) the last value given was from the manifold."""
        return 0.0 if self._storage is None else self._storage.projected_distance

    def check(self) -> None:
        """Raises `LostManifoldError` if a Riemannian leaf has become a plain parameter."""
        if self.is_riemannian and not isinstance(self.leaves[0], GeooptManifoldParameter):
            raise LostManifoldError(
                f"{self.path or self.name}: expected a ManifoldParameter, got "
                f"{type(self.leaves[0]).__name__}; an optimizer would move it off the manifold. "
                "Constrain the weight again with stiefel.orthogonal"
            )

    @torch.no_grad()
    def assign(self, X: Tensor) -> None:
        """Stores a point; a matrix off the manifold is projected.

        Args:
            X: Matrix of shape ``(*batch, n, p)``.

        Raises:
            ShapeError: If the shape differs.
            NonFiniteError: If `X` has a NaN or an infinity.
            RepresentationError: If the chart cannot hold the point; nothing is changed then.
        """
        with naming(self.path or self.name):
            check_tensor(X)
            self._assign(X.detach())

    def _assign(self, X: Tensor) -> None:
        shape = tuple(self.point.shape)
        if tuple(X.shape) != shape:
            raise ShapeError(
                f"expected a point of shape {shape}, got {tuple(X.shape)}: points are (..., n, p) "
                "with n >= p, the transposes of wide weights"
            )
        if self._storage is not None:
            self._storage.assign(X.to(self.leaves[0].device))
        elif is_stiefel(self.manifold):
            self.leaves[0].copy_(nearest(X)[0])
        else:
            self.leaves[0].copy_(self.manifold.projx(X))

    @torch.no_grad()
    def rebase(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Chooses new coordinates of the same weight (a new base, unit norms).

        Args:
            optimizer: Its moments for these leaves are moved to the new coordinates. Where one of
                a leaf's cannot be, all of the leaf's state is dropped: the optimizer starts again
                there, as it did at its first step.
        """
        if self._storage is None:
            return
        leaves = self._storage.originals
        new, move = self._storage.chart.rebase(leaves)
        for i, (leaf, value) in enumerate(zip(leaves, new, strict=True)):
            if optimizer is not None and leaf in optimizer.state:
                _move_state(optimizer, leaf, lambda key, moment, i=i: move(i, key, moment))
            leaf.copy_(value)
        if isinstance(optimizer, torch.optim.LBFGS):  # one history of all leaves, kept at the first
            optimizer.state.clear()

    @torch.no_grad()
    def release(self) -> nn.Module:
        """Turns the weight into a plain parameter (or buffer) with today's value.

        Returns:
            The module. Tied weights stay tied.
        """
        value = plain(getattr(self.module, self.name)).clone()
        leaf = self.leaves[0]
        free = nn.Parameter(value, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else value
        for module, name in self.owners:
            uninstall(module, name, free)
        return self.module

    def operator(self) -> Operator:
        """The weight as a matrix-free operator, in the orientation that the module uses."""
        return operator(self.module, self.name)


def _move_state(
    optimizer: torch.optim.Optimizer, leaf: Tensor, move: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Moves an optimizer's moments of a leaf in place, or drops its state.

    What has another shape (sums over rows and columns, as Adafactor keeps) is not understood: the
    state is dropped then too.
    """
    state = optimizer.state[leaf]
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    if any(value.ndim > 0 and value.shape != leaf.shape for value in tensors):
        del optimizer.state[leaf]
        return
    moved = {
        key: move(key, moment)
        for key, moment in state.items()
        if isinstance(moment, Tensor) and moment.shape == leaf.shape and moment.ndim > 0
    }
    if any(moment is None for moment in moved.values()):
        del optimizer.state[leaf]
        return
    for key, moment in moved.items():
        state[key].copy_(moment)


def check_module(model: object) -> None:
    """Raises a `ConfigurationError` if what should be a module is none."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"expected a torch.nn.Module, got {type(model).__name__}: pass the model, or the "
            "module that holds the weight"
        )


def constraints(model: nn.Module) -> Iterator[Constraint]:
    """Lists the constrained weights of a model, recursively, tied weights once.

    Bare `ManifoldParameter` attributes of the user's own modules, geoopt's too, are included.

    Args:
        model: Any module.

    Yields:
        A `Constraint` for each weight, in the order of ``model.named_modules()``.

    Example:
        >>> import torch, stiefel
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        >>> model = stiefel.orthogonal(model[1], via="tcwy") and model
        >>> [(c.path, c.via, tuple(c.point.shape)) for c in stiefel.constraints(model)]
        [('1.weight', 'tcwy', (3, 2))]
    """
    check_module(model)
    found: dict[int, tuple[str, ConstraintList | None, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        path = prefix + "." if prefix else ""
        for name in list(getattr(module, "parametrizations", {})):
            storage = storage_of(module, name)
            if storage is not None:
                key = id(storage.originals[0])
                found.setdefault(key, (path + name, storage, []))[2].append((module, name))
        for name, parameter in module._parameters.items():
            if isinstance(parameter, GeooptManifoldParameter):
                found.setdefault(id(parameter), (path + name, None, []))[2].append((module, name))
    for path, storage, owners in found.values():
        yield Constraint(*owners[0], tuple(owners), path, storage)


def operator(module: nn.Module, name: str = "weight") -> Operator:
    """The weight of a module as an operator: matrix-free where its chart can, else dense.

    A model that multiplies by one weight many times asks once per sequence.

    Args:
        module: The module; its weight may be constrained or plain.
        name: The weight, a matrix.

    Returns:
        An operator of the weight's own shape and orientation.

    Raises:
        ConfigurationError: If the module has no such weight.

    Example:
        >>> import torch, stiefel
        >>> layer = stiefel.orthogonal(torch.nn.Linear(4, 4), reflections=1, init="chart")
        >>> Q, x = stiefel.operator(layer), torch.randn(4, 2)
        >>> type(Q).__name__, Q.shape
        ('CompactWY', torch.Size([4, 4]))
        >>> torch.allclose(Q @ x, layer.weight @ x, atol=1e-5)
        True
    """
    storage = storage_of(module, name)
    if storage is not None:
        return storage.operator()
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ConfigurationError(
            f"expected a module with a weight {name!r}, got {type(module).__name__} without: give "
            "the name of its matrix, or the submodule that holds it"
        )
    return Dense(weight)
