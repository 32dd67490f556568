"""The tasks: layouts, baselines, purity of batches, shards, and the MNIST files."""

from __future__ import annotations

import gzip
import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stiefel.errors import ConfigurationError, DataError, UnknownNameError
from stiefel.experiments import mnist_files, streams
from stiefel.experiments.mnist_files import (
    MNIST_FILES,
    IdxFile,
    Mnist,
    load_mnist,
    locate,
    read_idx,
)
from stiefel.experiments.tasks import (
    TASKS,
    Copying,
    MovingDigits,
    PermutedMnist,
    PixelMnist,
    Task,
    pixel_permutation,
)

TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def small_mnist(count: int = 23) -> Mnist:
    bits = np.random.RandomState(0)
    images, labels = bits.randint(0, 256, (count, 28, 28)), bits.randint(0, 10, count)
    tests, answers = bits.randint(0, 256, (7, 28, 28)), bits.randint(0, 10, 7)
    return Mnist(*(array.astype(np.uint8) for array in (images, labels, tests, answers)))


def any_task(name: str) -> Task:
    kinds = {kind.name: kind for kind in (PixelMnist, PermutedMnist)}
    if name == "moving-digits":
        return MovingDigits(frames=4, frame_size=16, evaluation_sequences=7)
    return Copying(delay=7) if name == "copying" else kinds[name](data=small_mnist())


CLASSIFIED = [name for name, task in TASKS.items() if task.network == "sequence"]


# ------------------------------------------------------------------------------- copying


@pytest.mark.parametrize(("layout", "marker"), [("expRNN", 10), ("scoRNN", 9)])
@pytest.mark.parametrize("delay", [1, 5, 100])
def test_copying_layout(layout: str, marker: int, delay: int) -> None:
    batch = Copying(delay, layout).train_batch(3, 16, seed=1)
    tokens, targets = batch.inputs.argmax(-1), batch.targets
    assert batch.inputs.shape == (delay + 20, 16, 10)
    assert targets.shape == (delay + 20, 16)
    assert torch.equal(batch.inputs.sum(-1), torch.ones(delay + 20, 16))
    assert ((tokens[:10] >= 1) & (tokens[:10] <= 8)).all()
    rest = tokens[10:].clone()
    assert (rest[delay + marker - 10] == 9).all()
    rest[delay + marker - 10] = 0
    assert (rest == 0).all()
    assert (targets[:-10] == 0).all()
    assert torch.equal(targets[-10:], tokens[:10])


def test_copying_marker_stands_where_the_first_answer_is_due() -> None:
    tokens = Copying(20).train_batch(0, 1, seed=0).inputs.argmax(-1)[:, 0]
    targets = Copying(20).train_batch(0, 1, seed=0).targets[:, 0]
    first_answer = int(targets.nonzero()[0])
    assert int((tokens == 9).nonzero()) == first_answer == 30
    early = Copying(20, "scoRNN").train_batch(0, 1, seed=0).inputs.argmax(-1)[:, 0]
    assert int((early == 9).nonzero()) == 29


@pytest.mark.parametrize(
    ("delay", "baseline"), [(200, 0.09452), (1000, 0.020387), (2000, 0.010294)]
)
def test_copying_baseline(delay: int, baseline: float) -> None:
    assert Copying(delay).baseline == pytest.approx(baseline, rel=1e-4)


def test_copying_baseline_is_the_loss_of_blanks_and_then_a_guess() -> None:
    task = Copying(30)
    batch = task.train_batch(0, 64, seed=0)
    logits = torch.full((50, 64, 9), -40.0)
    logits[:-10, :, 0] = 40.0
    logits[-10:, :, 1:] = 40.0
    assert float(task.loss(logits, batch)) == pytest.approx(task.baseline, rel=1e-5)


def test_copying_symbols_are_uniform() -> None:
    data = Copying(1).train_batch(0, 20_000, seed=0).targets[-10:]
    counts = torch.bincount(data.flatten(), minlength=9)
    assert counts[0] == 0
    # 200,000 draws of 8 symbols: 25,000 each, with a standard deviation of 148
    assert (counts[1:] - 25_000).abs().max() < 5 * 148
    pairs = torch.bincount((8 * (data[0] - 1) + data[1] - 1), minlength=64)
    assert (pairs - 312.5).abs().max() < 5 * math.sqrt(312.5)


def test_copying_accuracy_counts_the_last_ten_steps_only() -> None:
    task = Copying(5)
    batch = task.train_batch(0, 8, seed=0)
    wrong_blanks = 5.0 * torch.nn.functional.one_hot(batch.targets, 9).float()
    wrong_blanks[:-10] = wrong_blanks[:-10].roll(1, dims=-1)
    scores = task.scores(wrong_blanks, batch.targets)
    assert (int(scores.correct), scores.answers, scores.loss_count) == (80, 80, 8 * 25)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"delay": 0}, ConfigurationError, "delay of at least 1"),
        ({"layout": "uRNN"}, UnknownNameError, "expRNN, scoRNN"),
        ({"evaluation_sequences": 0}, ConfigurationError, "at least 1 evaluation"),
    ],
)
def test_copying_refuses(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Copying(**options)


# ------------------------------------------------------- data keyed by (seed, step), shards


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_pure_function_of_seed_and_step(name: str) -> None:
    task, other = any_task(name), any_task(name)
    first = {step: task.train_batch(step, 5, seed=3) for step in range(12)}
    for step in (11, 2, 7, 0):  # another object, another order, nothing in between
        again = other.train_batch(step, 5, seed=3)
        assert torch.equal(first[step].inputs, again.inputs)
        assert torch.equal(first[step].targets, again.targets)
    assert not torch.equal(first[2].inputs, task.train_batch(2, 5, seed=4).inputs)
    assert not torch.equal(first[2].inputs, first[3].inputs)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("world", [2, 3])
def test_shards_are_disjoint_and_make_up_the_batch(name: str, world: int) -> None:
    task = any_task(name)
    for step in (0, 4):  # of 23 images in batches of 5, step 4 has only 3
        whole = task.train_batch(step, 5, seed=0)
        parts = [task.train_batch(step, 5, seed=0, rank=r, world=world) for r in range(world)]
        assert all(part.rows == whole.rows == whole.inputs.shape[1] for part in parts)
        for rank, part in enumerate(parts):
            assert torch.equal(part.inputs, whole.inputs[:, rank::world])
        assert sum(part.inputs.shape[1] for part in parts) == whole.rows


@pytest.mark.parametrize("name", CLASSIFIED)
def test_the_mean_loss_over_shards_is_the_loss_of_the_batch(name: str) -> None:
    task = any_task(name)
    whole = task.train_batch(4, 5, seed=0)
    shape = (*whole.targets.shape, task.output_size)
    logits = torch.randn(shape, dtype=torch.float64)
    expected = task.loss(logits, whole)
    for world in (2, 4):
        losses = [
            task.loss(
                logits[..., rank::world, :],
                task.train_batch(4, 5, seed=0, rank=rank, world=world),
                world=world,
            )
            for rank in range(world)
        ]
        assert float(torch.stack(losses).mean()) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(
        expected,
        torch.nn.functional.cross_entropy(logits.flatten(end_dim=-2), whole.targets.flatten()),
    )


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_shards_make_up_the_evaluation(name: str) -> None:
    task = any_task(name)
    whole = torch.cat([batch.inputs for batch in task.evaluation_batches(4, seed=0)], 1)
    expected = 1280 if name == "copying" else 7
    assert whole.shape[1] == expected
    rows = [
        batch.inputs.shape[1]
        for rank in range(3)
        for batch in task.evaluation_batches(4, seed=0, rank=rank, world=3)
    ]
    assert sum(rows) == expected


def test_evaluation_sequences_are_never_trained_on() -> None:
    task = Copying(5, evaluation_sequences=256)

    def rows(batch) -> set[tuple[int, ...]]:
        return {tuple(column.tolist()) for column in batch.targets[-10:].T}

    fresh = set().union(*(rows(batch) for batch in task.evaluation_batches(64, seed=0)))
    trained = set().union(*(rows(task.train_batch(step, 128, seed=0)) for step in range(50)))
    assert len(fresh) == 256
    assert len(trained) == 50 * 128
    assert not fresh & trained


def test_streams_differ_by_seed_stream_and_counter() -> None:
    def draw(seed: int, stream: int, counter: int) -> bytes:
        return streams.random_bits(seed, stream, counter, 8).tobytes()

    keys = [(s, t, c) for s in (0, 1, 2**63) for t in (0, 1) for c in (0, 1, 2**40)]
    assert len({draw(*key) for key in keys}) == len(keys)
    first = streams.random_bits(5, 0, 9, 4)
    assert np.array_equal(streams.random_bits(5, 0, 9, 100)[:4], first)
    # Philox 4x64-10 at this key and counter, so that the words never change under our feet
    generator = np.random.Philox(key=[5, 0], counter=[0, 0, 0, 9])
    assert np.array_equal(generator.random_raw(4), first)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_streams_refuse_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ConfigurationError, match="seed"):
        streams.random_bits(seed, 0, 0, 1)


def test_shard_refuses_a_rank_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="rank 2 of 2"):
        streams.shard(2, 2)


# ---------------------------------------------------------------------------- pixel MNIST


def test_an_epoch_sees_every_image_once_and_each_in_another_order() -> None:
    data = small_mnist()
    task = PixelMnist(data=data)
    assert task.steps_per_epoch(5) == 5
    orders = []
    for epoch in range(2):
        batches = [task.train_batch(5 * epoch + k, 5, seed=0) for k in range(5)]
        pixels = torch.cat([batch.inputs[..., 0] for batch in batches], 1).T
        assert pixels.shape == (23, 784)
        found = {tuple(image.tolist()) for image in (pixels * 255).round().long()}
        assert found == {tuple(image.reshape(-1).tolist()) for image in data.train_images}
        orders.append(pixels)
    assert not torch.equal(*orders)


def test_pixels_are_row_by_row_and_in_the_unit_interval() -> None:
    data = small_mnist()
    (batch,) = PixelMnist(data=data).evaluation_batches(10, seed=0)
    assert batch.inputs.shape == (784, 7, 1)
    assert 0 <= float(batch.inputs.min()) <= float(batch.inputs.max()) <= 1
    expected = torch.from_numpy(data.test_images.astype(np.float32)) / 255
    assert torch.equal(batch.inputs[:, :, 0].T.reshape(7, 28, 28), expected)
    assert batch.targets.tolist() == data.test_labels.tolist()


def test_permuted_pixels_are_the_same_pixels_in_the_published_order() -> None:
    order = pixel_permutation()
    assert sorted(order.tolist()) == list(range(784))
    assert np.array_equal(order, np.random.RandomState(92916).permutation(784))
    data = small_mnist()
    (plain,) = PixelMnist(data=data).evaluation_batches(10, seed=0)
    (permuted,) = PermutedMnist(data=data).evaluation_batches(10, seed=0)
    assert torch.equal(permuted.inputs, plain.inputs[torch.from_numpy(order)])
    assert torch.equal(permuted.targets, plain.targets)


def test_mnist_baseline_is_that_of_a_uniform_guess() -> None:
    task = PixelMnist(data=small_mnist())
    batch = task.train_batch(0, 5, seed=0)
    assert float(task.loss(torch.zeros(5, 10), batch)) == pytest.approx(task.baseline)
    assert task.baseline == pytest.approx(2.302585)


# ----------------------------------------------------------------------------- IDX files


def write_idx(path: Path, array: np.ndarray, *, packed: bool = False) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    plain = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(plain) if packed else plain)
    return plain


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(6, 28, 28), (6,)])
def test_idx_round_trip(tmp_path: Path, packed: bool, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape) % 251
    plain = write_idx(tmp_path / "file", array, packed=packed)
    md5 = hashlib.md5(plain).hexdigest()
    assert np.array_equal(read_idx(tmp_path / "file", shape=shape, md5=md5), array)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda plain: plain[:-100], "truncated, "),
        (lambda plain: plain[:10], "declares the shape"),
        (lambda plain: plain + b"x", "bytes of plain IDX"),
        (lambda plain: b"", "magic nothing"),
        (lambda plain: b"\0\0\x0d\3" + plain[4:], "magic 00000d03"),
        (lambda plain: b"\0\0\x08\1" + plain[4:], "magic 00000801"),
        (lambda plain: b"<html>404</html>", "magic 3c68746d"),
        (lambda plain: plain[:7] + b"\7" + plain[8:], r"\(7, 28, 28\)"),
        (lambda plain: plain[:-1] + b"\xff", "MD5"),
        (lambda plain: gzip.compress(plain)[:-20], "whole gzip file"),
        (lambda plain: gzip.compress(plain)[:40] + b"0" * 40, "whole gzip file"),
    ],
)
def test_a_wrong_idx_file_says_what_is_wrong(tmp_path: Path, damage, words: str) -> None:
    path = tmp_path / "images"
    plain = write_idx(path, np.arange(6 * 784).reshape(6, 28, 28) % 251)
    path.write_bytes(damage(plain))
    with pytest.raises(DataError, match=words) as raised:
        read_idx(path, shape=(6, 28, 28), md5=hashlib.md5(plain).hexdigest())
    message = str(raised.value)
    assert str(path) in message
    assert "expected" in message
    assert "got" in message
    assert "Delete the file" in message


def fixture_mnist(monkeypatch: pytest.MonkeyPatch, folder: Path, *, packed: bool) -> Mnist:
    """Writes a small MNIST and makes its shapes and checksums the expected ones."""
    data, expected = small_mnist(), {}
    folder.mkdir(parents=True, exist_ok=True)
    for part, array in data._asdict().items():
        name = MNIST_FILES[part].name
        plain = write_idx(folder / (name + ".gz" * packed), array, packed=packed)
        expected[part] = IdxFile(name, array.shape, "", hashlib.md5(plain).hexdigest())
    monkeypatch.setattr(mnist_files, "MNIST_FILES", expected)
    return data


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "mnist", "MNIST/raw"])
def test_mnist_is_found_in_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool, inside: str
) -> None:
    data = fixture_mnist(monkeypatch, tmp_path / inside, packed=packed)
    for found in (load_mnist(tmp_path), PixelMnist(tmp_path)):
        if isinstance(found, Mnist):
            assert all(np.array_equal(*pair) for pair in zip(found, data, strict=True))
        else:
            assert found.epoch_size == 23
    monkeypatch.setenv("STIEFEL_DATA", str(tmp_path))
    assert np.array_equal(load_mnist().test_labels, data.test_labels)


def test_a_missing_mnist_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-dir") as raised:
        locate(tmp_path, "train-images-idx3-ubyte")
    assert str(tmp_path) in str(raised.value)


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise ValueError("MD5 hash of downloaded file does not match")

    monkeypatch.delenv("STIEFEL_DATA", raising=False)
    monkeypatch.setattr("pooch.retrieve", refuse)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / name)
    with pytest.raises(DataError, match=r"f68b3c2d.*does not match.*--data-dir"):
        load_mnist()


def test_the_real_mnist(data_dir: Path) -> None:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no folder mnist in {data_dir}")
    for file in MNIST_FILES.values():
        packed = (data_dir / "mnist" / f"{file.name}.gz").read_bytes()
        assert hashlib.md5(packed).hexdigest() == file.md5_gz
    data = load_mnist(data_dir)
    assert data.train_images.shape == (60000, 28, 28)
    assert data.test_images.shape == (10000, 28, 28)
    assert data.train_images.dtype == np.uint8
    pixels = data.train_images.reshape(-1) / np.float32(255)
    assert pixels.mean(dtype=np.float64) == pytest.approx(0.13066, abs=5e-6)
    assert pixels.std(dtype=np.float64) == pytest.approx(0.30811, abs=5e-6)
    assert np.bincount(data.train_labels).tolist() == TRAIN_COUNTS
    assert PixelMnist(data=data).steps_per_epoch(128) == 469


def test_a_truncated_real_file_is_refused(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "mnist" / "train-images-idx3-ubyte.gz"
    if not source.is_file():
        pytest.skip(f"no {source}")
    short = tmp_path / source.name
    short.write_bytes(source.read_bytes()[:1_000_000])
    with pytest.raises(DataError, match="whole gzip file"):
        load_mnist(tmp_path)
