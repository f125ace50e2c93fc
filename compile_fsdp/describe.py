"""Compilations and their schedules -> the plain data of an explanation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from compile_fsdp.passes.costs import CostModel
from compile_fsdp.passes.facts import GraphFacts, GraphKind
from compile_fsdp.passes.steps import (
    GatherTogether,
    ReduceInner,
    ReduceOuter,
    ReduceTogether,
    Schedule,
    Step,
    Unshard,
    WaitReductions,
)

from .compilation import Compilation, RewrittenGraph
from .explanation import (
    CollectiveTotal,
    Decision,
    Explanation,
    GraphBreak,
    GraphExplanation,
    ModelledTime,
    ParameterGroup,
    PlannedStep,
    Recompile,
)
from .lanes import (
    Groups,
    bytes_of,
    end_of,
    fqns_of,
    label_of,
    lane_of,
    memory_points,
    microseconds,
    spans_of,
    time_unit,
)


def explanation_of(
    calls: Mapping[Compilation, int], breaks_elsewhere: Sequence[GraphBreak] = ()
) -> Explanation:
    """What these compilations are.

    Args:
        calls: how often each was called, in the order of an explanation.
        breaks_elsewhere: graph breaks that may belong to no compilation.
    """
    groups: dict[str, ParameterGroup] = {}
    graphs: list[GraphExplanation] = []
    for compilation, count in calls.items():
        own = {group.name: group for group in compilation.groups}
        groups.update(own)
        origin = GraphOrigin(compilation.policy.costs, compilation.compile_id, compilation.where)
        for rewritten in compilation.graphs:
            number = len(graphs)
            graphs.append(graph_explanation(number, origin, rewritten, own, count))
    return Explanation(
        torch_version=torch.__version__,
        world_size=_world_size(groups),
        groups=tuple(groups.values()),
        graphs=tuple(graphs),
        breaks=_breaks(calls, breaks_elsewhere),
        recompiles=tuple(
            Recompile(each.compile_id, each.failed_guard, each.where)
            for each in calls
            if each.failed_guard is not None
        ),
        notes=tuple(_notes(calls)),
        formats=tuple(dict.fromkeys(each for found in calls for each in found.formats)),
    )


def _world_size(groups: Groups) -> int:
    """Ranks of the running program; 1 without a process group or without groups."""
    if not groups or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()


def _breaks(
    calls: Mapping[Compilation, int], elsewhere: Sequence[GraphBreak]
) -> tuple[GraphBreak, ...]:
    """Each once, in the order of ``elsewhere``; one that ended a compilation knows it."""
    own = {_key(each.graph_break): each.graph_break for each in calls if each.graph_break}
    others = {_key(each): each for each in elsewhere}
    # A dict keeps the place of a key whose value is replaced.
    return tuple({**others, **own}.values())


def _key(found: GraphBreak) -> tuple[str, str, int]:
    return found.reason, found.file, found.line


def _notes(calls: Mapping[Compilation, int]) -> Iterator[str]:
    """What a reader might miss."""
    if not calls:
        yield (
            "Nothing was captured: no code that backend='compile_fsdp' compiled ran while the "
            "capture was open. Call a model that torch.compile(model, backend='compile_fsdp') "
            "returned inside of the with block; a sharded model that is not compiled is driven by "
            "module hooks and has no schedule."
        )
    for compilation in calls:
        kinds = {rewritten.kind for rewritten in compilation.graphs}
        if not kinds:
            yield (
                f"Compilation {compilation.compile_id} ({compilation.where}) came out of a compile "
                "cache, so its graphs were not seen. Open the capture around its first call, or "
                "use compile_fsdp.explain, which compiles anew."
            )
        elif GraphKind.FORWARD in kinds and GraphKind.BACKWARD not in kinds:
            yield (
                f"Compilation {compilation.compile_id} has no backward graph yet: it is compiled "
                "when the first backward runs. Call backward() inside of the with block."
            )


@dataclass(frozen=True)
class GraphOrigin:
    """Where a graph comes from.

    Attributes:
        costs: the cost model that its times are of.
        compile_id: Dynamo's name for the compilation.
        where: the user's line that it starts with.
    """

    costs: CostModel
    compile_id: str
    where: str


def graph_explanation(
    number: int,
    origin: GraphOrigin,
    rewritten: RewrittenGraph,
    groups: Groups,
    calls: int,
) -> GraphExplanation:
    """One graph; ``groups`` by name, ``calls`` as in `GraphExplanation`."""
    schedule = rewritten.schedule
    costs = origin.costs
    spans = spans_of(schedule, groups, costs)
    return GraphExplanation(
        number=number,
        kind=rewritten.kind.value,
        compile_id=origin.compile_id,
        where=origin.where,
        calls=0 if rewritten.kind is GraphKind.BACKWARD else calls,
        schedule=str(schedule),
        steps=tuple(_steps(schedule, groups)),
        spans=spans,
        collectives=collective_totals(schedule, groups),
        memory=memory_points(schedule, costs),
        decisions=tuple(
            Decision(groups[name].label, reason) for name, reason in schedule.reasons.items()
        ),
        time=_time(schedule, costs.name),
        time_unit=time_unit(schedule),
        state_bytes=schedule.memory.state,
        budget=schedule.budget,
        node_count=len(schedule.facts.names),
        before=rewritten.before,
        after=rewritten.after,
        communication=rewritten.communication,
        arena_bytes=schedule.arena.size if schedule.arena else None,
        arena_bound=schedule.arena.bound if schedule.arena else None,
    )


def _time(schedule: Schedule, cost_model: str) -> ModelledTime:
    modelled = schedule.timeline
    return ModelledTime(
        cost_model=cost_model,
        compute=microseconds(modelled.compute),
        communication=microseconds(modelled.communication),
        exposed=microseconds(modelled.exposed),
        total=microseconds(modelled.total),
    )


def _steps(schedule: Schedule, groups: Groups) -> Iterator[PlannedStep]:
    for number, step in enumerate(schedule.steps):
        time = schedule.timeline.steps[number] if schedule.timeline.steps else None
        yield PlannedStep(
            number=number,
            op=step.op,
            group="" if isinstance(step, WaitReductions) else label_of(step, groups),
            fqns=fqns_of(step, groups),
            bytes=bytes_of(step, groups),
            axis=_axis(step, groups),
            where=schedule.where(step),
            anchor=step.anchor,
            names=step.after,
            overlaps=_overlaps(schedule, number, groups),
            reason=step.reason,
            issued=microseconds(time.issued) if time else 0.0,
            start=microseconds(time.start) if time else 0.0,
            end=microseconds(time.end) if time else 0.0,
            exposed=microseconds(time.exposed) if time else 0.0,
        )


def _axis(step: Step, groups: Groups) -> str:
    if isinstance(step, Unshard | GatherTogether):
        return groups[step.names[0]].gather_axis
    if isinstance(step, ReduceInner | ReduceTogether):
        return groups[step.names[0]].inner_axis
    if isinstance(step, ReduceOuter):
        return groups[step.group].outer_axis
    return ""


def _overlaps(schedule: Schedule, number: int, groups: Groups) -> tuple[str, ...]:
    """Labels of the groups that are read while a collective may be in flight: a gather until its
    wait, a reduction until the next one on its lane. In order of first reader."""
    step = schedule.steps[number]
    if not isinstance(step, Unshard | ReduceInner | ReduceTogether | ReduceOuter):
        return ()
    return _read_between(schedule.facts, groups, step.anchor, end_of(schedule, number, step))


def _read_between(facts: GraphFacts, groups: Groups, start: int, end: int) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            groups[use.group].label
            for use in facts.parameters
            if use.first < end and use.last >= start
        )
    )


def collective_totals(schedule: Schedule, groups: Groups) -> tuple[CollectiveTotal, ...]:
    """All collectives of a schedule, by kind and axis."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for step in schedule.steps:
        size = bytes_of(step, groups)
        if not size:
            continue
        key = (_kind(step, groups[step.names[0]]), lane_of(step), _axis(step, groups))
        count, total = totals.get(key, (0, 0))
        # Data and scales of planes are gathered one after the other.
        apart = isinstance(step, Unshard) and bool(groups[step.group].planes)
        totals[key] = (count + 1 + apart, total + size)
    return tuple(CollectiveTotal(*key, *total) for key, total in totals.items())


def _kind(step: Step, group: ParameterGroup) -> str:
    if isinstance(step, ReduceInner | ReduceTogether):
        return group.inner_kind
    return group.outer_kind if isinstance(step, ReduceOuter) else "all_gather"
