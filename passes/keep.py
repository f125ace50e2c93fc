"""Which groups stay unsharded between forward and backward. No torch here.

A group that is kept saves its gather in backward and costs its bytes in the gap between its last
reader in forward and its first reader in backward:

    forward    [root [a ][b ][c ]  ]         gaps, outermost first:   a  |------------------|
    backward                   [root][c ][b ][a ]                     b      |-----------|
                                                                      c          |---|

*At once*: in the gap of a group nothing is read but what backward gathers before it computes anyway
(root and c above, one group being gathered ahead). All of that is unsharded together when backward
begins, with every activation alive, so keeping it raises no peak. This is seen from the order of
reads and from nothing else, and is what the default budget keeps.

A budget in bytes goes on from there, outwards from the turn, while the modelled live bytes allow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .estimates import Keeping
from .facts import GroupFacts
from .memory import filled
from .policy import Policy
from .range_maximum import RangeMaximum
from .steps import format_bytes

Interval = tuple[int, int, int]
"""First position, the one past the last, bytes."""


@dataclass(frozen=True)
class JointRead:
    """A node of a joint graph that reads a group; ``backward``: its result needs a gradient."""

    group: str
    position: int
    backward: bool


@dataclass(frozen=True)
class JointFacts:
    """What a joint graph, forward and backward in one, says about keeping.

    Attributes:
        size: its number of nodes.
        reads: in graph order.
        gradients: position of the last gradient of each group.
        live: bytes of activations by position.
        closes: nothing of the model runs between this forward and its backward: the graph computes
            a loss, or is all of the model. Otherwise "at once" cannot be known.
    """

    size: int
    reads: tuple[JointRead, ...]
    gradients: Mapping[str, int]
    live: tuple[int, ...]
    closes: bool


def choose(joint: JointFacts, groups: Mapping[str, GroupFacts], policy: Policy) -> Keeping:
    """Decide for each group that forward and backward read whether it is kept in between."""
    spans = _spans(joint, groups)
    at_once = _at_once(joint, spans, policy)
    state = sum(group.state_bytes for group in groups.values())
    bytes_left = _Ledger(joint, groups, policy, state)
    reasons: dict[str, str] = {}
    kept: list[str] = []
    for span in spans:
        keep, reason = _judge(span, groups[span.group], policy, at_once, bytes_left)
        verb = "kept" if keep else "released after forward"
        reasons[span.group] = f"{verb}: {reason}"
        if keep:
            kept.append(span.group)
            bytes_left.spend(span)
    peak = bytes_left.peak()
    budget = policy.budget_bytes
    over = 0 if budget is None else max(0, peak + state - budget)
    return Keeping(tuple(kept), reasons, peak + state, over)


@dataclass(frozen=True)
class _Span:
    """The gap of one group: positions from ``first`` until ``past``."""

    group: str
    first: int
    past: int
    bytes: int


def _judge(
    span: _Span,
    group: GroupFacts,
    policy: Policy,
    at_once: Mapping[str, str],
    left: _Ledger,
) -> tuple[bool, str]:
    asked = policy.reshards(group)
    if asked is not None:
        return not asked, f"reshard_after_forward={asked}"
    if policy.memory_budget == "unlimited":
        return True, "memory_budget='unlimited'"
    if span.group in at_once:
        return True, at_once[span.group]
    if policy.budget_bytes is None:
        return False, "keeping it could raise the peak"
    missing = left.missing(span)
    size = format_bytes(span.bytes)
    if missing > 0:
        return False, f"its {size} would exceed the budget by {format_bytes(missing)}"
    return True, f"its {size} fit into the budget with {format_bytes(-missing)} to spare"


def _spans(joint: JointFacts, groups: Mapping[str, GroupFacts]) -> list[_Span]:
    """The gaps of the groups that both directions read, innermost first."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for read in joint.reads:
        if read.backward:
            first.setdefault(read.group, read.position)
        else:
            last[read.group] = read.position
    return [
        _Span(name, last[name] + 1, position, groups[name].gather_bytes)
        for name, position in first.items()
        if name in last and groups[name].gather_bytes
    ]


def _at_once(joint: JointFacts, spans: Sequence[_Span], policy: Policy) -> dict[str, str]:
    """The groups that are gathered again at once, and how that is seen."""
    if not joint.closes:
        return {}
    ahead = 1 if policy.prefetch is None else policy.prefetch
    opening = dict.fromkeys(span.group for span in spans[: 1 + ahead])
    others = [read.position for read in joint.reads if read.group not in opening]
    return {
        span.group: f"released and gathered again within {span.past - span.first} nodes"
        for span in spans[: 1 + ahead]
        if bisect_left(others, span.first) == bisect_left(others, span.past)
    }


class _Ledger:
    """Modelled live bytes of a joint graph, and what keeping adds to them."""

    def __init__(
        self, joint: JointFacts, groups: Mapping[str, GroupFacts], policy: Policy, state: int
    ) -> None:
        intervals = [*_gathered(joint, groups), *_reduced(joint, groups)]
        self._limit = (policy.budget_bytes or 0) - state
        fixed = policy.activation_bytes
        live = joint.live if fixed is None else (fixed,) * joint.size
        rows = zip(live, filled(joint.size, intervals), strict=True)
        self._live = RangeMaximum([sum(row) for row in rows])

    def missing(self, span: _Span) -> int:
        """By how much keeping ``span`` would exceed the budget; negative: what would be left."""
        return self._live.maximum(span.first, span.past) + span.bytes - self._limit

    def spend(self, span: _Span) -> None:
        self._live.add(span.first, span.past, span.bytes)

    def peak(self) -> int:
        return self._live.maximum(0, len(self._live))


def _gathered(joint: JointFacts, groups: Mapping[str, GroupFacts]) -> list[Interval]:
    """Each group from the first reader of the one before it to its own last, in each direction."""
    intervals = []
    for direction in (False, True):
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for read in joint.reads:
            if read.backward is direction:
                first.setdefault(read.group, read.position)
                last[read.group] = read.position
        starts = list(first.values())
        for number, name in enumerate(first):
            start = starts[max(number - 1, 0)]
            intervals.append((start, last[name] + 1, groups[name].gather_bytes))
    return intervals


def _reduced(joint: JointFacts, groups: Mapping[str, GroupFacts]) -> list[Interval]:
    """Packed gradients, each until the next but one is packed."""
    order = sorted(joint.gradients.items(), key=lambda item: item[1])
    ends = [position + 1 for _, position in order[2:]] + [joint.size] * 2
    return [
        (position, end, groups[name].reduce_bytes)
        for (name, position), end in zip(order, ends, strict=False)
    ]
