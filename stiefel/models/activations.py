"""Nonlinearities of the recurrence: plain functions, and the in-place kernels of the rollout.

Every kernel writes the derivative in terms of the output ``h = sigma(z)``, so that a rollout
saves the hidden sequence and nothing else. Two lose too much of ``z`` and keep it aside: `abs` its
sign, one byte an entry, and modReLU on complex states the moduli, half a hidden sequence more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stiefel.errors import ConfigurationError, unknown

__all__ = ["LEAKY_SLOPE", "NONLINEARITIES", "ModReLU", "activate", "check_complex", "modrelu"]

#: Slope of `leaky_relu` for negative arguments.
LEAKY_SLOPE = 0.1

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_threshold = torch.ops.aten.threshold.out
_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_leaky_backward = torch.ops.aten.leaky_relu_backward.grad_input


def modrelu(z: Tensor, beta: Tensor) -> Tensor:
    """modReLU: ``sign(z) relu(|z| + beta)``, with sign(0) = 0; sign(z) = z / |z| for complex z.

    With ``beta = 0`` it is the identity. At ``z = 0`` value and gradients are exactly zero, and for
    complex z where |z| is at most the least normal number of its dtype.

    Args:
        z: Pre-activations `(..., features)`.
        beta: One bias for each unit, `(features,)`.

    Returns:
        A tensor of the shape of `z`.

    Example:
        >>> import torch
        >>> from stiefel.models import modrelu
        >>> modrelu(torch.tensor([-3.0, 0.5, 2.0]), torch.tensor(-1.0)) + 0.0
        tensor([-2., 0., 1.])
    """
    if z.is_complex():  # sgn is no number there
        z = z.masked_fill(z.detach().abs() <= torch.finfo(z.dtype).tiny, 0)
    return torch.sgn(z) * torch.relu(z.abs() + beta)


class ModReLU(nn.Module):
    """modReLU with a learnable bias for each unit, drawn from U(-0.01, 0.01).

    Args:
        features: Number of units.
        device: Device of the bias.
        dtype: Dtype of the bias.
        generator: Source of randomness of the start.
    """

    def __init__(
        self,
        features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        nn.init.uniform_(self.beta, -0.01, 0.01, generator=generator)

    def forward(self, z: Tensor) -> Tensor:
        """Applies the nonlinearity to `z`, `(..., features)`."""
        return modrelu(z, self.beta)


def activate(name: str, z: Tensor, beta: Tensor | None = None) -> Tensor:
    """Applies a nonlinearity out of place, for a single step under plain autograd.

    Args:
        name: One of `NONLINEARITIES`.
        z: Pre-activations `(..., features)`.
        beta: Bias of modReLU, `(features,)`; ignored by the others.

    Returns:
        A tensor of the shape of `z`.

    Raises:
        UnknownNameError: If `name` is not a nonlinearity.
    """
    match name:
        case "modrelu":
            return z if beta is None else modrelu(z, beta)
        case "abs":
            return z.abs()
        case "relu":
            return torch.relu(z)
        case "leaky_relu":
            return nn.functional.leaky_relu(z, LEAKY_SLOPE)
        case "tanh":
            return torch.tanh(z)
        case "identity":
            return z
    raise unknown("nonlinearity", name, NONLINEARITIES)


def drop_units(x: Tensor, probability: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`, of whole complex numbers too, which torch does not have."""
    if not x.is_complex():
        return nn.functional.dropout(x, probability, training)
    return x * nn.functional.dropout(torch.ones_like(x.real), probability, training)


class Kernel:
    """In-place kernel of one nonlinearity, over chunks of `(steps, B, H)`; here the identity.

    `forward_` and `backward_` are called once a step, `begin` and `add_bias_gradient_` once a chunk
    of the backward walk.

    Args:
        like: A tensor `(B, H)` whose dtype and device the buffers take.
        steps: Steps of the largest chunk.
        beta: Bias of modReLU `(H,)`, or None.
        kept: What the kernel keeps aside of each step, made by `empty_kept`.
    """

    def __init__(
        self, like: Tensor, steps: int, beta: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        self.like, self.steps, self.beta, self.kept = like, steps, beta, kept
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, steps: int) -> Tensor:
        """A scratch tensor `(steps, B, H)` that is allocated once and reused by every chunk."""
        if name not in self._buffers:
            self._buffers[name] = self.like.new_empty(self.steps, *self.like.shape)
        return self._buffers[name][:steps]

    def forward_(self, z: Tensor, t: int) -> None:
        """Replaces the pre-activation `z` `(B, H)` of step `t` by the state."""

    def begin(self, h: Tensor, first: int) -> None:
        """Prepares the backward walk of a chunk of states `h` `(steps, B, H)` from `first` on."""
        self.h = h.unbind(0)

    def backward_(self, delta: Tensor, j: int) -> None:
        """Multiplies `delta` by sigma'(z) at step `j` of the chunk."""

    def add_bias_gradient_(self, gradient: Tensor, delta: Tensor, ones: Tensor) -> None:
        """Adds the gradient of the bias over the chunk, `delta` being `(steps, B, H)`."""


class _Tanh(Kernel):
    """h = tanh z, dz = (1 - h^2) dh."""

    def forward_(self, z: Tensor, t: int) -> None:
        z.tanh_()

    def backward_(self, delta: Tensor, j: int) -> None:
        _tanh_backward(delta, self.h[j], grad_input=delta)


class _ReLU(Kernel):
    """h = max(z, 0), dz = [h > 0] dh."""

    def forward_(self, z: Tensor, t: int) -> None:
        z.relu_()

    def backward_(self, delta: Tensor, j: int) -> None:
        _threshold_backward(delta, self.h[j], 0, grad_input=delta)


class _LeakyReLU(Kernel):
    """h = z for z > 0 and slope z otherwise; h and z share their sign."""

    def forward_(self, z: Tensor, t: int) -> None:
        nn.functional.leaky_relu_(z, LEAKY_SLOPE)

    def backward_(self, delta: Tensor, j: int) -> None:
        _leaky_backward(delta, self.h[j], LEAKY_SLOPE, True, grad_input=delta)


class _Abs(Kernel):
    """h = |z|, dz = sign(z) dh, with sign(0) = 0; the only one that keeps a sign."""

    def forward_(self, z: Tensor, t: int) -> None:
        if self.kept is not None:
            torch.lt(z, 0, out=self.kept[t])
        z.abs_()

    def begin(self, h: Tensor, first: int) -> None:
        assert self.kept is not None
        # sign(z) = sign(h) (1 - 2 [z < 0])
        sign = torch.sign(h, out=self.buffer("sign", len(h)))
        negative = self.buffer("negative", len(h)).copy_(self.kept[first : first + len(h)])
        self.sign = sign.addcmul_(sign, negative, value=-2).unbind(0)

    def backward_(self, delta: Tensor, j: int) -> None:
        delta.mul_(self.sign[j])


class _ModReLU(Kernel):
    """h = sign(z) relu(|z| + beta), dz = [h != 0] dh, dbeta = sum of dh sign(h).

    Evaluated as ``z - clamp(z, -max(-beta, 0), max(-beta, 0)) + max(beta, 0) sign(z)``.
    """

    def __init__(
        self, like: Tensor, steps: int, beta: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        super().__init__(like, steps, beta, kept)
        assert beta is not None
        self.low, self.high = beta.clamp(max=0), (-beta).clamp(min=0)
        self.jump = beta.clamp(min=0)
        self.shrink, self.sign_z = torch.empty_like(like), torch.empty_like(like)

    def forward_(self, z: Tensor, t: int) -> None:
        torch.clamp(z, self.low, self.high, out=self.shrink)
        torch.sign(z, out=self.sign_z)
        z.sub_(self.shrink).addcmul_(self.sign_z, self.jump)

    def begin(self, h: Tensor, first: int) -> None:
        self.sign = torch.sign(h, out=self.buffer("sign", len(h)))
        self.active = torch.abs(self.sign, out=self.buffer("active", len(h))).unbind(0)

    def backward_(self, delta: Tensor, j: int) -> None:
        delta.mul_(self.active[j])

    def add_bias_gradient_(self, gradient: Tensor, delta: Tensor, ones: Tensor) -> None:
        signed = self.sign.mul_(delta).flatten(0, 1)
        gradient.addmv_(signed.t(), ones[: len(signed)])


class _Modulus(Kernel):
    """modReLU on the modulus of complex units, of which z `(B, 2 H)` holds [Re z, Im z].

    With r = |z| and e = z / r: h = (r + beta) e for r + beta > 0, else 0. dh goes back to z as
    dz = <e, dh> e + (|h| / r) <i e, dh> i e, with |h| / r = 1 + beta / r, and to beta as <e, dh>.
    Of h, e = h / |h| is left to rounding, but not r, which beta drowns where it is far larger: r
    is kept aside. Up to the least normal number a modulus counts as zero.
    """

    def __init__(
        self, like: Tensor, steps: int, beta: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        super().__init__(like, steps, beta, kept)
        assert beta is not None
        self.bias, self.limits = beta, torch.finfo(like.dtype)
        self.scale = like.new_empty(like.shape[0], len(beta))

    def forward_(self, z: Tensor, t: int) -> None:
        assert self.kept is not None
        parts, least = z.unflatten(1, (2, -1)), self.limits.tiny
        r = torch.hypot(parts[:, 0], parts[:, 1], out=self.kept[t])
        _threshold(r, least, -torch.inf, out=self.scale).add_(self.bias).clamp_(min=0)
        parts.div_(r.clamp_(min=least).unsqueeze(1)).mul_(self.scale.unsqueeze(1))

    def begin(self, h: Tensor, first: int) -> None:
        assert self.kept is not None
        parts, least = h.unflatten(-1, (2, -1)), self.limits.tiny
        modulus = torch.hypot(parts[..., :1, :], parts[..., 1:, :])
        rate = modulus / self.kept[first : first + len(h)].unsqueeze(-2)
        rate.clamp_(max=self.limits.max)  # infinity times zero is no number
        e = parts / modulus.masked_fill_(modulus < least, torch.inf)
        (a, b), self.units = e.split(1, dim=-2), e.unbind(0)
        self.turned = (torch.cat([-b, a], dim=-2) * rate).unbind(0)  # (|h| / r) i e
        self.halves = list(zip(a.unbind(0), b.unbind(0), strict=True))
        self.radials, self.tangential = torch.empty_like(rate), torch.empty_like(rate[0])
        self.each = self.radials.unbind(0)

    def backward_(self, delta: Tensor, j: int) -> None:
        parts = delta.unflatten(1, (2, -1))
        (x, y), (a, b) = parts.split(1, dim=1), self.halves[j]
        radial = torch.mul(x, a, out=self.each[j]).addcmul_(y, b)
        tangential = torch.mul(y, a, out=self.tangential).addcmul_(x, b, value=-1)
        torch.mul(self.units[j], radial, out=parts).addcmul_(self.turned[j], tangential)

    def add_bias_gradient_(self, gradient: Tensor, delta: Tensor, ones: Tensor) -> None:
        radials = self.radials.flatten(0, 2)
        gradient.addmv_(radials.t(), ones[: len(radials)])


#: Name of the kernel of modReLU on complex states.
MODULUS = "modulus"

#: The kernel of each nonlinearity, by name.
KERNELS: dict[str, type[Kernel]] = {
    "modrelu": _ModReLU,
    "abs": _Abs,
    "relu": _ReLU,
    "leaky_relu": _LeakyReLU,
    "tanh": _Tanh,
    "identity": Kernel,
    MODULUS: _Modulus,
}


def empty_kept(nonlinearity: str, states: Tensor) -> Tensor:
    """An empty tensor for what the kernel keeps aside of states `(T, B, H)`; most keep nothing."""
    if nonlinearity == "abs":
        return torch.empty_like(states, dtype=torch.bool)
    size = (*states.shape[:2], states.shape[2] // 2) if nonlinearity == MODULUS else (0,)
    return states.new_empty(size, dtype=states.dtype if nonlinearity == MODULUS else torch.bool)


#: Names of the nonlinearities that a recurrence can take.
NONLINEARITIES: tuple[str, ...] = tuple(name for name in KERNELS if name != MODULUS)

_COMPLEX = ("modrelu", "identity")


def check_complex(nonlinearity: str, dtype: torch.dtype | None) -> None:
    """Refuses a nonlinearity that complex states do not have.

    Raises:
        ConfigurationError: If the dtype is complex and it is neither modReLU nor the identity.
    """
    if dtype is not None and dtype.is_complex and nonlinearity not in _COMPLEX:
        raise ConfigurationError(
            f"complex states take nonlinearity 'modrelu' (on the modulus) or 'identity', got "
            f"{nonlinearity!r}: relu and tanh act on real numbers, and abs would make them real"
        )
