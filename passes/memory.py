"""Live bytes of a planned graph, position by position. No torch here.

    activations   results of nodes, until their last use; saved ones until the graph's end
    gathered      unsharded parameters, from the gather to the release (kept ones: to the end)
    gradients     packed full gradients on their way into a reduction, and those that wait for
                  others to be reduced with; where the compiler packs in place, from the first one

Position ``p`` stands for the time while node ``p`` runs, the steps before it issued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from .estimates import MemoryCurve
from .facts import GraphFacts, GroupFacts, NodeFacts
from .steps import Keep, ReduceInner, ReduceTogether, Release, Step, Unshard


def memory_curve(
    steps: Sequence[Step], facts: GraphFacts, groups: Mapping[str, GroupFacts], in_flight: int
) -> MemoryCurve:
    """The live bytes of a graph that follows ``steps``.

    ``in_flight``: so many packed gradients are held; the next reduction waits for the oldest, and
    where it is one, before it takes memory of its own.
    """
    size = len(facts.names)
    in_place = _packed_in_place(steps, facts)
    return MemoryCurve(
        activations=filled(
            size, [*_results(facts.nodes), *_not_by_themselves(in_place, facts, groups)]
        ),
        gathered=filled(size, _gathered(steps, facts, groups)),
        gradients=filled(
            size, [*_packed(steps, size, groups, in_place, in_flight), *_held(steps, facts, groups)]
        ),
        state=sum(group.state_bytes for group in groups.values()),
    )


def activations(nodes: Sequence[NodeFacts], size: int) -> tuple[int, ...]:
    """Bytes of the nodes' own results, by position."""
    return filled(size, _results(nodes))


def _results(nodes: Sequence[NodeFacts]) -> Iterator[tuple[int, int, int]]:
    intervals = ((at, node.last + 1, node.allocates) for at, node in enumerate(nodes))
    return (row for row in intervals if row[2])


def _packed_in_place(steps: Sequence[Step], facts: GraphFacts) -> Mapping[str, tuple[int, ...]]:
    """Of each group whose gradients are computed where they are reduced from, their positions."""
    found: dict[str, list[int]] = {}
    if facts.packs_in_place:
        alone = {step.group for step in steps if isinstance(step, ReduceInner)}
        for use in facts.gradients:
            if use.group in alone:
                found.setdefault(use.group, []).append(use.position)
    return {group: tuple(sorted(set(positions))) for group, positions in found.items()}


def _not_by_themselves(
    in_place: Mapping[str, Sequence[int]], facts: GraphFacts, groups: Mapping[str, GroupFacts]
) -> Iterator[tuple[int, int, int]]:
    """What the gradients' own memory is counted too much. One in another dtype than the packed ones
    is there until it has been cast."""
    for group, positions in in_place.items():
        cast = groups[group].reduce_bytes != groups[group].gather_bytes
        for position in positions:
            node = facts.nodes[position] if facts.nodes else NodeFacts()
            if node.allocates and position + cast <= node.last:
                yield position + cast, node.last + 1, -node.allocates


def _gathered(
    steps: Sequence[Step], facts: GraphFacts, groups: Mapping[str, GroupFacts]
) -> list[tuple[int, int, int]]:
    since = {group: 0 for group in facts.kept if group in groups} if facts.is_backward else {}
    end = len(facts.names)
    intervals = []
    for step in steps:
        if isinstance(step, Unshard):
            since.setdefault(step.group, step.anchor)
        elif isinstance(step, Release):
            until = end if isinstance(step, Keep) else step.anchor
            size = groups[step.group].gather_bytes
            intervals.append((since.pop(step.group), until, size))
    return intervals + [(first, end, groups[group].gather_bytes) for group, first in since.items()]


def _packed(
    steps: Sequence[Step],
    size: int,
    groups: Mapping[str, GroupFacts],
    in_place: Mapping[str, Sequence[int]],
    in_flight: int,
) -> list[tuple[int, int, int]]:
    reductions = [step for step in steps if isinstance(step, ReduceInner | ReduceTogether)]
    done = [step.anchor for step in reductions[in_flight:]]
    done += [size] * in_flight
    return [
        (
            min(in_place.get(step.names[0], [step.anchor])),
            until + (in_flight > 1),
            sum(groups[name].reduce_bytes for name in step.names),
        )
        for step, until in zip(reductions, done, strict=False)
    ]


def _held(
    steps: Sequence[Step], facts: GraphFacts, groups: Mapping[str, GroupFacts]
) -> list[tuple[int, int, int]]:
    last: dict[str, int] = {}
    for use in facts.gradients:
        last[use.group] = max(use.position, last.get(use.group, 0))
    return [
        (last[name] + 1, step.anchor, groups[name].reduce_bytes)
        for step in steps
        if isinstance(step, ReduceTogether)
        for name in step.groups
        if last[name] + 1 < step.anchor
    ]


def filled(size: int, intervals: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """The sum of intervals ``(first, past the last, bytes)`` at each position."""
    changes = [0] * (size + 1)
    for first, past, amount in intervals:
        changes[min(first, size)] += amount
        changes[min(past, size)] -= amount
    return tuple(accumulate(changes[:size]))
