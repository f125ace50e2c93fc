"""Captures on a CPU: they remember operators and collectives, and run them again.

What a CUDA graph does to the device, `EmulatedPool` does to the memory of tensors: a replay runs no
line of the program, takes no decision, and writes into the very memory that was written when it was
recorded. `StrictLane` knows the rules of capturing streams, and raises where CUDA would.

    with captured_on_cpu():
        compiled = torch.compile(model, backend="compile_fsdp", options={"cudagraphs": True, ...})
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_fsdp.runtime.capture import GraphCapture, captures_by
from compile_fsdp.runtime.streams import Event, _CpuEvent, _CpuLane, lanes_made_by

_T = TypeVar("_T")

OWN = "compile_fsdp"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass
class EmulatedPool:
    """Stands in for a pool of CUDA graphs."""

    captures: list[EmulatedCapture] = field(default_factory=list)

    def __call__(self, device: torch.device) -> EmulatedPool:
        return self

    def new(self) -> EmulatedCapture:
        self.captures.append(EmulatedCapture())
        return self.captures[-1]

    def is_busy(self) -> bool:
        return StrictLane.capturing is not None


class EmulatedCapture(GraphCapture):
    """Remembers each operator with the tensors that it read and wrote."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._inference = False

    def record(self, work: Callable[[], _T]) -> _T:
        StrictLane.capturing = _CapturingStreams()
        self._inference = torch.is_inference_mode_enabled()
        try:
            with _Recorder(self.calls):
                result = work()
            StrictLane.capturing.end()
            return result
        finally:
            StrictLane.capturing = None

    def replay(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            for operator, args, kwargs, recorded in self.calls:
                _write(recorded, operator(*args, **kwargs), operator)


def _write(recorded: Any, result: Any, operator: Any) -> None:
    """Put what an operator returns now where it was when it was recorded."""
    if operator.namespace == "c10d":
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                leaf.wait()
        return
    for memory, value in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
        if isinstance(memory, torch.Tensor) and memory.data_ptr() != value.data_ptr():
            if not _is_view(operator):
                memory.copy_(value)


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None for each in operator._schema.returns)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == OWN:
            with self:  # the host's part: what it asks of the device is recorded
                return func.redispatch(_CPU, *args, **kwargs)
        if func.namespace == "aten" and torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} reads a value while a graph is captured")
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result


class _CapturingStreams:
    """Which lanes take part in the capture that runs, and which have joined again."""

    def __init__(self) -> None:
        self.unjoined: set[StrictLane] = set()
        self.forked: set[StrictLane] = set()

    def end(self) -> None:
        assert not self.unjoined, f"a capture ends before {self.unjoined} have joined"


class StrictLane(_CpuLane):
    """A lane that obeys the rules of capturing: forked in, joined, no event from outside."""

    capturing: _CapturingStreams | None = None

    def _used(self) -> None:
        if self.capturing is not None:
            assert self in self.capturing.forked, f"{self} is used in a capture it is no part of"
            self.capturing.unjoined.add(self)

    def collective(self, start: Any, **keywords: Any) -> None:
        self._used()
        super().collective(start, **keywords)

    def then(self, fn: Callable[[], None]) -> None:
        self._used()
        super().then(fn)

    def record_event(self) -> Event:
        event = super().record_event()
        assert isinstance(event, _CpuEvent)
        # A stream that has not forked records for the world outside.
        inside = self.capturing is not None and self in self.capturing.forked
        return _StrictEvent(event, self, self.capturing if inside else None)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _StrictEvent)
        event.check()
        self._used()
        super().wait_event(event.event)

    def wait_current(self) -> None:
        if self.capturing is not None:
            self.capturing.forked.add(self)
            self.capturing.unjoined.add(self)
        super().wait_current()


class _StrictEvent(Event):
    def __init__(
        self, event: _CpuEvent, lane: StrictLane, capturing: _CapturingStreams | None
    ) -> None:
        self.event = event
        self._lane = lane
        self._recorded_in = capturing

    def check(self) -> None:
        assert self._recorded_in is StrictLane.capturing, (
            f"an event of {self._lane} is waited for on the other side of a capture's edge"
        )

    def wait(self) -> None:
        self.check()
        self.event.wait()
        if StrictLane.capturing is not None:
            StrictLane.capturing.unjoined.discard(self._lane)


@contextlib.contextmanager
def captured_on_cpu(*, enabled: bool = True) -> Iterator[EmulatedPool]:
    """While the context is open, the option "cudagraphs" works on CPU meshes, for ``aot_eager``."""
    pool = EmulatedPool()
    with contextlib.ExitStack() as stack:
        if enabled:
            stack.enter_context(captures_by("cpu", pool))
            stack.enter_context(lanes_made_by(StrictLane))
        yield pool
