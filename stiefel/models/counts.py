"""How many numbers a model is trained by."""

from __future__ import annotations

from torch import nn

from stiefel.geometry import manifold_dimension
from stiefel.manifolds import is_stiefel
from stiefel.parameter import constraints

__all__ = ["Counted"]


class Counted(nn.Module):
    """A module that says how many numbers it is trained by."""

    def expected_parameters(self, *, effective: bool = False) -> int:
        """The number of parameters; a complex number is two, and what is tied counts once.

        Args:
            effective: Whether a constrained weight counts by the dimension of its manifold,
                N (N - 1) / 2 for a real orthogonal one and n p - p (p + 1) / 2 for a tall one, as
                published tables count, instead of by the coordinates of its chart (N^2 for `cwy`
                with N reflections). A chart with fewer coordinates than that counts by those.

        Returns:
            The count.
        """
        held = {id(p): p.numel() * (2 if p.is_complex() else 1) for p in self.parameters()}
        count = 0
        for constraint in constraints(self) if effective else ():
            if not is_stiefel(constraint.manifold):
                continue
            point = constraint.point
            n, p = point.shape[-2:]
            matrices = point.numel() // (n * p)
            dimension = matrices * manifold_dimension(n, p, point.is_complex())
            count += min(dimension, sum(held.pop(id(leaf), 0) for leaf in constraint.leaves))
        return count + sum(held.values())
