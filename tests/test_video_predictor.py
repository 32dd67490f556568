"""`VideoPredictor`: its shape, causality, states, lengths, counts, and what torch does to it."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefel
from stiefel import errors
from stiefel.models import ConvLSTM, ConvNERU, VideoPredictor

CELLS: dict[str, Callable[..., VideoPredictor]] = {
    "neru": lambda **o: small(cell="convneru", via="cwy", **o),
    "neru-riemannian": lambda **o: small(cell="convneru", via="rgd-e-qr", **o),
    "neru-free": lambda **o: small(cell="convneru", kernel="free", init="haar", **o),
    "lstm": lambda **o: small(cell="convlstm", norm="instance", **o),
}


def small(**options: Any) -> VideoPredictor:
    shape = {"widths": (3, 4), "head_channels": 3, "kernel_size": 3, "dtype": torch.float64}
    return VideoPredictor(2, **{**shape, **options})


def video(*shape: int) -> Tensor:
    return torch.rand(*(shape or (4, 3, 2, 8, 12)), dtype=torch.float64)


@pytest.fixture(params=CELLS)
def make(request: pytest.FixtureRequest) -> Any:
    return CELLS[request.param]


def test_a_prediction_sees_the_frames_before_it_only(make: Any) -> None:
    model, x = make(), video().requires_grad_()
    prediction = model(x)
    assert prediction.shape == x.shape
    assert ((prediction > 0) & (prediction < 1)).all()
    (seen,) = torch.autograd.grad(prediction[2, 1].square().sum(), x)
    touched = seen.flatten(2).abs().amax(2) > 0
    expected = torch.zeros(4, 3, dtype=torch.bool)
    expected[:3, 1] = True
    assert torch.equal(touched, expected)


def test_frame_by_frame_is_the_same(make: Any) -> None:
    model, x = make(), video()
    expected, ends = model.predict(x)
    state = None
    for t in range(4):
        prediction, state = model.predict(x[t : t + 1], state)
        assert torch.allclose(prediction[0], expected[t], atol=1e-12)
    assert state is not None
    assert len(state) == len(ends) == 3
    alone, _ = model.predict(x[:, 1])
    assert torch.allclose(alone, expected[:, 1], atol=1e-12)
    turned = make(batch_first=True)
    turned.load_state_dict(model.state_dict())
    assert torch.allclose(turned(x.transpose(0, 1)).transpose(0, 1), expected, atol=1e-12)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_ragged_lengths_are_the_videos_alone(make: Any) -> None:
    model, x = make(), video()
    lengths = [4, 1, 2]
    for b, length in enumerate(lengths):
        x[length:, b] = torch.nan
    prediction = model(x, lengths)
    for b, length in enumerate(lengths):
        assert torch.allclose(prediction[:length, b], model(x[:length, b]), atol=1e-12)
        assert not prediction[length:, b].any()
    prediction.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_one_frame_and_an_empty_batch(make: Any) -> None:
    model = make()
    assert model(video(1, 1, 2, 8, 4)).shape == (1, 1, 2, 8, 4)
    empty = model(video(3, 0, 2, 8, 8))
    assert empty.shape == (3, 0, 2, 8, 8)
    empty.sum().backward()


def test_the_past_matters_unless_the_kernel_is_zero() -> None:
    x, other = video(), video()
    other[-1] = x[-1]
    for options, memory in (({}, True), ({"kernel": "zeros"}, False)):
        model = small(**options)
        same = torch.allclose(model(x)[-1], model(other)[-1], atol=1e-12)
        assert same != memory


@pytest.mark.parametrize("via", ["cwy", "matrix_exp", "rgd-e-qr"])
def test_trains_every_way_and_is_the_same_function(via: str) -> None:
    model, x = small(via=via), video(4, 2, 2, 8, 8)
    optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2, lr_riemannian=1.0)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x)[:-1] - x[1:]).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = model(x)
    stiefel.convert(model, "rgd-c-c" if via == "cwy" else "cwy")
    assert torch.allclose(model(x), expected, atol=1e-10)
    for constraint in stiefel.constraints(model):
        omega = constraint.point
        eye = torch.eye(omega.shape[-1], dtype=omega.dtype)
        assert (omega.mT @ omega - eye).abs().max() < 1e-10


def test_all_blocks_are_swapped_together() -> None:
    def made(channels: int, hidden: int, **options: Any) -> nn.Module:
        return ConvNERU(channels, hidden, dtype=torch.float64, **options)

    for options, kind in (({"cell": "convlstm"}, ConvLSTM), ({"cell": made}, ConvNERU)):
        model = VideoPredictor(2, widths=(3, 4, 5), dtype=torch.float64, **options)
        cells: Any = model.cells
        assert [type(cell) for cell in cells] == [kind] * 5
        assert [cell.hidden_channels for cell in cells] == [3, 4, 5, 4, 3]
        assert model(video(2, 1, 2, 16, 8)).shape == (2, 1, 2, 16, 8)


@pytest.mark.parametrize("cell", ["convneru", "convlstm"])
def test_counts(cell: str) -> None:
    model = VideoPredictor(1, cell=cell)
    convolutions = 25 * 32 + 9 * (32 * 64 + 64 * 128) + 9 * (128 * 64 + 128 * 32 + 64 * 32)
    norms = 2 * (32 + 64 + 128 + 64 + 32 + 32)
    head = 9 * 32 * 32 + 2 * 32 + 9 * 32 + 1
    widths = (32, 64, 128, 64, 32)
    gates = 4 if cell == "convlstm" else 1
    blocks = sum(gates * (25 * 2 * f * f + f) for f in widths)
    assert model.expected_parameters() == convolutions + norms + head + blocks
    fewer = sum(f * (f + 1) // 2 for f in widths) if cell == "convneru" else 0
    assert model.expected_parameters(effective=True) == model.expected_parameters() - fewer


def test_autocast(device: torch.device) -> None:
    model = VideoPredictor(2, widths=(3, 4), kernel_size=3).to(device)
    x = video().float().to(device)
    expected = model(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        prediction = model(x)
    assert (prediction - expected).abs().max() < 0.05
    prediction.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_fullgraph(make: Any) -> None:
    torch.compiler.reset()
    model, x = make(), video(2, 2, 2, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    prediction, expected = compiled(x), model(x)
    assert torch.allclose(prediction, expected, atol=1e-12)
    leaves = list(model.parameters())
    slopes = torch.autograd.grad(prediction.square().sum(), leaves)
    for a, b in zip(slopes, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def _train_together(rank: int, path: str, queue: Any) -> None:
    """Whether two processes, each with videos of its own, have one set of weights at the end."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    agree = {}
    for name, make in CELLS.items():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(make())
        torch.manual_seed(rank + 1)
        optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(video(2, 2, 2, 8, 8)).square().mean().backward()
            optimizer.step()
        total = torch.stack([p.detach().sum() for p in model.parameters()])
        gathered = [torch.zeros_like(total) for _ in range(2)]
        dist.all_gather(gathered, total)
        agree[name] = bool(torch.equal(*gathered))
    if rank == 0:
        queue.put(agree)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ddp_on_two_gloo_processes(tmp_path: Path) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_train_together, (str(tmp_path / "store"), queue), nprocs=2)
    assert queue.get() == dict.fromkeys(CELLS, True)


def test_example_video_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parent.parent / "examples" / "video_digits.py"
    example = runpy.run_path(str(path), run_name="example")
    found = example["main"](tmp_path, ["cwy", "rgd-c-c"], iterations=2, held_out=4)
    assert list(found) == ["repeat", "black", "cwy", "rgd-c-c", "convlstm"]
    assert all(0 < distance < 0.6 for distance in found.values())
    assert "drawings of two strokes" in capsys.readouterr().out


def test_videos_of_the_example_move_and_stay_whole(tmp_path: Path) -> None:
    path = Path(__file__).resolve().parent.parent / "examples" / "video_digits.py"
    task = runpy.run_path(str(path), run_name="example")["videos_of"](tmp_path, 4)
    (batch,) = task.evaluation_batches(4, seed=0)
    mass = batch.inputs.sum((2, 3, 4))
    assert torch.allclose(mass, mass[:1].expand_as(mass), rtol=1e-5)
    assert task.baseline > 0.01


def test_functional_call_and_gradients(make: Any) -> None:
    model, x = make(), video()
    leaves = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()

    values = {name: leaf.detach() for name, leaf in leaves.items()}
    slopes = torch.func.grad(loss)(values, x)
    wanted = torch.autograd.grad(model(x).square().sum(), list(leaves.values()))
    for name, slope in zip(leaves, wanted, strict=True):
        assert (slopes[name] - slope).abs().max() < 1e-10


def test_errors_teach() -> None:
    model = small()
    with pytest.raises(errors.ShapeError, match="multiples of 4"):
        model(video(2, 1, 2, 8, 6))
    with pytest.raises(errors.ShapeError, match="more than 4 x 4 pixels"):
        model(video(2, 1, 2, 4, 4))
    with pytest.raises(errors.ShapeError, match="C = 2 channels"):
        model(video(2, 1, 3, 8, 8))
    with pytest.raises(errors.ShapeError, match="T = 0"):
        model(video(0, 1, 2, 8, 8))
    with pytest.raises(errors.ShapeError, match="unbatched"):
        model(video(2, 2, 8, 8), lengths=[2])
    with pytest.raises(errors.ShapeError, match="each of 3 recurrent blocks"):
        model.predict(video(), [None])
    with pytest.raises(errors.DtypeError, match="float64"):
        small(cell=lambda a, b, **_: ConvNERU(a, b, dtype=torch.float64), dtype=torch.float32)(
            video().float()
        )
    with pytest.raises(errors.DtypeError, match=r"frames of torch\.float64"):
        model(video().float())
    with pytest.raises(errors.UnknownNameError, match="convlstm, convneru"):
        VideoPredictor(cell="gru")
    for widths in ((), (3, 0), (2.5,)):
        with pytest.raises(errors.ConfigurationError, match="positive integers"):
            VideoPredictor(widths=widths)  # pyright: ignore[reportArgumentType]
