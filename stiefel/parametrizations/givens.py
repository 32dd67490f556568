"""Givens: layers of rotations of disjoint pairs of coordinates (EURNN)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefel.errors import RepresentationError
from stiefel.geometry.clements import clements_angles
from stiefel.geometry.givens import rotate
from stiefel.geometry.givens_matrix import rotation_matrix
from stiefel.geometry.rotations import layer_steps, rotation_count
from stiefel.numerics import complex_dtype, compute_dtype, real_dtype
from stiefel.operators import Dense, Operator, Rotations
from stiefel.parametrizations.component import OneComponent
from stiefel.parametrizations.options import count_option

__all__ = ["Givens"]

#: The operator is used from 1024 rows on, for at most n / 64 layers: elsewhere products with the
#: matrix are faster.
_ROWS, _ROWS_A_LAYER = 1024, 64


def _operator_pays(n: int, layers: int) -> bool:
    return n >= _ROWS and _ROWS_A_LAYER * layers <= n


class Givens(OneComponent):
    """Q = F D F_L ... F_1: layers of plane rotations, O(n) angles a layer.

    EURNN (Jing et al., ICML 2017). Each layer turns disjoint pairs of coordinates by
    [[cos th, -e^(i phi) sin th], [sin th, e^(i phi) cos th]]; the coordinates are the angles th,
    shape ``(*batch, count)``, and for complex weights the phases phi, same shape, and omega of
    D = diag(e^(i omega)), shape ``(*batch, n)``: three originals, all real. F flips the last row
    where the determinant asks for it (real weights only; the buffer `flip`).

    n tunable layers have n (n - 1) / 2 angles and cover SO(n), or U(n); `right_inverse` is the
    decomposition of Clements et al. (Optica 3, 2016).

    Args:
        n: Rows.
        p: Columns; n, the only choice.
        batch: Leading dimensions.
        layers: L; n for the tunable style and log2 n for the FFT style by default. With fewer
            than n tunable layers, and with the FFT style, a given matrix cannot be kept.
        style: ``"tunable"`` turns neighbours, (0, 1), (2, 3), ... and (1, 2), (3, 4), ... in turn;
            ``"fft"`` pairs coordinates whose numbers differ in one bit, n a power of 2.

    Raises:
        ConfigurationError: If p < n, the style does not fit n, or layers < 1.
        UnknownNameError: If the style is none of the two.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import Givens
        >>> chart = Givens(4)
        >>> Q = chart(torch.randn(6, dtype=torch.float64))
        >>> torch.allclose(chart(chart.right_inverse(Q)), Q)
        True
    """

    name = "givens"
    tall = False

    def __init__(
        self,
        n: int,
        p: int | None = None,
        *,
        batch: Sequence[int] = (),
        layers: int | None = None,
        style: str = "tunable",
    ) -> None:
        super().__init__(n, p, batch=batch)
        if layers is None:
            layers = self.n if style == "tunable" else max(int(math.log2(self.n)), 1)
        count_option(self.name, "layers", layers, 1, said=self.said)
        layer_steps(self.n, layers, style)  # refuses what does not go together
        self.layers, self.style = layers, style
        self.inverts = style == "tunable" and layers >= self.n
        self.keep_flip()

    @property
    def rotations(self) -> int:
        """How many plane rotations there are, which is how many angles th."""
        return rotation_count(self.n, self.layers, self.style)

    def point_dtype(self, originals: Sequence[Tensor]) -> torch.dtype:
        """The dtype of the angles, or the complex one that goes with it where there are phases."""
        dtype = originals[0].dtype
        return dtype if len(originals) == 1 else complex_dtype(dtype)

    def _weight(self, originals: Sequence[Tensor]) -> Tensor:
        lifted = [original.to(compute_dtype(original.dtype)) for original in originals]
        theta = lifted[0]
        if len(lifted) == 1:
            flip = self.flip_for(theta.dtype)
            flip = None if flip is None else flip.to(theta.device)
            return rotation_matrix(theta, self.n, layers=self.layers, style=self.style, flip=flip)
        E = torch.eye(self.n, dtype=self.point_dtype(lifted), device=theta.device)
        E = E.expand(*theta.shape[:-1], self.n, self.n)
        return self.flip_rows(rotate(E, *lifted, layers=self.layers, style=self.style))

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight from th or, complex, from th, phi and omega."""
        return self._weight(originals).to(self.weight_dtype or self.point_dtype(originals))

    def operator(self, *originals: Tensor) -> Operator:
        """The layers themselves where n is large and they are few, else the dense weight."""
        emitted = self.weight_dtype or self.point_dtype(originals)
        if not _operator_pays(self.n, self.layers) or compute_dtype(emitted) != emitted:
            return Dense(self(*originals))
        angles = [original.to(real_dtype(emitted)) for original in originals]
        return Rotations(
            self.n, *angles, layers=self.layers, style=self.style, flip=self.flip_for(emitted)
        )

    def right_inverse(self, X: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The angles of X; layers after the n-th are at rest.

        Raises:
            ShapeError: If X has another shape.
            OffManifoldError: If the columns of X are not orthonormal.
            RepresentationError: If det X needs another `flip`, or the layers are too few or of
                the FFT style.
        """
        lifted = self.check_point(X)
        obstacle = self.obstacle(X)
        if obstacle is not None:
            raise RepresentationError(obstacle)
        theta, *phases = clements_angles(self.flip_rows(lifted))
        rest = (0, self.rotations - theta.shape[-1])
        angles = [torch.nn.functional.pad(theta, rest)]
        if phases:
            angles += [torch.nn.functional.pad(phases[0], rest), phases[1]]
        cast = tuple(angle.to(real_dtype(X.dtype)) for angle in angles)
        return cast if phases else cast[0]

    def obstacle(self, X: Tensor) -> str | None:
        """Too few layers, the FFT style, or the wrong determinant."""
        if self.inverts:
            return self.determinant_obstacle(X)
        have = f"{self.layers} layers" if self.style == "tunable" else "the FFT style"
        return (
            f"{self.label} with {have} reaches few matrices, and finds no angles of a given "
            f"one: take via='givens' with layers={self.n} and style='tunable', which cover all, or "
            "init='chart'"
        )

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Uninitialised angles; three tensors for complex dtypes."""
        shapes = [(*self.batch, self.rotations)]
        if dtype.is_complex:
            shapes += [shapes[0], (*self.batch, self.n)]
        empty = tuple(torch.empty(s, dtype=real_dtype(dtype), device=device) for s in shapes)
        return empty if dtype.is_complex else empty[0]

    def starting_originals(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Angles and phases uniform on (-pi, pi)."""
        empty = self.empty_originals(compute_dtype(dtype), device)
        angles = tuple(
            angle.uniform_(-math.pi, math.pi, generator=generator).to(real_dtype(dtype))
            for angle in ((empty,) if isinstance(empty, Tensor) else empty)
        )
        return angles if dtype.is_complex else angles[0]

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The weight of uniform angles and phases, in the current component."""
        angles = self.starting_originals(compute_dtype(dtype), device, generator)
        return self._weight((angles,) if isinstance(angles, Tensor) else angles).to(dtype)

    def extra_repr(self) -> str:
        """Sizes, the number of layers and their style."""
        return f"{super().extra_repr()}, layers={self.layers}, style={self.style!r}"
