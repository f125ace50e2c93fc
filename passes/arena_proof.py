"""Prove from a rewritten graph that nothing in its arena is overwritten while it is there.

Part of `verify`: the planner is not trusted, sizes and lifetimes are found again in the graph. That
communication nodes run in the order in which they stand is proven there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import Graph, Node

from .arena import ALIGNMENT, kept_offsets
from .facts import GraphFacts, GroupFacts
from .steps import NO_PLACE, Schedule
from .targets import GATHER_TOGETHER, RELEASE, UNSHARD, is_call

__all__ = ["VerificationError", "check_places_in_arena"]


class VerificationError(RuntimeError):
    """A rewritten graph is not provably right: a bug in the passes, never a user's fault."""


@dataclass(frozen=True)
class _Placed:
    """A group is gathered, by ``node``, into bytes from ``start`` until before ``stop``."""

    node: Node
    group: str
    start: int
    stop: int


def check_places_in_arena(
    graph: Graph,
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    schedule: Schedule,
) -> None:
    """Check the places that the gathers of ``graph`` name.

    Args:
        graph: the rewritten graph.
        facts: what was found in it before.
        groups: every group of the model, by name.
        schedule: the plan.

    Raises:
        VerificationError: names the node and the group.
    """
    gathers = [node for node in graph.nodes if is_call(node, UNSHARD, GATHER_TOGETHER)]
    if schedule.arena is None:
        for node in gathers:
            if node.kwargs:
                raise VerificationError(
                    f"{node.name} names a place in an arena, but the plan has none"
                )
        return
    sizes = {name: group.gather_bytes for name, group in groups.items()}
    placed = [each for node in gathers for each in _placed(node, sizes)]
    for each in placed:
        _check_one(each, sizes, schedule.arena.size)
    _check_kept(placed, facts, groups, schedule)
    _check_overlaps(graph, placed, facts)


def _placed(node: Node, sizes: Mapping[str, int]) -> Iterator[_Placed]:
    if is_call(node, UNSHARD):
        groups, offsets = [cast(str, node.args[1])], [node.kwargs.get("offset", NO_PLACE)]
    else:
        groups = cast(list[str], node.args[1])
        offsets = cast(list[Any], node.kwargs.get("offsets", []))
    if len(groups) != len(offsets):
        raise VerificationError(f"{node.name} gathers {groups} into the places {offsets}")
    for group, offset in zip(groups, cast(Sequence[int], offsets), strict=True):
        yield _Placed(node, group, offset, offset + sizes[group])


def _check_one(each: _Placed, sizes: Mapping[str, int], arena: int) -> None:
    node, start = each.node, each.start
    if node.kwargs.get("arena") != arena:
        found = node.kwargs.get("arena")
        raise VerificationError(
            f"{node.name} expects an arena of {found} bytes, the plan has {arena}"
        )
    if (start == NO_PLACE) != (sizes[each.group] == 0):
        raise VerificationError(
            f"{node.name} gathers {sizes[each.group]} bytes of group {each.group!r} to {start}"
        )
    if start != NO_PLACE and (start < 0 or start % ALIGNMENT or each.stop > arena):
        raise VerificationError(
            f"{node.name} puts group {each.group!r} at bytes {start} to {each.stop}, which must be "
            f"within {arena} and start at a multiple of {ALIGNMENT}"
        )


def _check_kept(
    placed: Sequence[_Placed],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    schedule: Schedule,
) -> None:
    """What outlives a forward graph is where its backward graph looks for it."""
    expected = kept_offsets(schedule.keeping, facts.kept, groups)
    for each in placed:
        if each.group in facts.kept and each.start != expected.get(each.group, NO_PLACE):
            raise VerificationError(
                f"{each.node.name} puts group {each.group!r}, which is kept between forward and "
                f"backward, at {each.start}; the other graph expects it at "
                f"{expected.get(each.group, NO_PLACE)}"
            )


def _check_overlaps(graph: Graph, placed: Sequence[_Placed], facts: GraphFacts) -> None:
    by_node: dict[Node, list[_Placed]] = {}
    for each in placed:
        by_node.setdefault(each.node, []).append(each)
    taken_over = facts.kept if facts.is_backward else ()
    there = {each.group: each for each in placed if each.group in taken_over}
    for node in graph.nodes:
        for each in by_node.get(node, []):
            mine = there.setdefault(each.group, each)
            if mine.start != each.start:
                raise VerificationError(
                    f"{node.name} looks for group {each.group!r} at {each.start}, {mine.node.name} "
                    f"puts it at {mine.start}"
                )
            for other in there.values():
                if other is not mine and other.start < mine.stop and mine.start < other.stop:
                    raise VerificationError(
                        f"{node.name} gathers group {each.group!r} into bytes {mine.start} to "
                        f"{mine.stop} of the arena, where group {other.group!r} still is "
                        f"({other.start} to {other.stop})"
                    )
        if is_call(node, RELEASE):
            there.pop(cast(str, node.args[1]), None)
