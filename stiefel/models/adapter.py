"""Fine-tuning a linear layer by a rotation of its input, made of a few reflections."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, ShapeError
from stiefel.numerics import compute_dtype, full_precision
from stiefel.operators import CompactWY, Operator
from stiefel.parameter import operator, orthogonal

__all__ = ["HouseholderAdapter"]


class _Rotation(nn.Module):
    """The d x d identity, kept by r reflections in equal pairs."""

    def __init__(
        self, size: int, reflections: int, like: Tensor, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        dtype = compute_dtype(like.dtype)
        self.weight = nn.Parameter(torch.eye(size, dtype=dtype, device=like.device))
        determinant = None if dtype.is_complex else 1
        orthogonal(self, via="cwy", reflections=reflections, init="keep", determinant=determinant)
        V, *phases = self.parameters()
        with torch.no_grad():
            half = torch.randn(
                size, reflections // 2, dtype=dtype, device=like.device, generator=generator
            )
            half /= torch.linalg.vector_norm(half, dim=0)
            V.copy_(half.repeat_interleave(2, dim=1))
            for phi in phases:
                phi.fill_(math.pi)


class HouseholderAdapter(nn.Module):
    """A frozen linear layer times a product of r reflections: y = W Q x + b.

    ``Q = H_1 H_2 ... H_r = I - Y U^H`` in compact WY form (`stiefel` chart ``"cwy"``) is applied
    to the input by two thin products and never formed: a pass costs 4 d r more operations a token
    than the layer alone. Q keeps all norms and angles of the columns that W acts on, so that the
    spectrum of the pretrained weight stays what it was. The start is the identity: the reflection
    vectors are r / 2 random pairs of equal ones (householder reflection adaptation, Yuan, Liu, Xu,
    NeurIPS 2024), and the determinant stays +1.

    Only Q is trained: the weight and the bias of the layer are frozen. Its coordinates are held in
    float32 or better, those of a layer in 16 bits too.

    Args:
        linear: The layer; it is held, not copied, and its parameters are frozen. Where its weight
            is tied to another module, that one is frozen with it, and changed by `merge`.
        reflections: r, even, at most the number of input features d; at 2 r >= d a dense rotation
            is as cheap.
        generator: Source of randomness of the pairs.

    Attributes:
        merged: Whether the layer's weight is W Q at the moment.

    Raises:
        ConfigurationError: If `reflections` is odd, or not between 2 and d.

    Example:
        >>> import torch
        >>> from stiefel.models import HouseholderAdapter
        >>> linear = torch.nn.Linear(64, 32)
        >>> x = torch.randn(5, 64)
        >>> before = linear(x)
        >>> adapter = HouseholderAdapter(linear, reflections=4)
        >>> torch.allclose(adapter(x), before, atol=1e-5)
        True
        >>> [name for name, p in adapter.named_parameters() if p.requires_grad]
        ['rotation.parametrizations.weight.original']
    """

    _kept: Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        reflections: int = 8,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise ConfigurationError(
                f"expected a torch.nn.Linear, got {type(linear).__name__}: give the adapter the "
                "linear submodule and put the adapter in its place"
            )
        d = linear.in_features
        if type(reflections) is not int or reflections % 2 or not 2 <= reflections <= d:
            raise ConfigurationError(
                f"expected an even number of reflections from 2 to the {d} input features, got "
                f"{reflections}: they start as pairs that cancel"
            )
        self.linear = linear.requires_grad_(False)
        self.rotation = _Rotation(d, reflections, linear.weight, generator)
        self.merged = False
        self._kept = None

    @property
    def reflections(self) -> int:
        """The number of reflections r."""
        return next(self.rotation.parameters()).shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        """The adapted layer.

        Args:
            x: `(..., d)`.

        Returns:
            `(..., out)`.

        Raises:
            ShapeError: If the last dimension is not d.
            ConfigurationError: If the adapter is merged and in training mode, where the rotation
                would get no gradient.
        """
        if x.ndim == 0 or x.shape[-1] != self.linear.in_features:
            raise ShapeError(
                f"expected an input of shape (..., {self.linear.in_features}), got {tuple(x.shape)}"
            )
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise ConfigurationError(
                    "the adapter is merged into the weight, so its rotation would get no gradient: "
                    "call unmerge() to train it, or eval() to use the merged layer"
                )
            return self.linear(x)
        return self.linear(_turned(x, operator(self.rotation)))

    @torch.no_grad()
    def merge(self) -> HouseholderAdapter:
        """Writes W Q into the layer's weight; the adapter then costs nothing.

        The weight before is kept until `unmerge`, in memory only: a state_dict holds the merged
        weight and says so.

        Returns:
            The adapter.

        Raises:
            ConfigurationError: If the layer makes its weight of other tensors (a parametrization),
                so that there is none to write into.
        """
        if not self.merged:
            if self.linear._parameters.get("weight") is None:
                raise ConfigurationError(
                    "expected a layer that holds its weight, got one that makes it of other "
                    "tensors, into which W Q cannot be written: use the adapter unmerged, or "
                    "make the weight a plain parameter before the adapter freezes it, by "
                    "stiefel.release(layer) or "
                    "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
                )
            W = self.linear.weight
            self._kept = W.detach().clone()
            W.copy_(self._product(W, inverse=False))
            self.merged = True
        return self

    @torch.no_grad()
    def unmerge(self) -> HouseholderAdapter:
        """Takes the rotation out of the layer's weight again.

        Exactly, where this adapter merged it. After loading a merged state, and where the weight
        was written to since, by the product with Q^H, with the rounding of the weight's dtype.

        Returns:
            The adapter.
        """
        if self.merged:
            W = self.linear.weight
            kept = None if self._kept is None else self._kept.to(W)
            if kept is None or not torch.equal(W, self._product(kept, inverse=False)):
                kept = self._product(W, inverse=True)
            W.copy_(kept)
            self._kept = None
            self.merged = False
        return self

    @full_precision()
    def _product(self, W: Tensor, *, inverse: bool) -> Tensor:
        """W Q, or W Q^H, in float32 or better."""
        rotation = operator(self.rotation)
        Q = rotation.to_dense()
        return (W.to(Q.dtype) @ (Q.mH if inverse else Q)).to(W.dtype)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the saved weight is the merged one."""
        return {"merged": self.merged}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Takes over whether the loaded weight is merged; it is not the one that was kept."""
        self.merged, self._kept = state["merged"], None

    def extra_repr(self) -> str:
        """The number of reflections, for printing."""
        return f"reflections={self.reflections}, merged={self.merged}"


def _turned(x: Tensor, rotation: Operator) -> Tensor:
    """Rows ``x Q^T = x - (x conj(U)) Y^T`` for `(..., d)`, in the dtype of x; det Q is +1."""
    if not isinstance(rotation, CompactWY):  # few features: the rotation is dense
        return x @ rotation.to_dense().mT.to(x.dtype)
    U, Y = rotation.U.to(x.dtype), rotation.Y.to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    return torch.addmm(rows, rows @ U.conj(), Y.mT, alpha=-1).reshape(x.shape)
