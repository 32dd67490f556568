"""Non-normal recurrent networks: a Schur form with an orthogonal basis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stiefel.errors import unknown
from stiefel.init import Initializer, fill_
from stiefel.models.base import RecurrentNetwork
from stiefel.models.layer import Constrained, start_weight
from stiefel.models.rollout import rollout
from stiefel.models.step import LayerStep, elman_step
from stiefel.numerics import compute_dtype, full_precision
from stiefel.parametrizations import Parametrization

__all__ = ["NNRNN", "SchurLayer"]

_MASKS = ("block", "triangle")


class SchurLayer(nn.Module):
    """One direction of one layer of an `NNRNN`, where the arguments are explained.

    ``basis.weight`` is P `(H, H)`; `gamma` `(ceil(H / 2),)`, `theta` `(H // 2,)` and `T`, the
    entries above the blocks row by row, make up Theta; ``input.weight`` is `(H, K)`, `beta` the
    bias of modReLU.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        mask: str,
        via: str | Parametrization | None,
        init: str | Initializer | None,
        input_init: Initializer | None,
        determinant: int | None,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        H = hidden_size
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mask = mask
        self.input = nn.Linear(input_size, H, bias=False, **empty)
        self.basis = nn.Linear(H, H, bias=False, **empty)
        self.gamma = nn.Parameter(torch.ones((H + 1) // 2, **empty))
        self.theta = nn.Parameter(torch.empty(H // 2, **empty))
        self.T = nn.Parameter(torch.zeros(_triangle_size(H, mask), **empty))
        self.beta = nn.Parameter(torch.empty(H, **empty))
        if input_init is not None:
            fill_(self.input.weight, input_init, generator=generator)
        else:
            nn.init.kaiming_normal_(self.input.weight, nonlinearity="relu", generator=generator)
        nn.init.uniform_(self.theta, 0, 2 * math.pi, generator=generator)
        nn.init.uniform_(self.beta, -0.01, 0.01, generator=generator)
        start_weight(
            self.basis,
            via,
            init,
            determinant=determinant,
            generator=generator,
            options=options,
        )

    def schur_form(self) -> Tensor:
        """Theta `(H, H)`: blocks gamma_i R(theta_i) on the diagonal, T above them."""
        working = compute_dtype(self.gamma.dtype)
        gamma, theta = self.gamma.to(working), self.theta.to(working)
        H, pairs = len(self.beta), len(theta)
        cosine, sine = gamma[:pairs] * theta.cos(), gamma[:pairs] * theta.sin()
        # R = [[cos, -sin], [sin, cos]]; an odd H ends in the one entry gamma
        places = _places(H, self.mask, self.T.device)
        entries = torch.cat([cosine, -sine, sine, cosine, gamma[pairs:], self.T.to(working)])
        return entries.new_zeros(H * H).index_add(0, places, entries).view(H, H)

    @full_precision()
    def recurrent_matrix(self) -> Tensor:
        """V = P Theta P^T `(H, H)`, in float32 or float64."""
        P = self.basis.weight.to(compute_dtype(self.gamma.dtype))
        return P @ self.schur_form() @ P.mT

    def forward(
        self,
        x: Tensor,
        h0: Tensor | None = None,
        lengths: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs `x` `(T, B, K)` from `h0` `(B, H)`; the matrix is made once.

        Returns:
            The states `(T, B, H)` and the last state `(B, H)`.
        """
        return rollout(
            x,
            self.input.weight,
            self.recurrent_matrix(),
            nonlinearity="modrelu",
            beta=self.beta,
            h0=h0,
            lengths=lengths,
            reverse=reverse,
        )

    def stepper(self) -> LayerStep:
        """One step of this layer, as a function that holds the matrix made here."""
        return elman_step(
            self.input.weight, self.recurrent_matrix(), nonlinearity="modrelu", beta=self.beta
        )


def _triangle_size(H: int, mask: str) -> int:
    """Entries of T: H (H - 1) / 2, less one for each pair with the block mask."""
    return H * (H - 1) // 2 - (H // 2 if mask == "block" else 0)


def _places(H: int, mask: str, device: torch.device) -> Tensor:
    """Where the entries of `SchurLayer.schur_form` go in the flattened matrix."""
    first = torch.arange(0, H - H % 2, 2, device=device)
    second = first + 1
    blocks = [first * H + first, first * H + second, second * H + first, second * H + second]
    last = torch.arange(H - H % 2, H, device=device) * (H + 1)
    rows = torch.arange(H, device=device)
    start = 2 * (rows // 2) + 2 if mask == "block" else rows + 1
    counts, size = (H - start).clamp(min=0), _triangle_size(H, mask)
    row = torch.repeat_interleave(rows, counts, output_size=size)
    before = counts.cumsum(0) - counts
    column = torch.arange(size, device=device) - before[row] + start[row]
    return torch.cat([*blocks, last, row * H + column])


class NNRNN(Constrained, RecurrentNetwork):
    """The non-normal RNN: h_t = modReLU(V h_{t-1} + U x_t) with V = P Theta P^T.

    P is orthogonal and goes through `stiefel.orthogonal`; Theta has blocks gamma_i R(theta_i) on
    its diagonal, rotations scaled by gamma_i, and T above them (Kerg et al. 2019). It starts with
    gamma = 1 and T = 0, hence V orthogonal, and theta ~ U(0, 2 pi). The moduli of the eigenvalues
    of V are |gamma_i|, since T has no entry within a diagonal block; the published code masks with
    the plain triangle, which has one in each (``mask="triangle"``), and lets them drift. There is
    no bias but that of modReLU. An odd H ends in a block of the one entry gamma.

    Train with ``loss + rnn.penalty(delta, decay)``, which holds gamma near 1 and T small.

    Args:
        input_size: Features of the input, K.
        hidden_size: Hidden units, H.
        num_layers: Layers.
        batch_first: Whether sequences are `(B, T, features)`.
        dropout: Probability of dropping a unit between layers.
        bidirectional: Whether a second recurrence per layer runs backwards.
        via: How P is trained, anything that ``stiefel.orthogonal(via=)`` takes, or None for a
            plain weight with the same start.
        init: Start of P, as `OrthogonalRNN`: Henaff if None.
        mask: ``"block"``, or ``"triangle"`` as published.
        input_init: A callable that fills U; Kaiming-normal (fan in, relu) if None.
        determinant: +1 or -1 fixes the component of P.
        learnable_h0: Whether the first state is learned.
        generator: Source of randomness of all starts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the chart or the metric.

    Raises:
        UnknownNameError: If `via`, `init` or `mask` is unknown.
        ConfigurationError: If options do not go together.
        RepresentationError: If the chart cannot hold the start that `init` names.

    Example:
        >>> import torch
        >>> from stiefel.models import NNRNN
        >>> rnn = NNRNN(10, 64, via="exprnn")
        >>> output, h_n = rnn(torch.randn(50, 8, 10))
        >>> output.shape, rnn.penalty(1.0).item()
        (torch.Size([50, 8, 64]), 0.0)
    """

    constrained = ("basis",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        via: str | Parametrization | None = "cwy",
        init: str | Initializer | None = None,
        *,
        mask: str = "block",
        input_init: Initializer | None = None,
        determinant: int | None = None,
        learnable_h0: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if mask not in _MASKS:
            raise unknown("mask", mask, _MASKS)

        def layer(features: int) -> SchurLayer:
            return SchurLayer(
                features,
                hidden_size,
                mask=mask,
                via=via,
                init=init,
                input_init=input_init,
                determinant=determinant,
                generator=generator,
                device=device,
                dtype=dtype,
                options=options,
            )

        super().__init__(
            layer,
            input_size,
            hidden_size,
            num_layers,
            batch_first=batch_first,
            dropout=dropout,
            bidirectional=bidirectional,
            learnable_h0=learnable_h0,
            device=device,
            dtype=dtype,
        )
        self.mask = mask

    def penalty(self, delta: float, decay: float = 0.0) -> Tensor:
        """delta sum_i (gamma_i - 1)^2 + (decay / 2) sum_{i < j} T_ij^2, over all layers.

        Args:
            delta: Weight of the first sum (published: 1e-4 copying, 0.15 pixels, 1e-4 to 1 text).
            decay: Weight of the second. Its gradient is ``decay T``, which is what the
                ``weight_decay`` of torch's SGD, RMSprop and Adam adds to a gradient.

        Returns:
            A scalar.
        """
        layers: Any = self.layers
        gamma = torch.cat([layer.gamma for layer in layers])
        loss = delta * (gamma - 1).square().sum()
        if decay:
            loss = loss + decay / 2 * torch.cat([layer.T for layer in layers]).square().sum()
        return loss

    def parameter_groups(self, decay: float) -> list[dict[str, Any]]:
        """Groups for a torch optimizer: T with weight decay, everything else without.

        Args:
            decay: Weight decay of T.

        Returns:
            Two groups, T of all layers first.
        """
        layers: Any = self.layers
        triangles = [layer.T for layer in layers]
        taken = {id(T) for T in triangles}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in taken]
        return [
            {"params": triangles, "weight_decay": decay},
            {"params": rest, "weight_decay": 0.0},
        ]

    def _shown(self) -> list[str]:
        return [f"via={self.via!r}", f"mask={self.mask!r}"]
