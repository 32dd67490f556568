"""Layers of disjoint plane rotations: the EURNN map, O(n) numbers a layer.

``W = D F_L ... F_1`` (Jing et al., ICML 2017), F_1 acts first. Layer F_k turns disjoint pairs of
coordinates (a, b), each by the block

    [[cos th, -e^(i phi) sin th], [sin th, e^(i phi) cos th]]     (real: phi = 0, D = I),

and ``D = diag(e^(i omega))``. *Tunable*: odd layers pair (0, 1), (2, 3), ...; even layers pair
(1, 2), (3, 4), ...; a coordinate without a partner passes through. *FFT*: layer k pairs
coordinates that differ in bit (k - 1) mod log2 n.

The arithmetic is real, in place on one buffer (`stiefel.geometry.rotations`): real and imaginary
parts are further columns, turned alike, and a phase is a rotation of the two parts of b. The
backward pass undoes the layers one by one, so that memory is O(n p): with G the gradient beside
the state, ``dL/dth = Re sum conj(G_b) a - conj(G_a) b`` after the rotation and
``dL/dphi = -Im sum conj(G_b) b`` after the phase. Many layers of a large matrix are first gathered
into small blocks (`stiefel.geometry.givens_blocks`), so that most of the work is products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel.geometry.givens_blocks import block_size, blocked, blocked_backward
from stiefel.geometry.kernel import differentiable, kernel_op
from stiefel.geometry.rotations import layer_steps, shears, sweep
from stiefel.numerics import real_dtype

__all__ = ["rotate"]


def _state(matrices: list[Tensor], lanes_last: bool) -> Tensor:
    """Matrices ``(lanes, n, p)`` side by side as the state of a sweep."""
    lanes, n, p = matrices[0].shape
    kind = real_dtype(matrices[0].dtype)
    parts = 2 if matrices[0].is_complex() else 1
    Z = torch.empty(
        (len(matrices), parts, n, *((p, lanes) if lanes_last else (lanes, p))),
        dtype=kind,
        device=matrices[0].device,
    )
    for state, A in zip(Z, matrices, strict=True):
        for part, values in zip(state, (A.real, A.imag) if parts == 2 else (A,), strict=True):
            if lanes_last:  # one transpose of two dimensions, which torch does in blocks
                part.flatten(0, 1).copy_(values.reshape(lanes, n * p).t())
            else:
                part.copy_(values.movedim(0, 1))
    return Z


def _matrix(state: Tensor, lanes_last: bool) -> Tensor:
    """A state ``(parts, n, ., .)`` of one kind as matrices ``(lanes, n, p)``, contiguous."""
    if lanes_last:
        _, n, p, lanes = state.shape
        parts = [part.flatten(0, 1).t().contiguous().view(lanes, n, p) for part in state]
    else:
        parts = [part.movedim(1, 0).contiguous() for part in state]
    return parts[0] if len(parts) == 1 else torch.complex(*parts)


def _flat(A: Tensor | None, dims: int) -> Tensor | None:
    """The batch in one leading dimension."""
    if A is None:
        return None
    return A.reshape(A.shape[:-dims].numel(), *A.shape[-dims:])


def _turned(
    tensors: list[Tensor],
    theta: Tensor,
    phi: Tensor | None,
    layers: int,
    style: str,
    undo: bool,
    want_moments: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Sweeps matrices ``(lanes, n, p)`` through the layers; with the moments of the angles."""
    lanes, n, p = tensors[0].shape
    lanes_last = lanes >= p
    Z = _state(tensors, lanes_last)
    steps = layer_steps(n, layers, style)
    angles = [theta] if phi is None else [theta, phi]
    lasting = [angle.mT.clone(memory_format=torch.contiguous_format) for angle in angles]
    moments = [torch.empty_like(angle) for angle in lasting]
    sweep(
        Z,
        steps,
        shears(lasting[0], None if phi is None else lasting[1], steps, n),
        undo=undo,
        moments=moments if want_moments else None,
        along=-2 if lanes_last else -1,
    )
    return [_matrix(state, lanes_last) for state in Z], [moment.mT for moment in moments]


@kernel_op(
    "givens_rotate",
    "(Tensor X, Tensor theta, Tensor? phi, Tensor? omega, int layers, str style, bool adjoint)"
    " -> Tensor[]",
    fake=lambda X, theta, phi, omega, layers, style, adjoint: [X.new_empty(X.shape)],
)
def _rotate(
    X: Tensor,
    theta: Tensor,
    phi: Tensor | None,
    omega: Tensor | None,
    layers: int,
    style: str,
    adjoint: bool,
) -> list[Tensor]:
    """``W X``, or ``W^H X``."""
    D = None if omega is None else torch.polar(torch.ones_like(omega), omega)[..., None]
    if D is not None and adjoint:
        X = X * D.conj_physical()
    flat, th, ph = _flat(X, 2), _flat(theta, 1), _flat(phi, 1)
    assert flat is not None
    assert th is not None
    size = block_size(flat.shape, layers, style, adjoint)
    if size:
        Y = blocked(flat, th, ph, layers, size)
    else:
        ((Y,), _) = _turned([flat], th, ph, layers, style, adjoint, False)
    Y = Y.reshape(X.shape)
    return [Y if D is None or adjoint else Y * D]


@kernel_op(
    "givens_rotate_backward",
    "(Tensor grad, Tensor Y, Tensor X, Tensor theta, Tensor? phi, Tensor? omega, int layers,"
    " str style, bool adjoint) -> Tensor[]",
    fake=lambda grad, Y, X, theta, phi, omega, layers, style, adjoint: [
        A.new_empty(A.shape) for A in (X, theta, phi, omega) if A is not None
    ],
)
def _rotate_backward(
    grad: Tensor,
    Y: Tensor,
    X: Tensor,
    theta: Tensor,
    phi: Tensor | None,
    omega: Tensor | None,
    layers: int,
    style: str,
    adjoint: bool,
) -> list[Tensor]:
    """Gradients of X and the angles; the sums of the adjoint have the other sign."""
    D = None if omega is None else torch.polar(torch.ones_like(omega), omega)[..., None]
    G, turns = grad, []
    if D is not None and not adjoint:
        turns = [_phase_sums(G, Y)]
        G, Y = G * D.conj_physical(), Y * D.conj_physical()
    y, g, th, ph = _flat(Y, 2), _flat(G, 2), _flat(theta, 1), _flat(phi, 1)
    assert y is not None
    assert g is not None
    assert th is not None
    size = block_size(y.shape, layers, style, adjoint)
    if size:
        g, sums = blocked_backward(y, g, th, ph, layers, size)
    else:
        ((y, g), sums) = _turned([y, g], th, ph, layers, style, not adjoint, True)
        if adjoint:
            sums = [-moment for moment in sums]
    G = g.reshape(X.shape)
    if D is not None and adjoint:
        turns = [-_phase_sums(G, y.reshape(X.shape))]
        G = G * D
    return [G, *(moment.reshape(theta.shape) for moment in sums), *turns]


def _phase_sums(G: Tensor, Y: Tensor) -> Tensor:
    """``-Im sum conj(G) Y`` along each row: the derivative by the phase of the row."""
    return (G.imag * Y.real - G.real * Y.imag).sum(-1)


_rotate_kernel = differentiable(_rotate, _rotate_backward, name="givens", keep_result=True)


def rotate(
    X: Tensor,
    theta: Tensor,
    phi: Tensor | None = None,
    omega: Tensor | None = None,
    *,
    layers: int,
    style: str = "tunable",
    adjoint: bool = False,
) -> Tensor:
    """Columns multiplied by layers of rotations, ``W X`` with ``W = D F_L ... F_1``.

    Args:
        X: Columns, shape ``(..., n, p)``; complex where there are phases.
        theta: Angles, shape ``(..., count)``, count = `rotation_count` (n, layers, style), the
            first layer's first; the batch is that of X.
        phi: Phases of the blocks, same shape; with omega.
        omega: Phases of the rows, shape ``(..., n)``.
        layers: L.
        style: ``"tunable"`` or ``"fft"``.
        adjoint: Whether to multiply by ``W^H``.

    Returns:
        The product, shape of X; differentiable once in X and the angles.
    """
    return _rotate_kernel(X, theta, phi, omega, layers, style, adjoint)
