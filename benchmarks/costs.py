"""What the charts and steps cost by count, what they cover, and when to choose them.

The formulae for a pass over T steps and for a gradient step are those of Tables 1 and 2 of the CWY
paper (Likhosherstov, Davis, Choromanski, Weller, AISTATS 2021) as far as they could be
reconstructed; a cell that ends in ``(?)`` is uncertain. N hidden units or rows, M columns, L
reflections or layers. `flops` counts one forward build of ours, leading terms only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FRAMES", "SQUARE", "ChartCost", "FrameCost"]


@dataclass(frozen=True)
class ChartCost:
    """A chart of square matrices.

    Attributes:
        via: Its name.
        paper: The paper's name of the method.
        serial: Serial time of a pass over T steps.
        parallel: Parallel time of it.
        flops: Of building the n x n weight once.
        covers: Which matrices are reached.
        determinant: Which determinants, for real weights.
        when: When to choose it.
    """

    via: str
    paper: str
    serial: str
    parallel: str
    flops: str
    covers: str
    determinant: str
    when: str


SQUARE = (
    ChartCost(
        "cwy",
        "CWY",
        "T L N + L^2 N + L^3",
        "T log(L N) + L^2 log L",
        "2 n^2 L + 2 n L^2",
        "products of L reflections; all of one determinant at L = n",
        "(-1)^L, or the other by flip",
        "the default: holds every value, any optimizer, and fewer reflections are cheaper still",
    ),
    ChartCost(
        "householder",
        "HR",
        "T L N",
        "T L log N (?)",
        "4 n^2 L",
        "as cwy",
        "as cwy",
        "to check cwy, or for very few reflections",
    ),
    ChartCost(
        "matrix_exp",
        "EXPRNN, DTRIV",
        "T N^2 + N^3",
        "T log N + N^3 (?)",
        "2 n^3 (7 + squarings)",
        "one component; one to one below pi",
        "that of the base",
        "coordinates that are geodesics: rebased, SGD is Riemannian gradient descent",
    ),
    ChartCost(
        "cayley",
        "SCORNN",
        "T N^2 + N^3",
        "T log N + N^2 log N (?)",
        "2 n^3",
        "almost one component: no eigenvalue -1 of Q D",
        "det D, or the other by flip",
        "the fastest full chart on a CPU; smooth and one to one",
    ),
    ChartCost(
        "own",
        "OWN",
        "-",
        "-",
        "4 n p^2 + 14/3 p^3",
        "all (centred: columns that sum to 0)",
        "that of the proxy",
        "frames from a free matrix; convolution kernels",
    ),
    ChartCost(
        "polar",
        "-",
        "-",
        "-",
        "4 n p^2 an iteration",
        "all",
        "that of the proxy",
        "as own, by products only; known as Bjorck's",
    ),
    ChartCost(
        "givens",
        "EURNN",
        "T L N",
        "T L",
        "3 n^2 L",
        "SO(n), U(n) at L = n layers",
        "+1, or -1 by flip",
        "few layers (fft: log2 n of them): the cheapest product with a vector",
    ),
    ChartCost(
        "urnn",
        "URNN",
        "T N log N",
        "T log N (?)",
        "10 n^2 log2 n",
        "a strict subset of U(n)",
        "complex only",
        "to reproduce the unitary RNN of 2016",
    ),
    ChartCost(
        "riemannian",
        "RGD",
        "T N^2 + N^3 (?)",
        "T log N + N^2 log N (?)",
        "0",
        "all",
        "that of the start",
        "steps along the manifold, its gradient norm, momentum on it",
    ),
)


@dataclass(frozen=True)
class FrameCost:
    """One gradient step on an N x M matrix with orthonormal columns.

    Attributes:
        name: The paper's name.
        via: The way to train that the measured time belongs to.
        parallel: Parallel time.
        matrix: The matrix that is inverted or factorised.
        flops: As printed.
        count: The same as a function of (N, M), for the order of the methods.
    """

    name: str
    via: str
    parallel: str
    matrix: str
    flops: str
    count: Callable[[int, int], float] | None


FRAMES = (
    FrameCost(
        "T-CWY",
        "tcwy",
        "log(M N) + M^2 log M (?)",
        "M x M, upper triangular",
        "4 N M^2 + 7/3 M^3",
        lambda n, m: 4 * n * m**2 + 7 / 3 * m**3,
    ),
    FrameCost(
        "OWN",
        "own",
        "log(M N) + M^3 (?)",
        "M x M, eigenvectors",
        "4 N M^2 + 14/3 M^3",
        lambda n, m: 4 * n * m**2 + 14 / 3 * m**3,
    ),
    FrameCost(
        "RGD-C-QR",
        "rgd-c-qr",
        "M log(M N) (?)",
        "QR",
        "10 N M^2 - 2/3 M^3",
        lambda n, m: 10 * n * m**2 - 2 / 3 * m**3,
    ),
    FrameCost(
        "RGD-E-QR",
        "rgd-e-qr",
        "M log(M N) (?)",
        "QR",
        "14 N M^2 - 2/3 M^3",
        lambda n, m: 14 * n * m**2 - 2 / 3 * m**3,
    ),
    FrameCost(
        "RGD-C-C",
        "rgd-c-c",
        "log(M N) + M^2 log M (?)",
        "2M x 2M (ours: M x M)",
        "28 N M^2 + 16 M^3",
        lambda n, m: 28 * n * m**2 + 16 * m**3,
    ),
    FrameCost(
        "RGD-E-C",
        "rgd-e-c",
        "log(M N) + M^2 log M (?)",
        "3M x 3M (ours: M x M)",
        "? N M^2 + 45 M^3 (?)",
        None,
    ),
)
