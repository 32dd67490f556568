"""Real training runs for the monitor, and its figures computed another way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import stiefel
from stiefel.experiments.tasks import Copying
from stiefel.models import ConvNERU, OrthogonalRNN, SequenceModel, VideoPredictor
from stiefel.parameter import ConstraintList
from stiefel.parametrizations import Parametrization

Loss = Callable[[nn.Module, int], Tensor]

#: Hidden units of the network that copies; channels of ConvNERU, whose kernel is (9 f, f).
HIDDEN, CHANNELS = 8, 2


@contextlib.contextmanager
def none_left_watched() -> Iterator[None]:
    """Asserts that no storage which is watched inside the block is watched after it."""
    met: list[ConstraintList] = []
    watched = ConstraintList.watched

    def noting(self: ConstraintList, watcher: Any) -> Any:
        met.append(self)
        return watched(self, watcher)

    ConstraintList.watched = noting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ConstraintList.watched = watched
    assert not any(storage.is_watched for storage in met)


def copying(
    via: str | Parametrization, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Loss]:
    """The copying task: a model, and the loss of step k."""
    task = Copying(delay=4)
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"via": via, "dtype": dtype, "generator": generator}
    if isinstance(via, Parametrization) and via.name == "urnn":
        options["init"] = "chart"
    rnn = OrthogonalRNN(task.input_size, HIDDEN, **options)
    model = SequenceModel(rnn, task.output_size, generator=generator)

    def loss(model: nn.Module, step: int) -> Tensor:
        batch = task.train_batch(step, 6, seed=0)
        return task.loss(model(batch.inputs.double()), batch, world=1)

    return model, loss


def _video(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


def frames(via: str | Parametrization, **options: Any) -> tuple[nn.Module, Loss]:
    """ConvNERU alone, which predicts the mean of the next frame."""
    generator = torch.Generator().manual_seed(2)
    options = {"init": "haar", "generator": generator, **options}
    model = ConvNERU(1, CHANNELS, 3, via=via, dtype=torch.float64, **options)

    def loss(model: nn.Module, step: int) -> Tensor:
        video = _video(step, 5, 3, 1, 6, 6)
        return (model(video[:-1])[0].mean(2, keepdim=True) - video[1:]).square().mean()

    return model, loss


def video(via: str) -> tuple[nn.Module, Loss]:
    """ConvNERU in a small video predictor: two weights, of (36, 4)."""
    generator = torch.Generator().manual_seed(3)
    model = VideoPredictor(
        1, widths=(4, 4), kernel_size=3, via=via, dtype=torch.float64, generator=generator
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        video = _video(step, 4, 2, 1, 8, 8)
        return (model(video[:-1]) - video[1:]).square().mean()

    return model, loss


def oracle(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, float]:
    """The figures of a record by autograd on released weights, and by the dense formulas."""
    figures: dict[str, float] = {}
    coordinates = copy.deepcopy(model)
    loss(coordinates).backward()
    released = copy.deepcopy(model)
    points = {c.path: (c.point.clone(), c.storage) for c in stiefel.constraints(released)}
    stiefel.release(released)
    loss(released).backward()
    for constraint in stiefel.constraints(coordinates):
        path = constraint.path
        X, storage = points[path]
        G = released.get_parameter(path).grad
        assert G is not None
        if storage is not None:
            X.requires_grad_()
            (G,) = torch.autograd.grad(storage.view(X), X, G)
            X = X.detach()
        figures |= {f"{path}/{name}": value for name, value in _of(X, G).items()}
        if not constraint.is_riemannian:
            grads = [leaf.grad for leaf in constraint.leaves]
            figures[f"{path}/coordinate_norm_squared"] = sum(
                float(g.abs().square().sum()) for g in grads
            )
            if constraint.via in ("cwy", "tcwy", "householder"):
                v, g = constraint.leaves[0].detach(), grads[0]
                sizes = v.norm(dim=-2).square() * g.norm(dim=-2).square()
                rest = sum(float(g.square().sum()) for g in grads[1:])
                figures[f"{path}/scale_free_coordinate_norm_squared"] = float(sizes.sum()) + rest
    for name in ("euclidean_norm", "canonical_norm", "kkt_residual", "gradient_norm"):
        each = [value for key, value in figures.items() if key.endswith("/" + name)]
        figures[f"model/{name}"] = sum(value**2 for value in each) ** 0.5
    return figures


def _of(X: Tensor, G: Tensor) -> dict[str, float]:
    n, p = X.shape[-2:]
    eye, wide = torch.eye(p, dtype=X.dtype), torch.eye(n, dtype=X.dtype)
    D = G - X @ G.mH @ X
    E = G - X @ (X.mH @ G + G.mH @ X) / 2
    size = float(G.norm())
    canonical = torch.einsum("...ij,...ik,...kj->", D.conj(), wide - X @ X.mH / 2, D).real
    sigma = torch.linalg.svdvals(X)
    figures = {
        "euclidean_norm": float(E.norm()),
        "canonical_norm": float(canonical) ** 0.5,
        "kkt_residual": float(D.norm()),
        "symmetry_residual": float((X.mH @ G - G.mH @ X).norm()) / 2,
        "gradient_norm": size,
        "relative": float(E.norm()) / size,
        "smallest_singular_value": float(sigma.min()),
        "largest_singular_value": float(sigma.max()),
    }
    if n == p and not X.is_complex():
        figures["determinant"] = float(torch.linalg.det(X).round())
    R = float((X.mH @ X - eye).abs().max())
    return figures | ({"max_residual": R} if R > 1e-10 else {})  # below, rounding


def compare(row: dict[str, Any], expected: dict[str, float], bound: float = 1e-6) -> None:
    """Holds a record to figures that were computed another way."""
    for name, value in expected.items():
        assert abs(row[name] - value) <= bound * abs(value) + 1e-13, (name, row[name], value)


def layers(via: str = "cwy", **options: Any) -> nn.Sequential:
    """A square weight, a tall one, and a head."""
    kind: Any = {"dtype": torch.float64}
    model = nn.Sequential(nn.Linear(6, 6, **kind), nn.Linear(3, 6, **kind), nn.Linear(6, 1, **kind))
    stiefel.orthogonal(model[0], via=via, init="haar", **options)
    stiefel.orthogonal(model[1], via=via, init="haar", **options)
    return nn.Sequential(
        model[0], nn.Tanh(), nn.Linear(6, 3, **kind), model[1], nn.Tanh(), model[2]
    )


def loss_of(model: nn.Module, seed: int = 0, rows: int = 8) -> Tensor:
    x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def sgd(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)
