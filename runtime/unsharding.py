"""Unsharding: whether a group's full parameters are there, for whom, and from when on.

    unshard   refresh a stale model weight, start the gather, record the ready event
    wait      compute waits for that event and no other
    release   the storage goes, after what compute has issued
    keep      nobody holds it any more, but the storage stays for a backward to come

Several may hold the full parameters at once (a compiled graph inside an eager parent): `holders`
counts them, and the last one releases.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from .host_state import UnshardingState
from .streams import Event, Lane
from .torch_internals import in_backward, writes_of
from .weights import GroupWeights


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
        holders: how many hold the full parameters; a prefetch alone does not.
        is_unsharded: whether they have storage (a gather may still be in flight).
        kept: a forward left them, held by nobody, for its backward. Only an unshard inside a
            backward may take them over: whatever else comes first may have changed the weights,
            and gathers anew or releases them.
        maybe_stepped: the main weight may have been written by a step that nobody announced.
        always_refreshes: so it may before every forward (an average that is updated by hand).
    """

    def __init__(self, weights: GroupWeights, sharded: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self.sharded = tuple(sharded)
        self.holders = 0
        self.is_unsharded = not weights.gathers
        self.kept = False
        self.maybe_stepped = True
        self.always_refreshes = False
        self._synced_writes = 0
        self._full_outdated = False
        self._ready: Event | None = None
        self._ready_for: dict[Phase, Event] = {}

    def sync(self) -> None:
        """Write what a step changed in the main weight into its part of the model weight."""
        if self._ready is not None:
            # A gather that nobody waited for may still be sending what is written now.
            self._ready.wait()
        with torch.inference_mode(False), torch.no_grad():
            self.weights.follow_main()
        self.maybe_stepped = False
        self._synced_writes = writes_of(self.sharded)
        self._full_outdated = True

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
            self._ready = lane.record_event()
            self._ready_for.clear()
        return refreshing

    def missing(self, lane: Lane, label: str) -> tuple[bool, bool]:
        """Whether a gather is needed, and whether ``lane`` is still writing what it would send."""
        refreshing = self._refresh(lane, label)
        # Still unsharded since before a step, because whoever held it was interrupted; or kept for
        # a backward that has not come.
        outdated = self._full_outdated or self.kept
        leftover = outdated and self.weights.gathers and not in_backward()
        self.kept = False
        return not self.is_unsharded or leftover, refreshing

    def gather(self, lane: Lane, label: str, *, depends: bool) -> None:
        """Start the gather; ``depends``: ``lane`` is still writing what it sends."""
        self.weights.gather(lane, label, depends=depends)
        self.note_gathered(lane)

    def note_gathered(self, lane: Lane) -> None:
        """What is on ``lane`` now gathers the full parameters."""
        self.is_unsharded = True
        self._full_outdated = False
        self._ready = lane.record_event()

    def unshard(self, lane: Lane, phase: Phase | None, *, label: str) -> None:
        """Start gathering on ``lane`` what is not there; the ready event is for ``phase``."""
        with torch.inference_mode(False), torch.no_grad():
            needed, refreshing = self.missing(lane, label)
            if needed:
                self.gather(lane, label, depends=refreshing)
        if phase is not None and self._ready is not None:
            self._ready_for[phase] = self._ready

    def wait(self, phase: Phase | None) -> None:
        """The current stream waits for the event that was recorded for ``phase``."""
        event = self._ready if phase is None else self._ready_for.get(phase, self._ready)
        if event is not None:
            event.wait()

    def release(self, lane: Lane) -> None:
        """Take the storage away, ordered on ``lane`` after the compute issued so far."""
        if not self.weights.gathers:
            return
        if self._ready is not None:
            # A gather may be in flight into this very storage.
            self._ready.wait()
        self.weights.release(lane)
        self.is_unsharded = False
        self.kept = False
        self._ready = None
        self._ready_for.clear()

    def hold(self) -> None:
        """One more holds the full parameters."""
        self.holders += 1

    def drop(self, label: str) -> bool:
        """One holder less; True if it was the last.

        Raises:
            RuntimeError: nobody holds them.
        """
        if self.holders == 0:
            raise RuntimeError(
                f"parameter group {label!r} was released more often than it was unsharded; a graph "
                "or a hook ran twice for one unshard"
            )
        self.holders -= 1
        return self.holders == 0

    # Captured graphs ---------------------------------------------------------------------------

    def forget_events(self) -> None:
        """Compute has waited for all that the events stand for."""
        self._ready = None
        self._ready_for.clear()

    def host_state(self) -> UnshardingState:
        """What the next `unshard`, `release` or `drop` decides by."""
        return UnshardingState(
            address=self.weights.full.local.data_ptr(),
            holders=self.holders,
            is_unsharded=self.is_unsharded,
            kept=self.kept,
            always_refreshes=self.always_refreshes,
            outdated=self._full_outdated and self.is_unsharded and self.weights.gathers,
            refreshes=self.maybe_stepped or writes_of(self.sharded) != self._synced_writes,
            redistributes=self.weights.redistribution_due,
        )

    def put_host_state(self, state: UnshardingState) -> None:
        """Be as in ``state``, which a recorded run of a graph has left behind."""
        self.holders = state.holders
        self.is_unsharded = state.is_unsharded
        self.kept = state.kept
        self._full_outdated = state.outdated
        self.weights.redistribution_due = state.redistributes
        if not state.refreshes:
            self.maybe_stepped = False
            self._synced_writes = writes_of(self.sharded)
