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
from typing import Any, Literal, Protocol

import torch

__all__ = ["COMPUTE", "Memory", "MemoryEvent"]

COMPUTE = "compute"
"""Whose memory it is that belongs to no lane."""


class AllocatingLane(Protocol):
    """What is asked of a lane: its name, and a context in which memory becomes the lane's."""

    @property
    def name(self) -> str:
        """The lane's name."""

    def allocating(self) -> AbstractContextManager[object]:
        """A context in which tensors are allocated for use on this lane."""


@dataclass(frozen=True)
class MemoryEvent:
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


@dataclass(frozen=True, eq=False)
class _Block:
    event: MemoryEvent
    end_of_life: weakref.finalize[Any, Any] | None


class Memory:
    """Hands out the bytes of one root's buffers. Methods may be called from any thread.

    Attributes:
        observers: called with each `MemoryEvent`, an allocation just after and a free just before
            it happens.
        source: makes a context in which new bytes are taken from torch: the place to have them come
            from a pool of one's own.
        allocations, frees: how often bytes were taken from torch and given back to it.
        live_bytes, peak_bytes: what is handed out now, and the most there ever was.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[MemoryEvent], None]] = []
        self.source: Callable[[], AbstractContextManager[object]] = nullcontext
        self.allocations = 0
        self.frees = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        # Reentrant: a garbage collection within may free another buffer.
        self._lock = threading.RLock()
        self._live: dict[int, _Block] = {}

    def empty(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        owner: str,
        lane: AllocatingLane | None = None,
    ) -> torch.Tensor:
        """A 1-D tensor of ``numel`` uninitialised elements, the first of its storage.

        Args:
            owner: what it is for, for people.
            lane: whose memory it is; None: compute's.
        """
        with torch.inference_mode(False), torch.no_grad(), self._taking(lane):
            tensor = torch.empty(numel, dtype=dtype, device=device)
        self._note_taken(tensor, owner, lane, watched=True)
        return tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """``tensor``, one of `empty`, is not read any more by what its lane does from now on.

        Memory that is not given back is let go of when the last tensor over it dies.
        """

    def grow(
        self, tensor: torch.Tensor, size: int, *, owner: str, lane: AllocatingLane | None = None
    ) -> None:
        """Give the storage of ``tensor``, which has none, ``size`` bytes on ``lane``."""
        with self._taking(lane):
            tensor.untyped_storage().resize_(size)
        self._note_taken(tensor, owner, lane, watched=True)

    def shrink(self, tensor: torch.Tensor, *, lane: AllocatingLane | None = None) -> None:
        """Take the bytes of the storage of ``tensor`` away, ordered on ``lane``."""
        storage = tensor.untyped_storage()
        if _has_memory(tensor):
            with self._lock:
                block = self._live.get(storage.data_ptr())
            if block is not None:
                if block.end_of_life is not None:
                    block.end_of_life.detach()
                self._note_freed(block.event)
        with _on(lane):
            storage.resize_(0)

    def _taking(self, lane: AllocatingLane | None) -> AbstractContextManager[object]:
        return _Nested(_on(lane), self.source())

    def _note_taken(
        self, tensor: torch.Tensor, owner: str, lane: AllocatingLane | None, *, watched: bool
    ) -> None:
        if not _has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        name = COMPUTE if lane is None else lane.name
        event = MemoryEvent("allocate", storage.data_ptr(), storage.nbytes(), owner, name)
        self.allocations += 1
        end = None
        if watched:
            end = weakref.finalize(storage, self._note_freed, event)
            end.atexit = False
        self._note(event, _Block(event, end))

    def _note(self, event: MemoryEvent, block: _Block) -> None:
        with self._lock:
            self._live[event.address] = block
            self.live_bytes += event.bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._tell(event)

    def _note_freed(self, taken: MemoryEvent) -> None:
        with self._lock:
            block = self._live.get(taken.address)
            # Another thread may have been given the same address already.
            if block is not None and block.event is taken:
                del self._live[taken.address]
            self.frees += 1
            self.live_bytes -= taken.bytes
        self._tell(MemoryEvent("free", taken.address, taken.bytes, taken.owner, taken.lane))

    def _tell(self, event: MemoryEvent) -> None:
        for observer in tuple(self.observers):
            observer(event)


class _Nested(AbstractContextManager[None]):
    """Two contexts, one in the other."""

    def __init__(
        self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]
    ) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)
        self._outer.__exit__(*exception)


def _on(lane: AllocatingLane | None) -> AbstractContextManager[object]:
    return nullcontext() if lane is None else lane.allocating()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Fake and meta tensors have none, nor has an empty one."""
    return type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel() > 0
