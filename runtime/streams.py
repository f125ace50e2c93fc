"""Lanes: in-order queues of communication, the same calling code on CPU and CUDA.

A lane holds the collectives of one kind (all-gathers, inner reductions, outer reductions) in
the order in which they were started. Compute never waits for a lane as a whole, only for an
`Event` that was recorded on it:

    gather lane    [ gather 0 ]e0 [ gather 1 ]e1 [ gather 2 ]e2
    compute                    e0.wait()  block 0  e1.wait()  block 1  ...

On CUDA a lane is a stream and waiting is done by the device; the host never blocks. On CPU a
lane is a queue of asynchronous gloo works and of calls that follow them; waiting completes the
queue up to the event, on the waiting thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch

from compile_fsdp.runtime.memory import Memory

__all__ = ["Event", "Lane", "Waitable", "lanes_made_by", "make_lane"]


class Waitable(Protocol):
    """Asynchronous work in flight, such as a ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Block the host (CPU) or the current stream (CUDA) until the work is done."""


class Event(ABC):
    """A point on a lane: everything that was on the lane when the event was recorded."""

    @abstractmethod
    def wait(self) -> None:
        """Make the caller's current stream wait; on CPU, block until the point is reached."""

    @property
    def has_passed(self) -> bool:
        """Whether the host has waited for it already, so that `wait` would do nothing."""
        return False


class Lane(ABC):
    """An in-order queue of communication. Methods may be called from any thread.

    Attributes:
        memory: where what the lane writes gets its bytes; the lanes of one root share it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory = Memory()

    @abstractmethod
    def collective(
        self,
        start: Callable[[], Waitable | None],
        *,
        depends: bool = False,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> None:
        """Start an asynchronous collective on the lane.

        Args:
            start: Issues the collective; returns its work, or None when there is nothing to
                wait for.
            depends: The collective reads or writes what earlier entries of the lane write, so
                it must run after all of them have finished. Otherwise works may overlap.
            reads, writes: The memory that it touches. Only a recording lane asks.
            label: What it is, for a recording lane.
        """

    @abstractmethod
    def then(self, fn: Callable[[], None]) -> None:
        """Run ``fn`` after everything earlier on the lane (CUDA: now, on the lane's stream).

        On CPU that is when somebody waits, possibly on another thread. ``fn`` must not add to
        this lane.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """The point after everything that is on the lane now."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Later entries of this lane run after ``event``, usually one of another lane."""

    @abstractmethod
    def wait_current(self) -> None:
        """Later entries of this lane run after what compute has issued so far."""

    def settle(self) -> None:
        """Complete what a collective that is started now would have to wait for (CPU: all that is
        before a pending call), so that its memory goes before more is taken."""
        return

    def synchronize(self) -> None:
        """Make the current stream wait for all of the lane (CUDA: no host block)."""
        self.record_event().wait()

    def allocating(self) -> AbstractContextManager[object]:
        """A context in which tensors are allocated for use on this lane."""
        return _ANYWHERE

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


_ANYWHERE = nullcontext()

# Not a context variable: backward may run in autograd's own threads, which do not inherit one.
_makers: list[Callable[[str], Lane]] = []


@contextmanager
def lanes_made_by(make: Callable[[str], Lane]) -> Iterator[None]:
    """While the context is open, `make_lane` calls ``make`` with the lane's name."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.remove(make)


def make_lane(device: torch.device, name: str) -> Lane:
    """A lane for buffers on ``device``: "cpu" and "meta" or "cuda".

    Raises:
        ValueError: The device type has no lane.
    """
    if _makers:
        return _makers[-1](name)
    if device.type in ("cpu", "meta"):
        return _CpuLane(name)
    if device.type == "cuda":
        return _CudaLane(device, name)
    raise ValueError(f"lane {name!r}: expected a cpu or cuda device, found {device}")


class _CpuLane(Lane):
    """A FIFO of works in flight and of calls that wait for them.

        queue   work  work  call  work
                 ^ next to complete      ^ record_event(): the number of entries so far

    A work is asynchronous from the moment it is issued; a call runs when the queue is drained
    past it. A collective is not issued past a pending call, for it may write what the call
    reads: so at most one reduction with its accumulation is outstanding.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Autograd may drain a lane from a thread of its own. Whoever waits holds the lock, so
        # nobody takes an entry that is half done for a finished one. Reentrant, because a call
        # may wait for an event of another lane whose calls wait for one of this lane.
        self._lock = threading.RLock()
        self._queue: deque[tuple[Literal["work", "call"], Callable[[], object]]] = deque()
        self._calls_pending = 0
        self._completed = 0

    def collective(
        self,
        start: Callable[[], Waitable | None],
        *,
        depends: bool = False,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> None:
        with self._lock:
            if depends or self._calls_pending:
                self._drain()
            work = start()
            if work is not None:
                self._queue.append(("work", work.wait))

    def then(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if not self._queue:
                fn()
                return
            self._calls_pending += 1
            self._queue.append(("call", fn))

    def record_event(self) -> Event:
        with self._lock:
            return _CpuEvent(self, self._completed + len(self._queue))

    def wait_event(self, event: Event) -> None:
        # A lane is in order: its own events need no waiting.
        if not (isinstance(event, _CpuEvent) and event.lane is self):
            self.then(event.wait)

    def settle(self) -> None:
        with self._lock:
            if self._calls_pending:
                self._drain()

    def wait_current(self) -> None:
        """Nothing to do: compute on CPU is finished when its call returns."""

    def drain_to(self, position: int) -> None:
        """Complete entries until ``position`` of them, counted from the lane's start, are."""
        with self._lock:
            while self._queue and self._completed < position:
                self._complete_next()

    def is_past(self, position: int) -> bool:
        """Whether so many entries, counted from the lane's start, are complete."""
        with self._lock:
            return self._completed >= position

    def _drain(self) -> None:
        while self._queue:
            self._complete_next()

    def _complete_next(self) -> None:
        # The entry leaves the queue before it runs: one that raises is not run a second time,
        # and those behind it stay in order for whoever waits next.
        kind, entry = self._queue.popleft()
        self._completed += 1
        if kind == "call":
            self._calls_pending -= 1
        entry()


class _CpuEvent(Event):
    def __init__(self, lane: _CpuLane, position: int) -> None:
        self.lane = lane
        self._position = position

    def wait(self) -> None:
        self.lane.drain_to(self._position)

    @property
    def has_passed(self) -> bool:
        return self.lane.is_past(self._position)


class _CudaLane(Lane):
    """A CUDA stream. Memory is never handed over with ``record_stream``: who releases a buffer
    that the lane wrote orders the release on the lane, after compute."""

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(name)
        self.stream = torch.cuda.Stream(device)

    def collective(
        self,
        start: Callable[[], Waitable | None],
        *,
        depends: bool = False,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> None:
        with torch.cuda.stream(self.stream):
            work = start()
            if work is not None:
                # Makes this stream wait for the communicator's; the host goes on.
                work.wait()

    def then(self, fn: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            fn()

    def record_event(self) -> Event:
        return _CudaEvent(self.stream.record_event(), self.stream.device)

    def wait_event(self, event: Event) -> None:
        with torch.cuda.stream(self.stream):
            event.wait()

    def wait_current(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def allocating(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
