"""Unsharding: whether a group's full parameters are there, for whom, and from when on.

    unshard   refresh a stale model weight, start the gather, record the ready event
    wait      compute waits for that event and no other
    release   the storage goes, after what compute has issued
    keep      nobody holds it any more, but the storage stays for a backward to come

Several may hold the full parameters at once (a compiled graph inside an eager parent): `holders`
counts them, and the last one releases. They may be in two places at once (see `gathered`), and are
held and released in each by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .arena import Arena, Place
from .dbuffer import DBuffer
from .gathered import Gathered
from .host_state import UnshardingState
from .modes import without_autograd
from .streams import Lane
from .torch_internals import in_backward, writes_of
from .weights import Weights, copy_on


class Phase(enum.Enum):
    """What a module is doing, and so what its group is unsharded for."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Unsharding:
    """The state of one group's full parameters.

    Attributes:
        weights: the buffers.
        sharded: the parameters over the main weight. What writes one of them and is counted (a
            user's ``parameter.mul_()``) is synced by the next unshard.
        own: the full parameters where the unsharded Parameters look.
        placed: those in a place that a plan gave them; without a place there are none.
        maybe_stepped: the main weight may have been written by a step that nobody announced.
        always_refreshes: so it may before every forward (an average that is updated by hand).
    """

    def __init__(self, weights: Weights, sharded: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self.sharded = tuple(sharded)
        self.own = Gathered(weights.full, is_there=not weights.gathers)
        self.placed: Gathered | None = None
        self.maybe_stepped = True
        self.always_refreshes = False
        self._synced_writes = 0
        # The last place that was asked for, in forward and in backward.
        self._asked: dict[bool, Place | None] = {}
        # By address; made once for each place.
        self._buffers: dict[int, DBuffer] = {}
        self._arena_size = 0

    # What is there ------------------------------------------------------------------------------

    @property
    def holders(self) -> int:
        """How many hold the full parameters, wherever; a prefetch alone does not."""
        return sum(each.holders for each in self._all())

    @property
    def is_unsharded(self) -> bool:
        """Whether they are anywhere (a gather may still be in flight)."""
        return any(each.is_there for each in self._all())

    @property
    def kept(self) -> bool:
        """A forward left them, held by nobody, for its backward. Only an unshard inside a backward
        may take them over: whatever else comes first may have changed the weights, and gathers
        anew or releases them."""
        return any(each.kept for each in self._all())

    def _all(self) -> tuple[Gathered, ...]:
        return (self.own,) if self.placed is None else (self.own, self.placed)

    def where(self, full: torch.Tensor | None) -> Gathered:
        """The full parameters that ``full`` is the flat buffer of; None: the group's own."""
        placed = self.placed
        if full is not None and placed is not None and _is_same(full, placed.buffer.local):
            return placed
        return self.own

    # Refreshing ---------------------------------------------------------------------------------

    def sync(self) -> None:
        """Write what a step changed in the main weight into its part of the model weight."""
        for each in self._all():
            if each.ready is not None:
                # A gather that nobody waited for may still be sending what is written now.
                each.ready.wait()
            each.outdated = self.weights.gathers
        with without_autograd():
            self.weights.follow_main()
        self.maybe_stepped = False
        self._synced_writes = writes_of(self.sharded)

    def _refresh(self, lane: Lane, label: str) -> bool:
        """Bring the model weight up to date; True if ``lane`` is still writing it."""
        idle = self.holders == 0 and not (self.weights.gathers and self.is_unsharded)
        due = self.always_refreshes and idle and not in_backward()
        if self.maybe_stepped or due or writes_of(self.sharded) != self._synced_writes:
            if self.kept:
                self.release(lane)
            self.sync()
            lane.wait_current()
        refreshing = self.weights.redistribute(lane, label)
        if refreshing and not self.weights.gathers:
            self.own.ready = lane.record_event()
            self.own.ready_for.clear()
        return refreshing

    # Unsharding ---------------------------------------------------------------------------------

    def missing(self, lane: Lane, label: str, place: Place | None = None) -> Missing:
        """Choose where the full parameters will be, and say what is missing for that.

        Where a plan put them, unless the group's own buffer has them already. What is there and
        not chosen is released if nobody holds it: copied before that, if it can be.
        """
        refreshing = self._refresh(lane, label)
        self._asked[in_backward()] = place
        if not self.weights.gathers:
            return Missing(self.own, False, refreshing)
        chosen = self.own
        if place is not None and not self.own.is_there:
            chosen = self.placed or self._take(place, lane, label)
        self._use_what_is_placed(chosen, lane, label)
        leftover = chosen.is_leftover and not in_backward()
        chosen.kept = False
        return Missing(chosen, not chosen.is_there or leftover, refreshing)

    def _use_what_is_placed(self, chosen: Gathered, lane: Lane, label: str) -> None:
        placed = self.placed
        if placed is None or placed is chosen:
            return
        fresh = placed.is_there and (in_backward() or not placed.is_leftover)
        if fresh and not chosen.is_there:
            chosen.buffer.reallocate_storage(lane, label)
            copy_on(lane, chosen.buffer.local, placed.buffer.local)
            self.note_gathered(chosen, lane)
            chosen.outdated = placed.outdated
        if placed.holders == 0:
            self._release(placed, lane)

    def _take(self, place: Place, lane: Lane, label: str) -> Gathered:
        full, arena = self.weights.full, lane.memory.arena
        slot = arena.take(
            place,
            full.local.numel(),
            full.dtype,
            full.device,
            owner=f"parameters of {label}",
            lane=lane,
        )
        if self._arena_size != arena.size:
            # Those in the old bytes would keep them alive.
            self._buffers.clear()
            self._arena_size = arena.size
        buffer = self._buffers.get(slot.tensor.data_ptr())
        if buffer is None or buffer.local is not slot.tensor:
            buffer = full.like(full.placements, slot.tensor)
            self._buffers[slot.tensor.data_ptr()] = buffer
        self.placed = Gathered(buffer, slot)
        return self.placed

    def gather(self, missing: Missing, lane: Lane, label: str) -> None:
        """Start the gather of what is missing."""
        target = missing.target
        self.weights.gather(target.buffer, lane, label, depends=missing.refreshing)
        self.note_gathered(target, lane)

    def note_gathered(self, target: Gathered, lane: Lane) -> None:
        """What is on ``lane`` now gathers the full parameters into ``target``."""
        target.is_there = True
        target.outdated = False
        target.ready = lane.record_event()

    def unshard(
        self, lane: Lane, phase: Phase | None, *, label: str, place: Place | None = None
    ) -> Gathered:
        """Start gathering on ``lane`` what is not there; the ready event is for ``phase``."""
        with without_autograd():
            missing = self.missing(lane, label, place)
            if missing.needed:
                self.gather(missing, lane, label)
        target = missing.target
        if phase is not None and target.ready is not None:
            target.ready_for[phase] = target.ready
        return target

    @property
    def expected_place(self) -> Place | None:
        """Where they were asked for the last time in this direction: where a prefetch, which knows
        no plan, puts them."""
        return self._asked.get(in_backward())

    def wait(self, phase: Phase | None, full: torch.Tensor | None = None) -> None:
        """The current stream waits for the event that was recorded for ``phase``."""
        target = self.where(full)
        event = target.ready if phase is None else target.ready_for.get(phase, target.ready)
        if event is not None:
            event.wait()

    # Releasing ----------------------------------------------------------------------------------

    def release(self, lane: Lane) -> None:
        """Take all bytes away, ordered on ``lane`` after the compute issued so far."""
        for each in self._all():
            self._release(each, lane)

    def _release(self, target: Gathered, lane: Lane) -> None:
        if not self.weights.gathers or not (target.is_there or target.slot):
            return
        if target.ready is not None:
            # A gather may be in flight into these very bytes.
            target.ready.wait()
        if target.slot is None:
            self.weights.release(lane)
        else:
            lane.wait_current()
            lane.memory.arena.leave(target.slot)
        if target is self.placed:
            self.placed = None
        target.note_gone()

    def drop(self, lane: Lane, label: str, full: torch.Tensor | None, *, keep: bool) -> None:
        """One holder less; the last one releases, or leaves them to a backward.

        Raises:
            RuntimeError: nobody holds them.
        """
        target = self.where(full)
        if target.holders == 0:
            raise RuntimeError(
                f"parameter group {label!r} was released more often than it was unsharded; a graph "
                "or a hook ran twice for one unshard"
            )
        target.holders -= 1
        if target.holders == 0:
            if keep and self.holders == 0:
                target.kept = self.weights.gathers
            else:
                self._release(target, lane)

    def forget_holders(self) -> None:
        """Nobody holds them any more."""
        for each in self._all():
            each.holders = 0

    # Captured graphs ---------------------------------------------------------------------------

    def forget_events(self) -> None:
        """Compute has waited for all that the events stand for."""
        for each in self._all():
            each.ready = None
            each.ready_for.clear()

    def host_state(self) -> UnshardingState:
        """What the next `unshard`, `release` or `drop` decides by."""
        return UnshardingState(
            own=self.own.state(),
            placed=None if self.placed is None else self.placed.state(),
            always_refreshes=self.always_refreshes,
            # A sync that would find nothing to do is none.
            refreshes=(self.maybe_stepped or writes_of(self.sharded) != self._synced_writes)
            and (self.weights.follows or (self.weights.gathers and self.is_unsharded)),
            redistributes=self.weights.redistribution_due,
        )

    def put_host_state(self, state: UnshardingState, arena: Arena) -> None:
        """Be as in ``state``, which a recorded run of a graph has left behind."""
        self.own.put_state(state.own)
        if self.placed is not None and self.placed.slot is not None:
            arena.leave(self.placed.slot)
        self.placed = None
        if state.placed is not None:
            self.placed = Gathered(state.placed.buffer)
            self.placed.put_state(state.placed)
            if state.placed.slot is not None:
                arena.take_again(state.placed.slot)
        self.weights.redistribution_due = state.redistributes
        if not state.refreshes:
            self.maybe_stepped = False
            self._synced_writes = writes_of(self.sharded)


@dataclass(frozen=True)
class Missing:
    """What an unshard has to do.

    Attributes:
        target: where the full parameters will be.
        needed: they must be gathered.
        refreshing: the lane is still writing what a gather would send.
    """

    target: Gathered
    needed: bool
    refreshing: bool


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.numel() > 0 and a.data_ptr() == b.data_ptr())
