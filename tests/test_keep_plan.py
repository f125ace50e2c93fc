"""Which groups are kept between forward and backward, decided on plain data.

A joint graph is written as its reads, one for each node: ``root a b c . | . root c b a root'``:
groups that are read, ``.`` for a node that reads none, and ``|`` between forward and backward.
"""

from __future__ import annotations

import pytest

from compile_fsdp.passes.facts import GroupFacts
from compile_fsdp.passes.keep import JointFacts, JointRead, choose
from compile_fsdp.passes.policy import Policy, parse_policy
from compile_fsdp.passes.range_maximum import RangeMaximum

MIB = 1 << 20
CHAIN = "root a b c root . | . root c b a"


def group(label: str, size: int = MIB) -> GroupFacts:
    return GroupFacts(label, label, size, size)


GROUPS = {label: group(label) for label in ("root", "a", "b", "c")}


def joint(text: str, *, live: int = 0, closes: bool = True) -> JointFacts:
    words = text.replace("|", " | ").split()
    turn = words.index("|")
    words.remove("|")
    reads = tuple(
        JointRead(word, position, position >= turn)
        for position, word in enumerate(words)
        if word != "."
    )
    gradients = {read.group: read.position for read in reads if read.backward}
    # Activations pile up until the turn and go away again.
    heights = [live * min(n + 1, len(words) - n) for n in range(len(words))]
    return JointFacts(len(words), reads, gradients, tuple(heights), closes)


def kept(text: str, policy: Policy | None = None, **options: object) -> str:
    return " ".join(choose(joint(text, **options), GROUPS, policy or Policy()).kept)  # type: ignore[arg-type]


def test_what_is_gathered_again_at_once_is_kept() -> None:
    keeping = choose(joint(CHAIN), GROUPS, Policy())
    assert keeping.kept == ("root", "c")
    assert keeping.reasons == {
        "root": "kept: released and gathered again within 2 nodes",
        "c": "kept: released and gathered again within 4 nodes",
        "b": "released after forward: keeping it could raise the peak",
        "a": "released after forward: keeping it could raise the peak",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c | c b a", "c b"),
        ("a b c . . . . . | c b a", "c b"),
        ("a b c root | root c b a", "root c"),
        ("root a b c | c b a root", "c b"),
        ("a b c a | c b a", ""),  # a is read in between, and gathered last
        ("a b c b | b c a", "b c"),
        ("a b | . .", ""),
        ("a . | a", "a"),
    ],
)
def test_only_what_backward_opens_with_may_be_read_in_between(text: str, expected: str) -> None:
    assert kept(text) == expected


def test_a_graph_that_does_not_end_the_forward_keeps_nothing_by_itself() -> None:
    assert kept(CHAIN, closes=False) == ""
    assert kept(CHAIN, Policy(memory_budget="unlimited"), closes=False) == "root c b a"


def test_prefetching_further_opens_with_more() -> None:
    assert kept(CHAIN, Policy(prefetch=0)) == "root"
    assert kept(CHAIN, Policy(prefetch=2)) == "root c b"


def test_groups_that_gather_nothing_are_not_kept() -> None:
    groups = {**GROUPS, "c": group("c", 0)}
    assert choose(joint(CHAIN), groups, Policy(memory_budget="unlimited")).kept == (
        "root",
        "b",
        "a",
    )


def test_a_budget_keeps_outwards_from_the_turn_as_far_as_it_reaches() -> None:
    """5 MiB are needed however little is kept: two groups and two reductions of one, and the one
    that is about to be reduced."""
    results = {}
    for budget in range(3, 8):
        keeping = choose(joint(CHAIN), GROUPS, Policy(memory_budget=budget * MIB))
        results[budget] = " ".join(keeping.kept)
        assert keeping.over_budget == max(0, 5 - budget) * MIB
        assert keeping.peak <= max(5, budget) * MIB
    assert results == {
        3: "root c",
        4: "root c",
        5: "root c b",
        6: "root c b a",
        7: "root c b a",
    }


def test_activations_take_their_part_of_the_budget() -> None:
    policy = Policy(memory_budget=6 * MIB)
    assert [kept(CHAIN, policy, live=live) for live in (0, MIB // 4, MIB // 2)] == [
        "root c b a",
        "root c b",
        "root c",
    ]
    fixed = Policy(memory_budget=6 * MIB, activation_bytes=MIB)
    assert kept(CHAIN, fixed) == kept(CHAIN, fixed, live=MIB) == "root c b"


def test_a_budget_that_cannot_hold_says_by_how_much() -> None:
    keeping = choose(joint(CHAIN, live=MIB), GROUPS, Policy(memory_budget=4 * MIB))
    assert keeping.kept == ("root", "c")
    assert keeping.over_budget == keeping.peak - 4 * MIB > 0
    assert "its 1.0 MiB would exceed the budget by" in keeping.reasons["b"]


def test_what_is_asked_for_goes_before_any_budget() -> None:
    policy = parse_policy({"reshard_after_forward": {"root": True, "a": False}})
    keeping = choose(joint(CHAIN), GROUPS, policy)
    assert keeping.kept == ("c", "a")
    assert keeping.reasons["a"] == "kept: reshard_after_forward=False"
    assert keeping.reasons["root"] == "released after forward: reshard_after_forward=True"


def test_range_maximum_against_a_list() -> None:
    values = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    tree = RangeMaximum(values)
    assert len(tree) == 11 and tree.maximum(4, 4) == 0
    for first, past, amount in [(0, 11, 1), (2, 5, 10), (5, 6, -4), (10, 11, 3), (0, 1, 20)]:
        tree.add(first, past, amount)
        values[first:past] = [value + amount for value in values[first:past]]
        for low in range(11):
            for high in range(low + 1, 12):
                assert tree.maximum(low, high) == max(values[low:high]), (low, high)
