"""Views: how the tensor that a module stores is a matrix ``(..., n, p)`` with n >= p.

A view is the last link of a constrained weight, ``tensor = view(chart(*originals))``. Wide
matrices are transposed here, once, so that no floor below ever meets one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from stiefel.errors import ConfigurationError, ShapeError, unknown

__all__ = ["VIEWS", "BlockView", "ConvolutionView", "MatrixView", "View", "make_view"]


class View(nn.Module, ABC):
    """A bijection between tensors of one shape and batches of tall matrices.

    Subclasses give `fold` and `unfold`; the transpose of wide matrices is added here.

    Args:
        shape: Shape of the tensor that the module stores.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        rows, columns = self.folded_shape()[-2:]
        self.transposed = rows < columns

    @abstractmethod
    def folded_shape(self) -> tuple[int, ...]:
        """Shape of the matrices before a transpose."""

    @abstractmethod
    def fold(self, tensor: Tensor) -> Tensor:
        """Reads the tensor as matrices, tall or wide."""

    @abstractmethod
    def unfold(self, matrix: Tensor) -> Tensor:
        """Inverse of `fold`."""

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape ``(*batch, n, p)``, n >= p, of the point."""
        *batch, rows, columns = self.folded_shape()
        return (*batch, max(rows, columns), min(rows, columns))

    def forward(self, X: Tensor) -> Tensor:
        """The tensor of the point `X`, shape ``(*batch, n, p) -> shape``."""
        return self.unfold(X.mT if self.transposed else X)

    def right_inverse(self, tensor: Tensor) -> Tensor:
        """The matrix of a tensor, ``shape -> (*batch, n, p)``.

        Raises:
            ShapeError: If the tensor has another shape than the module's.
        """
        if tuple(tensor.shape) != self.shape:
            raise ShapeError(
                f"expected a tensor of shape {self.shape}, got {tuple(tensor.shape)}: assign a "
                "tensor of the weight's own shape"
            )
        M = self.fold(tensor)
        return M.mT if self.transposed else M

    def extra_repr(self) -> str:
        """The two shapes."""
        return f"{self.shape} <-> {self.matrix_shape}"


class MatrixView(View):
    """The tensor is a matrix, or a batch of matrices in its leading dimensions."""

    def folded_shape(self) -> tuple[int, ...]:
        """The shape itself."""
        if len(self.shape) < 2:
            raise ShapeError(
                f"expected a weight with at least two dimensions, got shape {self.shape}: only "
                "matrices can be orthogonal"
            )
        return self.shape

    def fold(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def unfold(self, matrix: Tensor) -> Tensor:
        """The matrix itself."""
        return matrix


class ConvolutionView(View):
    """A kernel ``(out, in, k1, k2, ...)`` read as ``(k1 * k2 * in, out)``, scaled.

    ``kernel = scale * X`` with ``scale = 1 / sqrt(k1 * k2 * ...)`` by default: then the
    convolution with zero or circular padding and stride one never increases the norm of an image
    when X has orthonormal columns. Row ``(l * k2 + m) * in + i`` of X is tap (l, m) of input i.

    Args:
        shape: Shape of the kernel.
        scale: The factor between the point and the kernel.
    """

    def __init__(self, shape: Sequence[int], scale: float | None = None) -> None:
        super().__init__(shape)
        taps = math.prod(self.shape[2:])
        self.scale = 1.0 / math.sqrt(taps) if scale is None else float(scale)
        if not self.scale > 0:
            raise ConfigurationError(f"expected a positive scale, got {scale}")

    def folded_shape(self) -> tuple[int, ...]:
        """(k1 * k2 * in, out)."""
        if len(self.shape) < 3 or 0 in self.shape:
            raise ShapeError(
                f"expected a kernel of shape (out, in, k1, ...) without empty dimensions, got "
                f"{self.shape}: use view='matrix' for matrices"
            )
        return (math.prod(self.shape[2:]) * self.shape[1], self.shape[0])

    def fold(self, tensor: Tensor) -> Tensor:
        """(out, in, k1, k2) -> (k1 * k2 * in, out), divided by the scale."""
        order = (*range(2, tensor.ndim), 1, 0)
        return tensor.permute(order).reshape(self.folded_shape()) / self.scale

    def unfold(self, matrix: Tensor) -> Tensor:
        """(k1 * k2 * in, out) -> (out, in, k1, k2), times the scale."""
        taps = self.shape[2:]
        kernel = matrix.reshape(*taps, self.shape[1], self.shape[0])
        order = (kernel.ndim - 1, kernel.ndim - 2, *range(len(taps)))
        return kernel.permute(order) * self.scale


class BlockView(View):
    """A matrix ``(count * rows, columns)`` read as a batch of `count` stacked matrices.

    One constraint a gate of an LSTM, or a head of an attention layer.

    Args:
        shape: Shape of the stacked matrix.
        count: Number of blocks.
    """

    def __init__(self, shape: Sequence[int], count: int) -> None:
        self.count = count
        super().__init__(shape)

    def folded_shape(self) -> tuple[int, ...]:
        """(count, rows, columns)."""
        if not isinstance(self.count, int) or self.count < 1:
            raise ConfigurationError(f"expected a positive number of blocks, got {self.count!r}")
        if len(self.shape) != 2 or self.shape[0] % self.count:
            raise ShapeError(
                f"expected a matrix whose rows divide into {self.count} blocks, got shape "
                f"{self.shape}: choose a count that divides the first dimension"
            )
        return (self.count, self.shape[0] // self.count, self.shape[1])

    def fold(self, tensor: Tensor) -> Tensor:
        """(count * rows, columns) -> (count, rows, columns)."""
        return tensor.reshape(self.folded_shape())

    def unfold(self, matrix: Tensor) -> Tensor:
        """(count, rows, columns) -> (count * rows, columns)."""
        return matrix.reshape(self.shape)


#: Views by name, as ``view=`` takes them.
VIEWS: dict[str, type[View]] = {
    "matrix": MatrixView,
    "convolution": ConvolutionView,
    "blocks": BlockView,
}

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def make_view(
    view: str | tuple[str, float] | View | None, module: nn.Module, shape: Sequence[int]
) -> View:
    """Makes the view of a weight.

    Args:
        view: A name (``"matrix"``, ``"convolution"``), a name with its option
            (``("blocks", count)``, ``("convolution", scale)``), a `View`, or None: the
            convolution view for kernels of torch's convolutions, the matrix view otherwise.
        module: The module that stores the weight.
        shape: Shape of the weight.

    Returns:
        The view.

    Raises:
        UnknownNameError: If the name is unknown.
        ShapeError: If the weight has not the shape that the view needs.
    """
    if isinstance(view, View):
        if view.shape != tuple(shape):
            raise ShapeError(f"expected a view of shape {tuple(shape)}, got one of {view.shape}")
        return view
    if view is None:
        view = "convolution" if isinstance(module, _CONVOLUTIONS) else "matrix"
    name, *option = view if isinstance(view, tuple) and view else (view,)
    if not isinstance(name, str) or name not in VIEWS:
        raise unknown("view", view, VIEWS)
    wanted = {"matrix": (0, 0), "convolution": (0, 1), "blocks": (1, 1)}.get(name, (0, 99))
    if not wanted[0] <= len(option) <= wanted[1]:
        raise ConfigurationError(
            f"expected view='matrix', 'convolution', ('convolution', scale) or ('blocks', count), "
            f"got {view!r}"
        )
    return VIEWS[name](shape, *option)
