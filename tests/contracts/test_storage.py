"""What a constrained weight survives: copies, conversions, checkpoints, torch's transforms."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import DoubleBackwardError

#: Every way to train a real weight; ``cayley-base`` and ``exprnn`` are options of other names.
VIAS = [
    *("cwy", "tcwy", "householder", "matrix_exp", "exprnn", "cayley", "cayley-base"),
    *("own", "polar", "givens", "rgd-c-c", "rgd-e-qr"),
]
OPTIONS = {"cayley-base": {"via": "cayley", "rebase_every": 1000}}
#: Those that take only frames, and only square matrices (`exprnn` holds frames near I only).
FRAMES, SQUARE = {"tcwy"}, {"exprnn", "cayley", "cayley-base", "givens"}
LAYERS = ("tall", "wide", "conv", "square")
#: Buffers that a way keeps beside the coordinates, and those that flip the row of a square weight.
BUFFERS = {"matrix_exp": {"0.base"}, "cayley-base": {"0.base"}}
FLIPPING = {"cwy", "householder", "exprnn", "cayley", "givens"}
#: How many originals a complex weight has where it is not one.
COMPLEX_ORIGINALS = {"cwy": 2, "householder": 2, "givens": 3}


def constrained_layers(via):
    """The layers of `Net` that are constrained, in order."""
    return LAYERS[:3] if via in FRAMES else LAYERS[3:] if via in SQUARE else LAYERS


class Net(nn.Module):
    """A tall, a wide, a convolutional and a square weight, each constrained where `via` can."""

    def __init__(self, via: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.via = via
        self.tall = nn.Linear(4, 6, dtype=dtype)
        self.wide = nn.Linear(6, 4, dtype=dtype)
        self.conv = nn.Conv1d(2, 3, 5, dtype=dtype)
        self.square = nn.Linear(4, 4, dtype=dtype)
        for name in constrained_layers(via):
            stiefel.orthogonal(getattr(self, name), **OPTIONS.get(via, {"via": via}))

    def forward(self, x):
        y = self.square(self.wide(self.tall(x)))
        return y.sum() + self.conv(torch.ones(1, 2, 6, dtype=x.dtype, device=x.device)).sum()


def weights(model):
    return [getattr(c.module, c.name).detach().clone() for c in stiefel.constraints(model)]


def assert_constrained(model):
    found = list(stiefel.constraints(model))
    assert [c.path for c in found] == [f"{name}.weight" for name in constrained_layers(model.via)]
    for c in found:
        c.check()
        assert isinstance(c.leaves[0], stiefel.ManifoldParameter) == c.is_riemannian
        point = c.point
        bound = stiefel.tolerance(point.dtype, *point.shape[-2:])
        assert stiefel.geometry.orthonormality_residual(point).max() < bound


@contextlib.contextmanager
def future_flag(name):
    setter = getattr(torch.__future__, f"set_{name}")
    setter(True)
    try:
        yield
    finally:
        setter(False)


@pytest.fixture(params=VIAS)
def via(request):
    return request.param


def buffers_of(via, square):
    return BUFFERS.get(via, set()) | ({"0.flip"} if square and via in FLIPPING else set())


def test_state_dict_keys(via):
    constrained, expected = constrained_layers(via), set()
    for layer in LAYERS:
        expected |= {f"{layer}.bias"}
        if layer not in constrained:
            expected |= {f"{layer}.weight"}
            continue
        kept = {"original", *buffers_of(via, layer == "square")}
        expected |= {f"{layer}.parametrizations.weight.{key}" for key in kept}
    assert set(Net(via).state_dict()) == expected


@pytest.mark.parametrize("via", [via for via in VIAS if via not in FRAMES])
def test_state_dict_keys_of_a_complex_weight(via):
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    state = stiefel.orthogonal(layer, **OPTIONS.get(via, {"via": via})).state_dict()
    count = COMPLEX_ORIGINALS.get(via, 1)
    originals = {f"original{i}" for i in range(count)} if count > 1 else {"original"}
    kept = originals | buffers_of(via, square=True)
    assert set(state) == {"bias", *(f"parametrizations.weight.{key}" for key in kept)}


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(via, assign):
    source, target = Net(via), Net(via)
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    target.load_state_dict(state, assign=assign)
    assert_constrained(target)
    for a, b in zip(weights(source), weights(target), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("target", ["cwy", "rgd-c-c"])
def test_a_checkpoint_of_another_chart_is_refused_with_the_remedy(target):
    source = "rgd-c-c" if target == "cwy" else "cwy"
    other, model = Net(source), Net(target)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"holds coordinates of chart.*stiefel\.convert"):
        model.load_state_dict(other.state_dict(), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    chart = {"rgd-c-c": "riemannian", "cwy": "cwy"}[source]
    stiefel.convert(model, via=chart)
    model.load_state_dict(other.state_dict())
    stiefel.convert(model, via=target)
    for a, b in zip(weights(other), weights(model), strict=True):
        assert (a - b).abs().max() < 1e-6


def test_points_are_not_read_as_coordinates_when_metadata_is_lost():
    points, model = Net("rgd-c-c"), Net("tcwy")
    stripped = {k: v for k, v in points.state_dict().items() if not k.startswith("square")}
    with pytest.raises(RuntimeError, match=r"chart 'riemannian'.*stiefel\.convert"):
        model.load_state_dict(stripped, strict=False)
    model.load_state_dict(dict(model.state_dict().items()))


def test_an_off_manifold_checkpoint_is_refused_before_anything_is_copied():
    model = Net("rgd-c-c")
    before = weights(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["tall.parametrizations.weight.original"] *= 1.01
    with pytest.raises(RuntimeError, match=r"off the manifold.*2\.01e-02.*polar_factor"):
        model.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
def test_a_checkpoint_of_the_other_determinant_is_refused(via):
    layers = [
        stiefel.orthogonal(nn.Linear(4, 4), via=via, init="haar", determinant=d) for d in (1, -1)
    ]
    with pytest.raises(RuntimeError, match=r"determinant -1.*determinant=\+1"):
        layers[0].load_state_dict(layers[1].state_dict())
    assert torch.linalg.det(layers[0].weight).item() == pytest.approx(1, abs=1e-5)


def test_a_checkpoint_with_a_zero_reflection_is_refused():
    layer = stiefel.orthogonal(nn.Linear(4, 4))
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    state["parametrizations.weight.original"][:, 1] = 0
    with pytest.raises(RuntimeError, match=r"1 reflection vector.*\[1\].*nonzero"):
        layer.load_state_dict(state)


def test_a_rounded_checkpoint_is_polished():
    model = Net("rgd-c-c", torch.float64)
    rounded = {k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(rounded)
    assert_constrained(model)


@pytest.mark.parametrize("via", ["matrix_exp", "cayley-base"])
def test_a_spoilt_base_is_refused_before_anything_is_copied(via):
    model = Net(via)
    before = weights(model)
    state = {k: v.clone() for k, v in Net(via).state_dict().items()}
    state["square.parametrizations.weight.0.base"] *= 1.01
    with pytest.raises(RuntimeError, match=r"base in the checkpoint is off.*2\.01e-02"):
        model.load_state_dict(state)
    assert torch.equal(before[-1], weights(model)[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_base_is_loaded_in_its_own_precision(dtype):
    """A model made on meta, before any base was set, takes the complex or float64 base whole."""
    source = stiefel.orthogonal(nn.Linear(5, 5, dtype=dtype), via="matrix_exp")
    with torch.device("meta"):
        layer = stiefel.orthogonal(nn.Linear(5, 5, dtype=dtype), via="matrix_exp")
    layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.weight, source.weight)


def test_to_meta_and_back(via):
    model = Net(via)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = weights(model)
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert_constrained(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(model), strict=True))


def test_made_on_meta_then_loaded_with_assign(via):
    source = Net(via)
    with torch.device("meta"):
        model = Net(via)
    model.load_state_dict(source.state_dict(), assign=True)
    assert_constrained(model)
    assert all(torch.equal(a, b) for a, b in zip(weights(source), weights(model), strict=True))


@pytest.mark.parametrize(
    "flag", ["overwrite_module_params_on_conversion", "swap_module_params_on_conversion"]
)
def test_conversion_flags(via, flag):
    model = Net(via)
    expected = weights(model)
    with future_flag(flag):
        model.double()
        assert_constrained(model)
        model.load_state_dict(model.state_dict())
        assert_constrained(model)
    for a, b in zip(expected, weights(model), strict=True):
        assert (a - b).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_to_dtype(via, dtype):
    model = Net(via).to(dtype)
    assert all(w.dtype == dtype for w in weights(model))
    assert_constrained(model)
    model.to(torch.float64)
    assert_constrained(model)


def test_deepcopy_is_independent(via):
    model = Net(via)
    twin = copy.deepcopy(model)
    assert_constrained(twin)
    expected = weights(model)
    for c in stiefel.constraints(twin):
        c.assign(stiefel.geometry.haar(*c.point.shape[-2:]))
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(model), strict=True))
    assert not torch.equal(weights(twin)[0], expected[0])


@pytest.mark.parametrize("mode", ["autocast", "medium"])
def test_reduced_precision_never_reaches_a_weight(via, mode):
    model = Net(via)
    expected = weights(model)
    if mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = weights(model)
    else:
        torch.set_float32_matmul_precision("medium")
        try:
            got = weights(model)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert got[0].dtype == torch.float32


def test_functional_call_and_grad(via, device):
    model = Net(via, torch.float64).to(device)
    x = torch.randn(3, 4, dtype=torch.float64, device=device)
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p):
        return torch.func.functional_call(model, p, (x,)).square().sum()

    got = torch.func.grad(loss)(parameters)
    loss_now = model(x).square().sum()
    wanted = torch.autograd.grad(loss_now, list(model.parameters()))
    for (key, _), g in zip(model.named_parameters(), wanted, strict=True):
        assert (got[key] - g).abs().max() < 1e-10, key


def test_vmap_over_an_ensemble(via, device):
    models = [Net(via, torch.float64).to(device) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 4, dtype=torch.float64, device=device)

    def run(p, b):
        return torch.func.functional_call(models[0], (p, b), (x,))

    together = torch.func.vmap(run)(parameters, buffers)
    alone = torch.stack([m(x) for m in models])
    assert (together - alone).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_fullgraph(via, device):
    model = Net(via).to(device)
    x = torch.randn(3, 4, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(x)
    got = compiled(x)
    assert (got - expected).abs() < 1e-5
    leaves = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert (a - b).abs().max() < 1e-4


def test_export(via):
    model = Net(via)
    x = torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    assert (program.module()(x) - model(x)).abs() < 1e-5


@pytest.mark.parametrize("via", ["cwy", "tcwy", "householder", "own"])
def test_second_derivative_is_refused_clearly(via):
    layer = stiefel.orthogonal(nn.Linear(3, 5, dtype=torch.float64), via=via)
    (leaf,) = next(stiefel.constraints(layer)).leaves
    (g,) = torch.autograd.grad(layer.weight.square().sin().sum(), leaf, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        g.square().sum().backward()


def _ddp_worker(rank, path, vias, queue):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    agree = {via: _train_together(rank, via) for via in vias}
    if rank == 0:
        queue.put(agree)
    dist.destroy_process_group()


def _train_together(rank, via):
    """Whether the processes, each with data of its own, have one set of weights at the end."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(via))
    torch.manual_seed(rank + 1)
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).backward()
        optimizer.step()
    total = torch.stack([w.double().sum() for w in weights(model)])
    gathered = [torch.zeros_like(total) for _ in range(2)]
    dist.all_gather(gathered, total)
    return bool(torch.equal(*gathered))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ddp_on_two_gloo_processes(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    vias = ("cwy", "matrix_exp", "givens", "rgd-c-c")
    torch.multiprocessing.spawn(_ddp_worker, (str(tmp_path / "store"), vias, queue), nprocs=2)
    assert queue.get() == dict.fromkeys(vias, True)
