"""FsdpContext: what the FSDP modules of one root share.

It adds to the runtime's `GroupContext` what the eager driver needs: the order of units for
prefetching, which forwards are running, and what was unsharded on demand. It knows units, not
modules.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Hashable, Iterable
from typing import TYPE_CHECKING

import torch

from compile_fsdp.runtime.context import GroupContext
from compile_fsdp.runtime.group_unsharding import GroupUnsharding
from compile_fsdp.runtime.host_state import Uncapturable
from compile_fsdp.runtime.parameter_group import FsdpParameterGroup, Phase
from compile_fsdp.runtime.torch_internals import in_backward

if TYPE_CHECKING:
    from .graphed import GraphedStep
    from .unit import FsdpUnit


class FsdpContext(GroupContext):
    """Orders, nesting and on-demand holds of one root's units.

    Attributes:
        root: the root's number in the names of its groups.
        graphed_steps: what captures the compiled graphs of these units.
    """

    is_driven = True

    def __init__(self, device: torch.device, *, unified: bool = False) -> None:
        super().__init__(device, unified=unified)
        self.root = 0
        self.graphed_steps: list[weakref.ref[GraphedStep]] = []
        self._forward_order: list[FsdpUnit] = []
        self._next: dict[Phase, dict[FsdpUnit, FsdpUnit]] = {}
        self._orders: dict[Phase, list[FsdpUnit]] = {}
        self._in_graphs: set[str] = set()
        self._beyond: dict[Phase, dict[GroupUnsharding, FsdpUnit]] = {
            Phase.FORWARD: {},
            Phase.BACKWARD: {},
        }
        self._on_demand: dict[GroupUnsharding, None] = {}

    def set_orders(self, forward: list[FsdpUnit], backward: list[FsdpUnit]) -> None:
        """Fix the prefetch orders: forward as ``named_modules`` lists the units, backward parent
        first and children reversed."""
        self._forward_order = forward
        self._orders = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
        self._next = {
            Phase.FORWARD: dict(itertools.pairwise(forward)),
            Phase.BACKWARD: dict(itertools.pairwise(backward)),
        }

    @property
    def is_computing(self) -> bool:
        """Whether an eager forward of this root, or any backward, is running."""
        return self.eager_depth > 0 or in_backward()

    def unshard_on_demand(self, group: GroupUnsharding) -> None:
        """Unshard a group that no hook has (its owner's ``forward`` was not called), until the
        outermost forward or the backward ends."""
        if group not in self._on_demand:
            group.acquire()
            self._on_demand[group] = None
            if in_backward():
                self.finish_at_end_of_backward()
        group.wait_for_unshard()

    def enter_forward(self, unit: FsdpUnit) -> None:
        """``unit``'s eager forward begins; it may be running already (a recursive module)."""
        if self.eager_depth == 0:
            self.drop_leftovers()
            self.begin_graph()
            for group in self.groups():
                group.follow_requires_grad()
        self.eager_depth += 1
        unit.forwards += 1
        unit.move_to(Phase.FORWARD)

    def leave_forward(self, unit: FsdpUnit) -> tuple[FsdpParameterGroup, ...]:
        """An eager forward ended, also by an exception; the outermost one drops what nobody holds
        any more.

        Returns:
            Where it was the outermost, the groups that were unsharded on demand meanwhile: backward
            will need them.
        """
        unit.forwards -= 1
        if unit.forwards == 0:
            unit.drop_all()
            unit.move_to(Phase.RESTING)
        self.eager_depth -= 1
        if self.eager_depth > 0:
            return ()
        # Backward reads other planes than forward.
        on_demand = tuple(each for each in self._on_demand if isinstance(each, FsdpParameterGroup))
        self._drop_on_demand(self._on_demand)
        self._drop_unheld(also_kept=False)
        return on_demand

    def drop_leftovers(self) -> None:
        """See `GroupContext.drop_leftovers`; units go back to RESTING."""
        super().drop_leftovers()
        self._on_demand.clear()
        for unit in self._forward_order:
            unit.forget()

    def end_of_backward(self) -> None:
        """Finish every unit whose backward did not end by itself, then the gradients."""
        for unit in self._forward_order:
            if unit.phase is Phase.BACKWARD:
                self.finish_unit_backward(unit)
        self._drop_on_demand(self._on_demand)
        for group in self.groups():
            group.reduce_gradients()
        self._drop_unheld()
        super().end_of_backward()

    def finish_unit_backward(self, unit: FsdpUnit) -> None:
        """Release ``unit``'s weights, then reduce what gradients it has."""
        unit.drop_all()
        unit.move_to(Phase.RESTING)
        for group in unit.groups:
            # Rowwise planes, for a part of the module that was recomputed by itself.
            self._drop_on_demand(group.planes)
            group.reduce_gradients()

    def prefetch_after(self, unit: FsdpUnit, phase: Phase) -> None:
        """Start the gathers of the unit that comes after ``unit`` in ``phase``'s order."""
        following = self._next[phase].get(unit)
        if following is not None:
            following.prefetch(phase)

    def note_graph(self, names: Collection[str]) -> None:
        """A graph that reads the groups called ``names`` is being compiled.

        Its last unit also starts the gathers of the one that follows in the order of the units, if
        another graph reads that (blocks that are compiled one by one).
        """
        self._in_graphs.update(names)
        for phase, following in self._next.items():
            inside = [
                (unit, each)
                for unit in self._orders[phase]
                for each in unit.gathered_for(phase)
                if each.name in names
            ]
            for _, each in inside:
                self._beyond[phase].pop(each, None)
            if inside and inside[-1][0] in following:
                unit, each = inside[-1]
                self._beyond[phase][each] = following[unit]

    def prefetch_beyond_graph(self, group: GroupUnsharding) -> None:
        """See `GroupContext.prefetch_beyond_graph`."""
        phase = Phase.BACKWARD if in_backward() else Phase.FORWARD
        following = self._beyond[phase].get(group)
        if following is not None and self._in_graphs.issuperset(
            [each.name for each in following.gathered_for(phase)]
        ):
            following.prefetch(phase)

    def reached_from(self, group: GroupUnsharding) -> tuple[GroupUnsharding, ...]:
        """See `GroupContext.reached_from`."""
        phase = Phase.BACKWARD if in_backward() else Phase.FORWARD
        following = self._beyond[phase].get(group)
        return () if following is None else following.gathered_for(phase)

    def host_flags(self) -> Hashable:
        """See `GroupContext.host_flags`."""
        if self._on_demand:
            raise Uncapturable("parameters are unsharded on demand")
        return super().host_flags()

    def _drop_unheld(self, *, also_kept: bool = True) -> None:
        """Prefetched for somebody who never came, or kept by a forward for one."""
        for group in self.groups():
            if group.is_unsharded and not group.is_held and (also_kept or not group.is_kept):
                group.reshard_alone()

    def _drop_on_demand(self, groups: Iterable[GroupUnsharding]) -> None:
        for group in [each for each in groups if each in self._on_demand]:
            del self._on_demand[group]
            if group.is_readable:
                group.drop()
