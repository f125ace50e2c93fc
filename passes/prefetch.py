"""How far ahead of its wait each gather is issued. No torch here.

    unit       0        1        2              units of gathering, in order of first reader
    compute    [ 0     ][ 1     ][ 2 ...
    gathers        [  1   ][ 2  ]               issued at the wait of an earlier unit, the leader

Gathers run one after the other, so each must start early enough for itself and for those that
queue before it. The leader of a unit is the latest one that leaves this much compute, at least the
unit before. A unit is not gathered further ahead than that where it would raise the peak: of equal
units in a chain, each is gathered one ahead, and a small unit behind which a large one hides badly
is passed by.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .facts import GraphFacts, GroupFacts
from .policy import Policy
from .steps import format_seconds
from .timeline import clock

MOST_AHEAD = 8
"""Gathers queue: what is issued earlier than the queue is long gains nothing."""


@dataclass(frozen=True)
class Unit:
    """Groups that are gathered together, read from ``first`` to ``last``.

    Attributes:
        groups: their names.
        first, last: positions of the first and the last reader of any of them.
        gathered: they are there already, kept from the forward graph.
    """

    groups: tuple[str, ...]
    first: int
    last: int
    gathered: bool = False


@dataclass(frozen=True)
class Lead:
    """How far ahead a unit is gathered.

    Attributes:
        leader: number of the unit at whose wait the gather is issued; None: at the graph's start.
        reason: why there, for people.
    """

    leader: int | None
    reason: str


def leads(
    units: Sequence[Unit], facts: GraphFacts, groups: Mapping[str, GroupFacts], policy: Policy
) -> list[Lead]:
    """The lead of each of ``units``, which are in order of first reader."""
    model = _Model(units, facts, groups, policy)
    chosen = [Lead(None, "gathered first: nothing in this graph computes before it")][: len(units)]
    for number in range(1, len(units)):
        if policy.prefetch is None:
            ahead, limit = model.needed(number)
        else:
            ahead, limit = min(policy.prefetch, number), "as asked"
        chosen.append(Lead(number - ahead, model.reason(number, ahead, limit)))
    return chosen


class _Model:
    """Modelled times and bytes of units."""

    def __init__(
        self,
        units: Sequence[Unit],
        facts: GraphFacts,
        groups: Mapping[str, GroupFacts],
        policy: Policy,
    ) -> None:
        self.units = units
        self.firsts = [unit.first for unit in units]
        members = [[groups[name] for name in unit.groups] for unit in units]
        self.bytes = [sum(group.gather_bytes for group in each) for each in members]
        self.gather = [
            0.0 if unit.gathered else policy.costs.gather_seconds(each)
            for unit, each in zip(units, members, strict=True)
        ]
        if policy.equal_shapes and facts.nodes:
            before = clock(facts, policy.costs)
            self.begins = [before[unit.first] for unit in units]
        else:
            self.begins = self._nominal(members, facts, policy)
        self.starts = self._latest_starts()
        self.live = self._live_one_ahead()
        self.most = self._allowed(facts.is_backward)
        self.limited = policy.memory_budget != "unlimited"

    def _nominal(
        self, members: Sequence[Sequence[GroupFacts]], facts: GraphFacts, policy: Policy
    ) -> list[float]:
        """When each unit is waited for, if units computed for their parameters alone."""
        begins, now = [], 0.0
        for each in members:
            begins.append(now)
            now += sum(
                policy.costs.nominal_seconds(group, backward=facts.is_backward) for group in each
            )
        return begins

    def _latest_starts(self) -> list[float]:
        """When each gather must start to be done in time, the queue behind it in mind."""
        starts = [0.0] * len(self.units)
        free = float("inf")
        for number in reversed(range(len(self.units))):
            free = min(free, self.begins[number]) - self.gather[number]
            starts[number] = free
        return starts

    def _live_one_ahead(self) -> list[int]:
        """Gathered bytes at each wait if every unit is gathered one ahead."""
        changes = [0] * (len(self.units) + 1)
        for number, size in enumerate(self.bytes):
            changes[max(number - 1, 0)] += size
            changes[self._released(number)] -= size
        live, now = [], 0
        for change in changes[:-1]:
            now += change
            live.append(now)
        return live

    def _allowed(self, backward: bool) -> list[int]:
        """Gathered bytes that raise no peak, at each wait: what is live anyway there or where there
        are more activations, which is later in a forward graph and earlier in a backward one."""
        if backward:
            return list(accumulate(self.live, max))
        return list(accumulate(reversed(self.live), max))[::-1]

    def _released(self, number: int) -> int:
        """The first unit that is waited for after unit ``number`` has been released."""
        return max(number + 1, bisect_right(self.firsts, self.units[number].last))

    def needed(self, number: int) -> tuple[int, str]:
        """How many units ahead hide the gather, and what stops it from going further."""
        ahead = 1
        while ahead < min(number, MOST_AHEAD):
            if self.begins[number - ahead] <= self.starts[number]:
                return ahead, ""
            earlier = number - ahead - 1
            if self.limited and self.live[earlier] + self.bytes[number] > self.most[earlier]:
                return ahead, "further ahead would raise the peak"
            self.live[earlier] += self.bytes[number]
            ahead += 1
        return ahead, ""

    def reason(self, number: int, ahead: int, limit: str) -> str:
        """For people."""
        if self.units[number].gathered:
            return "kept since forward: nothing to gather"
        if ahead == 0:
            return f"not prefetched, {limit}"
        hides = self.begins[number] - self.begins[number - ahead]
        plural = "" if ahead == 1 else "s"
        text = (
            f"prefetched {ahead} group{plural} ahead: {format_seconds(hides)} of compute "
            f"{'hides' if hides >= self.gather[number] else 'for'} "
            f"{format_seconds(self.gather[number])}"
        )
        return f"{text}; {limit}" if limit else text
