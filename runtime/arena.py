"""The arena: one run of bytes in which gathered buffers have places that were planned.

    bytes      0        4096      8192      12288
    place      [ root   ][ blocks.0 ]                  blocks.1 has the place of root, which is
               [ blocks.1 ]                            released before it is gathered

A plan is made with the schedule of a graph, and travels in the graph. Nothing is decided here: a
place that somebody is still in, because another graph's plan put him there, is given to nobody
else, and who asked for it gets memory of his own. That is right, and counted.

The arena belongs to the gather lane, which gathers into it and on which places are left in order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from .memory import Memory

__all__ = ["AllocatingLane", "Arena", "Place", "Slot"]


class AllocatingLane(Protocol):
    """What is asked of a lane: its name, and a context in which memory becomes the lane's."""

    @property
    def name(self) -> str:
        """The lane's name."""

    def allocating(self) -> AbstractContextManager[object]:
        """A context in which tensors are allocated for use on this lane."""


@dataclass(frozen=True)
class Place:
    """Where a plan puts a gathered buffer.

    Attributes:
        offset: of its first byte in the arena.
        arena: bytes that the plan needs the arena to have.
    """

    offset: int
    arena: int


@dataclass(frozen=True, eq=False)
class Slot:
    """Bytes for one gathered buffer.

    Attributes:
        tensor: 1-D, the first elements of a storage of its own.
        owner, lane: what it is for, and whose memory it is, for people.
        start, stop: its bytes in the arena, where it is in there.
        block: whose bytes they are, where it is not.
    """

    tensor: torch.Tensor
    owner: str
    lane: str
    start: int = 0
    stop: int = 0
    block: torch.Tensor | None = None


class Arena:
    """The places of one root's gathered buffers.

    It grows when a plan needs more than it has. Who is in the old bytes stays there.

    Attributes:
        unplanned: how often somebody had to be put elsewhere than the plan said.
    """

    def __init__(self, memory: Memory) -> None:
        self.unplanned = 0
        self._memory = memory
        self._bytes: torch.Tensor | None = None
        # Made once for each place: the tensors of a place are the same ones in every step.
        self._tensors: dict[tuple[str, int, int], torch.Tensor] = {}
        self._taken: list[Slot] = []

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return 0 if self._bytes is None else self._bytes.numel()

    @property
    def address(self) -> int:
        """Of its first byte; 0 while it has none."""
        return 0 if self._bytes is None else self._bytes.data_ptr()

    @property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """First byte, and the one past the last, of each place that somebody is in."""
        return tuple(sorted((slot.start, slot.stop) for slot in self._taken))

    def take(
        self,
        place: Place,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        owner: str,
        lane: AllocatingLane,
    ) -> Slot:
        """Bytes for ``numel`` elements at ``place``, or elsewhere where that is not possible."""
        start, stop = place.offset, place.offset + numel * dtype.itemsize
        self._grow(max(place.arena, stop), device, lane)
        if any(slot.start < stop and start < slot.stop for slot in self._taken):
            self.unplanned += 1
            block = self._memory.empty(numel, dtype, device, owner=owner, lane=lane)
            return Slot(_alias(block, dtype), owner, lane.name, block=block)
        slot = Slot(self._tensor(owner, start, stop, dtype), owner, lane.name, start, stop)
        self.take_again(slot)
        return slot

    def take_again(self, slot: Slot) -> None:
        """``slot``, which somebody has left, is in use from now on, and nobody else is in it."""
        self._taken.append(slot)
        self._memory.note_used(slot.tensor, slot.owner, slot.lane)

    def leave(self, slot: Slot) -> None:
        """What the lane does from now on may use the bytes of ``slot``."""
        if slot.block is not None:
            self._memory.give_back(slot.block)
            return
        self._taken = [other for other in self._taken if other is not slot]
        self._memory.note_unused(slot.tensor, slot.owner, slot.lane)

    def _grow(self, size: int, device: torch.device, lane: AllocatingLane) -> None:
        if size > self.size:
            self._bytes = self._memory.raw(size, torch.uint8, device, lane)
            self._memory.note_taken()
            self._tensors.clear()
            # They keep the old bytes alive by themselves, and are in nobody's way.
            self._taken.clear()

    def _tensor(self, owner: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        key = (owner, start, stop)
        tensor = self._tensors.get(key)
        if tensor is None:
            assert self._bytes is not None
            tensor = self._tensors[key] = _alias(self._bytes[start:stop], dtype)
        return tensor


def _alias(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes by a storage of its own.

    ``as_strided`` counts from the start of the storage, and compilers from that of the tensor; and
    an op that names what was in a place before must not be seen to return the same tensor.
    """
    return from_dlpack(part).view(dtype)
