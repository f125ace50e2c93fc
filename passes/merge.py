"""Which groups are gathered by one collective. No torch here.

Neighbours in the order of first readers are joined as long as they are cut over the same ranks, in
the same dtype, and their buffers together stay below a limit: where copying them costs as much as a
collective's latency, or what the user says. From sizes of parameters and order of reads alone, so
all ranks join alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .facts import GroupFacts
from .policy import Policy


def joined(
    names: Sequence[str], groups: Mapping[str, GroupFacts], policy: Policy
) -> list[tuple[str, ...]]:
    """``names`` of groups to gather, in order, in runs that share a collective."""
    runs: list[list[str]] = []
    size = 0
    for name in names:
        group = groups[name]
        size += group.gather_bytes
        before = groups[runs[-1][-1]] if runs else None
        if before and _alike(before, group) and size <= _limit(group, policy):
            runs[-1].append(name)
        else:
            runs.append([name])
            size = group.gather_bytes
    return [tuple(run) for run in runs]


def _alike(one: GroupFacts, other: GroupFacts) -> bool:
    return (
        one.mergeable is not None
        and one.mergeable == other.mergeable
        and min(one.gather_bytes, other.gather_bytes) > 0
    )


def _limit(group: GroupFacts, policy: Policy) -> int:
    if policy.merge_below is None:
        return policy.costs.copy_break_even(group)
    return policy.merge_below
