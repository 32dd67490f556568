"""The rollout against a loop that does one step at a time under plain autograd."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from stiefel import errors, geometry
from stiefel.models import NONLINEARITIES, ModReLU, _walk, activate, modrelu, rollout
from stiefel.models.rollout import _backward_op, _forward_op
from stiefel.operators import CompactWY, Dense

FORMS = ("dense", "compact", "compact-flipped")


def sigma(name: str, z: Tensor, beta: Tensor | None) -> Tensor:
    """The nonlinearities once more, from their definitions."""
    if name == "modrelu":
        assert beta is not None
        size = z.abs() + beta
        return torch.where(size > 0, z.sign() * size, torch.zeros_like(z))
    if name == "leaky_relu":
        return torch.where(z > 0, z, 0.1 * z)
    return {"abs": torch.abs, "relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z}[
        name
    ](z)


@dataclass
class Case:
    """A recurrence with everything that it can have; None where it has not."""

    x: Tensor
    kernel: Tensor
    vectors: Tensor  # (H, H) for the dense form: the matrix; (H, L): reflections
    form: str
    nonlinearity: str
    bias: Tensor | None = None
    beta: Tensor | None = None
    h0: Tensor | None = None
    lengths: Tensor | None = None
    reverse: bool = False

    def recurrent(self) -> Tensor | CompactWY:
        if self.form == "dense":
            return self.vectors
        U = self.vectors / self.vectors.norm(dim=0)
        S = 0.5 * torch.eye(U.shape[1]).to(U) + torch.triu(U.mT @ U, 1)
        Y = torch.linalg.solve(S.mT, U.mT).mT  # Q = I - Y U^T
        flip = self.vectors.new_tensor(-1.0) if self.form == "compact-flipped" else None
        return CompactWY(U, Y, flip=flip)

    def leaves(self) -> list[Tensor]:
        every = (self.x, self.kernel, self.vectors, self.bias, self.beta, self.h0)
        return [leaf for leaf in every if leaf is not None and leaf.requires_grad]

    def run(self) -> tuple[Tensor, Tensor]:
        return rollout(
            self.x,
            self.kernel,
            self.recurrent(),
            nonlinearity=self.nonlinearity,
            bias=self.bias,
            beta=self.beta,
            h0=self.h0,
            lengths=self.lengths,
            reverse=self.reverse,
        )

    def loop(self) -> tuple[Tensor, Tensor]:
        """One sequence and one step at a time."""
        recurrent = self.recurrent()
        Q = recurrent if isinstance(recurrent, Tensor) else recurrent.to_dense()
        length, batch, _ = self.x.shape
        rows: list[list[Tensor]] = []
        ends = []
        for i in range(batch):
            steps = length if self.lengths is None else int(self.lengths[i])
            zero = Q.new_zeros(len(Q))
            h = zero if self.h0 is None else self.h0[i]
            row = [zero] * length
            for t in reversed(range(steps)) if self.reverse else range(steps):
                z = Q @ h + self.kernel @ self.x[t, i]
                h = sigma(self.nonlinearity, z if self.bias is None else z + self.bias, self.beta)
                row[t] = h
            rows.append(row)
            ends.append(h)
        return torch.stack([torch.stack(row) for row in rows], dim=1), torch.stack(ends)


def make(
    form: str,
    nonlinearity: str,
    device: torch.device | str = "cpu",
    *,
    T: int = 11,
    B: int = 3,
    K: int = 4,
    H: int = 7,
    bias: bool = False,
    h0: bool = False,
    lengths: bool = False,
    reverse: bool = False,
) -> Case:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        tensor = torch.randn(*shape, dtype=torch.float64, device=device) * scale
        return tensor.requires_grad_()

    if form == "dense":
        vectors = geometry.haar(H, H, dtype=torch.float64, device=device).requires_grad_()
    else:
        vectors = draw(H, 3)
    return Case(
        draw(T, B, K),
        draw(H, K),
        vectors,
        form,
        nonlinearity,
        bias=draw(H) if bias else None,
        beta=draw(H, scale=0.3) if nonlinearity == "modrelu" else None,
        h0=draw(B, H) if h0 else None,
        lengths=torch.tensor([T, 1, T // 2 + 1][:B], device=device) if lengths else None,
        reverse=reverse,
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 steps, so that short sequences cross several of them, one not full."""
    monkeypatch.setattr(_walk, "_LEAST_STEPS", 1)
    monkeypatch.setattr(_walk, "_MOST_STEPS", 4)


def assert_same_gradients(case: Case, bound: float = 1e-11) -> None:
    mine, theirs = case.run(), case.loop()
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < bound
    weights = [torch.randn_like(a) for a in mine]
    losses = {
        "states and end": lambda out: (out[0] * weights[0]).sum() + (out[1] * weights[1]).sum(),
        "end only": lambda out: (out[1] * weights[1]).sum(),
        "states only": lambda out: out[0].square().sum(),
    }
    for name, loss in losses.items():
        found = torch.autograd.grad(loss(mine), case.leaves(), retain_graph=True)
        expected = torch.autograd.grad(loss(theirs), case.leaves(), retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= bound * (1 + b.abs().max()), name


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_values_and_gradients_equal_a_loop(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    for h0, lengths, reverse in itertools.product((False, True), repeat=3):
        case = make(
            form, nonlinearity, device, bias=h0 != lengths, h0=h0, lengths=lengths, reverse=reverse
        )
        assert_same_gradients(case)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_chunk_size_does_not_matter(
    reverse: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = make("dense", "tanh", device, T=70, bias=True, h0=True, reverse=reverse)
    results = []
    for steps in (1, 7, 32, 70):
        monkeypatch.setattr(_walk, "_LEAST_STEPS", 1)
        monkeypatch.setattr(_walk, "_MOST_STEPS", steps)
        states, last = case.run()
        grads = torch.autograd.grad(states.square().sum() + last.sum(), case.leaves())
        results.append((states, last, *grads))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_default_chunks_are_between_8_and_32_steps() -> None:
    assert _walk.chunk_steps(1000, 1, 128) == 32
    assert _walk.chunk_steps(1000, 128, 190) == 21
    assert _walk.chunk_steps(1000, 128, 4096) == 8
    assert _walk.chunk_steps(5, 1, 1) == 5


@pytest.mark.parametrize("T", [1, 2])
def test_the_shortest_sequences(T: int, device: torch.device) -> None:
    for reverse in (False, True):
        assert_same_gradients(make("dense", "abs", device, T=T, h0=True, reverse=reverse))
        assert_same_gradients(make("compact", "abs", device, T=T, reverse=reverse))


# ------------------------------------------------------------------------ what torch does to it


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_gradcheck(nonlinearity: str, form: str) -> None:
    case = make(form, nonlinearity, T=3, B=2, K=2, H=7, bias=True, h0=True)
    names = [
        n for n in ("x", "kernel", "vectors", "bias", "beta", "h0") if getattr(case, n) is not None
    ]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return replace(case, **dict(zip(names, leaves, strict=True))).run()

    assert torch.autograd.gradcheck(function, case.leaves(), fast_mode=form != "dense")


@pytest.mark.parametrize("nonlinearity", ["tanh", "abs", "modrelu"])
def test_only_needed_gradients_are_returned(nonlinearity: str) -> None:
    case = make("compact", nonlinearity, bias=True, h0=True)
    every = torch.autograd.grad(case.run()[0].square().sum(), case.leaves())
    for at, leaf in enumerate(case.leaves()):
        for other in case.leaves():
            other.grad = None
        detached = [other for other in case.leaves() if other is not leaf]
        for other in detached:
            other.requires_grad_(False)
        case.run()[0].square().sum().backward()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, every[at], atol=1e-13)
        for other in detached:
            assert other.grad is None
            other.requires_grad_()


def test_func_grad_vmap_and_their_compositions() -> None:
    case = make("dense", "abs")
    x, V, Q = (leaf.detach() for leaf in case.leaves())
    xs = torch.randn(4, *x.shape, dtype=torch.float64)
    h0 = torch.randn(3, 7, dtype=torch.float64)

    def loss(x: Tensor, V: Tensor, Q: Tensor) -> Tensor:
        states, last = rollout(x, V, Q, nonlinearity="abs", h0=h0)
        return states.pow(3).sum() + last.sum()

    leaves = [t.clone().requires_grad_() for t in (x, V, Q)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(x, V, Q), expected, strict=True):
        assert torch.equal(a, b)

    # over inputs alone, over everything, over another place
    looped = torch.stack([loss(x, V, Q) for x in xs])
    assert torch.allclose(torch.vmap(loss, in_dims=(0, None, None))(xs, V, Q), looped)
    everything = torch.vmap(loss)(xs, V.expand(4, -1, -1), Q.expand(4, -1, -1))
    assert torch.allclose(everything, looped)
    moved = torch.vmap(loss, in_dims=(3, None, None))(xs.movedim(0, 3), V, Q)
    assert torch.allclose(moved, looped)

    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))
    single = [torch.func.grad(loss, argnums=(0, 1, 2))(x, V, Q) for x in xs]
    for k, stacked in enumerate(per_sample(xs, V, Q)):
        assert torch.allclose(stacked, torch.stack([grads[k] for grads in single]))
    outer = torch.func.grad(lambda Q: torch.vmap(lambda x: loss(x, V, Q))(xs).sum())(Q)
    assert torch.allclose(outer, sum(grads[2] for grads in single))


def test_vmap_over_inputs_with_lengths() -> None:
    case = make("compact", "tanh", lengths=True)
    xs = torch.randn(2, *case.x.shape, dtype=torch.float64)
    states, last = torch.vmap(lambda x: replace(case, x=x).run())(xs)
    for i, x in enumerate(xs):
        single = replace(case, x=x).run()
        assert torch.allclose(states[i], single[0])
        assert torch.allclose(last[i], single[1])


# Tracing an autograd.Function, torch instantiates one itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("nonlinearity", "form"), [("modrelu", "dense"), ("abs", "compact-flipped")]
)
def test_compile_fullgraph(nonlinearity: str, form: str) -> None:
    torch.compiler.reset()
    case = make(form, nonlinearity, h0=True, lengths=True)
    names = [n for n in ("x", "kernel", "vectors", "beta", "h0") if getattr(case, n) is not None]

    def loss(*leaves: Tensor) -> Tensor:
        states, last = replace(case, **dict(zip(names, leaves, strict=True))).run()
        return states.square().sum() + last.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*case.leaves()), case.leaves())
    expected = torch.autograd.grad(loss(*case.leaves()), case.leaves())
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


class _Exported(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kernel = torch.nn.Parameter(case.kernel.detach())
        self.weight = torch.nn.Parameter(case.vectors.detach())

    def forward(self, x: Tensor) -> Tensor:
        return rollout(x, self.kernel, self.weight, nonlinearity="abs")[0]


def test_export_with_dynamic_length_and_batch() -> None:
    case = make("dense", "abs")
    module = _Exported(case)
    sizes = {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B", min=2)}
    program = torch.export.export(module, (case.x.detach(),), dynamic_shapes=(sizes,))
    other = torch.randn(40, 5, 4, dtype=torch.float64)
    assert torch.equal(program.module()(other), module(other))


def test_a_second_derivative_is_a_clear_error() -> None:
    case = make("dense", "tanh")
    (slope,) = torch.autograd.grad(case.run()[0].sum(), case.vectors, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="first derivative only"):
        slope.sum().backward()
    x, V, Q = (leaf.detach() for leaf in case.leaves())

    def loss(Q: Tensor) -> Tensor:
        return rollout(x, V, Q, nonlinearity="tanh")[0].sum()

    with pytest.raises(errors.DoubleBackwardError):
        torch.func.grad(lambda Q: torch.func.grad(loss)(Q).sum())(Q)


@pytest.mark.parametrize("lengths", [False, True])
def test_operators_are_registered_correctly(lengths: bool) -> None:
    case = make("compact", "abs", h0=True, bias=True, lengths=lengths)
    U, Y = (factor.detach() for factor in (case.recurrent().U, case.recurrent().Y))
    plain = [case.x.detach(), case.kernel.detach(), case.bias.detach(), U, Y, None, None]
    problem = (*plain, case.h0.detach(), case.lengths, "abs", False)
    torch.library.opcheck(_forward_op, problem)
    states, last, negative = _forward_op(*problem)
    needs = [True, True, True, True, True, False, True]
    torch.library.opcheck(_backward_op, (states, last, states, negative, needs, *problem))


# -------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("form", ["dense", "compact"])
@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
def test_saved_memory_is_the_hidden_sequence(nonlinearity: str, form: str) -> None:
    """And one byte an entry for abs; nothing more."""
    T, B, H = 50, 4, 16
    case = make(form, nonlinearity, T=T, B=B, H=H, bias=True, h0=True)
    recurrent = case.recurrent()
    factors = [recurrent] if isinstance(recurrent, Tensor) else [recurrent.U, recurrent.Y]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states, _ = rollout(
            case.x,
            case.kernel,
            Dense(recurrent) if isinstance(recurrent, Tensor) else recurrent,
            nonlinearity=nonlinearity,
            bias=case.bias,
            beta=case.beta,
            h0=case.h0,
        )
    for given in (*case.leaves(), *factors):
        saved.pop(given.untyped_storage().data_ptr(), None)
    assert states.untyped_storage().data_ptr() in saved
    sign = T * B * H if nonlinearity == "abs" else 0
    assert sum(saved.values()) == 8 * T * B * H + sign


# ------------------------------------------------------------------------------ what it preserves


@pytest.mark.parametrize("nonlinearity", ["abs", "modrelu", "identity"])
@pytest.mark.parametrize("form", FORMS)
def test_the_norm_is_kept_over_a_thousand_steps(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    case = make(form, nonlinearity, device, T=1000, B=2, h0=True)
    x = torch.zeros_like(case.x)
    beta = None if case.beta is None else torch.zeros_like(case.beta)
    states, _ = replace(case, x=x, beta=beta).run()
    assert case.h0 is not None
    assert (states.norm(dim=-1) - case.h0.norm(dim=-1)).abs().max() < 1e-10


@pytest.mark.parametrize("nonlinearity", ["abs", "identity"])
@pytest.mark.parametrize("form", FORMS)
def test_the_norm_of_the_gradient_is_constant(
    nonlinearity: str, form: str, device: torch.device
) -> None:
    """|dC/dh_t| by way of the input: V = I, so that dC/dx_t = dC/dz_t."""
    case = make(form, nonlinearity, device, T=300, K=7, H=7)
    case = replace(case, kernel=torch.eye(7, dtype=torch.float64, device=device))
    _, last = case.run()
    (slope,) = torch.autograd.grad(last.square().sum(), case.x)
    norms = slope.norm(dim=-1)
    assert (norms / norms[-1] - 1).abs().max() < 1e-8


def test_modrelu_is_exactly_zero_at_zero() -> None:
    beta = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    x = torch.zeros(3, 1, 2, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(2, dtype=torch.float64)
    states, _ = rollout(x, eye, eye, nonlinearity="modrelu", beta=beta)
    assert torch.equal(states, torch.zeros_like(states))
    for slope in torch.autograd.grad(states.sum(), (x, beta)):
        assert torch.equal(slope, torch.zeros_like(slope))
    z = torch.tensor([[0.0, 0.0], [0.3, 0.3], [-2.0, -2.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.0], [0.8, 0.0], [-2.5, -1.5]], dtype=torch.float64)
    assert torch.allclose(modrelu(z, beta), expected)
    assert torch.equal(activate("modrelu", z, beta), modrelu(z, beta))


def test_modrelu_module_and_activate() -> None:
    module = ModReLU(1000, generator=torch.Generator().manual_seed(0))
    assert module.beta.abs().max() <= 0.01
    assert module.beta.std() > 0.005
    z = torch.randn(5, 1000)
    assert torch.equal(module(z), modrelu(z, module.beta))
    beta = torch.randn(1000)
    for name in NONLINEARITIES:
        assert torch.allclose(activate(name, z, beta), sigma(name, z, beta))
    with pytest.raises(errors.UnknownNameError, match="modrelu"):
        activate("softplus", z)


def test_padding_is_never_read(device: torch.device) -> None:
    for reverse in (False, True):
        case = make("dense", "relu", device, h0=True, lengths=True, reverse=reverse)
        clean = case.run()
        expected = torch.autograd.grad(clean[0].sum() + clean[1].sum(), case.leaves())
        assert case.lengths is not None
        past = torch.arange(len(case.x), device=device)[:, None] >= case.lengths
        with torch.no_grad():
            case.x[past] = torch.nan
        dirty = case.run()
        found = torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), case.leaves())
        assert torch.equal(dirty[0], clean[0])
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(clean[0][past], torch.zeros_like(clean[0][past]))


def test_reduced_precision_does_not_reach_the_recurrence(device: torch.device) -> None:
    case = make("dense", "tanh", device, T=20, B=64, H=64, K=64)
    x, V, Q = (leaf.detach().float().requires_grad_() for leaf in case.leaves())

    def results() -> list[Tensor]:
        states, _ = rollout(x, V, Q, nonlinearity="tanh")
        return [states, *torch.autograd.grad(states.square().sum(), (x, V, Q))]

    expected = results()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        under_autocast = results()
    torch.set_float32_matmul_precision("medium")
    try:
        under_medium = results()
    finally:
        torch.set_float32_matmul_precision("highest")
    for found in (under_autocast, under_medium):
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


def test_16_bit_tensors_are_lifted_to_float32(device: torch.device) -> None:
    case = make("dense", "tanh", device)
    x, V, Q = (leaf.detach().bfloat16() for leaf in case.leaves())
    states, last = rollout(x, V, Q, nonlinearity="tanh")
    assert states.dtype == last.dtype == torch.bfloat16
    lifted, _ = rollout(x.float(), V.float(), Q.float(), nonlinearity="tanh")
    assert torch.equal(states, lifted.bfloat16())


def test_layouts_do_not_matter(device: torch.device) -> None:
    case = make("dense", "abs", device, lengths=True)
    turned = case.x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    other = replace(
        case,
        x=turned,
        kernel=case.kernel.detach().mT.contiguous().mT.requires_grad_(),
        vectors=case.vectors.detach().mT.contiguous().mT.requires_grad_(),
    )
    results = []
    for each in (case, other):
        states, _ = each.run()
        # an expanded and a transposed gradient
        for out in (states.sum(), states.transpose(0, 1).contiguous().square().sum()):
            results.append(torch.autograd.grad(out, each.leaves(), retain_graph=True))
    for a, b in zip(results[:2], results[2:], strict=True):
        for left, right in zip(a, b, strict=True):
            assert torch.allclose(left, right, atol=1e-13)


# -------------------------------------------------------------------------------- bad and empty


def test_an_empty_batch_gives_empty_results_and_zero_gradients() -> None:
    for lengths in (None, torch.zeros(0, dtype=torch.int64)):
        x = torch.randn(5, 0, 4, requires_grad=True)
        V, Q = torch.randn(7, 4, requires_grad=True), torch.randn(7, 7, requires_grad=True)
        states, last = rollout(x, V, Q, nonlinearity="abs", lengths=lengths)
        assert states.shape == (5, 0, 7)
        assert last.shape == (0, 7)
        dx, dV, dQ = torch.autograd.grad(states.sum() + last.sum(), (x, V, Q))
        assert dx.shape == x.shape
        assert not dV.any()
        assert not dQ.any()


def test_errors_teach() -> None:
    x, V, Q = torch.randn(5, 3, 4), torch.randn(7, 4), torch.randn(7, 7)
    with pytest.raises(errors.ShapeError, match="at least one step"):
        rollout(x[:0], V, Q)
    with pytest.raises(errors.ShapeError, match=r"\(T, B, 4\)"):
        rollout(x[..., :3], V, Q)
    with pytest.raises(errors.ShapeError, match=r"\(7, 7\)"):
        rollout(x, V, Q[:, :6])
    with pytest.raises(errors.ShapeError, match=r"h0 of shape \(3, 7\)"):
        rollout(x, V, Q, h0=torch.zeros(2, 7))
    with pytest.raises(errors.ShapeError, match="beta"):
        rollout(x, V, Q, beta=torch.zeros(6))
    with pytest.raises(errors.UnknownNameError, match="leaky_relu"):
        rollout(x, V, Q, nonlinearity="leaky-relu")
    with pytest.raises(errors.ConfigurationError, match="beta"):
        rollout(x, V, Q, nonlinearity="tanh", beta=torch.zeros(7))
    with pytest.raises(errors.DtypeError, match="float64"):
        rollout(x.double(), V, Q)
    with pytest.raises(errors.DtypeError, match="float64"):
        rollout(x, V, Q.double())
    with pytest.raises(errors.DtypeError, match="floating point"):
        rollout(x.long(), V, Q)
    for lengths in ([1, 2, 6], [0, 1, 2]):
        with pytest.raises(errors.ShapeError, match="from 1 to T = 5"):
            rollout(x, V, Q, lengths=lengths)
    with pytest.raises(errors.ShapeError, match="3 sequences"):
        rollout(x, V, Q, lengths=[1, 2])
