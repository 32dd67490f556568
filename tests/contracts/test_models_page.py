"""The page that says which model to take: its counts are those of the models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stiefel.models import ASRNN, GRU, LSTM, NNRNN, ConvLSTM, ConvNERU, OrthogonalRNN, PlainRNN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
F, N = 10, 128
MODELS = {
    "`OrthogonalRNN`, modReLU": lambda: OrthogonalRNN(F, N),
    "`ASRNN`": lambda: ASRNN(F, N),
    "`NNRNN`": lambda: NNRNN(F, N),
    "`PlainRNN`": lambda: PlainRNN(F, N),
    "`LSTM`": lambda: LSTM(F, N),
    "`GRU`": lambda: GRU(F, N),
    "`ConvNERU`": lambda: ConvNERU(32, 32, 5),
    '`ConvNERU(kernel="zeros")`': lambda: ConvNERU(32, 32, 5, kernel="zeros"),
    "`ConvLSTM`": lambda: ConvLSTM(32, 32, 5),
}


def rows() -> dict[str, tuple[str, int]]:
    """Formula and number of each model of the table."""
    found = re.findall(r"^\| (.+?) \| \$(.+?)\$ \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (formula, int(number.replace(",", ""))) for name, formula, number in found}


def value(formula: str) -> int:
    """What a formula of the table gives at the sizes of its head."""
    text = formula.replace("f_\\text{in}", "c")
    text = re.sub(r"([A-Za-z0-9)]|\^2) (?=[A-Za-z(])", r"\1*", text).replace("^", "**")
    text = re.sub(r"(\d)\*?(?=[A-Za-z(])", r"\1*", text)
    return int(eval(text, {"F": F, "N": N, "k": 5, "c": 32, "f": 32}))


def test_every_model_has_a_row() -> None:
    assert set(rows()) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_counts(name: str) -> None:
    formula, number = rows()[name]
    assert number == MODELS[name]().expected_parameters(effective=True)
    assert value(formula) == number
