"""Places in the arena: never two buffers in one at once, and no byte wasted on equal ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.passes.arena import ALIGNMENT, Block, aligned, assign, kept_offsets, peak
from compile_fsdp.passes.estimates import Keeping
from compile_fsdp.passes.facts import GraphKind, GroupFacts
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.schedule import plan
from compile_fsdp.passes.steps import NO_PLACE, ArenaPlan, GatherTogether, Unshard
from tests.test_passes_verify import rewritten
from tests.test_verify_mutations import KINDS


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    count = draw(st.integers(0, 14))
    found = []
    for number in range(count):
        first = draw(st.integers(0, 20))
        length = draw(st.integers(1, 12))
        found.append(Block(str(number), draw(st.integers(1, 3000)), first, first + length))
    return found


def assert_apart(found: ArenaPlan, given_blocks: list[Block]) -> None:
    for block in given_blocks:
        start = found.offsets[block.name]
        assert start >= 0 and start % ALIGNMENT == 0
        assert start + block.size <= found.size
        for other in given_blocks:
            if other is not block and block.meets(other):
                there = found.offsets[other.name]
                assert there + other.size <= start or start + block.size <= there


@settings(deadline=None)
@given(blocks())
def test_no_two_that_are_there_at_once_overlap(given_blocks: list[Block]) -> None:
    found = assign(given_blocks)
    assert_apart(found, given_blocks)
    assert found.bound == peak(given_blocks) <= found.size
    assert assign(given_blocks) == found


@settings(deadline=None)
@given(blocks())
def test_the_bound_is_what_is_live_at_once(given_blocks: list[Block]) -> None:
    times = range(40)
    live = [sum(aligned(b.size) for b in given_blocks if b.first <= t < b.past) for t in times]
    assert peak(given_blocks) == max(live, default=0)


@settings(deadline=None)
@given(blocks(), st.integers(0, 4))
def test_others_keep_away_from_given_places(given_blocks: list[Block], fixed_count: int) -> None:
    fixed: dict[str, int] = {}
    end = 0
    for block in given_blocks[:fixed_count]:
        fixed[block.name] = end
        end += aligned(block.size)
    found = assign(given_blocks, fixed)
    assert_apart(found, given_blocks)
    assert {name: found.offsets[name] for name in fixed} == fixed


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5000))
def test_a_chain_of_equal_blocks_needs_no_more_than_the_bound(
    count: int, ahead: int, size: int
) -> None:
    chain = [Block(str(n), size, n, n + 1 + ahead) for n in range(count)]
    found = assign(chain)
    assert found.size == found.bound == min(count, 1 + ahead) * aligned(size)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=20))
def test_equal_blocks_in_any_order_need_no_more_than_the_bound(
    lives: list[tuple[int, int]],
) -> None:
    found = assign([Block(str(n), 1000, at, at + more) for n, (at, more) in enumerate(lives)])
    assert found.size == found.bound


def test_a_transformer_needs_no_more_than_the_bound() -> None:
    """The root lives through all of it, blocks of one size come and go, the last one is kept."""
    forward = [Block("root", 5000, 0, 90), *(Block(f"b{n}", 3000, n, n + 2) for n in range(79))]
    forward.append(Block("b79", 3000, 79, 1000))
    fixed = {"root": 0, "b79": aligned(5000)}
    found = assign(forward, fixed)
    assert found.size == found.bound == aligned(5000) + 2 * aligned(3000)


def facts(**sizes: int) -> Mapping[str, GroupFacts]:
    return {name: GroupFacts(name, name, size, size) for name, size in sizes.items()}


def test_kept_groups_have_one_place_in_whatever_graph_they_are_planned() -> None:
    groups = facts(a=300, b=100, c=600, d=0)
    assert kept_offsets(Keeping(), ["c", "a", "d"], groups) == {"a": 0, "c": 512}
    keeping = Keeping(kept=("a", "c", "d"))
    assert kept_offsets(keeping, ["c", "a"], groups) == {"c": 0, "a": 768}
    assert kept_offsets(keeping, [], groups) == {"c": 0, "a": 768}


@pytest.mark.parametrize(("kind", "mesh_shape", "merge_below"), KINDS)
def test_graphs_are_written_with_places(
    kind: GraphKind, mesh_shape: tuple[int, ...], merge_below: int
) -> None:
    right = rewritten(kind, mesh_shape, merge_below, arena=True)
    right.verify()
    arena = right.schedule.arena
    assert arena is not None and arena.size == arena.bound > 0
    places = {}
    for step in right.schedule.steps:
        if isinstance(step, Unshard):
            places[step.group] = step.place
        elif isinstance(step, GatherTogether):
            places.update(zip(step.groups, step.places, strict=True))
    assert places == arena.offsets
    assert NO_PLACE not in places.values()


def test_nothing_is_said_about_an_arena_that_nobody_asked_for() -> None:
    plain = rewritten(GraphKind.FORWARD)
    assert plain.schedule.arena is None
    assert "arena" not in str(plain.schedule) + plain.schedule.to_json()
    assert not any(node.kwargs for node in plain.graph.nodes if "unshard" in str(node.target))


def test_a_schedule_shows_its_arena() -> None:
    placed = rewritten(GraphKind.FORWARD, arena=True).schedule
    assert "; arena of 1.2 KiB" in str(placed).splitlines()[0]
    assert '"arena": {' in placed.to_json()
    again = plan(placed.facts, placed.groups, Policy(arena=True), placed.keeping)
    assert again.arena == placed.arena
