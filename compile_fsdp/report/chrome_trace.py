"""An explanation as a trace that ui.perfetto.dev and chrome://tracing open.

One process for each graph, one thread for each lane, a counter for memory. Times are the modelled
ones; where nothing was modelled, a position in the graph counts as a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from compile_fsdp.explanation import LANES, Explanation, GraphExplanation

_LEAST_DURATION = 0.001
"""Viewers leave out events that take no time."""


def dumps(explanation: Explanation) -> str:
    """See `Explanation.to_chrome_trace`."""
    events = [event for graph in explanation.graphs for event in _events(graph)]
    other = {"torch": explanation.torch_version, "world_size": explanation.world_size}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, indent=1
    )


def _events(graph: GraphExplanation) -> Iterator[dict[str, Any]]:
    process = {"pid": graph.number}
    yield {"ph": "M", "name": "process_name", **process, "args": {"name": graph.name}}
    yield {"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": graph.number}}
    for thread, lane in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", **process, "tid": thread, "args": {"name": lane}}
    for span in graph.spans:
        yield {
            "ph": "X",
            "name": span.label or span.detail,
            "cat": span.lane,
            **process,
            "tid": LANES.index(span.lane),
            "ts": span.start,
            "dur": max(_LEAST_DURATION, span.end - span.start),
            "args": {
                "bytes": span.bytes,
                "detail": span.detail,
                "step": span.step,
                "parameters": list(span.fqns),
            },
        }
    for point in graph.memory:
        used = {
            "activations": point.activations,
            "parameters": point.parameters,
            "gradients": point.gradients,
        }
        yield {"ph": "C", "name": "memory (bytes)", **process, "ts": point.at, "args": used}
