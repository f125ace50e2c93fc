"""Read from a profiler's trace what ran on which stream, and what ran beside what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.support import ON_CUDA

Event = dict[str, Any]


def trace_of(step: Callable[[], object], path: Path) -> list[Event]:
    """The events of a Chrome trace of ``step``, which is written to ``path``."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_CUDA else [])]
    with profile(activities=kinds) as watched:
        step()
        if ON_CUDA:
            torch.cuda.synchronize()
    watched.export_chrome_trace(str(path))
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def beside_compute(events: list[Event], what: str) -> tuple[int, int]:
    """How many kernels of another stream than compute's have ``what`` in their names, and how many
    of those run while compute does something. The stream of compute is the one with the GELUs."""
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    computing = {_stream(event) for event in device if "gelu" in event["name"].lower()}
    assert len(computing) == 1, f"GELUs are computed on streams {sorted(computing)}"
    busy = [_interval(event) for event in device if _stream(event) in computing]
    asked = [
        _interval(event)
        for event in device
        if _stream(event) not in computing and what in event["name"].lower()
    ]
    beside = [
        any(start < other_end and other_start < end for other_start, other_end in busy)
        for start, end in asked
    ]
    return len(asked), sum(beside)


def _stream(event: Event) -> int:
    stream: int = event["args"]["stream"]
    return stream


def _interval(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
