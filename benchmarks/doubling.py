"""Does twice as long a sequence cost twice as much?

Forward and backward of every sequence model over T and 2 T steps, in pairs. A model that looks a
step up in the whole sequence, or keeps what it need not, costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Goal, Section, Settings, Study, measure, require
from stiefel.models import (
    ASRNN,
    GRU,
    IRNN,
    LSTM,
    NNRNN,
    ConvLSTM,
    ConvNERU,
    OrthogonalRNN,
    Seq2Seq,
    VideoPredictor,
)

__all__ = ["sections"]

Run = Callable[[int], Tensor]


def _models(
    batch: int, hidden: int, channels: int, size: int, device: str
) -> dict[str, tuple[nn.Module, Run, bool]]:
    """Models, what runs them over T steps, and whether they are slow (a shorter T)."""
    made: dict[str, tuple[nn.Module, Run, bool]] = {}
    recurrent: dict[str, nn.Module] = {
        "OrthogonalRNN": OrthogonalRNN(10, hidden),
        "ASRNN": ASRNN(10, hidden),
        "NNRNN": NNRNN(10, hidden),
        "IRNN": IRNN(10, hidden),
        "LSTM": LSTM(10, hidden),
        "GRU": GRU(10, hidden),
    }
    for name, net in recurrent.items():
        net.to(device)

        def run(steps: int, net: nn.Module = net) -> Tensor:
            return net(torch.randn(steps, batch, 10, device=device))[0]

        made[name] = (net, run, False)
    frames: dict[str, nn.Module] = {
        "ConvNERU": ConvNERU(2, channels, 5),
        "ConvLSTM": ConvLSTM(2, channels, 5),
    }
    for name, net in frames.items():
        net.to(device)

        def run_frames(steps: int, net: nn.Module = net) -> Tensor:
            return net(torch.randn(steps, 4, 2, size, size, device=device))[0]

        made[name] = (net, run_frames, True)
    video = VideoPredictor(1, widths=(4, 8, 8)).to(device)
    made["VideoPredictor"] = (
        video,
        lambda steps: video(torch.rand(steps, 2, 1, 16, 16, device=device)),
        True,
    )
    translate = Seq2Seq(50, 50, embedding_size=16, hidden_size=hidden).to(device)

    def sentences(steps: int) -> Tensor:
        tokens = torch.randint(1, 50, (2, steps, batch), device=device)
        return translate(tokens[0][:20], tokens[1])

    made["Seq2Seq, target"] = (translate, sentences, True)
    return made


def _case(name: str, model: nn.Module, run: Run, steps: int) -> Case:
    leaves = list(model.parameters())

    def refresh() -> None:
        with torch.no_grad():
            for leaf in leaves:
                leaf.grad = None
                leaf.add_(1e-3 * torch.randn_like(leaf) * (leaf.abs().mean() + 1e-6))

    def check() -> None:
        refresh()
        output = run(steps)
        require("steps that are missing", float(steps - output.shape[0]), 0.0)
        output.sum().backward()

    return Case(name, lambda: run(steps).sum().backward(), refresh, check)


def sections(settings: Settings) -> Iterator[Section]:
    """Runs the benchmark and yields a table.

    Args:
        settings: Device, repeats, sizes.
    """
    quick = settings.quick
    models = _models(*((2, 4, 2, 8) if quick else (32, 128, 8, 16)), settings.device)
    for name, (model, run, slow) in models.items():
        steps = (4 if slow else 8) if quick else (40 if slow else 400)
        short, long = f"{name}, T = {steps}", f"{name}, T = {2 * steps}"
        cases = [_case(short, model, run, steps), _case(long, model, run, 2 * steps)]
        text = f"{name}: twice the steps at most 2.2 of the time"
        goals = [Goal(text, long, short, at_most=2.2)]
        yield measure(Study(f"forward + backward of {name}", cases, short, goals), settings)
