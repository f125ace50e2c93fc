"""What a plan moves in a step, by mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from compile_fsdp.passes.steps import Schedule

from ..describe import collective_totals
from ..explanation import CollectiveTotal
from .predict import Prediction


@dataclass(frozen=True)
class Traffic:
    """All collectives of a kind over an axis in one step.

    Attributes:
        axis: mesh axis.
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        when: forward, backward, or after a step.
        count: how many.
        bytes: of their full buffers.
    """

    axis: str
    kind: str
    when: str
    count: int
    bytes: int


def traffic(prediction: Prediction) -> tuple[Traffic, ...]:
    """Everything that a rank takes part in, in one step that is the last microbatch."""
    rows = [row for schedule in prediction.schedules for row in _of_graph(prediction, schedule)]
    refreshed = {
        name: size for name, size in prediction.captured.sizes.items() if size.refresh_bytes
    }
    if refreshed:
        described = prediction.captured.described
        axis = "dp_outer" if any(described[name].gather_axis for name in refreshed) else "dp_inner"
        total = sum(size.refresh_bytes for size in refreshed.values())
        rows.append(Traffic(axis, "all_gather", "after a step", len(refreshed), total))
    return tuple(rows)


def _of_graph(prediction: Prediction, schedule: Schedule) -> list[Traffic]:
    totals = collective_totals(schedule, prediction.captured.described)
    return [
        Traffic(
            each.axis,
            each.kind,
            schedule.kind.value,
            each.count,
            each.bytes // _cut(prediction, each),
        )
        for each in totals
        if each.axis
    ]


def _cut(prediction: Prediction, total: CollectiveTotal) -> int:
    """Into how many parts dp_inner has cut what is reduced over dp_outer."""
    shapes = {group.mesh_shape for group in prediction.captured.groups.values()}
    shape = next(iter(shapes), ())
    return shape[-1] if total.lane == "reduce_outer" and len(shape) > 1 else 1
