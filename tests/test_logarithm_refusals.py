"""`Stiefel.logmap` and `dist`: what is said of matrices that are no points."""

from __future__ import annotations

import pytest
import torch

import stiefel
from stiefel.errors import OffManifoldError, RepresentationError, ShapeError
from stiefel.geometry import haar

D = torch.float64


@pytest.mark.parametrize("what", ["logmap", "dist"])
@pytest.mark.parametrize("inner", ["canonical", "euclidean"])
def test_matrices_that_are_no_points(inner, what):
    manifold = stiefel.Stiefel(inner)
    between = getattr(manifold, what)
    X = haar(6, 2, dtype=D)
    with pytest.raises(OffManifoldError, match=r"expected orthonormal columns.*nan"):
        between(X, X * float("nan"))
    with pytest.raises(OffManifoldError, match="expected orthonormal columns"):
        between(X, 3 * torch.ones(6, 2, dtype=D).cumsum(0))
    with pytest.raises(ShapeError, match="two points of one size"):
        between(X, haar(7, 2, dtype=D))
    square = haar(3, 3, dtype=D)
    with pytest.raises(RepresentationError, match="determinant -1"):
        between(square, square.flip(0))
