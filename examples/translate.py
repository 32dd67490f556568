"""Translates short Spanish sentences: attention around an orthogonal RNN, by a chart and by RGD.

Run it with ``python examples/translate.py`` (about half a minute on one core). It reads 2,000 short
pairs of the Tatoeba collection from ``--data`` (``../shared/data/tatoeba/spa-eng.zip`` by default);
where there is no such file, sentences of a small made-up grammar take their place, and the first
line says so. For every ``--via`` a first model memorises one batch of pairs, and a second one
learns from all of them; its cross-entropy on held-out pairs is printed as it falls, beside that of
the frequencies of words, which know nothing of the source. At last every held-out sentence gets the
source of another one: a model that reads its source then does worse. No English sentence is on both
sides of the split, for Tatoeba has many translations of one sentence.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import argparse
import random
import re
import time
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import stiefel
from stiefel.models import Seq2Seq

PADDING, BEGIN, END, UNKNOWN = range(4)
WORDS = 6  # at most, in a sentence of either language
Pair = tuple[list[str], list[str]]
Batch = tuple[Tensor, Tensor]


def words(sentence: str) -> list[str]:
    """Lower case without accents, punctuation as words of its own."""
    letters = unicodedata.normalize("NFD", sentence.lower())
    plain = "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
    return re.findall(r"[a-z]+|[?.!,¿]", plain)


def read_pairs(data: Path, count: int) -> list[Pair]:
    """Spanish and English words of `count` short pairs, drawn from the file or made up."""
    draw = random.Random(0)
    if not data.is_file():
        print(f"no sentences at {data}: a made-up grammar instead")
        return made_up(count, draw)
    with zipfile.ZipFile(data) as archive:
        (name,) = (
            name for name in archive.namelist() if Path(name).name in ("spa.txt", "data.txt")
        )
        lines = archive.read(name).decode("utf-8").splitlines()
    print(f"sentences of Tatoeba, from {data}")
    pairs = []
    for line in lines:
        english, spanish = line.split("\t")[:2]
        pair = (words(spanish), words(english))
        if all(0 < len(side) <= WORDS for side in pair):
            pairs.append(pair)
    return draw.sample(pairs, min(count, len(pairs)))


def made_up(count: int, draw: random.Random) -> list[Pair]:
    """Sentences such as "el gato rojo ve un pez ." and "the red cat sees a fish ."."""
    nouns = {"gato": "cat", "perro": "dog", "pez": "fish", "pato": "duck", "oso": "bear"}
    adjectives = {"rojo": "red", "viejo": "old", "pequeno": "small", "triste": "sad"}
    verbs = {"ve": "sees", "busca": "seeks", "quiere": "loves", "oye": "hears"}
    articles = {"el": "the", "un": "a"}
    pairs: list[Pair] = []
    for _ in range(count):
        spanish: list[str] = []
        english: list[str] = []
        for part in ("subject", "object"):
            article, noun = draw.choice(list(articles)), draw.choice(list(nouns))
            spanish += [article, noun]
            english += [articles[article], nouns[noun]]
            if draw.random() < 0.7:
                adjective = draw.choice(list(adjectives))
                spanish.append(adjective)
                english.insert(-1, adjectives[adjective])
            if part == "subject":
                verb = draw.choice(list(verbs))
                spanish.append(verb)
                english.append(verbs[verb])
        pairs.append(([*spanish, "."], [*english, "."]))
    return pairs


def split(pairs: list[Pair], share: float = 0.15) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and held-out ones, by their English side."""
    sides = sorted({tuple(english) for _, english in pairs})
    random.Random(1).shuffle(sides)
    unseen = set(sides[: round(share * len(sides))])
    held_out = [pair for pair in pairs if tuple(pair[1]) in unseen]
    return [pair for pair in pairs if tuple(pair[1]) not in unseen], held_out


def vocabulary(sentences: Sequence[list[str]], least: int = 2) -> dict[str, int]:
    """Numbers of the words that occur at least that often."""
    counts = Counter(word for sentence in sentences for word in sentence)
    kept = sorted(word for word, count in counts.items() if count >= least)
    return {word: number for number, word in enumerate(kept, start=UNKNOWN + 1)}


def encoder(train: list[Pair]) -> tuple[Callable[[list[Pair]], Batch], int, int]:
    """What turns pairs into padded tokens `(S, B)`, `(T, B)`, and the sizes of the vocabularies."""
    source = vocabulary([spanish for spanish, _ in train])
    target = vocabulary([english for _, english in train])

    def encode(pairs: list[Pair]) -> Batch:
        rows = [[source.get(word, UNKNOWN) for word in spanish] for spanish, _ in pairs]
        ends = [
            [BEGIN, *(target.get(word, UNKNOWN) for word in english), END] for _, english in pairs
        ]
        return padded(rows), padded(ends)

    return encode, len(source) + UNKNOWN + 1, len(target) + UNKNOWN + 1


def padded(rows: list[list[int]]) -> Tensor:
    """Sentences as columns."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows])


def make(via: str, sizes: tuple[int, int]) -> tuple[Seq2Seq, torch.optim.Optimizer]:
    """A small model, its orthogonal weights trained by `via`, and one optimizer for all of it."""
    torch.manual_seed(0)
    model = Seq2Seq(*sizes, embedding_size=64, hidden_size=128, via=via)
    optimizer = stiefel.optim.build(model, lr=2e-3, lr_orthogonal=2e-4, lr_riemannian=0.02)
    return model, optimizer


def step(model: Seq2Seq, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One training step; returns the loss before it."""
    optimizer.zero_grad()
    loss = model.loss(*batch)
    loss.backward()
    stiefel.optim.clip_grad_norm_(model, 5.0)
    optimizer.step()
    return loss.item()


def memorise(via: str, sizes: tuple[int, int], batch: Batch, iterations: int) -> float:
    """Trains on one batch alone, and returns the share of sentences that greedy search recites."""
    model, optimizer = make(via, sizes)
    loss = 0.0
    for _ in range(iterations):
        loss = step(model, optimizer, batch)
    source, target = batch
    found = model.greedy(source, begin=BEGIN, end=END, max_length=len(target)).tokens
    wanted = torch.nn.functional.pad(target[1:], (0, 0, 0, 1), value=PADDING)
    found = torch.nn.functional.pad(found, (0, 0, 0, len(wanted) - len(found)), value=PADDING)
    share = (found == wanted).all(dim=0).float().mean().item()
    print(f"{via}: recites {share:.0%} of a batch, loss {loss:.4f}")
    return share


def of_frequencies(train: list[Batch], held_out: Batch, size: int) -> float:
    """The cross-entropy of held-out words by how often they are in the sentences to train on."""
    counts = torch.ones(size)
    for _, target in train:
        counts += torch.bincount(target[1:].flatten(), minlength=size)
    counts[PADDING] = 0
    wanted = held_out[1][1:]
    return -(counts / counts.sum()).log()[wanted[wanted != PADDING]].mean().item()


def learn(
    via: str, sizes: tuple[int, int], train: list[Batch], held_out: Batch, epochs: int
) -> list[float]:
    """Trains on all batches.

    Returns:
        The held-out cross-entropy before and after every epoch, and with sources mixed up.
    """
    model, optimizer = make(via, sizes)
    begin, curve = time.perf_counter(), []
    for epoch in range(epochs + 1):
        with torch.no_grad():
            curve.append(model.loss(*held_out).item())
        print(f"{via}: held-out cross-entropy {curve[-1]:.3f} after {epoch} epochs")
        if epoch < epochs:
            for batch in train:
                step(model, optimizer, batch)
    residuals = [
        stiefel.geometry.orthonormality_residual(constraint.point).max().item()
        for constraint in stiefel.constraints(model)
    ]
    with torch.no_grad():
        another = model.loss(held_out[0].roll(1, dims=1), held_out[1]).item()
    print(f"{via}: {another:.3f} with the source of another sentence")
    curve.append(another)
    print(
        f"{via}: {model.expected_parameters()} parameters, largest entry of |Q^T Q - I| "
        f"{max(residuals):.1e}, {time.perf_counter() - begin:.0f} s"
    )
    return curve


def main(
    data: Path, vias: list[str], epochs: int = 6, count: int = 2000, iterations: int = 150
) -> dict[str, tuple[float, list[float]]]:
    """Trains both models with every `via`.

    Args:
        data: The archive of sentences.
        vias: How orthogonal weights are trained.
        epochs: Passes over the pairs.
        count: Pairs.
        iterations: Training steps on the one batch to memorise.

    Returns:
        For every `via` the share of the batch that it recites, and the held-out cross-entropy
        before and after every epoch and, at last, with sources mixed up.
    """
    train, held_out = split(read_pairs(data, count))
    encode, *numbers = encoder(train)
    sizes = (numbers[0], numbers[1])
    print(f"{len(train)} pairs and {len(held_out)} held out; {sizes[0]} and {sizes[1]} words")
    batches = [encode(train[first : first + 32]) for first in range(0, len(train), 32)]
    unseen = encode(held_out)
    print(f"cross-entropy of frequencies {of_frequencies(batches, unseen, sizes[1]):.3f}")
    return {
        via: (
            memorise(via, sizes, batches[0], iterations),
            learn(via, sizes, batches, unseen, epochs),
        )
        for via in vias
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/tatoeba/spa-eng.zip"))
    parser.add_argument("--via", nargs="*", default=["cwy", "rgd-c-c"])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    main(arguments.data, arguments.via, arguments.epochs)
