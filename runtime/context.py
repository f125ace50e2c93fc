"""What the parameter groups of one root share while they run.

A `GroupContext` owns the communication lanes, the microbatch flag and the bookkeeping of a
backward (which groups reduced, what must happen when it ends). It knows groups, not modules:
the module-level half is ``compile_fsdp.context.FsdpContext``.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from .agreement import Step, agreement_of
from .arena import Place
from .dbuffer import DBuffer
from .host_state import Uncapturable
from .memory import Memory, anywhere
from .merging import gather_together, reduce_together
from .modes import without_autograd
from .process_groups import GATHER, REDUCE_INNER, REDUCE_OUTER, UNIFIED
from .streams import Event, Lane, make_lane
from .symmetric_memory import StagingPool
from .torch_internals import at_end_of_backward, in_backward

if TYPE_CHECKING:
    from .group_unsharding import GroupUnsharding
    from .parameter_group import FsdpParameterGroup


@dataclass(frozen=True)
class CommunicationLanes:
    """One in-order lane for each kind of communication that may overlap the others."""

    gather: Lane
    reduce_inner: Lane
    reduce_outer: Lane

    @classmethod
    def create(cls, device: torch.device, *, unified: bool = False) -> CommunicationLanes:
        """New lanes on ``device``; ``unified``: one for all kinds, on which nothing overlaps."""
        if unified:
            lane = make_lane(device, UNIFIED)
            return cls(lane, lane, lane)
        return cls(*[make_lane(device, name) for name in (GATHER, REDUCE_INNER, REDUCE_OUTER)])

    @property
    def distinct(self) -> tuple[Lane, ...]:
        """All lanes, each once."""
        return tuple(dict.fromkeys((self.gather, self.reduce_inner, self.reduce_outer)))


class GroupContext:
    """Lanes, microbatch state and backward bookkeeping of one root's parameter groups.

    Attributes:
        unified: whether all communication is on one lane.
        is_last_microbatch: whether a backward that runs now ends an optimizer step.
        is_driven: whether somebody calls `wait_for_reductions` when a backward ends. A group used
            by itself has no such driver, and its reductions are waited for at once.
        zeros_missing_gradients: every backward reduces every trainable group, at its end and in one
            order, with zeros for gradients that this rank does not have.
        memory: where the groups' buffers get their bytes while they run.
        weights_are_new: somebody has written weights, and the gather lane has not waited for that.
        eager_depth: how many hooked forwards of this root are on the Python stack.
    """

    is_driven = False

    def __init__(self, device: torch.device, *, unified: bool = False) -> None:
        self.device = device
        self.unified = unified
        self.memory = Memory()
        self._all_staged = True
        self.is_last_microbatch = True
        self.zeros_missing_gradients = False
        self.weights_are_new = False
        self.eager_depth = 0
        self._groups: list[weakref.ref[FsdpParameterGroup]] = []
        self._reduced: dict[FsdpParameterGroup, None] = {}
        self._withheld = False
        self._in_flight: deque[tuple[Event, DBuffer | torch.Tensor]] = deque()
        self._finish: weakref.ref[Callable[[], None]] | None = None

    @functools.cached_property
    def lanes(self) -> CommunicationLanes:
        """Made when first needed: of a nest of FSDP modules only the root's context runs."""
        lanes = CommunicationLanes.create(self.device, unified=self.unified)
        for lane in (lanes.gather, lanes.reduce_inner, lanes.reduce_outer):
            lane.memory = self.memory
        return lanes

    def renew_lanes(self) -> None:
        """Finish what is on the lanes and make new ones, as `streams.lanes_made_by` says now."""
        if "lanes" in self.__dict__:
            self.lanes.gather.synchronize()
            self.wait_for_reductions()
            del self.lanes

    def add_group(self, group: FsdpParameterGroup) -> None:
        """Take ``group`` in: it communicates on this context's lanes from now on."""
        self._groups.append(weakref.ref(group))
        group.context = self
        self.add_staging(group.staging)

    def add_staging(self, pool: StagingPool | None) -> None:
        """A group's staging buffers may come from ``pool``: they do where those of all groups may,
        for these share their memory."""
        self._all_staged = self._all_staged and pool is not None
        self.memory.source = pool.allocating if pool and self._all_staged else anywhere

    def groups(self) -> Iterator[FsdpParameterGroup]:
        """The live groups, in the order they were added."""
        for reference in self._groups:
            group = reference()
            if group is not None:
                yield group
                yield from cast("tuple[FsdpParameterGroup, ...]", group.planes)

    def begin_graph(self) -> None:
        """A graph, or an outermost forward, is about to issue its first gather.

        The gather lane first waits for what compute wrote (an optimizer step), and gradients that
        ``zero_grad`` has dropped give their memory back. What an interrupted graph left held is
        released: between the graphs of a forward nobody holds anything but eager hooks.
        """
        self.lanes.gather.wait_current()
        self.weights_are_new = False
        if in_backward():
            self.finish_at_end_of_backward()
        else:
            interrupted = self._finish is not None and self._finish() is None
            held = self.eager_depth == 0 and any(group.is_held for group in self.groups())
            if interrupted or held:
                self.drop_leftovers()
            for group in self.groups():
                group.release_unused_gradient_storage()
                if self.eager_depth == 0:
                    group.expect_step()

    def gather_together(
        self, groups: Sequence[FsdpParameterGroup], places: Sequence[Place | None]
    ) -> None:
        """Start gathering several groups by one collective; nobody holds them yet. ``places`` has
        for each where a plan puts it, if one does."""
        named = [(group.label, group.unsharding) for group in groups]
        gather_together(self.lanes.gather, named, places)

    def reduce_together(
        self, contributions: Mapping[FsdpParameterGroup, Mapping[int, torch.Tensor]]
    ) -> None:
        """Reduce the gradients of several groups, by tensor index, with one inner reduction."""
        with without_autograd():
            together = not self.zeros_missing_gradients and len(contributions) > 1
            if together and all(group.context is self for group in contributions):
                self.settle_reductions()
                sent = reduce_together(self.lanes.reduce_inner, contributions)
                self.note_reduction(tuple(contributions), sent)
                for group, gradients in contributions.items():
                    group.expect_hooks(tuple(gradients))
                return
        for group, gradients in contributions.items():
            group.reduce_gradients(gradients)

    def prefetch_beyond_graph(self, group: FsdpParameterGroup) -> None:
        """A graph has started the gather of ``group``: start what another graph, or the eager
        driver, will need after it. Without modules, nobody knows."""

    def drop_leftovers(self) -> None:
        """Release every group that an interrupted forward or backward left unsharded, and forget
        the gradients of such a backward that were not reduced yet."""
        for group in self.groups():
            group.reshard_parameters()
            group.forget_unreduced_gradients()
        self._reduced.clear()
        self._withheld = False
        if self._in_flight:
            self.wait_for_reductions()
        self._finish = None

    def settle_reductions(self) -> None:
        """Let go of packed gradients that nobody reads any more, before another reduction takes
        memory."""
        self.lanes.reduce_inner.settle()
        while self._in_flight and self._in_flight[0][0].has_passed:
            self._give_back(self._in_flight.popleft()[1])

    def note_reduction(
        self, groups: Sequence[FsdpParameterGroup], sent: DBuffer | torch.Tensor
    ) -> None:
        """Remember that ``groups`` reduce gradients in this backward.

        ``sent`` belongs to the compute stream and is read by the reduction lane, so it is kept
        until compute has waited for what is on the lane now: that happens when the next but one
        reduction starts, which bounds what is held to two packed buffers. (On CPU it has waited
        when the next one starts, see `settle_reductions`.)
        """
        self._reduced.update(dict.fromkeys(groups))
        self._in_flight.append((self.lanes.reduce_inner.record_event(), sent))
        while len(self._in_flight) > 2:
            event, oldest = self._in_flight.popleft()
            event.wait()
            self._give_back(oldest)
        if not self.is_driven:
            self.wait_for_reductions()

    def note_outer_reduction(self) -> None:
        """A group has started an outer reduction."""
        if not self.is_driven:
            self.wait_for_reductions()

    def note_withheld(self) -> None:
        """A group keeps gradients back until the end of this backward."""
        self._withheld = True

    def finish_at_end_of_backward(self) -> None:
        """Have `end_of_backward` called once when the running backward is over.

        Outside a backward there is no end to wait for, and reductions finish at once. A backward
        nested in another (reentrant activation checkpointing) is not an end.
        """
        if not in_backward():
            self.end_of_backward()
            return
        if self._finish is not None and self._finish() is not None:
            return
        if self._finish is not None:
            # The engine let go of the callback without calling it: an exception ended that
            # backward. This is another one.
            self.drop_leftovers()

        def finish() -> None:
            self._finish = None
            with torch.no_grad():
                self.end_of_backward()

        self._finish = weakref.ref(finish, self._backward_failed)
        at_end_of_backward(finish)

    def _backward_failed(self, _: object) -> None:
        """The engine let go of its callback without calling it: an exception is on its way.

        Who catches it may step, and read gradients, zero them in place or drop them: what is in
        flight comes first. An error of its own would hide the one that ended the backward.
        """
        with suppress(RuntimeError):
            self.join_lanes()

    def end_of_backward(self) -> None:
        """Finish gradients: outer reductions on the last microbatch, then wait for all of them.
        Users' hooks come last."""
        if self._withheld:
            self._withheld = False
            for group in self.groups():
                group.reduce_withheld_gradients()
        self._agree_on_end()
        reduced = list(self._reduced)
        for group in reduced:
            if self.is_last_microbatch:
                group.reduce_outer_gradients()
            group.flat_leaf.grad = None
        self._reduced.clear()
        self.wait_for_reductions()
        for group in reduced:
            group.call_gradient_hooks()

    def _agree_on_end(self) -> None:
        """A rank that has no more gradients to reduce says so: others may have some."""
        for group in {id(group.mesh): group for group in self._reduced}.values():
            step = Step.end_of_backward(f"model {group.model}")
            for axis in range(group.mesh.ndim):
                agreement = agreement_of(group.mesh.get_group(axis))
                if agreement is not None:
                    agreement.announce(step)

    def wait_for_reductions(self) -> None:
        """Compute issued after this sees finished gradients."""
        self.lanes.reduce_inner.synchronize()
        self.lanes.reduce_outer.synchronize()
        self._give_back_all()

    def _give_back_all(self) -> None:
        """Compute has waited for whoever read what was sent."""
        for _, sent in self._in_flight:
            self._give_back(sent)
        self._in_flight.clear()

    def _give_back(self, sent: DBuffer | torch.Tensor) -> None:
        self.memory.give_back(sent.local if isinstance(sent, DBuffer) else sent)

    # Captured graphs ---------------------------------------------------------------------------

    def join_lanes(self) -> None:
        """Compute issued after this sees all that is on the lanes now."""
        for lane in self.lanes.distinct:
            lane.synchronize()
        self._give_back_all()

    def fork_lanes(self) -> None:
        """What the lanes do from now on comes after what compute has issued so far."""
        for lane in self.lanes.distinct:
            lane.wait_current()

    def host_flags(self) -> Hashable:
        """What a graph's ops ask this context, as far as it is no group's.

        Raises:
            Uncapturable: they need the host.
        """
        if in_backward() and (self.zeros_missing_gradients or self._withheld):
            raise Uncapturable("gradients are kept back until the backward ends")
        # A forward is the same for every microbatch.
        last = in_backward() and self.is_last_microbatch
        return self.eager_depth > 0, last, self.memory.arena.taken

    def reached_from(self, group: FsdpParameterGroup) -> Sequence[GroupUnsharding]:
        """The groups whose gathers `prefetch_beyond_graph` starts."""
        return ()

    def has_reduced(self, group: FsdpParameterGroup) -> bool:
        """Whether ``group`` has reduced gradients in the running backward."""
        return group in self._reduced

    def note_reduced(self, group: FsdpParameterGroup) -> None:
        """``group`` has reduced gradients in the running backward, and compute sees them."""
        self._reduced[group] = None
