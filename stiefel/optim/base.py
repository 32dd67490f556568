"""One step loop for all Riemannian optimizers: gather, check, propose, commit.

A subclass says where one batch goes (`RiemannianOptimizer._propose`). The loop joins leaves into
batches, refuses what it must not step, changes nothing until everything has been checked, and
hands ordinary parameters to torch's arithmetic where it is told to.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from stiefel.errors import ConfigurationError, NonFiniteError, OffManifoldError
from stiefel.geometry import polar_factor
from stiefel.geometry.linear import readable
from stiefel.manifolds import Manifold, Stiefel
from stiefel.numerics import full_precision
from stiefel.optim.batches import Batch, Proposal, StateKind, by_pieces, point_ndim, write
from stiefel.optim.checks import (
    all_finite,
    non_finite_error,
    off_manifold,
)
from stiefel.optim.euclidean import EUCLIDEAN_STEPS, untouched_where_non_finite
from stiefel.optim.groups import LATE_STATES, GroupedLeaves, manifold_of
from stiefel.optim.mending import forgotten_where_longer, onto_manifold
from stiefel.optim.sorting import Facts, Part, sort

__all__ = ["Plan", "RiemannianOptimizer"]

#: How many tolerances off the manifold a point is before a step if something wrote into it.
_ASTRAY = 100
_LAYOUT = operator.attrgetter("layout")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step that has been gathered but not taken: batches, and ordinary leaves by group."""

    batches: list[Batch]
    euclidean: list[tuple[dict[str, Any], list[Tensor]]]

    def gradients(self) -> Iterator[Tensor]:
        """All gradients, joined where they are."""
        yield from (batch.gradients for batch in self.batches)
        for _, leaves in self.euclidean:
            yield from (leaf.grad for leaf in leaves if leaf.grad is not None)

    def leaves(self) -> list[Tensor]:
        """All parameters that the step would move."""
        moved = [leaf for batch in self.batches for leaf in batch.leaves]
        return moved + [leaf for _, leaves in self.euclidean for leaf in leaves]


class RiemannianOptimizer(GroupedLeaves):
    """Base of the optimizers that move manifold parameters along their manifolds.

    A parameter is stepped when its ``.grad`` is not None, as in torch; ``.grad`` is never changed.
    Leaves of equal manifold, matrix size, dtype and device in one group are stepped as one batch.

    Before anything is changed, two flags are read from each device: whether all gradients are
    finite, and whether all new points of a `stiefel.Stiefel` are on it within its tolerance. A
    point that is not (a step so large that floating point loses it) is computed again in double
    precision and brought to the nearest point of the manifold. With ``skip_nonfinite=True``
    nothing is read from an accelerator: leaves with a non-finite gradient stay where they are,
    chosen by `torch.where`, and so do those whose step overflows. A new point that is off is mended
    there by a fixed number of products (`stiefel.optim.mending`), and momentum that the step has
    spoilt is forgotten; on the CPU it is mended as above.

    Args:
        params: Parameters or groups, as for torch.
        defaults: Defaults of the groups; ``lr`` and ``maximize`` at least.
        euclidean: What to do with ordinary parameters: None refuses them, ``"sgd"`` steps them
            bit for bit as `torch.optim.SGD` does with the group's options, ``"adam"`` as
            `torch.optim.Adam`.
        skip_nonfinite: See above.
    """

    #: Whether averages of gradients are kept in the surrounding space by design, not tangent.
    ambient_state: bool = False

    def _propose(self, batch: Batch) -> Proposal:
        """Where a batch goes: a pure function of it, which treats every matrix by itself.

        A large batch of small matrices may come in pieces.
        """
        raise NotImplementedError

    # -- the step ---------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient.

        Args:
            closure: Evaluates the model again and returns the loss; called once.

        Returns:
            What the closure returned, or None.

        Raises:
            NonFiniteError: If a gradient is not finite; nothing has been changed.
            LostManifoldError: If a leaf is not on its manifold's parameter class any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self.gather()
        if not self.skip_nonfinite and not all_finite(plan.gradients()):
            raise non_finite_error(plan.leaves(), self.describe)
        self.commit(plan, self.propose(plan))
        return loss

    @torch.no_grad()
    def gather(self) -> Plan:
        """Joins the leaves that have gradients into batches; changes nothing.

        A plan holds until the next call: the memory of its batches is used again then.
        """
        batches, euclidean, followed = [], [], False
        for number, group in enumerate(self.param_groups):
            known_by = next(iter(self._state_kinds(group)), None)
            gradients = [leaf.grad for leaf in group["params"]]
            states = [self.state.get(leaf, {}) for leaf in group["params"]] if known_by else []
            now = (group["params"], gradients, states, known_by)
            sorting = self._sortings.get(number)
            if sorting is None or not sorting.facts.hold(*now):
                if not followed:
                    self._follow()
                    followed = True
                sorting = sort(Facts(*now), self._meet)
                self._sortings[number] = sorting
            for part in sorting.parts:
                kinds = {} if part.fresh else self._kinds_on(part.manifold, group)
                batches.append(self._batch(group, part, gradients, states, kinds))
            if sorting.ordinary:
                euclidean.append((group, list(sorting.ordinary)))
        return Plan(batches, euclidean)

    def _follow(self) -> None:
        """Lets states follow their leaves where `model.to` has changed these."""
        groups = self.param_groups
        self._forms = self._forms.follow(groups, self.state, self._fit_state, self.describe)

    def _meet(self, leaf: Tensor) -> tuple[Manifold | None, int]:
        """The manifold of a leaf, one object for all equal ones, and the dimensions of a point."""
        manifold = manifold_of(leaf)
        if manifold is None:
            self._check_ordinary(leaf)
            return None, 0
        known = self._manifolds.get(id(manifold))
        if known is None:
            same = next((m for _, m, _ in self._manifolds.values() if m == manifold), manifold)
            known = (manifold, same, point_ndim(manifold))
            self._manifolds[id(manifold)] = known  # holding the manifold keeps its id its own
        return known[1:]

    def _batch(
        self,
        group: dict[str, Any],
        part: Part,
        all_gradients: list[Tensor | None],
        all_states: list[Mapping[str, Any]],
        kinds: Mapping[str, StateKind],
    ) -> Batch:
        leaves, joint = part.leaves, part.joint
        self._check_manifold_leaf(leaves[0], part.manifold, group)
        gradients = [g for g in map(all_gradients.__getitem__, part.places) if g is not None]
        if not all(map(operator.is_, map(_LAYOUT, gradients), repeat(torch.strided))):
            pairs = zip(leaves, gradients, strict=True)
            leaf, gradient = next(pair for pair in pairs if pair[1].layout is not torch.strided)
            raise ConfigurationError(
                f"expected a dense gradient, got one of layout {gradient.layout} for "
                f"{self.describe(leaf)}: a sparse gradient has no meaning on a manifold. Use "
                "sparse=False in the layer that produces it"
            )
        states: dict[str, Tensor] = {}
        for name, kind in kinds.items():
            values = self._states_of(part, all_states, name)
            settled = joint.settled(name, values)
            states[name] = joint.join(values, kind) if settled is None else settled
        return Batch(
            manifold=part.manifold,
            group=group,
            leaves=leaves,
            joint=joint,
            points=joint.join(leaves, slot="points"),
            gradients=self._joined_gradients(part, gradients),
            state=states,
        )

    def _states_of(
        self, part: Part, all_states: list[Mapping[str, Any]], name: str
    ) -> list[Tensor]:
        """One state of each leaf; zeros where it was switched on later than the others."""
        try:
            return [all_states[place][name] for place in part.places]
        except KeyError:
            if name not in LATE_STATES:
                raise
        return [
            all_states[place].get(name, torch.zeros_like(all_states[place][LATE_STATES[name]]))
            for place in part.places
        ]

    def _joined_gradients(self, part: Part, gradients: list[Tensor]) -> Tensor:
        """The gradients of a batch; a copy for manifolds of others, some of which write into it."""
        joined = part.joint.join(gradients, slot="gradients")
        alone = len(gradients) == 1 and not isinstance(part.manifold, Stiefel)
        return joined.clone() if alone else joined

    @torch.no_grad()
    def propose(self, plan: Plan) -> list[Proposal]:
        """Computes where every batch goes; changes nothing."""
        with full_precision():
            if self.skip_nonfinite:
                return [self._go(batch, self._propose_where_finite)[0] for batch in plan.batches]
            gone = [self._go(batch, self._propose) for batch in plan.batches]
            proposals, lost = [go[0] for go in gone], [go[1] for go in gone]
            return self._on_manifold(plan.batches, proposals, lost)

    def _go(
        self, batch: Batch, propose: Callable[[Batch], Proposal]
    ) -> tuple[Proposal, Tensor | None]:
        """Where a batch goes, in pieces if it is large, and which new points are off."""
        masks = []

        def watched(piece: Batch) -> Proposal:
            proposal = propose(piece)
            if not self.skip_nonfinite:
                masks.append(off_manifold(piece.manifold, proposal.points))
            return proposal

        cuts = batch.cuts(whole_leaves=self.skip_nonfinite)
        if not cuts:
            proposal = watched(batch)
            return proposal, masks[0] if masks else None
        proposal = by_pieces(batch, cuts, watched)
        known = [mask for mask in masks if mask is not None]
        return proposal, torch.cat(known) if known else None

    def _propose_where_finite(self, batch: Batch) -> Proposal:
        good = batch.joint.each(torch.isfinite(batch.gradients))
        gradients = torch.where(good, batch.gradients, torch.zeros_like(batch.gradients))
        batch = dataclasses.replace(batch, gradients=gradients)
        proposal, lost = self._brought_back(batch, self._propose(batch))
        if lost is not None:
            good = good & batch.joint.each(~lost[..., None, None])
        for new in (proposal.points, *proposal.state.values()):  # a finite gradient may overflow
            good = good & batch.joint.each(torch.isfinite(new))
        state = {
            name: torch.where(good, new, batch.state.get(name, torch.zeros_like(new)))
            for name, new in proposal.state.items()
        }
        return Proposal(torch.where(good, proposal.points, batch.points), state)

    def _brought_back(self, batch: Batch, proposal: Proposal) -> tuple[Proposal, Tensor | None]:
        """Mends the points off a `stiefel.Stiefel`, and says which cannot be: they stay.

        These are the points that are not finite, and those that were off before the step. On an
        accelerator nothing is read.

        Returns:
            The proposal, and a mask of those points; None where that is not known, or none is.
        """
        off = off_manifold(batch.manifold, proposal.points)
        if off is None or (readable(off) and not bool(off.any())):
            return proposal, None
        before = off_manifold(batch.manifold, batch.points, slack=_ASTRAY)
        lost = ~proposal.points.isfinite().flatten(-2).all(-1)
        lost = off & (lost if before is None else lost | before)
        off = off & ~lost
        if readable(off):
            if bool(off.any()):
                proposal = self._replaced(batch, proposal, off, self._propose(batch.choose(off)))
            return proposal, lost
        points = torch.where(off[..., None, None], onto_manifold(proposal.points), proposal.points)
        still = off_manifold(batch.manifold, points)
        kinds, state = self._kinds_on(batch.manifold, batch.group), dict(proposal.state)
        for name in (name for name in state if kinds[name] == "point"):
            before_it = batch.state.get(name)
            state[name] = forgotten_where_longer(state[name], before_it, batch.gradients, off)
        return Proposal(points, state), lost if still is None else lost | still

    def _on_manifold(
        self, batches: list[Batch], proposals: list[Proposal], lost: list[Tensor | None]
    ) -> list[Proposal]:
        """Mends the points that floating point has lost; one flag is read in the usual case.

        A state that is not finite would stop its parameter for ever: it is an error.

        Args:
            batches: The batches.
            proposals: Where they go.
            lost: Masks of the points that are off their manifold; None where that is not known.
        """
        flags = [mask.any() for mask in lost if mask is not None]
        states = [value for proposal in proposals for value in proposal.state.values()]
        flags += [~torch.isfinite(value.sum()) for value in states]
        by_device = {flag.device: [f for f in flags if f.device == flag.device] for flag in flags}
        if not any(bool(torch.stack(some).any()) for some in by_device.values()):
            return proposals
        mended = [
            proposal if mask is None or not bool(mask.any()) else self._mend(batch, proposal, mask)
            for batch, proposal, mask in zip(batches, proposals, lost, strict=True)
        ]
        for batch, proposal in zip(batches, mended, strict=True):
            if not all_finite(proposal.state.values()):
                raise self._overflow(batch)
        return mended

    def _overflow(self, batch: Batch) -> NonFiniteError:
        names = [self.describe(leaf) for leaf in batch.leaves[:3]]
        return NonFiniteError(
            f"the step overflows: lr = {batch.group['lr']} times a gradient with entries up "
            f"to {float(batch.gradients.abs().max()):.1e}, in one of {', '.join(names)}. "
            "Nothing was changed. Lower the learning rate or clip the gradients"
        )

    def _mend(self, batch: Batch, proposal: Proposal, lost: Tensor) -> Proposal:
        """Computes the lost points again in double precision, and the nearest point to each."""
        before = off_manifold(batch.manifold, batch.points, slack=_ASTRAY)
        if before is not None and bool(before.any()):
            names = [self.describe(leaf) for leaf in batch.leaves[:3]]
            raise OffManifoldError(
                f"expected points on their manifold before the step, got one that is off it among "
                f"{', '.join(names)}: something wrote into the parameter in place (an initialiser, "
                "for instance). Nothing was changed. Assign to the module's weight instead, which "
                "projects, or project with manifold.projx"
            )
        again = self._propose(batch.choose(lost))
        if not all_finite([again.points, *again.state.values()]):
            raise self._overflow(batch)
        return self._replaced(batch, proposal, lost, again)

    def _replaced(
        self, batch: Batch, proposal: Proposal, lost: Tensor, again: Proposal
    ) -> Proposal:
        """A proposal with the nearest points to others, and their states, where a mask says so."""
        points = proposal.points.clone()
        points[lost] = polar_factor(again.points).to(points.dtype)
        state = {name: value.clone() for name, value in proposal.state.items()}
        kinds = self._kinds_on(batch.manifold, batch.group)
        for name, value in again.state.items():
            if kinds[name] != "leaf":
                state[name][lost] = value.to(state[name].dtype)
        return Proposal(points, state)

    @torch.no_grad()
    def commit(self, plan: Plan, proposals: list[Proposal]) -> None:
        """Writes the proposals, and steps the ordinary leaves."""
        for batch, proposal in zip(plan.batches, proposals, strict=True):
            leaves, joint = batch.leaves, batch.joint
            kinds = self._kinds_on(batch.manifold, batch.group)
            write(leaves, joint.separate(proposal.points))
            for name, value in proposal.state.items():
                if joint.is_home(name, batch.state.get(name)):
                    batch.state[name].copy_(value)
                elif (
                    name in batch.state
                    and not joint.many
                    and all(name in self.state[leaf] for leaf in leaves)
                ):
                    parts = joint.separate(value, kinds[name])
                    write([self.state[leaf][name] for leaf in leaves], parts)
                else:
                    parts = joint.settle(name, value, kinds[name])
                    for leaf, part in zip(leaves, parts, strict=True):
                        self.state[leaf][name] = part
        for group, leaves in plan.euclidean:
            step = EUCLIDEAN_STEPS[self.euclidean or "sgd"]
            if self.skip_nonfinite:
                with untouched_where_non_finite(leaves, self.state):
                    step(group, leaves, self.state)
            else:
                step(group, leaves, self.state)
