"""The video task: every method that trains on moving digits, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from stiefel.experiments.methods import METHODS, fitting
from stiefel.experiments.module import Experiment, build_model, orthogonality_error
from stiefel.experiments.options import TrainOptions, make_task, resolve
from stiefel.experiments.tasks import MovingDigits
from tests.small_runs import interrupted_at, results, run

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
    cells: Any = experiment.model.cells
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
    model: Any = build_model(resolve(options, task), task)
    assert model.widths == tuple(3 * 2**k for k in range((16, 32, 64).index(frame_size) + 1))


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


def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    words = ("moving-digits", "--method", "rgd-adam", *TINY)
    assert run(*words, "--output", tmp_path / "whole") == 0
    with interrupted_at(3):
        run(*words, "--output", tmp_path / "parts")
    torch.manual_seed(12345)
    assert run("moving-digits", "--output", tmp_path / "parts", "--resume") == 0
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
