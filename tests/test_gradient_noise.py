"""Squared gradient norms without bias: planted gradients, and samples drawn without replacement."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

import stiefel
from stiefel.diagnostics import gradient_noise, squared_norm_estimate
from stiefel.errors import ConfigurationError, NonFiniteError, ShapeError


def _deviations(shape: str, d: int) -> torch.Tensor:
    j = torch.arange(1, d + 1, dtype=torch.float64)
    return torch.ones_like(j) if shape == "even" else j**-0.25


def _covered(draw, truth: float, runs: int, **options) -> tuple[float, float]:
    """How often the interval covers the truth, and its mean width."""
    hits, width = 0, 0.0
    for _ in range(runs):
        estimate = squared_norm_estimate(draw(), **options)
        hits += estimate.low <= truth <= estimate.high
        width += estimate.high - estimate.low
    return hits / runs, width / runs


@pytest.mark.parametrize("m", [8, 32])
@pytest.mark.parametrize(("d", "shape"), [(12, "even"), (100, "even"), (100, "uneven")])
@pytest.mark.parametrize("signal", [0.0, 1.0, 30.0])
def test_the_interval_covers_and_is_not_wide(m, d, shape, signal) -> None:
    """Against the oracle t interval: u +- t_(m-1) times the true standard error of u."""
    draws = torch.Generator().manual_seed(1)
    s = _deviations(shape, d)
    direction = torch.randn(d, dtype=torch.float64, generator=draws) * s
    noise = float((s**2).sum()) / m
    gradient = direction * math.sqrt(signal * noise) / direction.norm()

    def draw() -> torch.Tensor:
        return gradient + s * torch.randn(m, d, dtype=torch.float64, generator=draws)

    coverage, width = _covered(draw, float(gradient @ gradient), 1000)
    along, square = float((gradient * s).square().sum()), float((s**4).sum())
    error = math.sqrt(4 * along / m + 2 * square / (m * (m - 1)))
    assert 0.93 <= coverage <= 0.97
    assert width <= 1.2 * 2 * float(stdtrit(m - 1, 0.975)) * error


@pytest.mark.parametrize(
    ("power", "d", "signal", "least", "most", "widest"),
    [
        (0.0, 1, 0.0, 0.92, 0.97, 3.0),
        (0.0, 2, 3.0, 0.93, 0.97, 1.3),
        (1.0, 100, 0.0, 0.92, 0.97, 2.0),
        (1.0, 100, 10.0, 0.97, 1.0, 1.5),
    ],
)
def test_noise_in_few_directions_makes_it_wide_but_not_wrong(
    power, d, signal, least, most, widest
) -> None:
    """Effective dimension tr(C)^2 / tr(C^2) of one to three: the price that the docs state."""
    draws = torch.Generator().manual_seed(4)
    m = 16
    s = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    direction = torch.randn(d, dtype=torch.float64, generator=draws)
    gradient = direction * math.sqrt(signal * float((s**2).sum()) / m) / direction.norm()

    def draw() -> torch.Tensor:
        return gradient + s * torch.randn(m, d, dtype=torch.float64, generator=draws)

    coverage, width = _covered(draw, float(gradient @ gradient), 1000)
    along, square = float((gradient * s).square().sum()), float((s**4).sum())
    error = math.sqrt(4 * along / m + 2 * square / (m * (m - 1)))
    assert least <= coverage <= most
    assert width <= widest * 2 * float(stdtrit(m - 1, 0.975)) * error


@pytest.mark.parametrize(
    ("m", "kind", "least"), [(4, "even", 0.88), (6, "even", 0.91), (8, "loudest", 0.88)]
)
def test_few_micro_batches_cover_less(m: int, kind: str, least: float) -> None:
    """What the docs say of fewer than eight, and of a gradient where the noise is loudest."""
    draws = torch.Generator().manual_seed(5)
    d = 100
    s = torch.arange(1, d + 1, dtype=torch.float64) ** (0.0 if kind == "even" else -0.5)
    gradient = torch.zeros(d, dtype=torch.float64)
    gradient[:10] = s[:10] * math.sqrt(2 * float((s**2).sum()) / m) / s[:10].norm()

    def draw() -> torch.Tensor:
        return gradient + s * torch.randn(m, d, dtype=torch.float64, generator=draws)

    coverage, _ = _covered(draw, float(gradient @ gradient), 1000)
    assert least <= coverage <= 0.97


def test_the_interval_covers_for_heavy_tails_and_without_replacement() -> None:
    """Samples with heavy tails; half of a population in every draw."""
    draws = np.random.default_rng(0)
    samples = draws.standard_t(5, size=(256, 40)) + 0.1
    truth = float((samples.mean(0) ** 2).sum())

    def draw() -> torch.Tensor:
        taken = draws.permutation(256)[:128].reshape(16, 8)
        return torch.from_numpy(samples[taken].mean(1))

    coverage, width = _covered(draw, truth, 1000, population=256, batch_size=8)
    assert 0.93 <= coverage <= 0.97
    naive, wider = _covered(draw, truth, 1000)
    assert naive < 0.93  # too low on average, though wider
    assert wider > 1.1 * width


@pytest.mark.parametrize(("m", "b"), [(2, 2), (3, 1), (2, 3), (6, 1)])
def test_draws_without_replacement_are_unbiased(m: int, b: int) -> None:
    """The mean over every possible draw of m micro-batches of b from 6 samples."""
    draws = torch.Generator().manual_seed(2)
    samples = torch.randn(6, 3, dtype=torch.float64, generator=draws) + 0.3
    mean = samples.mean(0)
    values, floors, errors, plain = [], [], [], []
    for order in itertools.permutations(range(6)):
        g = samples[list(order[: m * b])].reshape(m, b, 3).mean(1)
        estimate = squared_norm_estimate(g, population=6, batch_size=b)
        values.append(estimate.value)
        floors.append(estimate.noise_floor)
        errors.append(float((g.mean(0) - mean).square().sum()))
        plain.append(squared_norm_estimate(g).value)
    truth = float(mean.square().sum())
    scatter = float((samples - mean).square().sum()) / 6
    assert np.mean(values) == pytest.approx(truth, rel=1e-12)
    assert np.mean(floors) == pytest.approx(np.mean(errors), rel=1e-12, abs=1e-15)
    assert np.mean(plain) == pytest.approx(truth - scatter / 5, rel=1e-12)


def test_two_halves_are_the_inner_product() -> None:
    a, b = torch.randn(2, 5, 3, dtype=torch.float64)
    estimate = squared_norm_estimate([a, b])
    assert estimate.value == pytest.approx(float((a * b).sum()), rel=1e-12)
    assert estimate.noise_floor == pytest.approx(float((a - b).square().sum()) / 4, rel=1e-12)
    assert (estimate.low, estimate.high) == (-math.inf, math.inf)
    assert math.isnan(estimate.standard_error)


def test_the_standard_error_is_that_of_the_estimate() -> None:
    """Unbiased for skewed noise as well, and the noise floor is that of the whole batch."""
    draws = torch.Generator().manual_seed(3)
    m, d = 16, 20
    gradient = torch.full((d,), 1.0, dtype=torch.float64)
    values, variances, floors = [], [], []
    for _ in range(4000):
        noise = torch.rand(m, d, dtype=torch.float64, generator=draws)
        estimate = squared_norm_estimate(gradient - noise.log() - 1)
        values.append(estimate.value)
        variances.append(estimate.standard_error**2)
        floors.append(estimate.noise_floor)
    assert np.mean(values) == pytest.approx(20.0, abs=4 * np.std(values) / math.sqrt(4000))
    assert np.mean(variances) == pytest.approx(np.var(values), rel=0.1)
    assert np.mean(floors) == pytest.approx(d / m, rel=0.02)


def test_complex_gradients_are_pairs_of_real_ones() -> None:
    g = torch.randn(8, 4, 3, dtype=torch.complex128)
    assert squared_norm_estimate(g) == squared_norm_estimate(torch.view_as_real(g))


def test_float32_gradients_are_summed_in_float64() -> None:
    g = 1000 + torch.randn(8, 50)
    assert squared_norm_estimate(g) == squared_norm_estimate(g.double())


def test_equal_gradients_have_no_noise() -> None:
    estimate = squared_norm_estimate(torch.ones(6, 4))
    assert estimate.low == estimate.value == estimate.high == 4.0
    assert estimate.noise_floor == 0


@pytest.mark.parametrize(
    ("gradients", "options", "error", "word"),
    [
        (torch.ones(1, 3), {}, ShapeError, "halves"),
        (torch.full((4, 3), math.nan), {}, NonFiniteError, "micro-batches"),
        (torch.ones(4, 3), {"population": 10}, ConfigurationError, "batch_size"),
        (torch.ones(4, 3), {"population": 10, "batch_size": 3}, ConfigurationError, "cannot be"),
        (torch.ones(4, 3), {"confidence": 95}, ConfigurationError, "between 0 and 1"),
    ],
)
def test_refusals_say_what_to_do(gradients, options, error, word) -> None:
    with pytest.raises(error, match=word):
        squared_norm_estimate(gradients, **options)


# ------------------------------------------------------------------------- of a whole model


def _sample_loss(model, x, y):
    return lambda: (model(x) - y).square().sum(-1).mean()


@pytest.mark.parametrize("via", ["cwy", "matrix_exp", "riemannian"])
def test_gradient_noise_of_a_model_is_that_of_its_point_gradients(via) -> None:
    """Against gradients in closed form, for every weight and for both together."""
    torch.manual_seed(0)
    first = stiefel.orthogonal(torch.nn.Linear(5, 5, bias=False), via=via)
    second = stiefel.orthogonal(torch.nn.Linear(5, 3), via="own")
    model = torch.nn.Sequential(first, second).double()
    x, y = torch.randn(6, 4, 5).double(), torch.randn(6, 4, 3).double()
    losses = [_sample_loss(model, *pair) for pair in zip(x, y, strict=True)]
    kept = torch.ones(3, dtype=torch.float64)
    second.bias.grad = kept
    estimates = gradient_noise(model, losses, population=60, batch_size=4)
    assert second.bias.grad is kept
    assert all(p.grad is None for p in model.parameters() if p is not second.bias)

    W, F, b = map(Tensor.detach, (first.weight, second.weight, second.bias))
    gradients = {"0.weight": [], "1.weight": []}
    for inputs, targets in zip(x, y, strict=True):
        out = 2 * (inputs @ W.mT @ F.mT + b - targets) / len(inputs)
        for path, X, G in (
            ("0.weight", W, (out @ F).mT @ inputs),
            ("1.weight", F.mT, (out.mT @ (inputs @ W.mT)).mT),
        ):
            gradients[path].append(G - X @ (X.mT @ G + G.mT @ X) / 2)
    joined = [
        torch.cat([g.flatten() for g in pair]) for pair in zip(*gradients.values(), strict=True)
    ]
    assert list(estimates) == ["0.weight", "1.weight", "model"]
    for path, g in {**gradients, "model": joined}.items():
        want = squared_norm_estimate(g, population=60, batch_size=4)
        for name in ("value", "low", "high", "standard_error", "noise_floor"):
            assert getattr(estimates[path], name) == pytest.approx(getattr(want, name), rel=1e-9)


def test_a_weight_without_a_gradient_is_said() -> None:
    torch.manual_seed(0)
    used = stiefel.orthogonal(torch.nn.Linear(4, 4), via="cwy")
    idle = stiefel.orthogonal(torch.nn.Linear(4, 4), via="cwy")
    model = torch.nn.ModuleDict({"used": used, "idle": idle})
    losses = [lambda x=x: used(x).sin().mean() for x in torch.randn(5, 8, 4)]
    estimates = gradient_noise(model, losses)
    assert math.isnan(estimates["idle.weight"].value)
    assert "no estimate" in str(estimates["idle.weight"])
    assert estimates["model"].missing == "without idle.weight"
    assert estimates["model"].value == estimates["used.weight"].value


def test_refusals_of_models() -> None:
    layer = stiefel.orthogonal(torch.nn.Linear(4, 4), via="cwy")
    x = torch.randn(8, 4)
    with pytest.raises(ConfigurationError, match="at least two losses"):
        gradient_noise(layer, [lambda: layer(x).mean()])
    plain = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigurationError, match=r"stiefel\.orthogonal"):
        gradient_noise(plain, [lambda: plain(x).mean()] * 3)
