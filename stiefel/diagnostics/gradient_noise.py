"""Is the gradient zero, or is it noise? An unbiased |grad|^2 from independent micro-batches.

The squared norm of one batch's gradient is too large by the variance of that gradient, so it never
falls below the noise. Products of gradients of *different* batches are not, on average:
E <g_a, g_b> = |grad|^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from stiefel.diagnostics.columns import MODEL
from stiefel.diagnostics.point_gradients import point_gradients
from stiefel.errors import ConfigurationError, NonFiniteError, ShapeError
from stiefel.geometry import euclidean_gradient
from stiefel.numerics import full_precision, in_double

__all__ = ["NormEstimate", "gradient_noise", "squared_norm_estimate"]

#: Micro-batches from which the interval is finite; the variance of the estimate needs four.
_FEWEST = 4
#: How many times m - 1 terms tr(C^2) is known from. It depends on the noise; this keeps the
#: coverage of every kind of noise in the tests.
_KNOWN_BETTER = 1.25


@dataclass(frozen=True)
class NormEstimate:
    """An estimate of |grad|^2 and the noise that it was made from.

    Attributes:
        value: Unbiased estimate of |grad|^2; may be negative where the gradient is small.
        low: Lower end of the interval. At or below zero: the gradient may be zero.
        high: Upper end of the interval.
        confidence: How often such intervals cover the true value.
        standard_error: Estimated standard deviation of `value`; NaN below four micro-batches.
        noise_floor: Expected |gradient noise|^2 of one whole batch, all micro-batches together:
            what the squared norm of the batch's mean gradient shows where the gradient is zero.
        count: Micro-batches.
        missing: Why there is no estimate, or which weights it leaves out; None for nothing.
    """

    value: float
    low: float
    high: float
    confidence: float
    standard_error: float
    noise_floor: float
    count: int
    missing: str | None = None

    @property
    def is_noise(self) -> bool:
        """Whether the interval reaches zero: the batch does not tell the gradient from noise."""
        return self.low <= 0

    def __str__(self) -> str:
        if self.count == 0:
            return f"no estimate: {self.missing}"
        verdict = "cannot be told from zero" if self.is_noise else "not zero"
        return (
            f"|grad|^2 = {self.value:.3g}, {100 * self.confidence:g} % interval [{self.low:.3g}, "
            f"{self.high:.3g}], noise {self.noise_floor:.3g}, {self.count} micro-batches: {verdict}"
        )


def squared_norm_estimate(
    gradients: Tensor | Sequence[Tensor],
    *,
    population: int | None = None,
    batch_size: int | None = None,
    confidence: float = 0.95,
) -> NormEstimate:
    """Estimates |grad|^2 without bias from the gradients of m micro-batches.

    ``(|sum g|^2 - sum |g_i|^2) / (m (m - 1)) = |mean g|^2 - s^2 / m``, with s^2 the sum of
    |g_i - mean g|^2 over m - 1. Two half-batches (m = 2) give <g_a, g_b>. Micro-batches of b
    samples drawn without replacement from N repel each other: E <g_a, g_b> = |grad|^2
    - tr(Cov) / (N - 1). Since E s^2 = tr(Cov) N / (b (N - 1)) then, ``b s^2 / N`` mends it exactly:
    the estimate becomes |mean g|^2 - (1 - m b / N) s^2 / m, and |mean g|^2 once all samples are in.

    The interval is the set of all t that the estimate u does not contradict, (u - t)^2 <= q^2 V(t),
    with V(t) = 4 (1 - f) lambda t / m + 2 (1 - f)^2 tr(C^2) / (m (m - 1)) the variance of u where
    the true value is t: C is the covariance of a micro-batch, lambda the noise along the gradient
    g, f = m b / N the part of the population that was drawn (0 without one), q Student's quantile.
    tr(C^2) and g^T C g are estimated without bias for any distribution, from products of different
    micro-batches; lambda = (g^T C g + tr(C^2) / m) / |mean g|^2 goes from the noise's own
    directions to that of the gradient as the gradient stands out (at most tr(C^2)^(1/2), more than
    which no direction has). A lower end below zero is cut to zero, or to the estimate where that is
    lower.

    Args:
        gradients: m micro-batch gradients, a tensor ``(m, ...)`` or a list of tensors of one
            shape, real or complex; each the mean over its micro-batch, all of one size.
        population: N, if the samples were drawn without replacement from that many; None for
            independent draws.
        batch_size: b, samples in a micro-batch; needed with `population`.
        confidence: Of the interval.

    Returns:
        The estimate. Its interval is infinite for m < 4; the coverage that the docs state holds
        from m = 8 on.

    Raises:
        ShapeError: If there are fewer than two gradients, or they have different shapes.
        NonFiniteError: If a gradient has a NaN or an infinity.
        ConfigurationError: If `confidence` is not in (0, 1), or only one of `population` and
            `batch_size` is given, or m b > N.

    Example:
        >>> import torch
        >>> from stiefel.diagnostics import squared_norm_estimate
        >>> draws = torch.Generator().manual_seed(0)
        >>> noise = torch.randn(16, 50, generator=draws)
        >>> squared_norm_estimate(noise).is_noise, squared_norm_estimate(noise + 1).is_noise
        (True, False)
    """
    stacked = gradients if isinstance(gradients, Tensor) else _stacked(list(gradients))
    if stacked.ndim < 2 or stacked.shape[0] < 2:
        raise ShapeError(
            f"expected at least two micro-batch gradients (m, ...), got {tuple(stacked.shape)}: "
            "one batch alone cannot tell its gradient from its noise. Cut it in halves"
        )
    return _estimate(_gram(stacked), population, batch_size, confidence)


def gradient_noise(
    model: nn.Module,
    losses: Iterable[Callable[[], Tensor]],
    *,
    population: int | None = None,
    batch_size: int | None = None,
    confidence: float = 0.95,
) -> dict[str, NormEstimate]:
    """Estimates |grad|^2 of every constrained weight, and of all of them, with their noise.

    The gradient is the Euclidean Riemannian gradient G - X sym(X^H G) of the point X, whatever
    chart the weight is trained in. Batch norm couples the samples of a micro-batch: the estimate
    is then of the gradient of micro-batches of this size. Batch norm and dropout in training mode
    draw and count as in any forward pass; running averages move. Gradients of the parameters are
    left as they were.

    Args:
        model: The model; its weights stay.
        losses: One function for each micro-batch, all of one size, that returns its mean loss.
        population: As in `squared_norm_estimate`.
        batch_size: As in `squared_norm_estimate`.
        confidence: As in `squared_norm_estimate`.

    Returns:
        Estimates by path, and ``"model"`` of all weights together. A weight without a point
        gradient has a NaN estimate that says why, and ``"model"`` says which it leaves out.

    Raises:
        ConfigurationError: If the model has no constrained weight with a point gradient, or there
            are fewer than two losses, or one is no function that returns a real number with a
            graph; and as `squared_norm_estimate`.
        NonFiniteError: If a gradient has a NaN or an infinity.

    Example:
        >>> import torch, stiefel
        >>> from stiefel.diagnostics import gradient_noise
        >>> layer = stiefel.orthogonal(torch.nn.Linear(6, 6, bias=False), via="cwy")
        >>> data = torch.randn(8, 32, 6)
        >>> losses = [lambda x=x: (layer(x) - x).square().mean() for x in data]
        >>> sorted(gradient_noise(layer, losses))
        ['model', 'weight']
    """
    drawn, reasons = _micro_batch_gradients(model, losses)
    estimates: dict[str, NormEstimate] = {}
    total = None
    for path, gradients in drawn.items():
        if path in reasons:
            estimates[path] = _nothing(confidence, reasons[path])
            continue
        gram = _gram(torch.stack(gradients))
        estimates[path] = _estimate(gram, population, batch_size, confidence)
        total = gram if total is None else total + gram
    if total is None:
        said = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise ConfigurationError(
            "no constrained weight of the model got a gradient, so there is nothing to estimate"
            f" ({said or 'it has none: constrain a weight with stiefel.orthogonal'})"
        )
    whole = _estimate(total, population, batch_size, confidence)
    if reasons:
        whole = replace(whole, missing="without " + ", ".join(reasons))
    return {**estimates, MODEL: whole}


def _micro_batch_gradients(
    model: nn.Module, losses: Iterable[Callable[[], Tensor]]
) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """Riemannian gradients of every weight, one a loss, and why some weights have none."""
    drawn: dict[str, list[Tensor]] = {}
    reasons: dict[str, str] = {}
    count = 0
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for loss in losses:
            for parameter, _ in kept:
                parameter.grad = None
            count += 1
            with torch.inference_mode(False), point_gradients(model) as points:
                _value(loss).backward()
            for path, point in points.items():
                taken = drawn.setdefault(path, [])
                if point.gradient is None:
                    reasons.setdefault(path, point.missing or "no gradient came")
                    continue
                X, G = in_double(point.point), in_double(point.gradient)
                with full_precision():
                    taken.append(euclidean_gradient(X, G))
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    if count < 2:
        raise ConfigurationError(
            f"expected at least two losses, one a micro-batch, got {count}: one batch alone "
            "cannot tell its gradient from its noise"
        )
    return drawn, reasons


def _value(loss: Callable[[], Tensor]) -> Tensor:
    """The loss, if `backward` can be called on it."""
    got = loss() if callable(loss) else loss
    if callable(loss) and isinstance(got, Tensor) and got.numel() == 1 and got.requires_grad:
        return got.reshape(())
    if not callable(loss):
        said = f"a {type(loss).__name__} that is no function"
    elif not isinstance(got, Tensor):
        said = f"{type(got).__name__}"
    elif got.numel() != 1:
        said = f"a tensor of shape {tuple(got.shape)}"
    else:
        said = "a number without a graph (detached, or from a block without gradients)"
    raise ConfigurationError(
        "expected functions without arguments, one a micro-batch, that return the mean loss, a "
        f"scalar tensor, got {said}: pass [lambda x=x: loss(model(x)) for x in batches]"
    )


def _stacked(gradients: list[Tensor]) -> Tensor:
    shapes = [tuple(g.shape) if isinstance(g, Tensor) else type(g).__name__ for g in gradients]
    if not gradients or not isinstance(shapes[0], tuple) or set(shapes) != {shapes[0]}:
        raise ShapeError(f"expected gradients of one shape, one a micro-batch, got {shapes}")
    return torch.stack(gradients)


def _nothing(confidence: float, reason: str) -> NormEstimate:
    nan = math.nan
    return NormEstimate(nan, nan, nan, confidence, nan, nan, 0, reason)


def _gram(gradients: Tensor) -> np.ndarray:
    """K_ij = Re <g_i, g_j> in float64, shape (m, m), from gradients ``(m, ...)``."""
    rows = in_double(gradients).flatten(1)
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    with full_precision():
        K = (rows @ rows.mT).cpu().numpy()
    if not np.isfinite(K).all():
        bad = sorted(set(np.argwhere(~np.isfinite(np.diag(K))).flatten().tolist()))
        raise NonFiniteError(
            f"the gradients of micro-batches {bad} have a NaN, an infinity, or a square that "
            "overflows: leave those micro-batches out, or look for the step where it began"
        )
    return K


def _estimate(
    K: np.ndarray, population: int | None, batch_size: int | None, confidence: float
) -> NormEstimate:
    """The estimate from the Gram matrix, whose fourth powers may overflow: in units of its size.

    The unit is a power of two, so that nothing is rounded by it.
    """
    unit = math.ldexp(1.0, min(math.frexp(float(np.abs(K).max()))[1], 1000))
    found = _scaled_estimate(K / unit, population, batch_size, confidence)
    names = ("value", "low", "high", "standard_error", "noise_floor")
    return replace(found, **{name: getattr(found, name) * unit for name in names})


def _scaled_estimate(
    K: np.ndarray, population: int | None, batch_size: int | None, confidence: float
) -> NormEstimate:
    """The estimate from the Gram matrix, in the letters of `squared_norm_estimate`."""
    m = len(K)
    rest = 1 - _drawn(m, population, batch_size)  # 1 - f
    if not 0 < confidence < 1:
        raise ConfigurationError(f"expected a confidence between 0 and 1, got {confidence}")
    means = K.mean(0)
    square = means.mean()  # |mean g|^2
    centred = K - means - means[:, None] + square
    s2 = float(np.trace(centred)) / (m - 1)
    u, floor = float(square) - rest * s2 / m, rest * s2 / m
    if m < _FEWEST:
        return NormEstimate(u, -math.inf, math.inf, confidence, math.nan, floor, m)

    T = _trace_of_square(centred)
    noise = rest**2 * 2 * T / (m * (m - 1))
    along = max(_noise_along_gradient(K) + T / m, 0.0)  # lambda |mean g|^2
    most = math.sqrt(T)  # no direction has more noise than the root of tr(C^2)
    along = min(along / float(square), most) if square > 0 else most
    slope = rest * 4 * along / m
    linear = slope * max(u, 0.0)
    variance = noise + linear
    if not variance > 0:
        return NormEstimate(u, u, u, confidence, 0.0, floor, m)
    # Satterthwaite: the linear part is known from m - 1 terms, tr(C^2) from more
    degrees = variance**2 / (linear**2 / (m - 1) + noise**2 / (_KNOWN_BETTER * (m - 1)))
    q2 = float(stdtrit(degrees, (1 + confidence) / 2)) ** 2
    middle = u + q2 * slope / 2
    half = math.sqrt(max((q2 * slope / 2) ** 2 + q2 * slope * u + q2 * noise, 0.0))
    low = min(max(middle - half, min(0.0, u)), u)
    return NormEstimate(u, low, middle + half, confidence, math.sqrt(variance), floor, m)


def _trace_of_square(centred: np.ndarray) -> float:
    """tr(C^2) without bias for any distribution, from the Gram matrix of g_i - mean g.

    ``(m-1)/(m (m-2) (m-3)) ((m-1)(m-2) |S|_F^2 + (tr S)^2 - m Q)``, S the sample covariance and
    (m-1) Q = sum |g_i - mean g|^4. Source: Himeno, Yamada, J. Multivariate Anal. 130 (2014).
    """
    m = len(centred)
    squares = np.diag(centred)
    S2 = (centred**2).sum() / (m - 1) ** 2
    trace = squares.sum() / (m - 1)
    Q = (squares**2).sum() / (m - 1)
    inner = (m - 1) * (m - 2) * S2 + trace**2 - m * Q
    return max(0.0, float((m - 1) / (m * (m - 2) * (m - 3)) * inner))


def _noise_along_gradient(K: np.ndarray) -> float:
    """g^T C g without bias for any distribution, g the true gradient, from K_ij = <g_i, g_j>.

    The mean of K_ij K_ik over different i, j, k less that of K_ij K_kl over different i, j, k, l.
    """
    m = len(K)
    apart = K - np.diag(np.diag(K))
    rows = apart.sum(0)
    squares, once, all_pairs = (apart**2).sum(), (rows**2).sum(), rows.sum() ** 2
    three = (once - squares) / (m * (m - 1) * (m - 2))
    four = (all_pairs - 4 * once + 2 * squares) / (m * (m - 1) * (m - 2) * (m - 3))
    return float(three - four)


def _drawn(m: int, population: int | None, batch_size: int | None) -> float:
    """f = m b / N, the part of the population that was drawn; 0 for independent draws."""
    if population is None and batch_size is None:
        return 0.0
    if population is None or batch_size is None:
        raise ConfigurationError(
            "draws without replacement need both population= (N, all samples) and batch_size= "
            f"(b, samples in a micro-batch), got {population} and {batch_size}"
        )
    if batch_size < 1 or m * batch_size > population:
        raise ConfigurationError(
            f"{m} micro-batches of {batch_size} samples cannot be drawn without replacement from "
            f"{population}. If some samples came twice the draws were with replacement: leave "
            "population= and batch_size= out"
        )
    return m * batch_size / population
