"""Matrix-free operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel.geometry.rotations import rotation_count
from stiefel.operators import CompactWY, Dense, FourierReflections, Operator, Rotations


def random_angles(
    batch: tuple[int, ...],
    n: int,
    layers: int,
    style: str,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Angles of layers of rotations, and phases for a complex dtype."""
    count = rotation_count(n, layers, style)
    sizes = [count, count, n] if dtype.is_complex else [count]
    return [torch.randn(*batch, k, dtype=dtype.to_real(), device=device) for k in sizes]


#: ``make(dtype, device)`` gives an operator of some (batch, n, p).
OPERATORS: dict[str, Callable[[torch.dtype, torch.device], Operator]] = {
    "dense": lambda dtype, device: Dense(torch.randn(2, 5, 3, dtype=dtype, device=device)),
    **{
        f"compact-wy-{columns}{'-flipped' if flipped else ''}": (
            lambda dtype, device, p=columns, f=flipped: CompactWY(
                torch.randn(2, 5, 2, dtype=dtype, device=device),
                torch.randn(2, 5, 2, dtype=dtype, device=device),
                columns=p,
                flip=torch.tensor([1, -1], dtype=torch.int8, device=device) if f else None,
            )
        )
        for columns, flipped in [(5, False), (5, True), (3, False)]
    },
    "fourier-reflections": lambda dtype, device: FourierReflections(
        torch.polar(torch.ones(5, 3), torch.randn(5, 3)).to(device, dtype),
        torch.nn.functional.normalize(torch.randn(5, 2, dtype=dtype, device=device), dim=0),
        torch.randperm(5).to(device),
    ),
    **{
        f"rotations-{style}-{layers}": (
            lambda dtype, device, n=n, layers=layers, style=style, batch=batch: Rotations(
                n,
                *random_angles(batch, n, layers, style, dtype, device),
                layers=layers,
                style=style,
                flip=torch.tensor([1, -1], dtype=torch.int8, device=device) if batch else None,
            )
        )
        for batch, n, layers, style in [((2,), 5, 3, "tunable"), ((), 8, 2, "fft")]
    },
}
#: Dtypes of the operators that do not take all of them.
OPERATOR_DTYPES = {"fourier-reflections": [torch.complex128]}
