"""`ConvNERU`: the bound on norms and adjoints, its kernels, their starts and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefel
from stiefel import errors, geometry
from stiefel.models import ConvNERU, box_
from stiefel.models.activations import NONLINEARITIES, activate
from stiefel.models.convolution import convolve
from tests.frame_networks import TALL_VIAS, dense_convolution, disturb, double, frames

PADDING_MODES = ("zeros", "circular")
SIZES = [3, 5, (3, 1), (2, 4), 4]


def layer(rnn: nn.Module) -> Any:
    layers: Any = rnn.layers
    return layers[0]


def kernel_of(rnn: nn.Module) -> Tensor:
    return layer(rnn).recurrent.weight


def flattened(kernel: Tensor) -> Tensor:
    """Khat `(kh kw in, out)`: rows by tap and then by input channel."""
    return kernel.permute(2, 3, 1, 0).flatten(0, 2)


def train(rnn: nn.Module, steps: int = 5) -> list[float]:
    optimizer = stiefel.optim.build(rnn, lr=1e-2, lr_orthogonal=1e-2, lr_riemannian=1.0)
    x, losses = frames(4, 2, 2, 6, 6), []
    for _ in range(steps):
        optimizer.zero_grad()
        output, _ = rnn(x)
        loss = (output - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --------------------------------------------------------------------------------- the norm theorem


@pytest.mark.parametrize("via", TALL_VIAS)
def test_the_kernel_is_on_the_manifold_and_never_raises_a_norm(via: str) -> None:
    rnn = double(ConvNERU, via=via)
    start = kernel_of(rnn).detach().clone()
    losses = train(rnn, 8)
    assert losses[-1] < losses[0]
    K = kernel_of(rnn).detach()
    assert (K - start).abs().max() > 1e-3
    omega = 3 * flattened(K)
    assert omega.shape == (27, 3)
    assert (omega.mT @ omega - torch.eye(3)).abs().max() < 1e-10
    for mode in PADDING_MODES:
        gain = torch.linalg.matrix_norm(dense_convolution(K, 6, mode), ord=2)
        assert 0.1 < gain <= 1 + 1e-10


@pytest.mark.parametrize("padding_mode", PADDING_MODES)
@pytest.mark.parametrize("size", SIZES)
def test_the_convolution_is_its_dense_operator_of_norm_at_most_one(
    size: int | tuple[int, int], padding_mode: str
) -> None:
    pixels = 12 if size == 3 else 6
    K = kernel_of(double(ConvNERU, kernel_size=size)).detach()
    dense = dense_convolution(K, pixels, padding_mode)
    G = frames(2, 3, pixels, pixels)
    expected = (G.flatten(1) @ dense.mT).view_as(G)
    assert (convolve(G, K, None, padding_mode) - expected).abs().max() < 1e-12
    assert torch.linalg.matrix_norm(dense, ord=2) <= 1 + 1e-10
    # and without the scale 1 / sqrt(kh kw) it does raise norms
    scale = (K.shape[-1] * K.shape[-2]) ** 0.5
    assert torch.linalg.matrix_norm(scale * dense, ord=2) > 1.1


@pytest.mark.parametrize("size", SIZES)
def test_the_box_kernel_keeps_constant_images(size: int | tuple[int, int]) -> None:
    K = kernel_of(double(ConvNERU, kernel_size=size, init="box", via="rgd-c-c")).detach()
    kh, kw = K.shape[-2:]
    Q = K[:, :, 0, 0] * kh * kw
    assert (K * kh * kw - Q[:, :, None, None]).abs().max() < 1e-12
    assert (Q.mT @ Q - torch.eye(3)).abs().max() < 1e-12
    flat = frames(2, 3, 1, 1).expand(2, 3, 6, 6)
    moved = convolve(flat, K, None, "circular")
    assert (moved.norm() - flat.norm()).abs() < 1e-10
    gain = torch.linalg.matrix_norm(dense_convolution(K, 6, "circular"), ord=2)
    assert (gain - 1).abs() < 1e-10
    haar = kernel_of(double(ConvNERU, kernel_size=size)).detach()
    assert convolve(flat, haar, None, "circular").norm() < 0.95 * flat.norm()


def test_even_sizes_pad_like_torch() -> None:
    K, x = frames(3, 2, 4, 2), frames(2, 2, 7, 6)
    with pytest.warns(UserWarning, match="even kernel"):
        expected = nn.functional.conv2d(x, K, padding="same")
    assert (convolve(x, K, None, "zeros") - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("nonlinearity", "padding_mode"),
    [
        *(("relu", "zeros"), ("abs", "zeros"), ("tanh", "zeros")),
        *(("leaky_relu", "circular"), ("identity", "circular")),
    ],
)
def test_states_grow_at_most_by_their_input(nonlinearity: str, padding_mode: str) -> None:
    """|G_t| <= |G_{t-1}| + |B| + |K_in X_t| over a thousand steps."""
    rnn = double(ConvNERU, nonlinearity=nonlinearity, padding_mode=padding_mode, init="box")
    disturb(rnn)
    x = frames(1000, 1, 2, 5, 5)
    with torch.no_grad():
        states, _ = rnn(x)
        drive = layer(rnn).input
        pushed = convolve(x.squeeze(1), drive.weight, None, padding_mode).flatten(1).norm(dim=1)
    norms = states.flatten(1).norm(dim=1)
    before = torch.cat([norms.new_zeros(1), norms[:-1]])
    bias = 5 * drive.bias.norm()
    assert (norms <= before + bias + pushed + 1e-10).all()
    assert norms[-1] > 1


def _norms_and_adjoints(rnn: nn.Module, steps: int) -> tuple[Tensor, Tensor]:
    """|G_t| and |dC/dG_t| of a rollout from a random G_0, C linear in the last state.

    With K_in the identity U_t = X_t, so the gradient of X_t is delta_t = sigma'(z_t) dC/dG_t, and
    dC/dG_{t-1} = K^T delta_t.
    """
    with torch.no_grad():
        nn.init.dirac_(layer(rnn).input.weight)
    x = torch.zeros(steps, 1, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    start, last = frames(1, 1, 3, 5, 5), frames(1, 1, 3, 5, 5)
    states, _ = rnn(x, start)
    (delta,) = torch.autograd.grad((states[-1] * last).sum(), x)
    dense = dense_convolution(kernel_of(rnn).detach(), 5, rnn.padding_mode)
    adjoints = torch.cat([delta.flatten(1) @ dense, last.flatten(2).flatten(1)])
    norms = torch.cat([start.flatten(1), states.detach().flatten(1)]).norm(dim=1)
    return norms, adjoints.norm(dim=1)


@pytest.mark.parametrize(
    ("nonlinearity", "via"), [("abs", "cwy"), ("identity", "rgd-c-c"), ("relu", "own")]
)
@pytest.mark.parametrize("padding_mode", PADDING_MODES)
def test_adjoints_are_bounded_where_an_unconstrained_kernel_explodes(
    nonlinearity: str, via: str, padding_mode: str
) -> None:
    shape: dict[str, Any] = {"nonlinearity": nonlinearity, "padding_mode": padding_mode}
    shape |= {"in_channels": 3, "bias": False, "init": "box"}
    norms, adjoints = _norms_and_adjoints(double(ConvNERU, via=via, **shape), 1000)
    assert norms.shape == adjoints.shape == (1001,)
    assert (norms[1:] <= norms[:-1] + 1e-10).all()
    assert (adjoints[:-1] <= adjoints[1:] + 1e-10).all()
    if padding_mode == "circular" and nonlinearity != "relu":
        assert min(norms[-1], adjoints[0]) > 1e-2  # what a constant image has does not vanish
    unbounded = double(ConvNERU, kernel="free", **shape)
    with torch.no_grad():
        kernel_of(unbounded).mul_(3)  # the factor 1/q left out
    norms, adjoints = _norms_and_adjoints(unbounded, 100)
    if nonlinearity != "relu":
        assert min(norms[-1], adjoints[0]) > 1e20


# ----------------------------------------------------------------------------------- the recurrence


@pytest.mark.parametrize("padding_mode", PADDING_MODES)
@pytest.mark.parametrize("nonlinearity", ["relu", "abs"])
def test_the_recurrence_is_its_formula(nonlinearity: str, padding_mode: str) -> None:
    rnn = double(ConvNERU, nonlinearity=nonlinearity, padding_mode=padding_mode)
    disturb(rnn)
    x, G = frames(6, 2, 2, 5, 5), frames(2, 3, 5, 5)
    output, last = rnn(x, G.unsqueeze(0))
    recurrent = dense_convolution(kernel_of(rnn), 5, padding_mode)
    of_input = dense_convolution(layer(rnn).input.weight, 5, padding_mode)
    bias = layer(rnn).input.bias.repeat_interleave(25)
    flat = G.flatten(1)
    for t in range(6):
        z = flat @ recurrent.mT + bias + x[t].flatten(1) @ of_input.mT
        flat = activate(nonlinearity, z)
        assert (output[t].flatten(1) - flat).abs().max() < 1e-12
    assert (last.squeeze(0).flatten(1) - flat).abs().max() < 1e-12


def test_without_a_kernel_states_do_not_know_the_past() -> None:
    rnn = double(ConvNERU, kernel="zeros")
    assert not list(stiefel.constraints(rnn))
    assert sum(p.numel() for p in rnn.parameters()) == 9 * 2 * 3 + 3
    x = frames(5, 2, 2, 6, 6)
    x.requires_grad_()
    output, _ = rnn(x, frames(1, 2, 3, 6, 6))
    (past,) = torch.autograd.grad(output[3].square().sum(), x)
    assert past[3].abs().max() > 0
    assert not past[:3].any()
    assert torch.equal(output[3], rnn(x[3:4])[0][0])


def test_the_kernel_is_read_once_per_sequence_and_never_kept() -> None:
    rnn = double(ConvNERU, num_layers=2)
    asked = []
    for each in stiefel.constraints(rnn):
        assert each.storage is not None
        each.storage.register_forward_hook(lambda *_: asked.append(1))
    x = frames(7, 2, 2, 5, 5)
    with torch.no_grad():
        before, _ = rnn(x)
        assert len(asked) == 2
        for each in stiefel.constraints(rnn):
            each.leaves[0].copy_(torch.randn_like(each.leaves[0]))
        assert not torch.allclose(before, rnn(x)[0])


# ----------------------------------------------------------------------------- starts and gradients


def test_the_point_moves_by_the_gradient_over_q() -> None:
    """dL/dOmega = (1/q) dL/dKhat, and RGD moves Omega by it."""
    rnn = double(ConvNERU, via="rgd-c-c", kernel_size=5)
    (constraint,) = stiefel.constraints(rnn)
    x, weights = frames(3, 1, 2, 6, 6), frames(3, 6, 6)
    (rnn(x)[1] * weights).sum().backward()
    (leaf,) = constraint.leaves
    omega, found = leaf.detach().as_subclass(Tensor).clone(), leaf.grad
    assert torch.allclose(omega, 5 * flattened(kernel_of(rnn)).detach(), atol=1e-12)

    K = kernel_of(rnn).detach().clone().requires_grad_()
    G, drive = None, layer(rnn).input
    for frame in x:
        z = drive(frame)
        G = torch.relu(z if G is None else z + convolve(G, K, None, "zeros"))
    assert G is not None
    (of_kernel,) = torch.autograd.grad((G * weights).sum(), K)
    assert found is not None
    assert torch.allclose(found, flattened(of_kernel) / 5, atol=1e-12)

    optimizer = stiefel.optim.build(rnn, lr=0.0, lr_riemannian=0.1)
    optimizer.step()
    gradient = geometry.canonical_gradient(omega, flattened(of_kernel) / 5)
    moved = geometry.cayley_retraction(omega, -0.1 * gradient)
    assert torch.allclose(constraint.point, moved, atol=1e-12)


@pytest.mark.parametrize("via", ["cwy", "polar", "rgd-c-c"])
def test_one_start_whichever_way_the_kernel_is_trained(via: str) -> None:
    def start(**options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return kernel_of(double(ConvNERU, generator=generator, **options)).detach()

    assert torch.allclose(start(via=via), start(via=None), atol=1e-12)
    assert torch.allclose(start(via=via), start(kernel="free", init="haar"), atol=1e-12)
    assert torch.allclose(start(via=via, init="box"), start(kernel="free", init="box"), atol=1e-12)


def test_free_kernels() -> None:
    glorot = double(ConvNERU, kernel="free", hidden_channels=16)
    limit = (6 / (2 * 9 * 16)) ** 0.5
    K = kernel_of(glorot)
    assert 0.95 * limit < K.abs().max() <= limit
    assert abs(K.std() - limit / 3**0.5) < 0.03 * limit
    assert not list(stiefel.constraints(glorot))
    filled = double(ConvNERU, kernel="free", init=nn.init.ones_)
    assert torch.equal(kernel_of(filled), torch.ones(3, 3, 3, 3, dtype=torch.float64))
    start = kernel_of(glorot).detach().clone()
    assert train(glorot)[-1] < train(glorot, 1)[0] + 1e-12
    assert not torch.equal(kernel_of(glorot), start)


def test_a_chart_that_cannot_hold_haar_takes_its_own_start() -> None:
    rnn = double(ConvNERU, via="own", center=True)
    K = kernel_of(rnn)
    assert flattened(K).sum(0).abs().max() < 1e-12
    with pytest.raises(errors.RepresentationError):
        double(ConvNERU, via="own", center=True, init="box")


@pytest.mark.parametrize("size", [1, 3, (3, 2)])
def test_counts(size: int | tuple[int, int]) -> None:
    taps = {1: 1, 3: 9, (3, 2): 6}[size]
    for options in ({"via": "cwy"}, {"via": "rgd-c-c"}, {"kernel": "free"}, {"kernel": "zeros"}):
        f_in, f, kernel = 2, 3, 0 if options.get("kernel") == "zeros" else taps * 3 * 3
        for more, count in (
            ({}, taps * f_in * f + kernel + f),
            ({"bias": False, "num_layers": 2}, taps * (f_in + f) * f + 2 * kernel),
            ({"learnable_h0": True}, taps * f_in * f + kernel + f + f),
        ):
            rnn = double(ConvNERU, kernel_size=size, **options, **more)
            assert rnn.expected_parameters() == count
    rnn = double(ConvNERU, kernel_size=size)
    assert rnn.expected_parameters(effective=True) == taps * 3 * (2 + 3) + 3 - 6
    free = double(ConvNERU, kernel_size=size, kernel="free")
    assert free.expected_parameters(effective=True) == taps * 3 * (2 + 3) + 3


def test_errors_teach() -> None:
    with pytest.raises(errors.ConfigurationError, match=r"\|sigma\(x\)\| <= \|x\|"):
        ConvNERU(2, 3, nonlinearity="modrelu")
    with pytest.raises(errors.UnknownNameError, match="abs, identity"):
        ConvNERU(2, 3, nonlinearity="sigmoid")
    with pytest.raises(errors.UnknownNameError, match="'stiefel'"):
        ConvNERU(2, 3, kernel="stiefl")
    with pytest.raises(errors.UnknownNameError, match="circular"):
        ConvNERU(2, 3, padding_mode="reflect")
    with pytest.raises(errors.ConfigurationError, match="kernel='stiefel'"):
        ConvNERU(2, 3, kernel="free", retraction="qr")
    with pytest.raises(errors.ConfigurationError, match="no recurrent kernel"):
        ConvNERU(2, 3, kernel="zeros", init="haar")
    with pytest.raises(errors.ConfigurationError, match="'haar', 'box'"):
        ConvNERU(2, 3, init="glorot")
    with pytest.raises(errors.UnknownNameError, match="glorot"):
        ConvNERU(2, 3, init="boxes")
    with pytest.raises(errors.ConfigurationError, match="weight_dtype"):
        ConvNERU(2, 3, weight_dtype=torch.bfloat16)
    for size in (0, (3,), (3, 3, 3), 2.5):
        with pytest.raises(errors.ConfigurationError, match="positive integer"):
            ConvNERU(2, 3, size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.ConfigurationError, match="hidden_channels"):
        ConvNERU(2, 0)
    with pytest.raises(errors.DtypeError, match="real floating point"):
        ConvNERU(2, 3, dtype=torch.complex64)
    with pytest.raises(errors.ShapeError, match="at least 2 x 2 pixels"):
        ConvNERU(2, 3, 5, padding_mode="circular")(torch.randn(1, 1, 2, 1, 4))
    with pytest.raises(errors.ShapeError, match="multiple of p"):
        box_(torch.empty(7, 3))
    assert "modrelu" in NONLINEARITIES


def test_counts_follow_the_kernel() -> None:
    """With few reflections there are fewer numbers, and a released kernel is a free one."""
    few = ConvNERU(2, 3, 3, via="cwy", reflections=2)
    assert few.expected_parameters() == 9 * 2 * 3 + 3 + 2 * 9 * 3
    assert few.expected_parameters(effective=True) == few.expected_parameters()
    rnn = ConvNERU(2, 3, 3)
    held = rnn.expected_parameters()
    assert rnn.expected_parameters(effective=True) == held - 6
    stiefel.release(rnn)
    assert rnn.expected_parameters(effective=True) == rnn.expected_parameters() == held
