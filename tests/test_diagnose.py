"""``stiefel diagnose`` of runs: its figures against independent ones, its page, its words."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stiefel
from stiefel.diagnostics import CSVLogger, NormEstimate
from stiefel.errors import ConfigurationError
from stiefel.experiments.diagnosis import Diagnosis, measure
from stiefel.experiments.diagnosis_answers import answers, stationary
from stiefel.experiments.diagnosis_page import draw_diagnosis
from stiefel.experiments.logs import read_metrics
from stiefel.experiments.saved import SavedRun
from stiefel.models import SequenceModel
from tests.small_diagnoses import MONITORED, OUTPUTS, diagnose, numbers, others, train_tiny
from tests.small_runs import TINY, files, interrupted_at, run

WEIGHT = "rnn.layers.0.recurrent.weight"
PLAIN = ("unconstrained", "lstm")


class Diagnosed(NamedTuple):
    run: Path
    output: Path
    printed: str
    numbers: dict


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Diagnosed]:
    """Tiny runs and their diagnoses, elsewhere."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    for method in (*MONITORED, *PLAIN):
        folder, output = train_tiny(root, method), root / f"of-{method}"
        before, printed = files(folder), io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert diagnose(folder / "checkpoint.ckpt", "--output", output, "--seed", 7) == 0
        assert files(folder) == before
        assert set(files(output)) == OUTPUTS
        found[method] = Diagnosed(folder, output, printed.getvalue(), numbers(output))
    return found


def expected_gradients(folder: Path) -> tuple[Tensor, list[Tensor]]:
    """X and dL/dX of every batch in float64, by autograd on a plain weight."""
    found = SavedRun.read(folder)
    model = found.model("64")
    stiefel.release(model)
    weight = model.get_parameter(WEIGHT)
    batches = found.batches(4, seed=7)
    losses = [found.task.loss(model(batch.inputs), batch) for batch in batches]
    gradients = [torch.autograd.grad(loss, weight)[0] for loss in losses]
    return weight.detach(), gradients


def as_it_is(model: nn.Module) -> Tensor:
    """The weight in its own precision, held in float64."""
    (constraint,) = stiefel.constraints(model)
    weight = getattr(constraint.module, constraint.name)
    assert weight.dtype == torch.float32
    return weight.double()


# ------------------------------------------------------------------------------- the figures


@pytest.mark.parametrize("method", MONITORED)
def test_stationarity_is_that_of_a_plain_weight(runs: dict[str, Diagnosed], method: str) -> None:
    found = runs[method].numbers["weights"][WEIGHT]["stationarity"]
    X, gradients = expected_gradients(runs[method].run)
    G = torch.stack(gradients).mean(0)
    S = X.T @ G
    D = G - X @ G.T @ X
    expected = {
        "euclidean_norm": (G - X @ (S + S.T) / 2).norm(),
        "canonical_norm": (D * (D - X @ X.T @ D / 2)).sum().sqrt(),
        "kkt_residual": D.norm(),
        "symmetry_residual": ((S - S.T) / 2).norm(),
        "gradient_norm": G.norm(),
        "relative": (G - X @ (S + S.T) / 2).norm() / G.norm(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6), name
    assert (found["coordinate_norm_squared"] is None) == (method == "rgd-c-c")


@pytest.mark.parametrize("method", MONITORED)
def test_the_estimate_is_the_mean_product_of_different_batches(
    runs: dict[str, Diagnosed], method: str
) -> None:
    found = runs[method].numbers
    X, gradients = expected_gradients(runs[method].run)
    tangent = torch.stack([G - X @ (X.T @ G + G.T @ X) / 2 for G in gradients]).flatten(1)
    products = tangent @ tangent.T
    value = (products.sum() - products.trace()) / 12
    noise = (tangent - tangent.mean(0)).square().sum() / 3
    for figures in (found["weights"][WEIGHT], found["model"]):
        assert figures["estimate"]["value"] == pytest.approx(float(value), rel=1e-6)
        assert figures["batch_noise"] == pytest.approx(float(noise), rel=1e-6)
        low, high = figures["estimate"]["low"], figures["estimate"]["high"]
        assert low <= figures["estimate"]["value"] <= high


@pytest.mark.parametrize("method", MONITORED)
def test_feasibility_is_that_of_the_weight_as_it_is(
    runs: dict[str, Diagnosed], method: str
) -> None:
    found = runs[method].numbers
    with torch.no_grad():
        X = as_it_is(SavedRun.read(runs[method].run).model())
    residual = X.T @ X - torch.eye(len(X), dtype=X.dtype)
    figures = found["weights"][WEIGHT]["feasibility"]
    assert 0 < figures["max_residual"] < 1e-5
    assert figures["max_residual"] == pytest.approx(float(residual.abs().max()), rel=1e-6)
    assert figures["frobenius_residual"] == pytest.approx(float(residual.norm()), rel=1e-6)
    assert figures["determinant"] == round(float(torch.linalg.det(X)))
    expected = torch.linalg.svdvals(X).tolist()
    assert found["singular_values"][WEIGHT] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("method", [*MONITORED, *PLAIN])
def test_flow_is_that_of_the_outputs(runs: dict[str, Diagnosed], method: str) -> None:
    """In a network of one layer the output of a step is its state."""
    flows = runs[method].numbers["flows"]
    (flow,) = (each for each in flows if each["name"] == "h, layer 0")
    saved = SavedRun.read(runs[method].run)
    model, batch = saved.model("64"), saved.batches(4, seed=7)[0]
    assert isinstance(model, SequenceModel)
    with torch.no_grad():
        output, _ = model.rnn(batch.inputs)
    assert flow["states"] == pytest.approx(output.norm(dim=-1).mean(1).tolist(), rel=1e-9)
    assert len(flow["adjoints"]) == saved.task.length == 23
    rest = output[-1:].clone().requires_grad_()  # C depends on the last state by its answer alone
    answer = batch._replace(targets=batch.targets[-1:])
    (saved.task.loss(model.head(rest), answer) * batch.rows / saved.task.length).backward()
    assert rest.grad is not None
    last = float(rest.grad.norm(dim=-1).mean())
    assert flow["adjoints"][-1] == pytest.approx(last, rel=1e-9)


def test_scores_and_history(runs: dict[str, Diagnosed]) -> None:
    folder, found = runs["cwy"].run, runs["cwy"].numbers
    assert (found["step"], found["iterations"], found["finished"]) == (6, 6, True)
    saved = SavedRun.read(folder)
    model, batches = saved.model("64"), saved.batches(4, seed=7)
    with torch.no_grad():
        losses = [float(saved.task.loss(model(batch.inputs), batch)) for batch in batches]
    assert found["loss"] == pytest.approx(math.fsum(losses) / 4, rel=1e-9)
    assert found["first_loss"] == read_metrics(folder / "metrics.csv")[0]["loss"]
    rows = CSVLogger.read(folder / "stationarity.csv")
    assert found["history"]["steps"] == [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert found["history"]["values"] == [float(row["model/euclidean_norm"]) ** 2 for row in rows]
    assert found["history"]["judgement"]["verdict"] == "too early to say"


# ------------------------------------------------------------------------- words and picture


def test_what_is_printed_of_a_weight_in_a_chart(runs: dict[str, Diagnosed]) -> None:
    printed = runs["cwy"].printed
    for words in (
        "copying, delay 3; method cwy",
        "step 6 of 6, finished",
        "4 batches of 6 sequences",
        f"{WEIGHT}, 8 x 8, via cwy",
        "max |X^T X - I|",
        "KKT residual",
        "chart's differential",
        "on the manifold: yes, to rounding",
        "stationary: no",
        "while training: too early to say",
        "gradients through time: h, layer 0, survive",
        str(runs["cwy"].output / "diagnosis.png"),
    ):
        assert words in printed, words
    assert "proves nothing" not in printed  # the chart has full rank


def test_the_answers_come_before_the_figures(runs: dict[str, Diagnosed]) -> None:
    for found in runs.values():
        printed, said = " ".join(found.printed.split()), found.numbers["answers"]
        places = [printed.index(f"- {answer}") for answer in said]
        assert places == sorted(places)
        assert places[-1] < printed.index("|h_t|")
        assert all(len(line) <= 97 for line in found.printed.splitlines() if line[:2] == "- ")


def test_a_riemannian_weight_has_no_chart(runs: dict[str, Diagnosed]) -> None:
    printed = runs["rgd-c-c"].printed
    assert f"{WEIGHT}, 8 x 8, via riemannian" in printed
    assert "differential" not in printed
    assert "coordinate" not in printed
    assert runs["rgd-c-c"].numbers["weights"][WEIGHT]["differential"] is None


@pytest.mark.parametrize("method", PLAIN)
def test_a_model_without_constraints_says_so_and_shows_its_flow(
    runs: dict[str, Diagnosed], method: str
) -> None:
    printed, found = runs[method].printed, runs[method].numbers
    assert f"no constrained weight: method {method}" in printed
    assert ("is a plain matrix, singular values from" in printed) == (method == "unconstrained")
    assert "|dC/dh_t|" in printed
    assert found["weights"] == {}
    assert found["model"]["estimate"] is None
    assert all(norm > 0 for norm in found["flows"][0]["adjoints"])


def test_a_record_of_a_model_without_constraints_is_judged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("copying", "--method", "lstm", *TINY, "--monitor-every", 1, "--output", folder) == 0
    assert diagnose(folder) == 0
    (said,) = (text for text in numbers(folder)["answers"] if text.startswith("while training"))
    assert "at least 8 finite positive values" in said
    assert "smaller --monitor-every" in said
    assert "Of single batches |grad|^2 of all that is trained was" in said
    assert numbers(folder)["history"]["figure"] == "model/total_norm"


def test_a_gradient_of_zero_is_no_stationary_point_of_anything(runs: dict[str, Diagnosed]) -> None:
    """Dead states: the loss does not see the weight."""
    found = measured(runs["cwy"].run)
    assert found.model is not None
    zero = NormEstimate(0.0, 0.0, 0.0, 0.95, 0.0, 0.0, 4)
    still = dataclasses.replace(found, estimate=zero, batch_noise=0.0)
    assert stationary(still).startswith("yes, exactly")  # of all of G nothing is tangent
    dead = dataclasses.replace(still, model=dataclasses.replace(found.model, gradient_norm=0.0))
    assert "the loss does not see the weights" in stationary(dead)
    unsure = dataclasses.replace(found, estimate=NormEstimate(-0.1, 0, 0.5, 0.95, 0.1, 0.2, 4))
    assert "|grad|^2 may be zero, and is at most 0.5 with 95 % confidence" in stationary(unsure)
    lost = dataclasses.replace(found, estimate=None)
    assert "not finite" in stationary(lost)


def measured(folder: Path, samples: int = 4, seed: int | None = None) -> Diagnosis:
    return measure(SavedRun.read(folder), samples=samples, seed=seed, confidence=0.95)


@pytest.mark.parametrize("method", ["cwy", "unconstrained"])
def test_the_page_has_six_panels(runs: dict[str, Diagnosed], method: str) -> None:
    found = measured(runs[method].run)
    panels = {axes.get_title(): axes for axes in draw_diagnosis(found).axes}
    assert list(panels) == [
        *("squared gradient norm, |grad|^2", "squared gradient norm while training"),
        *("distance to the manifold, max |X^T X - I|", "singular values"),
        *("hidden states, |h_t|", "hidden gradients, |dC/dh_t|"),
    ]
    (adjoints,) = panels["hidden gradients, |dC/dh_t|"].get_lines()
    assert list(adjoints.get_ydata()) == list(found.flows[0].adjoints)
    record = panels["squared gradient norm while training"]
    words = [text.get_text() for text in record.texts]
    assert any("--monitor-every" in text for text in words) == (method == "unconstrained")
    if method == "cwy":
        assert found.history is not None
        assert list(record.get_lines()[0].get_ydata()) == list(found.history.values)
        words = " ".join(panels["squared gradient norm, |grad|^2"].get_xlabel().split())
        assert words == f"stationary: {stationary(found)}"


def test_many_weights_are_named_by_what_tells_them_apart(runs: dict[str, Diagnosed]) -> None:
    found = measured(runs["cwy"].run)
    (weight,), (values,) = found.weights.values(), found.singular_values.values()
    paths = [f"cells.{i}.layers.0.recurrent.weight" for i in range(3)]
    many = dataclasses.replace(
        found,
        weights=dict.fromkeys(paths, weight),
        singular_values=dict.fromkeys(paths, values),
    )
    gradient, _, feasible, singular, *_ = draw_diagnosis(many).axes
    names = [label.get_text() for label in gradient.get_xticklabels()]
    assert names == ["cells.0", "cells.1", "cells.2", "model"]
    assert [label.get_text() for label in feasible.get_xticklabels()] == names[:3]
    legend = singular.get_legend()
    assert legend is not None
    for text, name in zip(legend.get_texts(), names[:3], strict=True):
        assert text.get_text().startswith(f"{name}; its chart: ")


def test_states_that_are_all_zero_are_said_and_not_drawn(runs: dict[str, Diagnosed]) -> None:
    found = measured(runs["cwy"].run)
    flow = dataclasses.replace(found.flows[0], states=(0.0,) * 23)
    states = draw_diagnosis(dataclasses.replace(found, flows=[flow])).axes[4]
    assert not states.get_lines()
    assert "zero at every step" in " ".join(states.texts[0].get_text().split())


def test_gradients_that_vanish_or_explode_are_named(runs: dict[str, Diagnosed]) -> None:
    found = measured(runs["cwy"].run)
    for first, word in ((1e-4, "vanish"), (1e-2, "survive"), (1e2, "survive"), (1e4, "explode")):
        flow = dataclasses.replace(found.flows[0], adjoints=(first, 0.5, 1.0))
        said = " ".join(answers(dataclasses.replace(found, flows=[flow])))
        assert f"gradients through time: h, layer 0, {word}. Back from step 3 to step 1" in said


# -------------------------------------------------------------------- what is left, and where


def test_outputs_go_into_the_run_folder_by_default(tmp_path: Path) -> None:
    folder = train_tiny(tmp_path, "cwy")
    before = files(folder)
    assert diagnose(folder) == 0
    assert others(folder) == before
    assert set(files(folder)) == set(before) | OUTPUTS
    assert (folder / "diagnosis.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run("copying", "--resume", "--output", folder, "--iterations", 8) == 0  # still a run


def test_the_same_words_give_the_same_numbers(runs: dict[str, Diagnosed]) -> None:
    torch.manual_seed(1)
    state, folder = torch.get_rng_state(), runs["cwy"].run
    a, b = measured(folder).as_json(), measured(folder).as_json()
    assert torch.equal(torch.get_rng_state(), state)
    assert a == b
    c, d = measured(folder, seed=5).as_json(), measured(folder, samples=9).as_json()
    assert (a["seed"], c["seed"], d["batches"]) == (0, 5, 9)
    assert len({each["model"]["estimate"]["value"] for each in (a, c, d)}) == 3


# ----------------------------------------------------------------------- how a run may have ended


def test_a_checkpoint_before_the_end_is_not_that_of_a_finished_run(tmp_path: Path) -> None:
    """A run may end between the reading of its checkpoint and of its summary."""
    folder = train_tiny(tmp_path, "cwy")
    read = SavedRun.read(folder)
    assert read.finished
    assert not dataclasses.replace(read, step=5).finished


def test_an_interrupted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with interrupted_at(5):
        run("copying", *TINY, "--output", tmp_path)
    assert diagnose(tmp_path) == 0
    assert "step 4 of 6, unfinished" in capsys.readouterr().out
    assert numbers(tmp_path)["finished"] is False


@pytest.mark.parametrize(
    ("method", "rate"), [("unconstrained", 1e30), ("cwy", 1e30), ("cwy", 1e18)]
)
def test_a_diverged_run(
    method: str, rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They end on a NaN after the first checkpoint, or with dead states."""
    words = ("--method", method, "--lr", rate, "--checkpoint-every", 1, "--output", tmp_path)
    assert run("copying", *TINY, *words) == (1 if rate == 1e30 else 0)
    capsys.readouterr()
    assert diagnose(tmp_path) == 0
    assert "training has diverged: the loss was 3.36" in capsys.readouterr().out
    found = numbers(tmp_path)
    assert found["diverged"]
    assert found["loss"] is None or found["loss"] > 1e10
    assert (tmp_path / "diagnosis.png").stat().st_size > 10_000


def test_double_precision_and_few_reflections(tmp_path: Path) -> None:
    assert run("copying", *TINY, "--precision", 64, "--output", tmp_path / "double") == 0
    weight = measured(tmp_path / "double").weights[WEIGHT]
    assert weight.feasibility.max_residual < 1e-13
    assert run("copying", *TINY, "--reflections", 2, "--output", tmp_path / "few") == 0
    said = " ".join(answers(measured(tmp_path / "few")))
    assert "chart is rank-deficient" in said
    assert "a small coordinate gradient proves nothing. Read |grad|" in said


# ------------------------------------------------------------------------------ the batches


def test_batches_of_a_training_set_are_drawn_from_it_without_replacement(data_dir: Path) -> None:
    from stiefel.experiments.mnist_files import Mnist, load_mnist
    from stiefel.experiments.options import TrainOptions
    from stiefel.experiments.tasks.pixel_mnist import PixelMnist

    data = load_mnist(data_dir)
    task = PixelMnist(data=Mnist(*(array[:41] for array in data)))
    options = TrainOptions("smnist", batch_size=4, iterations=100)
    saved = SavedRun(None, Path("checkpoint"), options, task, 0, {})  # pyright: ignore
    drawn = torch.cat([batch.inputs for batch in saved.batches(10)], dim=1).squeeze(-1)
    assert drawn.dtype == torch.float64
    assert len({tuple(image.tolist()) for image in drawn.T}) == 40
    trained = [task.train_batch(step, 4, seed=0).inputs for step in range(30)]
    first = saved.batches(1)[0].inputs
    assert not any(torch.equal(first.float(), inputs) for inputs in trained)
    assert saved.population == 41
    with pytest.raises(ConfigurationError, match=r"--samples 11.* 10 batches of 4"):
        saved.batches(11)
