"""What people find about a rewritten graph where they look for it: torch's logs and traces.

- ``TORCH_LOGS="compile_fsdp"`` logs one line for each graph, ``TORCH_LOGS="+compile_fsdp"`` its
  schedule with the reasons as well. (Or the name of one module, ``"+compile_fsdp.passes"``.)
- ``TORCH_TRACE=folder`` writes a trace that ``tlparse`` turns into pages. The artifacts of each
  compilation that start with ``compile_fsdp_`` are from here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.fx import Graph

from .listing import listing
from .show import show
from .steps import Schedule, format_seconds
from .torch_internals import trace_artifact

_log = logging.getLogger(__name__)


def publish(before: str, schedule: Schedule, after: Graph) -> None:
    """Log and trace one rewritten graph. Costs next to nothing when nobody listens.

    Args:
        before: the `listing` of the graph before the rewrite.
        schedule: what it follows now.
        after: the rewritten graph.
    """
    _log.info("%s", _summary(schedule))
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", explained(schedule))
    kind = f"compile_fsdp_{schedule.kind.value}"
    trace_artifact(f"{kind}_schedule", "string", lambda: explained(schedule))
    trace_artifact(f"{kind}_schedule_data", "json", schedule.to_json)
    trace_artifact(f"{kind}_communication", "string", lambda: show(after))
    trace_artifact(f"{kind}_graph_before", "string", lambda: before)
    trace_artifact(f"{kind}_graph_after", "string", lambda: listing(after))


def explained(schedule: Schedule) -> str:
    """The schedule's table, and why each decision was taken."""
    return "\n".join([str(schedule), *_reasons(schedule)])


def _summary(schedule: Schedule) -> str:
    title = str(schedule).splitlines()[0]
    total, exposed = schedule.timeline.total, schedule.timeline.exposed
    if not total:
        return title
    return f"{title}, {format_seconds(total)} of which {format_seconds(exposed)} exposed"


def _reasons(schedule: Schedule) -> Iterator[str]:
    for group, reason in schedule.reasons.items():
        yield f"{schedule.groups[group].label}: {reason}"
    for number, step in enumerate(schedule.steps):
        if step.reason:
            yield f"{number}: {step.reason}"
