"""The video task: moving digits, their baseline, and every method that trains on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.experiments import sprites
from stiefel.experiments.methods import METHODS, fitting
from stiefel.experiments.mnist_files import Mnist
from stiefel.experiments.module import Experiment, build_model, orthogonality_error
from stiefel.experiments.options import TrainOptions, make_task, resolve
from stiefel.experiments.sprites import MnistDigits, Shapes
from stiefel.experiments.streams import EVALUATION, random_bits
from stiefel.experiments.tasks import MovingDigits
from tests.small_runs import run
from tests.test_resume import Stop, interrupt_at, numbers

METHODS_OF_FRAMES = fitting("frames")
TINY = ["--hidden", "4", "--frame-size", "16", "--frames", "4", "--evaluation-sequences", "6"]
TINY += ["--batch-size", "4", "--iterations", "6", "--checkpoint-every", "2", "--threads", "1"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Images of 16 pixels are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**options) -> MovingDigits:
    return MovingDigits(**{"frames": 4, "frame_size": 16, "evaluation_sequences": 6, **options})


def small_mnist(train: int = 5, test: int = 3) -> Mnist:
    bits = np.random.RandomState(0)
    images = [bits.randint(0, 256, (count, 28, 28)).astype(np.uint8) for count in (train, test)]
    return Mnist(images[0], np.zeros(train, np.uint8), images[1], np.zeros(test, np.uint8))


# ------------------------------------------------------------------------------------- videos


def slow_walk(word: int, frames: int, room: int, unit: int) -> list[list[int]]:
    """A ball in each direction, moved pixel by pixel: it turns where the next pixel is a wall."""
    places = [[0, 0] for _ in range(frames)]
    for axis, half in enumerate((word % 2**32, word // 2**32)):
        speed = unit * [-3, -2, -1, 1, 2, 3][half % 6]
        place, way = (half // 6) % (room + 1), 1 if speed > 0 else -1
        for frame in range(frames):
            places[frame][axis] = place
            for _ in range(abs(speed)):
                if not 0 <= place + way <= room:
                    way = -way
                place += way
    return places


@pytest.mark.parametrize(("frame_size", "unit"), [(16, 1), (32, 1), (64, 2)])
@pytest.mark.parametrize("source", ["shapes", "mnist"])
def test_videos_are_what_a_slow_hand_draws(frame_size: int, unit: int, source: str) -> None:
    images = Shapes() if source == "shapes" else MnistDigits(data=small_mnist())
    frames, size = 12, 7 * frame_size // 16
    words = random_bits(3, 0, 0, 3 * 2 * 2).reshape(3, 2, 2)
    found = sprites.videos(images, words, frames=frames, frame_size=frame_size, held_out=False)
    wanted = torch.zeros(frames, 3, 1, frame_size, frame_size)
    for row, digits in enumerate(words):
        for look, walk in digits:
            image = images.draw(np.array([look]), size, held_out=False)[0]
            for frame, (y, x) in enumerate(slow_walk(int(walk), frames, frame_size - size, unit)):
                window = wanted[frame, row, 0, y : y + size, x : x + size]
                window.copy_(torch.maximum(window, image))
    assert torch.equal(found, wanted)
    assert ((found[1:] - found[:-1]).abs().sum((2, 3, 4)) > 0).all()  # nothing stands still


def test_shapes_are_two_strokes() -> None:
    images = Shapes().draw(random_bits(0, 0, 0, 200), 14, held_out=False)
    assert images.shape == (200, 14, 14)
    assert 0 <= images.min() < 1e-3
    assert images.max() <= 1
    assert (images.amax((1, 2)) > 0.6).all()  # the dot of an end is never far from a pixel
    assert len({tuple(image.flatten().tolist()) for image in images}) == 200
    # ends at (2, 2), (11, 11) and (2, 11), (11, 2), coordinate by coordinate: a cross
    ends = [0, 0, 255, 255, 0, 255, 255, 0]
    word = sum(value << (8 * place) for place, value in enumerate(ends))
    cross = Shapes().draw(np.array([word], dtype=np.uint64), 14, held_out=False)[0]
    assert torch.allclose(cross, cross.T)
    assert torch.allclose(cross.flip(1), cross.flip(0), atol=1e-5)
    assert cross[2, 2] == cross[11, 11] == cross[2, 11] == 1
    assert cross[2, 6] < 1e-3


def test_digits_of_mnist_are_those_of_the_right_set() -> None:
    data = small_mnist()
    source, words = MnistDigits(data=data), random_bits(0, 0, 0, 400)
    for held_out, images in ((False, data.train_images), (True, data.test_images)):
        drawn = source.draw(words, 28, held_out=held_out)
        known = [torch.from_numpy(image.astype(np.float32)) / 255 for image in images]
        counts = [int((drawn == image).all((1, 2)).sum()) for image in known]
        assert sum(counts) == 400
        share = 400 / len(known)
        assert all(abs(count - share) < 5 * share**0.5 for count in counts)
    small_ones = source.draw(words[:2], 14, held_out=False)
    large = source.draw(words[:2], 28, held_out=False)
    assert small_ones[1, 3, 5] == large[1, 6:8, 10:12].max()


# --------------------------------------------------------------------------------------- task


def test_shapes_and_alignment() -> None:
    task = small(digits=1)
    batch = task.train_batch(0, 5, seed=0)
    assert batch.inputs.shape == batch.targets.shape == (3, 5, 1, 16, 16)
    assert torch.equal(batch.inputs[1:], batch.targets[:-1])
    assert batch.rows == 5
    assert task.length == 3


def test_baseline_is_the_slow_l1_of_repeating_the_last_frame() -> None:
    task = small()
    words = random_bits(0, EVALUATION, 0, 6 * 2 * 2).reshape(6, 2, 2)
    video = sprites.videos(Shapes(), words, frames=4, frame_size=16, held_out=True)
    total = 0.0
    for t in range(3):
        for row in range(6):
            for y in range(16):
                for x in range(16):
                    ahead, now = video[t + 1, row, 0, y, x], video[t, row, 0, y, x]
                    total += abs(ahead.item() - now.item())
    assert task.baseline == pytest.approx(total / (3 * 6 * 16 * 16), rel=1e-6)
    (batch,) = task.evaluation_batches(10, seed=0)
    assert float(task.loss(batch.inputs, batch)) == pytest.approx(task.baseline, rel=1e-5)


def test_evaluation_is_the_same_for_every_seed_and_never_trained_on() -> None:
    task = small()
    (one,), (other,) = task.evaluation_batches(10, seed=0), task.evaluation_batches(10, seed=7)
    assert torch.equal(one.inputs, other.inputs)

    def looks(batch) -> set[bytes]:
        return {video.numpy().tobytes() for video in batch.inputs.transpose(0, 1).contiguous()}

    trained = set().union(*(looks(task.train_batch(step, 8, seed=0)) for step in range(20)))
    assert len(trained) == 160
    assert not trained & looks(one)


def test_scores() -> None:
    """Repeating has no changing pixel right, the truth all of them, black those that go off."""
    task = small()
    (batch,) = task.evaluation_batches(10, seed=0)
    answers = []
    for prediction, right in ((batch.inputs, 0), (batch.targets, 1)):
        scores = task.scores(prediction, batch.targets)
        assert scores.correct == right * scores.answers
        assert float(scores.loss_sum / scores.loss_count) == pytest.approx(
            task.baseline * (1 - right), rel=1e-9
        )
        answers.append(int(scores.answers))
    lit = batch.targets > 0.5
    assert answers == [int((lit[1:] != lit[:-1]).sum())] * 2
    black = task.scores(torch.zeros_like(batch.targets), batch.targets)
    assert int(black.correct) == int((lit[:-1] & ~lit[1:]).sum()) > 0


@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_loss_over_shards_is_the_loss_of_the_batch(world: int) -> None:
    task = small()
    whole = task.train_batch(1, 5, seed=0)
    prediction = torch.rand_like(whole.targets).double()
    parts = [
        task.loss(
            prediction[:, rank::world],
            task.train_batch(1, 5, seed=0, rank=rank, world=world),
            world=world,
        )
        for rank in range(world)
    ]
    expected = (prediction - whole.targets).abs().mean()
    assert float(task.loss(prediction, whole)) == pytest.approx(float(expected), rel=1e-12)
    assert float(torch.stack(parts).mean()) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"frames": 2}, ConfigurationError, "at least 3 frames"),
        ({"frame_size": 28}, ConfigurationError, "16, 32, 64"),
        ({"digits": 0}, ConfigurationError, "at least 1 digit, got 0"),
        ({"evaluation_sequences": 0}, ConfigurationError, "at least 1 evaluation"),
        ({"source": "kth"}, UnknownNameError, "mnist, shapes"),
        ({"source": "shapes", "data_dir": "x"}, ConfigurationError, "leave one of the two out"),
    ],
)
def test_refusals(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small(**options)


def test_it_says_what_moves() -> None:
    assert small().describe() == "moving-digits, 2 generated shapes, 4 frames of 16 x 16"
    of_mnist = small(sprites=MnistDigits(data=small_mnist()), digits=1)
    assert of_mnist.describe() == "moving-digits, 1 digits of MNIST, 4 frames of 16 x 16"
    assert (small().source, of_mnist.source) == ("shapes", "mnist")


def test_images_of_ones_own() -> None:
    class Boxes(sprites.Sprites):
        plural = "boxes"

        def draw(self, words: sprites.Words, size: int, *, held_out: bool) -> torch.Tensor:
            return torch.ones(len(words), size, size)

    task = small(sprites=Boxes())
    assert task.source == "Boxes"
    assert task.describe() == "moving-digits, 2 boxes, 4 frames of 16 x 16"
    assert set(task.train_batch(0, 2, seed=0).inputs.unique().tolist()) == {0.0, 1.0}


def test_digits_of_the_real_mnist(data_dir: Path) -> None:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no folder mnist in {data_dir}")
    task = MovingDigits(data_dir=data_dir, evaluation_sequences=20)
    assert task.source == "mnist"
    assert 0.05 < task.baseline < 0.12
    assert task.train_batch(0, 2, seed=0).inputs.max() > 0.9


# ------------------------------------------------------------------------------------ methods


def experiment_of(name: str) -> Experiment:
    options = TrainOptions(
        "moving-digits",
        method=name,
        hidden=4,
        frame_size=16,
        frames=4,
        evaluation_sequences=2,
        batch_size=4,
        iterations=5,
    )
    task = make_task(options)
    resolved = resolve(options, task)
    torch.manual_seed(0)
    return Experiment(build_model(resolved, task), task, resolved)


def kernels(experiment: Experiment) -> list[torch.Tensor]:
    cells = experiment.model.cells
    return [cell.layers[0].recurrent.weight.detach().clone() for cell in cells]


@pytest.fixture(scope="module")
def trained() -> dict[str, dict]:
    """Eight steps of every method on one batch."""
    found = {}
    for name in METHODS_OF_FRAMES:
        experiment = experiment_of(name)
        optimizer = experiment.configure_optimizers()
        batch = experiment.task.train_batch(0, 4, seed=0)
        has_kernel = name not in ("convlstm", "zeros")
        before = kernels(experiment) if has_kernel else []
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = experiment.task.loss(experiment.model(batch.inputs), batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        after = kernels(experiment) if has_kernel else []
        moved = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
        found[name] = {"losses": losses, "moved": moved, "experiment": experiment}
    return found


@pytest.mark.parametrize("name", METHODS_OF_FRAMES)
def test_every_method_lowers_the_loss(trained: dict[str, dict], name: str) -> None:
    losses = trained[name]["losses"]
    assert losses[1] < losses[0]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", METHODS_OF_FRAMES)
def test_kernels_move_and_stay_on_the_manifold(trained: dict[str, dict], name: str) -> None:
    method, experiment = METHODS[name], trained[name]["experiment"]
    error = orthogonality_error(experiment.model)
    if name in ("convlstm", "zeros"):
        assert np.isnan(error)
        return
    moved = trained[name]["moved"]
    assert all((step > 1e-6) == method.trained for step in moved)
    if method.near:
        assert error < 0.5
    elif method.constrained or name == "frozen":
        assert error < 1e-5
    else:
        assert error > 1e-4


def test_methods_with_an_orthogonal_start_start_alike(trained: dict[str, dict]) -> None:
    first = {
        name: result["losses"][0]
        for name, result in trained.items()
        if name not in ("convlstm", "zeros", "glorot-init")
    }
    assert len(first) == 18
    assert list(first.values()) == pytest.approx([first["tcwy"]] * 18, rel=1e-4)
    assert trained["glorot-init"]["losses"][0] != pytest.approx(first["tcwy"], rel=1e-4)


def test_the_published_word_and_ours_are_one_method(trained: dict[str, dict]) -> None:
    assert trained["orth-init"]["losses"] == trained["unconstrained"]["losses"]


def test_all_blocks_are_swapped_together(trained: dict[str, dict]) -> None:
    for name, result in trained.items():
        cells = result["experiment"].model.cells
        if name == "convlstm":
            assert all(type(cell).__name__ == "ConvLSTM" for cell in cells)
        else:
            assert all(cell.via == METHODS[name].via for cell in cells if cell.kernel == "stiefel")
            wanted = {"zeros": "zeros", "glorot-init": "free", "orth-init": "free"}
            assert {cell.kernel for cell in cells} == {wanted.get(name, "stiefel")}


@pytest.mark.parametrize(("name", "remembers"), [("zeros", False), ("tcwy", True)])
def test_zeros_see_one_frame_only(name: str, remembers: bool) -> None:
    model = experiment_of(name).model
    one = small().train_batch(0, 2, seed=0).inputs
    other = small().train_batch(1, 2, seed=0).inputs.clone()
    other[-1] = one[-1]
    with torch.no_grad():
        ours, theirs = model(one), model(other)
    assert torch.allclose(ours[-1], theirs[-1], atol=1e-6) != remembers
    assert not torch.allclose(ours[0], theirs[0], atol=1e-6)


@pytest.mark.parametrize("frame_size", [16, 32, 64])
def test_levels_halve_frames_down_to_eight_pixels(frame_size: int) -> None:
    options = TrainOptions("moving-digits", method="tcwy", hidden=3, frame_size=frame_size)
    task = make_task(options)
    model = build_model(resolve(options, task), task)
    assert model.widths == tuple(3 * 2**k for k in range((16, 32, 64).index(frame_size) + 1))
    assert sum(weight.numel() for weight in model.parameters()) == model.expected_parameters()


@pytest.mark.parametrize("name", METHODS_OF_FRAMES)
def test_the_rule_of_learning_rates(name: str) -> None:
    options = TrainOptions("moving-digits", method=name, frame_size=16, frames=4, hidden=4)
    task = make_task(options)
    found, lr = resolve(options, task), 3e-3
    assert found.lr == lr
    gradient = 100 * lr * 25 / (task.baseline * 3)
    n, p = 25 * 4, 4
    expected = {
        **dict.fromkeys(METHODS, lr / 10),
        **dict.fromkeys(("frozen", "zeros", "convlstm")),
        **dict.fromkeys(("rgd-c-c", "rgd-c-qr", "rgd-e-c", "rgd-e-qr"), gradient),
        **dict.fromkeys(("landing", "pogo"), gradient),
        **dict.fromkeys(("rgd-adam", "riemannian-adam"), (n * p) ** 0.5 * lr / 10),
        "stiefel-muon": n**0.5 * lr / 10,
    }
    assert found.lr_orthogonal == pytest.approx(expected[name])


# ----------------------------------------------------------------------------------- the command


def test_a_run_and_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run("moving-digits", "--method", "tcwy", *TINY, "--output", folder) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("moving-digits, 2 generated shapes, 4 frames of 16 x 16; method tcwy")
    assert "(that of repeating the last frame)" in printed
    found = json.loads((folder / "summary.json").read_text())
    share = found["loss"] / found["baseline"]
    assert f"moving-digits, tcwy: l1 per pixel is {share:.2%} of the baseline" in printed
    assert found["baseline"] == pytest.approx(small().baseline)
    assert 0 <= found["accuracy"] <= 1
    assert found["orthogonality_error"] < 1e-5
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["source"], config["digits"], config["delay"]) == ("shapes", 2, None)
    assert run("--config", folder / "config.yaml", "--output", tmp_path / "again") == 0
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert {**again, "seconds": 0} == {**found, "seconds": 0}
    assert run("moving-digits", "--digits", 1, "--output", folder, "--resume") == 2
    assert "digits was 2, now 1" in capsys.readouterr().err


def test_the_picture_has_the_unit_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = []
    monkeypatch.setattr(
        "stiefel.experiments.training.plot_loss",
        lambda metrics, plot, **rest: labels.append(rest["measure"]),
    )
    assert run("moving-digits", "--method", "zeros", *TINY, "--output", tmp_path / "run") == 0
    words = ("--hidden", 8, "--delay", 3, "--evaluation-sequences", 16, "--iterations", 1)
    assert run("copying", *words, "--output", tmp_path / "copying") == 0
    assert labels == ["l1 per pixel", "cross-entropy, nats"]


@pytest.mark.parametrize("precision", ["64", "bf16-mixed"])
def test_precisions(tmp_path: Path, precision: str) -> None:
    words = ("--method", "rgd-e-qr", "--precision", precision, "--output", tmp_path / "run")
    assert run("moving-digits", *TINY, *words) == 0
    error = json.loads((tmp_path / "run" / "summary.json").read_text())["orthogonality_error"]
    assert error < (1e-12 if precision == "64" else 1e-5)


def test_interrupted_and_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("moving-digits", "--method", "rgd-adam", *TINY)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(Stop):
            run(*words, "--output", tmp_path / "parts")
    torch.manual_seed(12345)
    assert run("moving-digits", "--output", tmp_path / "parts", "--resume") == 0
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
