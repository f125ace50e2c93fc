"""Memory: the one place from which a root's buffers get their bytes while it runs.

    gathered buffers           grow, shrink    the gather lane's
    packed partial gradients   empty           compute's
    reduced pieces, staging    empty           the lane's that writes them
    main gradients             empty           compute's

Whose memory it is decides when it may be used again: what a lane (or compute) lets go of may at
once be handed to the same lane, which works in order, and to nobody else. That is how torch's
allocator treats memory that was allocated on a stream, and nothing here calls ``record_stream``.

What is allocated when weights are first sharded is not counted: it is no part of a step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .arena import AllocatingLane, Arena
from .modes import without_autograd

__all__ = ["COMPUTE", "Memory", "MemoryEvent", "anywhere"]

COMPUTE = "compute"
"""Whose memory it is that belongs to no lane."""


_ANYWHERE = nullcontext()


def anywhere() -> AbstractContextManager[object]:
    """A context in which bytes are taken from where torch takes them."""
    return _ANYWHERE


class MemoryEvent(NamedTuple):
    """Bytes were handed out, or let go of.

    Attributes:
        what: ``"allocate"`` or ``"free"``. After a free the bytes may be handed out to the same
            lane again.
        address: of the first byte.
        bytes: how many.
        owner: what they are for, for people.
        lane: the name of the lane that they belong to, or `COMPUTE`.
    """

    what: Literal["allocate", "free"]
    address: int
    bytes: int
    owner: str
    lane: str


@dataclass(eq=False)
class _Block:
    """Bytes that torch gave us.

    Attributes:
        event: their last handing out.
        pool: those that may take their place; None: none may.
        number: of the block, in the order of their making.
        used: they are handed out now.
        end_of_life: notices that no tensor over them is left; None once that has been noticed.
    """

    event: MemoryEvent
    pool: tuple[object, ...] | None = None
    number: int = 0
    used: bool = True
    end_of_life: weakref.ref[torch.UntypedStorage] | None = None


class Memory:
    """Hands out the bytes of one root's buffers. Methods may be called from any thread.

    *Static* memory never goes back to torch: what is given back waits for somebody who asks for as
    many elements of the same dtype on the same lane. A step that asks for the same as the one
    before it then takes nothing from torch, and finds everything at the same addresses.

    Attributes:
        observers: called with each `MemoryEvent`, an allocation just after and a free just before
            it happens. Those of static memory are about its use, not about torch.
        source: makes a context in which new bytes are taken from torch: the place to have them come
            from a pool of one's own.
        is_static: whether this memory is static. It may become so at any time, and then stays so.
        arena: the places that plans gave gathered buffers.
        allocations, frees: how often bytes were taken from torch and given back to it.
        live_bytes, peak_bytes: what is handed out now, and the most there ever was.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[MemoryEvent], None]] = []
        self.source: Callable[[], AbstractContextManager[object]] = anywhere
        self.is_static = False
        self.arena = Arena(self)
        self.allocations = 0
        self.frees = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        # Reentrant: a garbage collection within may free another buffer.
        self._lock = threading.RLock()
        # By address.
        self._blocks: dict[int, _Block] = {}
        # Also those whose address another one has by now: they are heard of once more.
        self._living: set[_Block] = set()
        self._waiting: dict[tuple[object, ...], list[tuple[int, torch.Tensor]]] = {}
        self._made = 0

    def empty(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        owner: str,
        lane: AllocatingLane | None = None,
        lasting: bool = False,
    ) -> torch.Tensor:
        """A 1-D tensor of ``numel`` uninitialised elements, the first of its storage.

        Args:
            owner: what it is for, for people.
            lane: whose memory it is; None: compute's.
            lasting: it is needed beyond the graph that runs. Bytes that are handed out again and
                again are not for that: a captured graph writes into them without asking.
        """
        pool = None
        if self.is_static and numel and not lasting:
            pool = (_name_of(lane), dtype, device, numel)
        tensor = None if pool is None else self._take_from(pool, owner)
        if tensor is None:
            tensor = self.raw(numel, dtype, device, lane)
            self._note_raw(tensor, owner, lane, pool)
        return tensor

    def raw(
        self, numel: int, dtype: torch.dtype, device: torch.device, lane: AllocatingLane | None
    ) -> torch.Tensor:
        """New elements from torch, of which nobody is told."""
        with without_autograd(), _on(lane), self.source():
            return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, tensor: torch.Tensor) -> None:
        """``tensor``, one of `empty`, is not touched any more by what its lane does from now on.

        Static memory may hand its bytes out again. Other memory is let go of when the last tensor
        over it dies, and so is what is never given back.
        """
        if not _has_memory(tensor):
            return
        with self._lock:
            block = self._blocks.get(tensor.data_ptr())
            pool = None if block is None else block.pool
            if block is None or pool is None or not block.used or pool[-1] != tensor.numel():
                return
            block.used = False
            self._count(-block.event.bytes)
            self._waiting.setdefault(pool, []).append((block.number, tensor))
        self._tell_freed(block.event)

    def grow(
        self, tensor: torch.Tensor, size: int, *, owner: str, lane: AllocatingLane | None = None
    ) -> None:
        """Give the storage of ``tensor``, which has none, ``size`` bytes on ``lane``."""
        with _on(lane), self.source():
            tensor.untyped_storage().resize_(size)
        self._note_raw(tensor, owner, lane, None)

    def shrink(self, tensor: torch.Tensor, *, lane: AllocatingLane | None = None) -> None:
        """Take the bytes of the storage of ``tensor`` away, ordered on ``lane``."""
        storage = tensor.untyped_storage()
        if _has_memory(tensor):
            with self._lock:
                block = self._blocks.get(storage.data_ptr())
            if block is not None:
                self._note_gone(block)
        with _on(lane):
            storage.resize_(0)

    def note_used(self, tensor: torch.Tensor, owner: str, lane: str) -> None:
        """``tensor``, a part of what is there already, is in use from now on."""
        if _has_memory(tensor):
            event = _event(tensor, owner, lane)
            self._count(event.bytes)
            self._tell(event)

    def note_unused(self, tensor: torch.Tensor, owner: str, lane: str) -> None:
        """The end of `note_used`."""
        if _has_memory(tensor):
            event = _event(tensor, owner, lane)
            self._count(-event.bytes)
            self._tell_freed(event)

    def note_taken(self) -> None:
        """Somebody took bytes from `raw`, of whose use we are told separately."""
        self.allocations += 1

    def _take_from(self, pool: tuple[object, ...], owner: str) -> torch.Tensor | None:
        """The oldest block that waits: the same one in every step, whatever order they came in."""
        with self._lock:
            waiting = self._waiting.get(pool)
            if not waiting:
                return None
            number = min(range(len(waiting)), key=lambda each: waiting[each][0])
            _, tensor = waiting.pop(number)
            block = self._blocks[tensor.data_ptr()]
            block.event = block.event._replace(owner=owner)
            block.used = True
        self._note_used(block)
        return tensor

    def _note_raw(
        self,
        tensor: torch.Tensor,
        owner: str,
        lane: AllocatingLane | None,
        pool: tuple[object, ...] | None,
    ) -> None:
        if not _has_memory(tensor):
            return
        self.allocations += 1
        self._made += 1
        block = _Block(_event(tensor, owner, _name_of(lane)), pool, self._made)
        # Not `weakref.finalize`, whose own books cost more than ours.
        block.end_of_life = weakref.ref(tensor.untyped_storage(), lambda _: self._note_gone(block))
        self._note_used(block)

    def _note_used(self, block: _Block) -> None:
        with self._lock:
            self._blocks[block.event.address] = block
            self._living.add(block)
            self._count(block.event.bytes)
        self._tell(block.event)

    def _count(self, size: int) -> None:
        with self._lock:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _note_gone(self, block: _Block) -> None:
        with self._lock:
            if block.end_of_life is None:
                return
            block.end_of_life = None
            self._living.discard(block)
            # Another thread may have been given the same address already.
            if self._blocks.get(block.event.address) is block:
                del self._blocks[block.event.address]
            # It was in use: what waits to be used is held.
            self.frees += 1
            self._count(-block.event.bytes)
        self._tell_freed(block.event)

    def _tell_freed(self, used: MemoryEvent) -> None:
        if self.observers:
            self._tell(used._replace(what="free"))

    def _tell(self, event: MemoryEvent) -> None:
        for observer in tuple(self.observers):
            observer(event)


def _event(tensor: torch.Tensor, owner: str, lane: str) -> MemoryEvent:
    size = tensor.untyped_storage().nbytes()
    return MemoryEvent("allocate", tensor.data_ptr(), size, owner, lane)


def _name_of(lane: AllocatingLane | None) -> str:
    return COMPUTE if lane is None else lane.name


def _on(lane: AllocatingLane | None) -> AbstractContextManager[object]:
    return _ANYWHERE if lane is None else lane.allocating()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors have none, nor has an empty one."""
    return type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel() > 0
