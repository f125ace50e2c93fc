"""Which groups are gathered, or reduced, by one collective. No torch here.

Neighbours in the order of first readers, or of last gradients, are joined as long as they are cut
over the same ranks, in the same dtype, and their buffers together stay below a limit: where copying
them costs as much as a collective's latency, or what the user says. From sizes of parameters and
order of reads alone, so all ranks join alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .facts import GroupFacts
from .policy import Policy


def joined(
    names: Sequence[str], groups: Mapping[str, GroupFacts], policy: Policy
) -> list[tuple[str, ...]]:
    """``names`` of groups to gather, in order, in runs that share a collective."""
    return _runs(
        [groups[name] for name in names],
        policy,
        size_of=lambda group: group.gather_bytes,
        kind_of=lambda group: group.mergeable,
    )


def joined_reductions(
    names: Sequence[str], groups: Mapping[str, GroupFacts], policy: Policy
) -> list[tuple[str, ...]]:
    """``names`` of groups to reduce, in order, in runs that share an inner reduction."""
    return _runs(
        [groups[name] for name in names],
        policy,
        size_of=lambda group: group.reduce_bytes,
        kind_of=lambda group: group.reduces_with,
    )


def _runs(
    groups: Sequence[GroupFacts],
    policy: Policy,
    *,
    size_of: Callable[[GroupFacts], int],
    kind_of: Callable[[GroupFacts], str | None],
) -> list[tuple[str, ...]]:
    runs: list[list[GroupFacts]] = []
    total = 0
    for group in groups:
        size, kind = size_of(group), kind_of(group)
        total += size
        before = runs[-1][-1] if runs else None
        alike = before and size and size_of(before) and kind is not None and kind_of(before) == kind
        if alike and total <= _limit(group, policy):
            runs[-1].append(group)
        else:
            runs.append([group])
            total = size
    return [tuple(group.name for group in run) for run in runs]


def _limit(group: GroupFacts, policy: Policy) -> int:
    if policy.merge_below is None:
        return policy.costs.copy_break_even(group)
    return policy.merge_below
