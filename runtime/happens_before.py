"""Happens-before: are two accesses to the same memory in a fixed order, whatever the device does?

What streams were asked to do is a list of records in the order in which the host asked. Within a
stream everything is in order; between streams only events order anything:

    gather    Access(writes full) --- Signal e1 .                        Free(full)
                                                 \\                        ^ ordered?
    compute                                       Wait e1 --- Access(reads full) --- Signal e2

Each stream has a vector clock: for every stream the last of its records that is known to be over.
A wait joins the clock that the event was signalled with. An access happens before a later one when
the later one's stream knows of it. Two accesses of which one writes and neither happens before the
other are a race. This is plain Python on plain data; `compile_fsdp.runtime.recording` records.

Memory is known by its addresses, so views, aliases and slots of an arena need no special care. As
in CUDA's caching allocator, a block belongs to the stream it was allocated on. Its allocation
counts as a write by that stream (what was there before may still be in use, in that stream's
order); when it is freed that stream may hand it out again at once, so every use must be over for
that stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "COMPUTE",
    "Access",
    "Allocate",
    "Entry",
    "Free",
    "Race",
    "Record",
    "Signal",
    "Span",
    "Wait",
    "races",
]

COMPUTE = "compute"
"""The stream that everything runs on which nobody has put elsewhere."""


@dataclass(frozen=True)
class Span:
    """Addresses ``start`` to ``stop``, in bytes."""

    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True)
class Entry:
    """Why work runs on ``stream``: a lane was asked for it at ``where``.

    Attributes:
        how: the method of the lane: ``"then"``, ``"collective"``, ``"allocating"`` or ``"wait"``.
        where: file, line and function that called it.
    """

    stream: str
    how: str
    where: str


Entries = tuple[Entry, ...]
"""The stack of entries that is open; work runs on the stream of the last one."""


def stream_of(entries: Entries) -> str:
    """The stream that work runs on inside of ``entries``."""
    return entries[-1].stream if entries else COMPUTE


@dataclass(frozen=True)
class Access:
    """Work that reads and writes memory: an operator or a collective."""

    entries: Entries
    what: str
    where: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return f"{stream_of(self.entries)}: {self.what}"


@dataclass(frozen=True)
class Allocate:
    """Memory for block number ``block``. ``new`` is False where it was there before anything was
    recorded: then it only says whose it is."""

    entries: Entries
    block: int
    span: Span
    where: str
    new: bool = True

    def __str__(self) -> str:
        what = "allocates" if self.new else "has"
        return f"{stream_of(self.entries)}: {what} block {self.block}, {self.span.bytes} bytes"


@dataclass(frozen=True)
class Free:
    """A block's memory went back to the stream it was allocated on."""

    block: int
    where: str

    def __str__(self) -> str:
        return f"frees block {self.block}"


@dataclass(frozen=True)
class Signal:
    """Event number ``event`` stands for all that is on the stream now."""

    entries: Entries
    event: int
    where: str

    def __str__(self) -> str:
        return f"{stream_of(self.entries)}: event {self.event}"


@dataclass(frozen=True)
class Wait:
    """What comes later on the stream comes after event number ``event``."""

    entries: Entries
    event: int
    where: str

    def __str__(self) -> str:
        return f"{stream_of(self.entries)}: waits for event {self.event}"


Record = Access | Allocate | Free | Signal | Wait


@dataclass(frozen=True)
class _Touch:
    """One stream's use of some memory; ``time`` counts the stream's records."""

    verb: Literal["reads", "writes", "allocates", "frees"]
    what: str
    where: str
    stream: str
    time: int

    def __str__(self) -> str:
        what = "memory" if self.verb in ("allocates", "frees") else self.what
        if self.verb == "frees":
            return f"a block of stream {self.stream} is freed ({self.where})"
        if self.verb == "allocates":
            return f"stream {self.stream} allocates {what} ({self.where})"
        return f"{what} on stream {self.stream} {self.verb} it ({self.where})"


@dataclass(frozen=True)
class Race:
    """Two uses of ``bytes`` bytes of memory that nothing orders.

    Attributes:
        kind: ``"gather"``: a gather's output is used and no wait orders it. ``"freed early"``:
            memory is freed while a stream may still use it. ``"used after free"``. ``"unordered"``:
            any other two accesses of which one writes.
        first, second: what is done, on which stream and where; in the host's order.
    """

    kind: str
    first: str
    second: str
    bytes: int

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(self)


_SENTENCES = {
    "gather": "{0.bytes} bytes are used before their gather is known to be over:\n"
    "    {0.first}\n    then {0.second}; no wait orders the two",
    "freed early": "{0.bytes} bytes are freed while they may still be in use:\n"
    "    {0.first}\n    then {0.second}; that stream has not waited for the use",
    "used after free": "{0.bytes} bytes are used after they were freed:\n"
    "    {0.first}\n    then {0.second}",
    "unordered": "{0.bytes} bytes are used by two streams in no order:\n"
    "    {0.first}\n    then {0.second}; no wait orders the two",
}


def races(log: Iterable[Record]) -> list[Race]:
    """Every pair of uses in ``log`` that races; of many alike only one, with the bytes of all."""
    return _Checker().check(log)


@dataclass
class _Segment:
    """Memory with one history: for each stream its last use that may still matter."""

    start: int
    stop: int
    writes: dict[str, _Touch] = field(default_factory=dict)
    reads: dict[str, _Touch] = field(default_factory=dict)
    freed: _Touch | None = None

    def forget(self) -> None:
        """Start a new history."""
        self.writes, self.reads, self.freed = {}, {}, None


class _Memory:
    """Segments by address, cut where histories differ."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def within(self, span: Span) -> Iterator[_Segment]:
        """Segments that cover ``span`` and nothing else."""
        if span.start >= span.stop:
            return
        self._cut(span.start)
        self._cut(span.stop)
        position = bisect_left(self._starts, span.start)
        address = span.start
        while address < span.stop:
            if position == len(self._starts) or self._starts[position] > address:
                following = self._starts[position] if position < len(self._starts) else span.stop
                self._insert(position, _Segment(address, min(following, span.stop)))
            segment = self._segments[position]
            yield segment
            address = segment.stop
            position += 1

    def _cut(self, address: int) -> None:
        position = bisect_left(self._starts, address) - 1
        if position < 0 or self._segments[position].stop <= address:
            return
        left = self._segments[position]
        right = _Segment(address, left.stop, dict(left.writes), dict(left.reads), left.freed)
        left.stop = address
        self._insert(position + 1, right)

    def _insert(self, position: int, segment: _Segment) -> None:
        self._starts.insert(position, segment.start)
        self._segments.insert(position, segment)


class _Checker:
    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = {}
        self._events: dict[int, dict[str, int]] = {}
        self._blocks: dict[int, tuple[str, Span]] = {}
        self._memory = _Memory()
        self._found: dict[tuple[str, str, str], int] = {}

    def check(self, log: Iterable[Record]) -> list[Race]:
        for record in log:
            if isinstance(record, Access):
                self._access(record)
            elif isinstance(record, Signal):
                clock = self._clock(stream_of(record.entries))
                self._events[record.event] = dict(clock)
            elif isinstance(record, Wait):
                self._wait(record)
            elif isinstance(record, Allocate):
                self._allocate(record)
            else:
                self._free(record)
        return [
            Race(kind, first, second, count) for (kind, first, second), count in self._found.items()
        ]

    def _clock(self, stream: str) -> dict[str, int]:
        return self._clocks.setdefault(stream, {stream: 0})

    def _touch(self, verb: str, what: str, where: str, stream: str) -> _Touch:
        clock = self._clock(stream)
        clock[stream] += 1
        return _Touch(verb, what, where, stream, clock[stream])  # type: ignore[arg-type]

    def _wait(self, record: Wait) -> None:
        clock = self._clock(stream_of(record.entries))
        # An event that was never signalled is over, as on CUDA.
        for stream, time in self._events.get(record.event, {}).items():
            clock[stream] = max(clock.get(stream, 0), time)

    def _access(self, record: Access) -> None:
        stream = stream_of(record.entries)
        reading = self._touch("reads", record.what, record.where, stream)
        for span in record.reads:
            for segment in self._memory.within(span):
                self._compare(segment, segment.writes, reading)
                segment.reads[stream] = reading
        writing = self._touch("writes", record.what, record.where, stream)
        for span in record.writes:
            for segment in self._memory.within(span):
                self._compare(segment, segment.writes, writing)
                self._compare(segment, segment.reads, writing)
                # Who comes after this write comes after what it came after.
                segment.writes, segment.reads = {stream: writing}, {}

    def _allocate(self, record: Allocate) -> None:
        stream = stream_of(record.entries)
        self._blocks[record.block] = (stream, record.span)
        touch = self._touch("allocates", "", record.where, stream)
        for segment in self._memory.within(record.span):
            segment.forget()
            if record.new:
                segment.writes[stream] = touch

    def _free(self, record: Free) -> None:
        stream, span = self._blocks.pop(record.block)
        touch = self._touch("frees", "", record.where, stream)
        for segment in self._memory.within(span):
            self._compare(segment, segment.writes, touch)
            self._compare(segment, segment.reads, touch)
            segment.forget()
            segment.freed = touch

    def _compare(self, segment: _Segment, earlier: dict[str, _Touch], now: _Touch) -> None:
        if segment.freed is not None:
            self._found_race("used after free", segment, segment.freed, now)
        clock = self._clocks[now.stream]
        for stream, touch in earlier.items():
            if touch.time > clock.get(stream, 0):
                kind = "unordered"
                if now.verb == "frees":
                    kind = "freed early"
                elif touch.what.startswith("all_gather") and touch.verb == "writes":
                    kind = "gather"
                self._found_race(kind, segment, touch, now)

    def _found_race(self, kind: str, segment: _Segment, first: _Touch, second: _Touch) -> None:
        key = (kind, str(first), str(second))
        self._found[key] = self._found.get(key, 0) + segment.stop - segment.start
