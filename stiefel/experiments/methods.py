"""What one word stands for: the chart or metric, the optimizer, and the learning rates.

A method is (cell or block, via, options, optimizer, learning rates, initialiser). All methods of a
task share its model, data, start and main learning rate `lr`, so that swapping the word swaps only
how the recurrent weight is trained. A `cell` is what it stands for in tasks of sequences, a `block`
in tasks of frames, where the weight is the kernel of every recurrent block; a method that has only
one of them fits only those tasks (`fitting`).

**The rule of learning rates.** Everything but the recurrent weight is trained by RMSprop at the
task's `lr` (frames: by Adam, as published). RMSprop moves each entry by about `lr` a step whatever
the scale of the loss; a Riemannian gradient step moves in proportion to the gradient, hence to the
loss. The rate of the recurrent weight is therefore

- *chart coordinates* (``cwy`` and all other charts), also trained by RMSprop: ``lr / 10``, the
  habit of the published experiments on orthogonal RNNs;
- *the point itself, canonical metric*: ``100 lr / (baseline * length)``, where `baseline` is the
  task's loss without memory and `length` the steps of a sequence: the gradient is proportional to
  the loss that is at stake and sums over the steps that carry it. (For copying the product is
  10 ln 8 = 20.8 at any delay, for pixel MNIST 784 ln 10 = 1805.) For a q x q kernel q^2 times
  that, n / p for an n x p point: the point is q times the kernel, and its gradient is that of the
  kernel over q, so that a step of the kernel is r / q^2 times its own gradient;
- *the point itself, Euclidean metric*: twice that for a square matrix, whose Euclidean gradient is
  exactly half the canonical one, so that both metrics then take the same steps. The same for a
  tall one, of which only the part within the column space is halved;
- *steps of a length that the rate sets* (``rgd-adam``, ``riemannian-adam``: about the rate in
  the Frobenius norm, whatever the gradient): ``sqrt(n p) lr / 10``, which is the length of an
  n x p matrix whose entries are ``lr / 10``, the step of the chart coordinates (of kernels, the
  first one);
- *steps whose spectral norm is the rate* (``stiefel-muon``): ``sqrt(n) lr / 10``, for all
  singular values of a step are equal and the Frobenius norm is ``sqrt(p)`` times as large;
- *a plain weight* (``unconstrained``, ``rnn``, ``rnn-orth``, ``irnn``, ``orth-init``,
  ``glorot-init``), by the optimizer of the rest: ``lr / 10`` too. Nothing holds its norm: at `lr`
  its first steps alone make it expand, and a hundred steps of recurrence explode;
- *gates* (``lstm``, ``gru``, ``convlstm``) and blocks without a recurrent kernel (``zeros``) have
  no rate of their own: everything is trained at `lr`.

The published rates of these models obey the same rule: copying asRNN 2e-4 and 2e-5, LSTM 1e-3, RNN
1e-3, RNN-orth 2e-4, nnRNN 5e-4 (1e-6 its basis); pixels asRNN 7e-4 and 7e-5 for 122 units, LSTM
1e-3, nnRNN 1.5e-4 and 1.5e-5.

`lr` itself belongs to the task (`recipes`). Sweeps with seed 0, in which differences of half a
point are noise: on copying at its defaults the rule gives 4.8e-3, and the final loss is 1.3 % of
the baseline (``rgd-c-c``) and 2.0 % (``rgd-c-qr``); at 2.9e-3, 5.8e-3 and 1.2e-2 it is 2.0, 1.7,
2.3 % and 2.1, 1.7, 1.9 %. On ``smnist`` it gives 3.9e-5, and the training loss of ``rgd-c-c`` at
step 100 is 0.8; at 1e-4 and 3e-4 it is above 1.5, and at 3e-3 it does not leave the baseline.
``cwy`` on copying at once, twice and four times its rate: 1.1, 1.8, 2.9 %.
On ``moving-digits`` (digits of MNIST, 200 steps, l1 0.087 of repeating the last frame) the rule
gives 9.6; ``rgd-c-c`` ends at 0.056, 0.056, 0.055 and 0.054 at 0.04, 0.4, 4 and 10, and ``tcwy``
at 0.054 both at ``lr / 10`` and at `lr`; with `lr` raised to 1e-2 it ends at 0.069.
``rgd-adam`` on copying at half, once and twice its rate: 2.3, 1.4, 1.0 %; at their rates
``riemannian-adam`` 1.3, ``stiefel-muon`` 0.5, ``pogo`` 4.6, ``landing`` 2.7 % (with the optimizer's
default radius, 0.5, it is 41 %).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stiefel.errors import ConfigurationError, unknown

__all__ = ["METHODS", "Method", "fitting", "method"]

Rate = Literal["chart", "canonical", "euclidean", "length", "spectral", "plain", "main", "none"]


@dataclasses.dataclass(frozen=True)
class Method:
    """How a recurrent weight is stored and trained.

    Attributes:
        name: The word on the command line.
        summary: What it is, in a line.
        via: What `stiefel.orthogonal` is told; None leaves a plain weight.
        rate: Which line of the rule gives the learning rate of the recurrent weight.
        options: More options of the chart or the manifold.
        cell: The recurrent network of sequences, a name of `stiefel.experiments.cells.CELLS`; None
            where there is none by this method.
        block: The recurrent blocks of a video predictor, a name of
            `stiefel.experiments.blocks.BLOCKS`; None where there are none by this method.
        riemannian: What trains points on a manifold, a name of `stiefel.optim.build`.
        initialiser: The start of the recurrent weight; None takes the task's.
    """

    name: str
    summary: str
    via: str | None
    rate: Rate
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cell: str | None = "orthogonal_rnn"
    block: str | None = None
    riemannian: str = "rgd"
    initialiser: str | None = None

    def riemannian_options(self, rate: float | None) -> dict[str, float]:
        """Options of the Riemannian optimizer beside its rate.

        A step of the landing field shrinks a small distance to the manifold by the factor
        ``1 - 2 rate attraction``: the attraction is set so that it is 1/2. The radius is 0.1. The
        first gradients of a long recurrence are large and take the weight to the radius at once;
        at 0.5, the default, most of its start is lost there.

        Args:
            rate: The learning rate of the recurrent weight.
        """
        if self.riemannian != "landing" or not rate:
            return {}
        return {"attraction": 1 / (4 * rate), "radius": 0.1}

    @property
    def trained(self) -> bool:
        """Whether the recurrent weight is trained at all."""
        return self.rate != "none"

    @property
    def constrained(self) -> bool:
        """Whether training keeps the recurrent weight orthogonal by construction."""
        return self.via is not None

    @property
    def near(self) -> bool:
        """Whether its optimizer keeps the weight near the manifold only, as it documents."""
        return self.riemannian in ("landing", "pogo")

    @property
    def takes_reflections(self) -> bool:
        """Whether the number of Householder reflections can be chosen."""
        return self.via in ("cwy", "hr")

    def fits(self, network: str) -> bool:
        """Whether it trains this kind of network, a word of `Task.network`."""
        return (self.cell if network == "sequence" else self.block) is not None

    def orthogonal_rate(
        self, lr: float, baseline: float, length: int, shape: tuple[int, int]
    ) -> float | None:
        """The learning rate of the recurrent weight, by the rule at the head of this module.

        Args:
            lr: The task's main learning rate.
            baseline: The task's baseline.
            length: Steps of a sequence.
            shape: Rows and columns of the recurrent weight, n >= p.

        Returns:
            The rate; None where the recurrent weight has no rate of its own.
        """
        rows, columns = shape
        match self.rate:
            case "chart" | "plain":
                return lr / 10
            case "canonical":
                return 100 * lr * rows / (columns * baseline * length)
            case "euclidean":
                halved = 2 if rows == columns else 1
                return 100 * halved * lr * rows / (columns * baseline * length)
            case "length":
                return (rows * columns) ** 0.5 * lr / 10
            case "spectral":
                return rows**0.5 * lr / 10
            case _:
                return None


#: Methods whose optimizer is not RGD: name, what it is, via, rate, optimizer.
_BEYOND_GRADIENT_DESCENT: tuple[tuple[str, str, str, Rate, str], ...] = (
    ("rgd-adam", "Cayley Adam, one second moment a matrix", "rgd-adam", "length", "rgd-adam"),
    ("riemannian-adam", "Adam of Riemannian gradients, Cayley", "rgd-e-c", "length", "adam"),
    (
        "landing",
        "landing field, near the manifold, no retraction",
        "landing",
        "euclidean",
        "landing",
    ),
    ("pogo", "tangent step and normal correction, near the manifold", "pogo", "euclidean", "pogo"),
    ("stiefel-muon", "spectral steepest descent", "stiefel-muon", "spectral", "stiefel-muon"),
)


def _of_both(name: str, summary: str, via: str, rate: Rate = "chart", **more: Any) -> Method:
    """A method of square weights and of tall ones, hence of both kinds of network."""
    return Method(name, summary, via, rate, block="stiefel", **more)


def _recurrent() -> Iterator[Method]:
    """The recurrent networks with a cell of their own."""
    yield Method(
        "asrnn", "adaptive-saturated RNN of two exponentials", "exprnn", "chart", cell="asrnn"
    )
    yield Method(
        "nnrnn", "non-normal RNN, an exponential its basis", "exprnn", "chart", cell="nnrnn"
    )
    yield Method("irnn", "identity start, ReLU, then any matrix", None, "plain", cell="irnn")
    for name, start, initialiser in (
        ("rnn-orth", "uniform orthogonal start", "haar"),
        ("rnn", "Glorot start", "glorot"),
    ):
        summary = f"tanh, {start}, then any matrix"
        yield Method(name, summary, None, "plain", cell="plain_rnn", initialiser=initialiser)
    yield Method("lstm", "torch's LSTM with a forget bias of 1", None, "main", cell="lstm")
    yield Method("gru", "torch's GRU", None, "main", cell="gru")


def _convolutional() -> Iterator[Method]:
    """The rows of video prediction whose kernels are not on the manifold."""
    rows: tuple[tuple[str, str, Rate, str, str | None], ...] = (
        ("convlstm", "ConvLSTM blocks", "main", "convlstm", None),
        ("zeros", "no recurrent kernel: a frame from the last one alone", "main", "zeros", None),
        ("glorot-init", "Glorot start, then any kernel", "plain", "free", "glorot"),
        ("orth-init", "orthogonal start, then any kernel", "plain", "free", "haar"),
    )
    for name, summary, rate, block, initialiser in rows:
        yield Method(name, summary, None, rate, cell=None, block=block, initialiser=initialiser)


METHODS: dict[str, Method] = {
    entry.name: entry
    for entry in (
        _of_both("cwy", "product of Householder reflections, in compact WY form", "cwy"),
        Method(
            "tcwy", "the first columns of that product", "tcwy", "chart", cell=None, block="stiefel"
        ),
        _of_both("hr", "the same reflections, one after another", "hr"),
        Method("exprnn", "exponential of a skew matrix", "exprnn", "chart"),
        _of_both("dtriv", "exponential at a base that moves every 100 steps", "dtriv"),
        _of_both("dtriv-inf", "exponential at the start of training", "dtriv-inf"),
        Method("scornn", "Cayley map times signs, half of them -1", "scornn", "chart"),
        _of_both("own", "symmetric orthonormalisation of a free matrix", "own"),
        Method("eurnn", "layers of Givens rotations", "eurnn", "chart"),
        Method(
            "urnn",
            "complex: phases, Fourier maps, reflections",
            "urnn",
            "chart",
            cell="unitary_rnn",
        ),
        _of_both("rgd-c-c", "gradient descent, canonical metric, Cayley", "rgd-c-c", "canonical"),
        _of_both("rgd-e-c", "gradient descent, Euclidean metric, Cayley", "rgd-e-c", "euclidean"),
        _of_both("rgd-c-qr", "gradient descent, canonical metric, QR", "rgd-c-qr", "canonical"),
        _of_both("rgd-e-qr", "gradient descent, Euclidean metric, QR", "rgd-e-qr", "euclidean"),
        *(
            _of_both(name, summary, via, rate, riemannian=riemannian)
            for name, summary, via, rate, riemannian in _BEYOND_GRADIENT_DESCENT
        ),
        Method(
            "unconstrained", "orthogonal start, then any matrix", None, "plain", block="stiefel"
        ),
        *_recurrent(),
        *_convolutional(),
        Method(
            "frozen",
            "orthogonal start, recurrent weight not trained",
            None,
            "none",
            block="stiefel",
        ),
    )
}


def fitting(network: str) -> list[str]:
    """Names of the methods that train a kind of network, a word of `Task.network`."""
    return [name for name, entry in METHODS.items() if entry.fits(network)]


def method(name: str) -> Method:
    """Looks a method up.

    Raises:
        UnknownNameError: If there is no such method; the message lists them.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def check_reflections(entry: Method, reflections: int | None, hidden: int) -> None:
    """Refuses a number of reflections that the method cannot use.

    Raises:
        ConfigurationError: If it is not between 1 and `hidden`, or the method has no reflections.
    """
    if reflections is None:
        return
    if not entry.takes_reflections:
        takers = ", ".join(name for name, other in METHODS.items() if other.takes_reflections)
        raise ConfigurationError(
            f"--reflections is an option of {takers}, and the method is {entry.name}: leave it out"
        )
    if not 1 <= reflections <= hidden:
        raise ConfigurationError(
            f"expected --reflections between 1 and the hidden size {hidden}, got {reflections}"
        )
