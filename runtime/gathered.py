"""Gathered: full parameters in one place, and who holds them there.

A group has at most two of them at a time. Its own buffer is the one that the unsharded Parameters
are views of, so the eager driver uses that: it grows and shrinks. A compiled graph whose plan has
places uses one of those, in the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .arena import Slot
from .dbuffer import DBuffer
from .host_state import GatheredState, Uncapturable
from .streams import Event

if TYPE_CHECKING:
    from .unsharding import Phase

__all__ = ["Gathered"]


@dataclass(eq=False)
class Gathered:
    """Full parameters in one place.

    Attributes:
        buffer: where they are, or will be.
        slot: whose bytes those are; None: the buffer's own.
        is_there: they are there (or a gather is in flight).
        holders: how many hold them here; a prefetch alone does not.
        kept: a forward left them, held by nobody, for its backward.
        outdated: the weights were written since.
        ready: what a reader waits for.
        ready_for: the same, of those who gave a phase.
    """

    buffer: DBuffer
    slot: Slot | None = None
    is_there: bool = False
    holders: int = 0
    kept: bool = False
    outdated: bool = False
    ready: Event | None = None
    ready_for: dict[Phase, Event] = field(default_factory=dict)

    @property
    def is_leftover(self) -> bool:
        """Still there since before a step, because whoever held it was interrupted; or kept for a
        backward that has not come. A new forward must not read that."""
        return self.outdated or self.kept

    def state(self) -> GatheredState:
        """For a captured graph.

        Raises:
            Uncapturable: they are not where their plan puts them; a captured graph would not know
                that they are in its way.
        """
        if self.slot is not None and self.slot.block is not None:
            raise Uncapturable("gathered parameters are not at the place that a plan gave them")
        return GatheredState(
            address=self.buffer.local.data_ptr(),
            is_there=self.is_there,
            holders=self.holders,
            kept=self.kept,
            outdated=self.outdated and self.is_there,
            buffer=self.buffer,
            slot=self.slot,
        )

    def put_state(self, state: GatheredState) -> None:
        """Be as in ``state``, which a recorded run of a graph has left behind."""
        self.buffer, self.slot = state.buffer, state.slot
        self.is_there, self.holders = state.is_there, state.holders
        self.kept, self.outdated = state.kept, state.outdated

    def note_gone(self) -> None:
        """The bytes are somebody else's."""
        self.is_there = self.kept = self.outdated = False
        self.slot = None
        self.ready = None
        self.ready_for.clear()
