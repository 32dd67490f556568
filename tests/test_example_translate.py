"""The example of translation: it recites, it learns, and its split does not leak."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "examples" / "translate.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(PATH), run_name="example")


def test_both_ways_recite_a_batch_and_the_held_out_loss_falls(example, tmp_path, capsys):
    found = example["main"](tmp_path / "none.zip", ["cwy", "rgd-c-c"], 3, 1000)
    assert "made-up grammar" in capsys.readouterr().out
    for recited, (before, *_, after, mixed_up) in found.values():
        assert recited == 1
        assert after < 0.6 * before
        assert mixed_up > after + 0.2


def test_real_pairs_and_their_split(example, data_dir, capsys):
    pairs = example["read_pairs"](data_dir / "tatoeba" / "spa-eng.zip", 2000)
    assert "of Tatoeba" in capsys.readouterr().out
    assert len(pairs) == 2000
    train, held_out = example["split"](pairs)
    assert len(train) + len(held_out) == 2000
    assert 200 < len(held_out) < 400
    assert not {tuple(e) for _, e in train} & {tuple(e) for _, e in held_out}
    encode, sources, targets = example["encoder"](train)
    source, target = encode(held_out)
    assert source.max() < sources
    assert target.max() < targets
    assert (target[0] == 1).all()
    assert ((target == 2).sum(0) == 1).all()


def test_words(example):
    assert example["words"]("¿Qué?  No, señor!") == ["¿", "que", "?", "no", ",", "senor", "!"]
