"""Where in one run of bytes each gathered buffer of a graph goes. No torch here.

A buffer occupies its place from the step that gathers it to the step that releases it. Two that are
there at the same time must not overlap; one that is released leaves its place to others:

    steps       unshard root .. unshard blocks.0 .. unshard blocks.1 .. release root ..
    bytes 0     [ root                                             ] [ blocks.2
    bytes 4096               [ blocks.0 .. released ] [ blocks.1 ..

No plan needs fewer bytes than are live at once somewhere: that is the *bound*. Placing buffers of
unequal sizes at the bound is a hard problem, so a few orders are tried, and the best one is taken:
each buffer in turn goes into the smallest gap that it fits into. Where all have one size, going by
time needs no more than the bound.

What is kept between forward and backward must be at the same place in both graphs, which are
planned one by one. So the places of kept groups follow from what was decided before the two came
apart, and nothing else: one behind the other from the arena's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .estimates import Keeping
from .facts import GraphFacts, GroupFacts
from .steps import ArenaPlan, GatherTogether, Keep, Release, Step, Unshard

__all__ = ["ALIGNMENT", "Block", "assign", "kept_offsets", "peak", "plan_arena", "with_places"]

ALIGNMENT = 256
"""Every place starts at a multiple of so many bytes: what CUDA's own allocations guarantee, and
more than any vector load or collective asks for."""


@dataclass(frozen=True)
class Block:
    """A buffer of ``size`` bytes that is there from time ``first`` until before ``past``."""

    name: str
    size: int
    first: int
    past: int

    def meets(self, other: Block) -> bool:
        """Whether both are there at some time."""
        return self.first < other.past and other.first < self.past


def aligned(size: int) -> int:
    """``size``, rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def peak(blocks: Iterable[Block]) -> int:
    """The most bytes that are there at once, every block rounded up."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + aligned(block.size)
        changes[block.past] = changes.get(block.past, 0) - aligned(block.size)
    live = most = 0
    for time in sorted(changes):
        live += changes[time]
        most = max(most, live)
    return most


def assign(blocks: Sequence[Block], fixed: Mapping[str, int] | None = None) -> ArenaPlan:
    """Places for ``blocks``, whose names differ.

    Args:
        blocks: in any order; equal lists give equal plans.
        fixed: places that are given, by name.
    """
    fixed = fixed or {}
    given = [block for block in blocks if block.name in fixed]
    others = [block for block in blocks if block.name not in fixed]
    bound = peak(blocks)
    best: ArenaPlan | None = None
    for key in _ORDERS:
        offsets = dict(fixed)
        placed = [(offsets[block.name], block) for block in given]
        for block in sorted(others, key=key):
            offsets[block.name] = _best_fit(block, placed)
            placed.append((offsets[block.name], block))
        size = max((offset + aligned(block.size) for offset, block in placed), default=0)
        if best is None or size < best.size:
            best = ArenaPlan({block.name: offsets[block.name] for block in blocks}, size, bound)
        if best.size == bound:
            break
    assert best is not None
    return best


_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda block: (block.first, -block.size),
    lambda block: (-block.size, block.first),
    lambda block: (block.first - block.past, -block.size, block.first),
    lambda block: ((block.first - block.past) * block.size, block.first),
    lambda block: (-block.past, -block.size),
)


def _best_fit(block: Block, placed: Sequence[tuple[int, Block]]) -> int:
    """The start of the smallest gap that ``block`` fits into, the lowest of equal ones; behind
    everything, where there is no gap."""
    size = aligned(block.size)
    neighbours = sorted(
        (offset, offset + aligned(other.size)) for offset, other in placed if other.meets(block)
    )
    end, best = 0, None
    for start, stop in neighbours:
        gap = start - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, stop)
    return end if best is None else best[1]


def kept_offsets(
    keeping: Keeping, kept: Sequence[str], groups: Mapping[str, GroupFacts]
) -> dict[str, int]:
    """The places of kept groups: the same in forward and backward.

    Args:
        keeping: what was decided on the joint graph.
        kept: the groups that the graph at hand keeps or takes over.
        groups: all groups of the model, in an order that forward and backward agree on.
    """
    # Backward is done first with what it takes over first: that lies next to the others' bytes.
    order = dict.fromkeys([*reversed(keeping.kept), *(name for name in groups if name in kept)])
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        if name in groups and groups[name].gather_bytes:
            offsets[name] = end
            end += aligned(groups[name].gather_bytes)
    return offsets


def plan_arena(
    steps: Sequence[Step],
    facts: GraphFacts,
    groups: Mapping[str, GroupFacts],
    keeping: Keeping,
) -> ArenaPlan:
    """Places for everything that ``steps`` gather.

    Args:
        steps: of one graph, in the order in which they are issued.
        facts: the graph.
        groups: all groups of the model, in an order that forward and backward agree on.
        keeping: what was decided on the joint graph that both are parts of.
    """
    fixed = kept_offsets(keeping, facts.kept, groups)
    return assign(lifetimes(steps, facts, groups), fixed)


def lifetimes(
    steps: Sequence[Step], facts: GraphFacts, groups: Mapping[str, GroupFacts]
) -> list[Block]:
    """From which step to which each gathered group is there; kept ones beyond the graph."""
    since = dict.fromkeys(facts.kept, -1) if facts.is_backward else {}
    blocks: list[Block] = []

    def end(name: str, past: int) -> None:
        if name in groups and groups[name].gather_bytes:
            blocks.append(Block(name, groups[name].gather_bytes, since[name], past))
        del since[name]

    for number, step in enumerate(steps):
        if isinstance(step, Unshard | GatherTogether):
            for name in step.names:
                since.setdefault(name, number)
        elif isinstance(step, Release) and step.group in since:
            end(step.group, len(steps) if isinstance(step, Keep) else number)
    for name in list(since):
        end(name, len(steps))
    return blocks


def with_places(steps: Sequence[Step], arena: ArenaPlan) -> tuple[Step, ...]:
    """``steps`` that say where in ``arena`` they put what they gather."""
    placed: list[Step] = []
    for step in steps:
        if isinstance(step, Unshard):
            step = replace(step, place=arena.place(step.group))
        elif isinstance(step, GatherTogether):
            step = replace(step, places=tuple(arena.place(name) for name in step.groups))
        placed.append(step)
    return tuple(placed)
