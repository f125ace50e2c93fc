"""A schedule over time: when each lane is busy, and how much memory is in use.

Time is modelled microseconds where a cost model has counted the graph's nodes, else a position in
the graph: then a gather lasts until its wait, and a reduction until the next one on its lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from compile_fsdp.passes.costs import CostModel
from compile_fsdp.passes.steps import (
    GatherTogether,
    GroupStep,
    ReduceInner,
    ReduceOuter,
    ReduceTogether,
    Schedule,
    Step,
    Unshard,
    Wait,
)
from compile_fsdp.passes.timeline import clock

from .explanation import LANES, MemoryPoint, ParameterGroup, Span

Groups = Mapping[str, ParameterGroup]


def time_unit(schedule: Schedule) -> str:
    """``"us"`` or ``"node"``, see above."""
    return "us" if schedule.facts.nodes and schedule.timeline.total > 0 else "node"


def bytes_of(step: Step, groups: Groups) -> int:
    """The size of the buffer that a step gathers or reduces; 0 where it does neither."""
    if isinstance(step, Unshard):
        return 0 if step.gathered else groups[step.group].gather_bytes
    if isinstance(step, GatherTogether):
        return sum(groups[name].gather_bytes for name in step.groups)
    if isinstance(step, ReduceInner | ReduceTogether | ReduceOuter):
        return sum(groups[name].reduce_bytes for name in step.names)
    return 0


def fqns_of(step: Step, groups: Groups) -> tuple[str, ...]:
    """The parameters that a step is about."""
    if isinstance(step, GatherTogether):
        return tuple("=".join(names) for name in step.groups for names in groups[name].fqns)
    if isinstance(step, ReduceTogether):
        return tuple(
            "=".join(groups[name].fqns[index])
            for name, indices in zip(step.groups, step.indices, strict=True)
            for index in indices
        )
    if not isinstance(step, GroupStep):
        return ()
    names = groups[step.group].fqns
    indices = step.indices if isinstance(step, ReduceInner) else range(len(names))
    return tuple("=".join(names[index]) for index in indices)


def lane_of(step: Step) -> str:
    """The lane on which a step communicates."""
    if isinstance(step, Unshard | GatherTogether):
        return "gather"
    return "reduce_inner" if isinstance(step, ReduceTogether) else step.op


def label_of(step: Step, groups: Groups) -> str:
    """The groups that a gather or reduction is of, for people."""
    return "+".join(groups[name].label for name in step.names)


def spans_of(schedule: Schedule, groups: Groups, costs: CostModel) -> tuple[Span, ...]:
    """Compute first, then communication in the order of issue."""
    starts = _starts(schedule, costs)
    compute = (span for span in _compute(schedule, groups, starts) if span.end > span.start)
    return (*compute, *_communication(schedule, groups))


def microseconds(seconds: float) -> float:
    """To a nanosecond: the model knows no better, and longer numbers only fill files."""
    return round(seconds * 1e6, 3)


def _starts(schedule: Schedule, costs: CostModel) -> list[float]:
    """When compute gets to each position: in microseconds with all waiting before it, or the
    position itself."""
    if time_unit(schedule) == "node":
        return [float(position) for position in range(len(schedule.facts.names))]
    exposed = [0.0] * len(schedule.facts.names)
    for step, time in zip(schedule.steps, schedule.timeline.steps, strict=True):
        exposed[step.anchor] += time.exposed
    before = clock(schedule.facts, costs)
    return [
        microseconds(before[position] + waited)
        for position, waited in enumerate(itertools.accumulate(exposed))
    ]


def _communication(schedule: Schedule, groups: Groups) -> Iterator[Span]:
    timed = time_unit(schedule) == "us"
    for number, step in enumerate(schedule.steps):
        if lane_of(step) not in LANES:
            continue
        if isinstance(step, Unshard) and step.gathered:
            continue
        start: float = step.anchor
        end: float = end_of(schedule, number, step)
        if timed:
            time = schedule.timeline.steps[number]
            start, end = microseconds(time.start), microseconds(time.end)
        yield Span(
            lane=lane_of(step),
            start=float(start),
            end=float(end),
            label=label_of(step, groups),
            detail=schedule.where(step),
            step=number,
            bytes=bytes_of(step, groups),
            fqns=fqns_of(step, groups),
        )


def end_of(schedule: Schedule, number: int, step: Step) -> int:
    """The position until which a collective may be in flight: a gather until its wait, a
    reduction until the next one on its lane."""
    gathers = isinstance(step, Unshard | GatherTogether)
    for later in schedule.steps[number + 1 :]:
        if gathers:
            ends = isinstance(later, Wait) and later.group in step.names
        else:
            ends = lane_of(later) == lane_of(step)
        if ends:
            return later.anchor
    return schedule.facts.end


def _compute(schedule: Schedule, groups: Groups, starts: Sequence[float]) -> Iterator[Span]:
    """One span for each run of nodes between two steps."""
    facts = schedule.facts
    waits = {step.anchor for step in schedule.steps}
    for start, end in itertools.pairwise(sorted({facts.start, facts.end, *waits})):
        read = [use for use in facts.parameters if use.first < end and use.last >= start]
        names = facts.names[start:end]
        yield Span(
            lane="compute",
            start=starts[start],
            end=round(starts[end] - _waited(schedule, end), 3),
            label=" ".join(dict.fromkeys(groups[use.group].label for use in read)),
            detail=names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})",
            fqns=tuple(dict.fromkeys("=".join(groups[use.group].fqns[use.index]) for use in read)),
        )


def _waited(schedule: Schedule, position: int) -> float:
    """Microseconds that compute stands still before ``position``."""
    if time_unit(schedule) == "node":
        return 0.0
    steps = zip(schedule.steps, schedule.timeline.steps, strict=True)
    return microseconds(sum(time.exposed for step, time in steps if step.anchor == position))


def memory_points(schedule: Schedule, costs: CostModel) -> tuple[MemoryPoint, ...]:
    """The memory curve, a point wherever it changes."""
    curve = schedule.memory
    rows = zip(
        _starts(schedule, costs), curve.activations, curve.gathered, curve.gradients, strict=False
    )
    points: list[MemoryPoint] = []
    for at, activations, gathered, gradients in rows:
        point = MemoryPoint(at, activations, gathered, gradients)
        if points and _uses(points[-1]) == _uses(point):
            continue
        if points and points[-1].at == at:
            # Nodes that take no time: a curve shows the most of them.
            points[-1] = max(points[-1], point, key=lambda each: each.total)
        else:
            points.append(point)
    return tuple(points)


def _uses(point: MemoryPoint) -> tuple[int, int, int]:
    return point.activations, point.parameters, point.gradients
