"""Recording lanes: the real runtime on streams that only write down what they are asked for.

    with recorded_step(model) as recorder:
        loss = model(batch).backward()
        optimizer.step()
    recorder.check()        # RuntimeError: every race, with both sides

A recording lane behaves like a CUDA stream: whatever it is given it does at once, as if on a stream
of its own, and waiting is only noted. So a wait that is missing shows on any device, in any
interleaving, although nothing ever runs at the same time. What runs outside of lanes is compute's:
operators are seen by a dispatch mode (`compile_fsdp.runtime.recorded_memory`).
`compile_fsdp.runtime.happens_before` tells whether all of it is in order.

Compile a model before it is recorded: Dynamo does not trace under a dispatch mode. Kernels that
Inductor wrote are not seen, so record with ``options={"inner": "aot_eager"}``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from .happens_before import Access, Entry, Race, Record, Signal, Wait, races
from .parameter import get_containing_parameter_group
from .recorded_memory import HELPERS, NO_HELPERS, Operators, Storages, place
from .streams import Event, Lane, Waitable, lanes_made_by

if TYPE_CHECKING:
    from .context import GroupContext
    from .parameter_group import FsdpParameterGroup

__all__ = ["Recorder", "RecordingLane", "recorded_groups", "recorded_step"]


class Recorder:
    """What streams were asked to do, from the first lane or operator on.

    Attributes:
        log: the records, in the order of the host.
    """

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.memory = Storages(self)
        self.is_open = True
        self._names: dict[str, int] = {}
        self._events = 0
        self._thread = _PerThread()

    # What a person asks ------------------------------------------------------------------------

    def races(self) -> list[Race]:
        """Uses of memory that nothing orders; see `compile_fsdp.runtime.happens_before.Race`."""
        return races(self.log)

    def check(self) -> None:
        """Raise if anything races.

        Raises:
            RuntimeError: with each race.
        """
        found = self.races()
        if found:
            count = "1 race" if len(found) == 1 else f"{len(found)} races"
            raise RuntimeError(f"{count}: " + "\n".join(map(str, found)))

    # What is recorded --------------------------------------------------------------------------

    def make_lane(self, name: str) -> RecordingLane:
        """A lane on a stream of its own, called ``name`` (or ``name 2`` and so on)."""
        number = self._names[name] = self._names.get(name, 0) + 1
        return RecordingLane(self, name if number == 1 else f"{name} {number}")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Why the calling thread's work runs on the stream it runs on."""
        return self._thread.entries

    @property
    def is_paused(self) -> bool:
        """Whether the calling thread is inside of a collective, whose accesses are declared."""
        return self._thread.paused or not self.is_open

    def note(self, record: Record) -> None:
        """Add ``record``, unless the recording is over."""
        if self.is_open:
            self.log.append(record)

    def signal(self, entries: tuple[Entry, ...], where: str) -> int:
        """The number of a new event on the stream of ``entries``."""
        self.memory.look()
        self._events += 1
        self.note(Signal(entries, self._events, where))
        return self._events

    def wait(self, entries: tuple[Entry, ...], event: int, where: str) -> None:
        """The stream of ``entries`` waits for ``event``."""
        self.memory.look()
        self.note(Wait(entries, event, where))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the calling thread does is not looked at."""
        before, self._thread.paused = self._thread.paused, True
        try:
            yield
        finally:
            self._thread.paused = before

    def enter(self, entry: Entry) -> None:
        """What the calling thread does from now on is on the stream of ``entry``."""
        self.memory.look()
        self._thread.entries = (*self._thread.entries, entry)

    def leave(self) -> None:
        """The end of the last `enter`."""
        self.memory.look()
        self._thread.entries = self._thread.entries[:-1]

    def close(self) -> None:
        """Record nothing any more."""
        self.is_open = False
        self.memory.forget()


class _PerThread(threading.local):
    """Which stream is current is each thread's own business, as with CUDA."""

    entries: tuple[Entry, ...] = ()
    paused = False


class _On:
    """A context in which work is on a stream."""

    def __init__(self, recorder: Recorder, entry: Entry) -> None:
        self._recorder = recorder
        self._entry = entry

    def __enter__(self) -> None:
        self._recorder.enter(self._entry)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.leave()


class RecordingLane(Lane):
    """A lane that behaves like a CUDA stream, on any device, and tells a `Recorder`."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        super().__init__(name)
        self._recorder = recorder

    def _on(self, how: str) -> _On:
        # Whoever allocates does it by a helper.
        helpers = HELPERS if how == "allocating" else NO_HELPERS
        return _On(self._recorder, Entry(self.name, how, place(helpers)))

    def collective(
        self,
        start: Callable[[], Waitable | None],
        *,
        depends: bool = False,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> None:
        recorder = self._recorder
        with self._on("collective"):
            with recorder.paused():
                work = start()
                if work is not None:
                    work.wait()
            read, written = recorder.memory.spans(reads), recorder.memory.spans(writes)
            what = label or "collective"
            recorder.note(Access(recorder.entries, what, place(), read, written))

    def then(self, fn: Callable[[], None]) -> None:
        with self._on("then"):
            fn()

    def record_event(self) -> Event:
        where = place()
        entries = (*self._recorder.entries, Entry(self.name, "event", where))
        return _RecordingEvent(self._recorder, self._recorder.signal(entries, where))

    def wait_event(self, event: Event) -> None:
        where = place()
        if isinstance(event, _RecordingEvent):
            entries = (*self._recorder.entries, Entry(self.name, "wait_event", where))
            self._recorder.wait(entries, event.number, where)
        else:
            event.wait()

    def wait_current(self) -> None:
        where = place()
        event = self._recorder.signal(self._recorder.entries, where)
        entries = (*self._recorder.entries, Entry(self.name, "wait_current", where))
        self._recorder.wait(entries, event, where)

    def allocating(self) -> _On:
        return self._on("allocating")


class _RecordingEvent(Event):
    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number

    def wait(self) -> None:
        self._recorder.wait(self._recorder.entries, self.number, place())


@contextmanager
def recorded_step(module: nn.Module) -> Iterator[Recorder]:
    """Record everything that ``module`` and who uses it do while the context is open.

    ``module`` is an FSDP root. Everything runs, with right results, one thing after another.
    """

    def groups() -> Iterable[FsdpParameterGroup]:
        found = [get_containing_parameter_group(each) for each in module.parameters()]
        return dict.fromkeys(group for group in found if group is not None)

    with recorded_groups(groups) as recorder:
        yield recorder


@contextmanager
def recorded_groups(groups: Callable[[], Iterable[FsdpParameterGroup]]) -> Iterator[Recorder]:
    """As `recorded_step`, for what the parameter groups that ``groups()`` returns do."""
    recorder = Recorder()
    contexts: dict[GroupContext, None] = {}
    try:
        with lanes_made_by(recorder.make_lane):
            for group in groups():
                if group.context not in contexts:
                    group.context.renew_lanes()
                    contexts[group.context] = None
                for each in (group, *group.planes):
                    recorder.memory.watch(each.full_local_tensor, group.context.lanes.gather.name)
            with Operators(recorder):
                yield recorder
    finally:
        recorder.close()
        # The first forward gives the groups their root's context.
        for context in contexts | dict.fromkeys(group.context for group in groups()):
            context.renew_lanes()
