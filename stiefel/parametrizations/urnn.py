"""uRNN: unitary weights of 7n parameters, products of phases, Fourier transforms, reflections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, DtypeError, RepresentationError
from stiefel.geometry.wy_factors import unit_columns
from stiefel.numerics import compute_dtype, real_dtype
from stiefel.operators import Dense, FourierReflections, Operator
from stiefel.parametrizations.base import Parametrization

__all__ = ["URNN"]


class URNN(Parametrization):
    """``W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1`` with 7n real parameters; complex square weights only.

    D = diag(e^(i theta)), R = I - 2 v v^H / |v|^2 with complex v, F the unitary discrete Fourier
    transform and Pi a fixed random permutation (Arjovsky, Shah, Bengio, ICML 2016). A product
    with a vector costs O(n log n), see `operator`. The originals are the two reflection vectors,
    the columns of V ``(n, 2)``, and the real angles theta ``(n, 3)``; the lengths of the vectors
    do not matter, and a zero vector acts as the identity.

    The matrices are a strict subset of U(n) for n > 7 (Wisdom, Powers, Hershey, Le Roux, Atlas,
    NeurIPS 2016), and coordinates of a given matrix are not looked for: the chart takes its own
    start. Which subset it is depends on Pi, a buffer that is saved with the weight.

    Args:
        n: Rows.
        p: Columns; n.
        batch: None of them.
        seed: Decides the permutation together with n.

    Raises:
        ShapeError: If n < 1.
        ConfigurationError: If p < n, there is a batch, or `seed` is no whole number.

    Example:
        >>> import torch
        >>> from stiefel.parametrizations import URNN
        >>> chart = URNN(8)
        >>> W = chart(*chart.starting_originals(torch.complex128))
        >>> torch.allclose(W.mH @ W, torch.eye(8, dtype=torch.complex128))
        True
    """

    name = "urnn"
    tall = False
    batched = False
    permutation: Tensor

    def __init__(
        self, n: int, p: int | None = None, *, batch: Sequence[int] = (), seed: int = 0
    ) -> None:
        super().__init__(n, p, batch=batch)
        self.inverts = False
        if isinstance(seed, bool) or not isinstance(seed, Integral):
            raise ConfigurationError(
                f"{self.label}: expected seed= to be a whole number, got {seed!r}. It decides the "
                "permutation; leave it out for that of seed 0"
            )
        generator = torch.Generator().manual_seed(int(seed))
        self.register_buffer("permutation", torch.randperm(n, generator=generator))

    def forward(self, *originals: Tensor) -> Tensor:
        """The weight ``(n, n)`` from V ``(n, 2)``, complex, and theta ``(n, 3)``, real."""
        return self.emit(self._factored(originals).to_dense(), originals[0])

    def operator(self, *originals: Tensor) -> Operator:
        """The factors, applied one after another; the dense weight where it is cast."""
        if self.weight_dtype not in (None, originals[0].dtype):
            return Dense(self(*originals))
        return self._factored(originals)

    def _factored(self, originals: Sequence[Tensor]) -> FourierReflections:
        V = originals[0]
        theta = originals[1].to(real_dtype(V.dtype))  # module.half() and .double() change it alone
        phases = torch.polar(torch.ones_like(theta), theta)
        return FourierReflections(phases, unit_columns(V), self.permutation)

    def right_inverse(self, X: Tensor) -> Tensor | tuple[Tensor, ...]:
        """No originals of a given matrix are known.

        Raises:
            RepresentationError: Always, for a complex matrix.
            DtypeError: If X is real.
        """
        raise RepresentationError(self.obstacle(X))

    def obstacle(self, X: Tensor) -> str:
        """Why no matrix can be kept.

        Raises:
            DtypeError: If X is real.
        """
        self._check_complex(X.dtype)
        return (
            f"{self.label} covers a family of 7n = {7 * self.n} parameters in U({self.n}) and does "
            "not look for a given matrix in it: use its own start (init='chart'), or a chart that "
            "covers U(n), via='cwy' or via='givens'"
        )

    def _check_complex(self, dtype: torch.dtype) -> None:
        if not dtype.is_complex:
            raise DtypeError(
                f"{self.label} covers complex weights only, got {dtype}: make the weight complex "
                "(for instance dtype=torch.complex64), or use a chart with real weights, "
                "via='givens' or via='cwy'"
            )

    def empty_originals(
        self, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> tuple[Tensor, ...]:
        """Uninitialised V ``(n, 2)`` and theta ``(n, 3)``.

        Raises:
            DtypeError: If `dtype` is real.
        """
        self._check_complex(dtype)
        V = torch.empty(self.n, 2, dtype=dtype, device=device)
        return V, torch.empty(self.n, 3, dtype=real_dtype(dtype), device=device)

    def starting_originals(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, ...]:
        """theta ~ U(-pi, pi); Re v and Im v ~ U(-a, a), a = sqrt(6 / (2 + 2n)) (Glorot).

        Raises:
            DtypeError: If `dtype` is real.
        """
        V, theta = self.empty_originals(compute_dtype(dtype), device)
        a = math.sqrt(6 / (2 + 2 * self.n))
        torch.view_as_real(V).uniform_(-a, a, generator=generator)
        return V, theta.uniform_(-math.pi, math.pi, generator=generator)

    def start(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The weight of `starting_originals`.

        Raises:
            DtypeError: If `dtype` is real.
        """
        originals = self.starting_originals(dtype, device, generator)
        permutation = self.permutation.to(originals[0].device)
        phases = torch.polar(torch.ones_like(originals[1]), originals[1])
        op = FourierReflections(phases, unit_columns(originals[0]), permutation)
        return op.to_dense().to(dtype)
