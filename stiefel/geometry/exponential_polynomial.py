"""A polynomial of degree 12 for the exponential, by four matrix products.

With powers A, A2 = A A, A3 = A2 A and four linear combinations B_i = b_i0 I + b_i1 A + b_i2 A2 +
b_i3 A3 (their 16 numbers below):

    A6 = B3 + B4 B4,    T = B1 + (B2 + A6) A6.

Five products would be needed by the method of Paterson and Stockmeyer; that four are enough, once
the 16 numbers solve 13 polynomial equations, is due to Sastre (Linear Algebra Appl. 539 (2018))
and to Bader, Blanes and Casas (Mathematics 7 (2019)). The numbers here were solved for anew: the
targets are other polynomials, and among the real solutions the one is taken whose rounding errors
grow least (``sum |b|`` over the terms equals e^theta, the least possible).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stiefel.geometry.linear import add_product, add_product_

__all__ = [
    "ECONOMISED_DOUBLE",
    "ECONOMISED_SINGLE",
    "TAYLOR",
    "Polynomial",
]

_Row = tuple[float, float, float, float]


@dataclass(frozen=True)
class Polynomial:
    """The numbers b_ij, and how large a matrix may be.

    Attributes:
        rows: b_ij: row i for B_i, column j for A^j.
        reach: Spectral norm up to which the polynomial is accurate.
    """

    rows: tuple[_Row, _Row, _Row, _Row]
    reach: float

    def combination(
        self, i: int, A: Tensor, A2: Tensor, A3: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """B_i (i from 1 to 4), a new tensor or in the memory of `out`."""
        constant, first, second, third = self.rows[i - 1]
        B = torch.mul(A, first, out=out).add_(A2, alpha=second).add_(A3, alpha=third)
        B.diagonal(dim1=-2, dim2=-1).add_(constant)
        return B

    def evaluate(
        self, A: Tensor, A2: Tensor | None = None, work: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """T, and A2 (computed unless it is given), A3 and A6 for the backward pass.

        `work` is memory like A to work in.
        """
        A2 = A @ A if A2 is None else A2
        A3 = A2 @ A
        B4 = self.combination(4, A, A2, A3, work)
        A6 = add_product_(self.combination(3, A, A2, A3), B4, B4)
        return self.last(A, A2, A3, A6, B4), A2, A3, A6

    def last(
        self, A: Tensor, A2: Tensor, A3: Tensor, A6: Tensor, work: Tensor | None = None
    ) -> Tensor:
        """T, one product more than A6."""
        left = self.combination(2, A, A2, A3, work).add_(A6)
        return add_product_(self.combination(1, A, A2, A3), left, A6)

    def cotangents(
        self, G: Tensor, A: Tensor, A2: Tensor, A3: Tensor, A6: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """From the cotangent of T those of A, A2 and A3, each taken for free, and two free ones.

        New memory costs as much as a pass over it: what is no longer needed takes the next result,
        and the last two tensors are such memory.
        """
        left = self.combination(2, A, A2, A3).add_(A6)
        G2 = G @ A6.mH
        G3 = add_product(G2, left.mH, G)
        B4 = self.combination(4, A, A2, A3, left)
        G4 = add_product_(G3 @ B4.mH, B4.mH, G3)
        terms = list(zip((G, G2, G3, G4), self.rows, strict=True))

        def sum_of(j: int, out: Tensor | None) -> Tensor:
            total = torch.mul(G4, self.rows[3][j], out=out)
            for term, row in terms[:3]:
                total.add_(term, alpha=row[j])
            return total

        return sum_of(1, left), sum_of(2, None), sum_of(3, G4), G2, G3


_SINGLE_ROWS = (
    (0.2054237389193114, 0.1381112980291732, 0.09373532072929602, 0.01011790929164446),
    (3.88669547489198, 0.9138110828116354, 0.1380107128404589, 0.0003222405434822736),
    (0.1303377416163497, 0.07134130617032255, 0.008504789618911594, 0.007608078549045169),
    (0.2536642356534423, 0.1746702715836703, 0.0188126296946764, 0.006391215813781997),
)
_DOUBLE_ROWS = (
    (0.004116122707510934, 0.002395911553331211, 0.08754636123473986, 0.002185896934166908),
    (4.566718189778091, 0.9881211294025615, 0.1539760334966131, -0.001407489649274589),
    (0.2085496537025335, 0.1585985482553072, 0.02184561910040141, 0.01231821132054136),
    (0.0008286506135304711, 0.1337402584304516, 0.0202149268912686, 0.006743607993899396),
)
_TAYLOR_ROWS = (
    (0.5937421909876799, 0.8071443867033763, 0.272619312949283, 0.02499128475183039),
    (4.854305391243517, 1.274260264353033, 0.1571411748835403, -0.001473705504161333),
    (0.07787234145006522, 7.288406286413618e-08, 0.01814461201865118, 0.01148901753369115),
    (-0.06650349090257483, -0.1318106101383018, -0.02027855540589259, -0.006759518468630863),
)
#: Chebyshev series of exp on the imaginary interval [-3.4 i, 3.4 i]; error 2.6e-7 there.
ECONOMISED_SINGLE = Polynomial(_SINGLE_ROWS, reach=3.4)
#: The same on [-0.7 i, 0.7 i]; error 4.3e-16 there.
ECONOMISED_DOUBLE = Polynomial(_DOUBLE_ROWS, reach=0.7)
#: The Taylor polynomial, for matrices that are not normal; error 2.7e-16 at a norm of 0.4.
TAYLOR = Polynomial(_TAYLOR_ROWS, reach=0.4)
