"""Damage to a recorded log, as if one line of the runtime were missing or wrong.

A site is a line of the runtime that asked a lane for something. A mutation changes everything that
was recorded for one site:

    dropped     a wait (`wait_current`, `wait_event`, an event's `wait`) is not there
    forgotten   a stretch of work (`then`, `collective`, `allocating`) is on the stream around it
    elsewhere   that work is on a stream that nobody knows of
    too soon    an event is recorded before the last works of its stream, not after them
    early       memory is freed as soon as the last stream but its own has been asked to use it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from compile_fsdp.runtime.happens_before import (
    Access,
    Allocate,
    Entry,
    Free,
    Record,
    Signal,
    Span,
    Wait,
    stream_of,
)

__all__ = ["Mutation", "mutate", "mutations"]

ELSEWHERE = "elsewhere"
# One optimizer step on all parameters of a model is so many works at most.
SOON = 60
STRETCHES = ("then", "collective", "allocating")


@dataclass(frozen=True, order=True)
class Mutation:
    """``what`` is done to everything that ``site`` asked for."""

    kind: str
    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.what} {self.kind} at {self.site}"


def mutations(log: Iterable[Record]) -> set[Mutation]:
    """Every mutation that changes ``log``."""
    return {*_waits(log), *_stretches(log), *_events(log), *_frees(log)}


def mutate(log: list[Record], mutation: Mutation) -> list[Record]:
    """A copy of ``log``, damaged."""
    if mutation.what == "dropped":
        return [each for each in log if not _is_wait(each, mutation)]
    if mutation.what == "early":
        return _free_early(log, mutation.site)
    if mutation.what == "too soon":
        return _signal_too_soon(log, mutation.site)
    change = _forgotten if mutation.what == "forgotten" else _elsewhere
    return [_moved(each, mutation, change) for each in log]


def _waits(log: Iterable[Record]) -> Iterator[Mutation]:
    for each in log:
        if isinstance(each, Wait):
            yield Mutation(_kind_of(each), "dropped", each.where)


def _kind_of(wait: Wait) -> str:
    how = wait.entries[-1].how if wait.entries else ""
    return how if how.startswith("wait") else "wait"


def _is_wait(record: Record, mutation: Mutation) -> bool:
    return (
        isinstance(record, Wait)
        and record.where == mutation.site
        and _kind_of(record) == mutation.kind
    )


def _stretches(log: Iterable[Record]) -> Iterator[Mutation]:
    for each in log:
        if isinstance(each, Access | Allocate) and each.entries:
            entry = each.entries[-1]
            if entry.how in STRETCHES:
                for what in ("forgotten", "elsewhere"):
                    yield Mutation(entry.how, what, entry.where)


def _forgotten(entries: tuple[Entry, ...], at: int) -> tuple[Entry, ...]:
    return entries[:at] + entries[at + 1 :]


def _elsewhere(entries: tuple[Entry, ...], at: int) -> tuple[Entry, ...]:
    return (*entries[:at], replace(entries[at], stream=ELSEWHERE), *entries[at + 1 :])


def _moved(
    record: Record,
    mutation: Mutation,
    change: Callable[[tuple[Entry, ...], int], tuple[Entry, ...]],
) -> Record:
    if isinstance(record, Free):
        return record
    for at, entry in enumerate(record.entries):
        if entry.how == mutation.kind and entry.where == mutation.site:
            return replace(record, entries=change(record.entries, at))
    return record


def _events(log: Iterable[Record]) -> Iterator[Mutation]:
    for each in log:
        if isinstance(each, Signal):
            yield Mutation("event", "too soon", each.where)


def _signal_too_soon(log: list[Record], site: str) -> list[Record]:
    damaged: list[Record] = []
    for record in log:
        position = len(damaged)
        if isinstance(record, Signal) and record.where == site:
            stream = stream_of(record.entries)
            works = [
                at
                for at, each in enumerate(damaged)
                if isinstance(each, Access) and stream_of(each.entries) == stream
            ]
            position = works[-SOON] if len(works) >= SOON else 0
        damaged.insert(position, record)
    return damaged


def _frees(log: Iterable[Record]) -> Iterator[Mutation]:
    log = list(log)
    for allocated, _, _ in _shared_blocks(log):
        yield Mutation("free", "early", allocated.where)


def _shared_blocks(log: list[Record]) -> Iterator[tuple[Allocate, int, int]]:
    """Blocks that other streams than their own use: with where in ``log`` that is asked for last,
    and where they are freed."""
    live: dict[int, tuple[Allocate, int | None]] = {}
    for position, record in enumerate(log):
        if isinstance(record, Allocate):
            live[record.block] = (record, None)
        elif isinstance(record, Access):
            stream, spans = stream_of(record.entries), record.reads + record.writes
            for block, (allocated, _) in live.items():
                if stream != stream_of(allocated.entries):
                    if any(_overlap(span, allocated.span) for span in spans):
                        live[block] = (allocated, position)
        elif isinstance(record, Free):
            allocated, last = live.pop(record.block)
            if last is not None and allocated.new:
                yield allocated, last, position


def _overlap(left: Span, right: Span) -> bool:
    return left.start < right.stop and right.start < left.stop


def _free_early(log: list[Record], site: str) -> list[Record]:
    moved: dict[int, list[Record]] = {}
    gone = set()
    for allocated, last, end in _shared_blocks(log):
        if allocated.where == site:
            moved.setdefault(last, []).append(log[end])
            gone.add(end)
    damaged: list[Record] = []
    for position, record in enumerate(log):
        if position not in gone:
            damaged.append(record)
        damaged += moved.get(position, [])
    return damaged
