"""When the steps of a schedule would run, by the cost model. No torch here.

Three lanes beside compute, each in order: gathers, inner reductions, outer reductions. Compute
stops at a wait whose gather is still on its way; what it waits there is *exposed*.

    gathers   [ a ][ b ]   [ c ]
    compute        [ a    ][ b ]..[ c ]          .. exposed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from .costs import CostModel
from .estimates import StepTime, Timeline
from .facts import GraphFacts, GroupFacts
from .steps import (
    GatherTogether,
    ReduceInner,
    ReduceOuter,
    ReduceTogether,
    Step,
    Unshard,
    Wait,
    WaitReductions,
)


def clock(facts: GraphFacts, costs: CostModel) -> list[float]:
    """Seconds of compute before each position, and before the graph's end as the last entry."""
    seconds = [costs.node_seconds(node) for node in facts.nodes] or [0.0] * len(facts.names)
    return [0.0, *accumulate(seconds)]


def timeline(
    steps: Sequence[Step],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    costs: CostModel,
) -> Timeline:
    """Play ``steps``."""
    before = clock(facts, costs)
    lanes = _Lanes(groups, costs)
    for step in steps:
        lanes.play(step, before[step.anchor])
    return Timeline(tuple(lanes.times), before[-1], before[-1] + lanes.delay, lanes.communication)


class _Lanes:
    """The state of the play: when each lane is free, and when each group is ready."""

    def __init__(self, groups: Mapping[str, GroupFacts], costs: CostModel) -> None:
        self.groups = groups
        self.costs = costs
        self.delay = 0.0
        self.communication = 0.0
        self.times: list[StepTime] = []
        self._free: dict[type[Step], float] = {Unshard: 0.0, ReduceInner: 0.0, ReduceOuter: 0.0}
        self._ready: dict[str, float] = {}

    def play(self, step: Step, clock: float) -> None:
        now = clock + self.delay
        if isinstance(step, Unshard | ReduceInner | ReduceOuter):
            earliest = max(now, self._ready.get(step.group, 0.0))
            start = max(earliest, self._free[type(step)])
            end = start + self._seconds(step)
            self._free[type(step)] = self._ready[step.group] = end
            self.communication += end - start
            self.times.append(StepTime(now, start, end))
            return
        if isinstance(step, GatherTogether | ReduceTogether):
            self._play_together(step, now)
            return
        waited: Sequence[str] = ()
        if isinstance(step, Wait):
            waited = (step.group,)
        elif isinstance(step, WaitReductions):
            waited = step.groups
        ready = max((self._ready[group] for group in waited), default=now)
        exposed = max(0.0, ready - now)
        self.delay += exposed
        self.times.append(StepTime(now, now, now, exposed))

    def _play_together(self, step: GatherTogether | ReduceTogether, now: float) -> None:
        members = [self.groups[name] for name in step.groups]
        gathers = isinstance(step, GatherTogether)
        lane: type[Step] = Unshard if gathers else ReduceInner
        seconds_of = self.costs.gather_seconds if gathers else self.costs.reduce_inner_seconds
        seconds = seconds_of(members)
        start = max(now, self._free[lane])
        end = self._free[lane] = start + seconds
        if not gathers:  # a gathered group is ready with its own unshard
            self._ready.update(dict.fromkeys(step.groups, end))
        self.communication += seconds
        self.times.append(StepTime(now, start, end))

    def _seconds(self, step: Unshard | ReduceInner | ReduceOuter) -> float:
        group = self.groups[step.group]
        if isinstance(step, Unshard):
            return 0.0 if step.gathered else self.costs.gather_seconds([group])
        if isinstance(step, ReduceInner):
            return self.costs.reduce_inner_seconds([group])
        return self.costs.reduce_outer_seconds(group)
