"""Facts about a graph + groups + policy -> Schedule. Everything that is decided is decided here.

A pure function of plain data: no torch, no clock, no set whose order could differ between ranks.
Ranks that compile the same program plan the same communication without talking to each other, also
where their batches differ in shape: see `policy` for what may decide what.

The default plan of a graph that reads groups a, b, c one after the other (time goes right):

    gathers    [unshard a][unshard b]   [unshard c]
    compute               [wait a  read a  release a][wait b  read b  release b][wait c ...
    reductions                                       [reduce a]                 [reduce b]

- A group has one interval in a graph, from its first reader to its last; groups are gathered in
  the order of their first readers, as far ahead of their wait as `prefetch` says.
- What a group frees is freed before anything new is gathered. A group that `keep` chose is not
  freed at the end of forward but taken over by backward.
- A group's gradients are reduced once, after the last of them.
- The outer reduction of a group goes along with the inner reduction of the next one: by then its
  own inner reduction has had a group's compute to finish behind.

Order is carried by arguments. Steps form one chain: each names its predecessor's result, so
no compiler can move a gather behind the compute it should overlap with, or keep gradients alive
until the end. ``release`` takes no order arguments; the reads before it hold it back, and the
next step names what it freed. ``wait_reductions`` is held back by the tokens it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .arena import plan_arena, with_places
from .estimates import Keeping
from .facts import GraphFacts, GraphKind, GroupFacts
from .memory import memory_curve
from .merge import joined, joined_reductions
from .policy import Policy
from .prefetch import Unit, leads
from .steps import (
    GatherTogether,
    GroupStep,
    Keep,
    ReduceInner,
    ReduceOuter,
    ReduceTogether,
    Release,
    Schedule,
    Step,
    Unshard,
    Wait,
    WaitReductions,
    format_bytes,
)
from .timeline import timeline

__all__ = ["Policy", "plan"]

NOTHING_KEPT = Keeping()


def plan(
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    policy: Policy,
    keeping: Keeping = NOTHING_KEPT,
) -> Schedule:
    """Plan the communication of one graph.

    Args:
        facts: what the graph reads and produces.
        groups: the groups of the model by name; may hold more than the graph uses.
        policy: what the user asked for.
        keeping: what was decided on the joint graph, for its reasons (see `keep`).

    Returns:
        The schedule; it has no steps when the graph uses no group.

    Raises:
        KeyError: the graph uses a group that is not in ``groups``.
    """
    intervals = _intervals(facts)
    reductions = _reductions(facts)
    slots = [
        *_gather_slots(intervals, facts, groups, policy),
        *_release_slots(intervals, facts, groups, keeping.reasons),
        *_reduction_slots(reductions, facts, groups, policy),
    ]
    # Slots that compare equal keep the order in which they were listed.
    slots.sort(key=lambda slot: (slot.step.anchor, slot.turn))
    used = dict.fromkeys(
        [*(interval.group for interval in intervals), *(part.group for part in reductions)]
    )
    steps = _chained([slot.step for slot in slots])
    arena = plan_arena(steps, facts, groups, keeping) if policy.arena else None
    if arena is not None:
        steps = with_places(steps, arena)
    known = {name: groups[name] for name in used}
    return Schedule(
        steps=steps,
        facts=facts,
        groups=known,
        memory=memory_curve(steps, facts, known, policy.costs.device.reductions),
        timeline=timeline(steps, facts, known, policy.costs),
        budget=policy.budget_bytes,
        keeping=keeping,
        arena=arena,
    )


@dataclass(frozen=True)
class _Interval:
    """A group is read from position ``first`` to position ``last``."""

    group: str
    first: int
    last: int


@dataclass(frozen=True)
class _Reduction:
    """A group has all its gradients after position ``last``."""

    group: str
    indices: tuple[int, ...]
    last: int


# At one place in the graph: free first, then reduce what is ready, then gather, then wait.
_FIRST = 0
_RELEASE, _REDUCE_INNER, _REDUCE_OUTER, _UNSHARD, _WAIT, _LAST = range(1, 7)


@dataclass(frozen=True)
class _Slot:
    """A step and its turn among the steps with the same anchor."""

    turn: int
    step: Step


def _intervals(facts: GraphFacts) -> list[_Interval]:
    """One interval for each group, in order of first reader."""
    merged: dict[str, _Interval] = {}
    for use in facts.parameters:
        known = merged.setdefault(use.group, _Interval(use.group, use.first, use.last))
        merged[use.group] = replace(
            known, first=min(known.first, use.first), last=max(known.last, use.last)
        )
    return sorted(merged.values(), key=lambda interval: interval.first)


def _reductions(facts: GraphFacts) -> list[_Reduction]:
    """One reduction for each group with gradients, in order of last gradient."""
    merged: dict[str, _Reduction] = {}
    for use in facts.gradients:
        known = merged.setdefault(use.group, _Reduction(use.group, (), use.position))
        merged[use.group] = replace(
            known,
            indices=tuple(sorted({*known.indices, use.index})),
            last=max(known.last, use.position),
        )
    return sorted(merged.values(), key=lambda reduction: reduction.last)


def _gather_slots(
    intervals: Sequence[_Interval],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    policy: Policy,
) -> Iterator[_Slot]:
    kept = facts.kept if facts.is_backward else ()
    units = _units(intervals, kept, groups, policy)
    for each in intervals:
        yield _Slot(_WAIT, Wait(anchor=each.first, group=each.group, reason="read from here on"))
    for unit, lead in zip(units, leads(units, facts, groups, policy), strict=True):
        turn, anchor = _FIRST, facts.start
        if lead.leader is not None:
            turn, anchor = _UNSHARD, units[lead.leader].first
        together = len(unit.groups) > 1
        if together:
            why = f"too small for a collective each; {lead.reason}"
            yield _Slot(turn, GatherTogether(anchor=anchor, groups=unit.groups, reason=why))
        gathered = unit.gathered or together
        why = "gathered together" if together else lead.reason
        for group in unit.groups:
            yield _Slot(turn, Unshard(anchor=anchor, group=group, gathered=gathered, reason=why))


def _units(
    intervals: Sequence[_Interval],
    kept: Sequence[str],
    groups: Mapping[str, GroupFacts],
    policy: Policy,
) -> list[Unit]:
    """What is gathered together, in order of first reader. What is kept stands alone."""
    known = {each.group: each for each in intervals}
    units: list[Unit] = []
    for is_kept, run in groupby(known, key=lambda group: group in kept):
        names = list(run)
        for members in [(name,) for name in names] if is_kept else joined(names, groups, policy):
            first = min(known[name].first for name in members)
            last = max(known[name].last for name in members)
            units.append(Unit(members, first, last, gathered=is_kept))
    return units


def _release_slots(
    intervals: Sequence[_Interval],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    reasons: Mapping[str, str],
) -> Iterator[_Slot]:
    for each in intervals:
        if facts.kind is GraphKind.FORWARD and each.group in facts.kept:
            reason = reasons.get(each.group, "kept for backward")
            yield _Slot(_RELEASE, Keep(anchor=each.last + 1, group=each.group, reason=reason))
            continue
        reason = f"frees {format_bytes(groups[each.group].gather_bytes)}: no reader is left"
        yield _Slot(_RELEASE, Release(anchor=each.last + 1, group=each.group, reason=reason))


def _reduction_slots(
    reductions: Sequence[_Reduction],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    policy: Policy,
) -> Iterator[_Slot]:
    if not reductions:
        return
    known = {reduction.group: reduction for reduction in reductions}
    runs = [[known[name] for name in run] for run in joined_reductions(list(known), groups, policy)]
    # A gradient may be a graph input; nothing is written between the inputs.
    anchors = [max(run[-1].last + 1, facts.start) for run in runs]
    for run, own, following in zip(runs, anchors, [*anchors[1:], facts.end], strict=True):
        yield _Slot(_REDUCE_INNER, _inner_reduction(run, own))
        for reduction in run:
            if groups[reduction.group].finishes_later:
                why = "while the next group is reduced over dp_inner"
                if following == facts.end:
                    why = "nothing is left to hide it behind"
                outer = ReduceOuter(anchor=following, group=reduction.group, reason=why)
                yield _Slot(_REDUCE_OUTER, outer)
    names = tuple(reduction.group for reduction in reductions)
    why = "whoever runs after the graph sees finished gradients"
    yield _Slot(_LAST, WaitReductions(anchor=facts.end, groups=names, reason=why))


def _inner_reduction(run: Sequence[_Reduction], anchor: int) -> Step:
    if len(run) == 1:
        (alone,) = run
        why = "its last gradient is there"
        return ReduceInner(anchor=anchor, group=alone.group, indices=alone.indices, reason=why)
    return ReduceTogether(
        anchor=anchor,
        groups=tuple(each.group for each in run),
        indices=tuple(each.indices for each in run),
        reason="too small for a collective each; the last gradient of all is there",
    )


def _chained(steps: Sequence[Step]) -> tuple[Step, ...]:
    """``steps`` with the earlier steps that each must name (see the module's docstring)."""
    chained: list[Step] = []
    latest_token: dict[str, int] = {}
    since: list[int] = []  # the previous chained step, then the releases after it
    for number, step in enumerate(steps):
        if isinstance(step, Release):
            since.append(number)
            chained.append(step)
            continue
        if isinstance(step, WaitReductions):
            after = tuple(dict.fromkeys(latest_token[group] for group in step.groups))
        else:
            after = tuple(n for n in since if not _is_implied(steps, n, step, since))
        chained.append(replace(step, after=after))
        since = [number]
        if isinstance(step, ReduceInner | ReduceTogether | ReduceOuter):
            latest_token.update(dict.fromkeys(step.names, number))
    return tuple(chained)


def _is_implied(steps: Sequence[Step], earlier: int, step: Step, since: Sequence[int]) -> bool:
    """Whether ``step`` follows ``steps[earlier]`` without naming it: it works on the same
    result, or it names a later release of the same buffer."""
    before = steps[earlier]
    if isinstance(before, ReduceTogether) and isinstance(step, ReduceOuter):
        return step.group in before.groups
    if not isinstance(before, GroupStep) or not isinstance(step, GroupStep):
        return False
    if before.group == step.group and (
        (isinstance(before, Unshard) and isinstance(step, Wait))
        or (isinstance(before, ReduceInner) and isinstance(step, ReduceOuter))
    ):
        return True
    return isinstance(before, Unshard | Wait) and any(
        isinstance(release := steps[n], Release) and release.group == before.group
        for n in since
        if n > earlier
    )
