"""The video task: what moves, moving digits, their baseline and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stiefel.errors import ConfigurationError, UnknownNameError
from stiefel.experiments import sprites
from stiefel.experiments.mnist_files import Mnist
from stiefel.experiments.sprites import MnistDigits, Shapes
from stiefel.experiments.streams import EVALUATION, random_bits
from stiefel.experiments.tasks import MovingDigits


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
