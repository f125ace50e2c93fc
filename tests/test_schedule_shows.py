"""Whole schedules as people read them, one for each thing that a plan can do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.facts import (
    GradientUse,
    GraphFacts,
    GraphKind,
    GroupFacts,
    NodeFacts,
    ParameterUse,
)
from compile_fsdp.passes.keep import JointFacts, JointRead, choose
from compile_fsdp.passes.policy import Policy
from compile_fsdp.passes.schedule import plan
from compile_fsdp.passes.steps import Schedule
from tests.test_schedule import KIB, facts, group

MIB = 1 << 20
ROOT, A, B = group("root"), group("a"), group("b")


def schedule(
    kind: GraphKind, text: str, *groups: GroupFacts, kept: tuple[str, ...] = (), **policy: object
) -> Schedule:
    known = replace(facts(kind, text), kept=tuple(f"0/{label}/0" for label in kept))
    return plan(known, {each.name: each for each in groups}, Policy(**policy))  # type: ignore[arg-type]


TWO_BLOCKS = "tokens input\nembed reads root.0\nmm_a reads a.0\nmm_b reads b.0\nhead reads root.1"
TWO_BLOCKS_BACKWARD = """
    tangents input
    d_head is root.1'
    d_x reads root.1
    d_mm_b is b.0' reads b.0
    d_mm_a is a.0' reads a.0
    d_embed is root.0'
"""


def test_zero3_of_two_blocks() -> None:
    """Backward finds the head and the last block where forward has left them."""
    forward = schedule(GraphKind.FORWARD, TWO_BLOCKS, ROOT, A, B, kept=("root", "b"))
    backward = schedule(
        GraphKind.BACKWARD, TWO_BLOCKS_BACKWARD, ROOT, A, B, kept=("root", "b"), prefetch=1
    )
    assert_expected_inline(
        str(forward),
        """\
forward: 3 unshard (12.0 KiB)
#  step     group  where           bytes  names  behind
0  unshard  root   at the start  4.0 KiB
1  unshard  a      before embed  4.0 KiB  0      root
2  wait     root   before embed           1
3  unshard  b      before mm_a   4.0 KiB  2      a
4  wait     a      before mm_a            3
5  release  a      after mm_a
6  wait     b      before mm_b            5
7  keep     b      after mm_b
8  keep     root   after head""",
    )
    assert_expected_inline(
        str(backward),
        """\
backward: 1 unshard (4.0 KiB), 3 reduce (24.0 KiB)
 #  step             group  where            bytes  names    behind
 0  unshard          root   at the start
 1  unshard          b      before d_x              0        root
 2  wait             root   before d_x              1
 3  release          root   after d_x
 4  unshard          a      before d_mm_b  4.0 KiB  3        b
 5  wait             b      before d_mm_b           4
 6  release          b      after d_mm_b
 7  reduce_inner     b      after d_mm_b   8.0 KiB  6
 8  wait             a      before d_mm_a           7
 9  release          a      after d_mm_a
10  reduce_inner     a      after d_mm_a   8.0 KiB  9
11  reduce_inner     root   after d_embed  8.0 KiB  10
12  wait_reductions         at the end              7 10 11""",
    )


def test_hsdp_with_two_microbatches() -> None:
    """One graph serves both: reduce_outer does nothing before the last microbatch."""
    groups = [replace(each, finishes_later=True, mesh_shape=(2, 4)) for each in (ROOT, A, B)]
    backward = schedule(GraphKind.BACKWARD, TWO_BLOCKS_BACKWARD, *groups, prefetch=1)
    assert_expected_inline(
        str(backward),
        """\
backward: 3 unshard (12.0 KiB), 3 reduce (24.0 KiB)
 #  step             group  where            bytes  names     behind
 0  unshard          root   at the start   4.0 KiB
 1  unshard          b      before d_x     4.0 KiB  0         root
 2  wait             root   before d_x              1
 3  release          root   after d_x
 4  unshard          a      before d_mm_b  4.0 KiB  3         b
 5  wait             b      before d_mm_b           4
 6  release          b      after d_mm_b
 7  reduce_inner     b      after d_mm_b   8.0 KiB  6
 8  wait             a      before d_mm_a           7
 9  release          a      after d_mm_a
10  reduce_inner     a      after d_mm_a   8.0 KiB  9
11  reduce_outer     b      after d_mm_a   8.0 KiB  10
12  reduce_inner     root   after d_embed  8.0 KiB  11
13  reduce_outer     a      at the end     8.0 KiB  12
14  reduce_outer     root   at the end     8.0 KiB  13
15  wait_reductions         at the end              11 13 14""",
    )


def test_a_budget_that_keeps_some_groups() -> None:
    order = [group(label, MIB) for label in ("root", "a", "b", "c", "d")]
    reads = [JointRead(each.name, n, False) for n, each in enumerate(order)]
    reads += [JointRead(order[0].name, 5, False)]
    back = (order[0], *reversed(order[1:]))
    reads += [JointRead(each.name, n, True) for n, each in enumerate(back, start=6)]
    joint = JointFacts(11, tuple(reads), {}, (MIB,) * 11, closes=True)
    keeping = choose(joint, {each.name: each for each in order}, Policy(memory_budget=5 * MIB))
    text = "\n".join(f"{name[2:-2]:<4} {reason}" for name, reason in keeping.reasons.items())
    assert_expected_inline(
        text,
        """\
root kept: released and gathered again within 0 nodes
d    kept: released and gathered again within 2 nodes
c    kept: its 1.0 MiB fit into the budget with 0 B to spare
b    released after forward: its 1.0 MiB would exceed the budget by 1.0 MiB
a    released after forward: its 1.0 MiB would exceed the budget by 1.0 MiB""",
    )


def test_merged_small_groups() -> None:
    """Two neighbours of 4 KiB each share a collective; the third would be too much."""
    small = [replace(each, mergeable="float32 0") for each in (A, B, group("c"))]
    text = "x input\nmm_a reads a.0\nmm_b reads b.0\nmm_c reads c.0"
    merged = schedule(GraphKind.FORWARD, text, *small, merge_below=9 * KIB)
    assert_expected_inline(
        str(merged),
        """\
forward: 2 unshard (12.0 KiB)
#  step             group  where           bytes  names  behind
0  gather_together  a+b    at the start  8.0 KiB
1  unshard          a      before mm_a            0
2  unshard          b      before mm_a            1      a
3  unshard          c      before mm_a   4.0 KiB  2      a b
4  wait             a      before mm_a            3
5  release          a      after mm_a
6  wait             b      before mm_b            5
7  release          b      after mm_b
8  wait             c      before mm_c            7
9  release          c      after mm_c""",
    )


def test_merged_reductions() -> None:
    """HSDP: one inner reduction for both small groups, an outer one for each."""
    small = [replace(each, reduces_with="float32 0", finishes_later=True) for each in (A, B)]
    text = "g input\nd_b is b.0'\nd_a is a.0'"
    merged = schedule(GraphKind.BACKWARD, text, *small, merge_below=16 * KIB)
    assert_expected_inline(
        str(merged),
        """\
backward: 1 reduce (16.0 KiB)
#  step             group  where          bytes  names  behind
0  reduce_together  b+a    after d_a   16.0 KiB
1  reduce_outer     b      at the end   8.0 KiB
2  reduce_outer     a      at the end   8.0 KiB  1
3  wait_reductions         at the end            1 2""",
    )


def test_a_graph_break_in_the_middle() -> None:
    """Each part releases what it gathered, but the second one, which computes the loss, keeps."""
    first = schedule(GraphKind.FORWARD, "tokens input\nembed reads root.0\nmm_a reads a.0", ROOT, A)
    second = schedule(
        GraphKind.FORWARD,
        "hidden input\nmm_b reads b.0\nhead reads root.1",
        ROOT,
        B,
        kept=("root", "b"),
    )
    assert_expected_inline(
        f"{first}\n\n{second}",
        """\
forward: 2 unshard (8.0 KiB)
#  step     group  where           bytes  names  behind
0  unshard  root   at the start  4.0 KiB
1  unshard  a      before embed  4.0 KiB  0      root
2  wait     root   before embed           1
3  release  root   after embed
4  wait     a      before mm_a            3
5  release  a      after mm_a

forward: 2 unshard (8.0 KiB)
#  step     group  where           bytes  names  behind
0  unshard  b      at the start  4.0 KiB
1  unshard  root   before mm_b   4.0 KiB  0      b
2  wait     b      before mm_b            1
3  keep     b      after mm_b
4  wait     root   before head            3
5  keep     root   after head""",
    )


def test_reasons_say_what_hides_what() -> None:
    """A head behind which blocks hide badly is gathered earlier than they are."""
    blocks = [
        replace(group(label, 8 * MIB), numel=4 * MIB, mesh_shape=(8,), dtype="bfloat16")
        for label in ("a", "b", "c", "d")
    ]
    head = replace(blocks[0], name="0/head/0", label="head", gather_bytes=30 * MIB)
    text = "x input\nmm_a reads a.0\nmm_b reads b.0\nmm_c reads c.0\nmm_d reads d.0\nh reads head.0"
    costs = replace(cost_model("h100"), tokens=4096)
    planned = schedule(
        GraphKind.FORWARD, text, *blocks, head, costs=costs, memory_budget="unlimited"
    )
    reasons = [
        f"{step.op} {planned.groups[step.names[0]].label}: {step.reason}"
        for step in planned.steps
        if step.op == "unshard"
    ]
    assert_expected_inline(
        "\n".join(reasons),
        """\
unshard a: gathered first: nothing in this graph computes before it
unshard b: prefetched 1 group ahead: 69.4 us of compute hides 52.6 us
unshard c: prefetched 2 groups ahead: 138.9 us of compute hides 52.6 us
unshard d: prefetched 2 groups ahead: 138.9 us of compute hides 52.6 us
unshard head: prefetched 2 groups ahead: 138.9 us of compute hides 108.7 us""",
    )


def test_live_bytes_follow_the_graph_and_the_steps() -> None:
    """Nodes of 1 KiB each, the first alive to the end, the others until the next one."""
    known = facts(GraphKind.FORWARD, TWO_BLOCKS)
    nodes = [NodeFacts(KIB, min(n + 1, 5)) for n in range(5)] + [NodeFacts()]
    nodes[0] = NodeFacts(KIB, 5)
    known = replace(known, nodes=tuple(nodes), kept=(ROOT.name,))
    groups = {each.name: replace(each, state_bytes=KIB) for each in (ROOT, A, B)}
    memory = plan(known, groups, Policy(prefetch=0)).memory
    assert memory.activations == tuple(KIB * n for n in (1, 2, 3, 3, 3, 2))
    assert memory.gathered == tuple(4 * KIB * n for n in (0, 1, 2, 2, 1, 1))
    assert (memory.peak, memory.peak_at, memory.state) == (11 * KIB, 2, 3 * KIB)
    assert memory.at_peak == {"activations": 3 * KIB, "gathered": 8 * KIB, "gradients": 0}


@pytest.mark.parametrize(
    ("costs", "live"), [("h100", (0, 0, 1, 2, 3, 2)), ("cpu", (0, 0, 1, 1, 1, 1))]
)
def test_packed_gradients_live_until_a_later_reduction(costs: str, live: tuple[int, ...]) -> None:
    """The next but one on a device; the next one on CPU, where lanes wait for each by itself."""
    text = "tangents input\nd_c is c.0'\nd_b is b.0'\nd_a is a.0'\nd_x"
    groups = [group(label) for label in ("a", "b", "c")]
    memory = schedule(GraphKind.BACKWARD, text, *groups, costs=cost_model(costs)).memory
    assert memory.gradients == tuple(8 * KIB * n for n in live)


@pytest.mark.parametrize("merged", [False, True])
def test_gradients_computed_where_they_are_reduced_have_no_other_memory(merged: bool) -> None:
    """From the first one on they have the buffer that is reduced, but those of ``b``, which have
    another dtype than it, their own until they have been cast. What is reduced together is copied.
    """
    text = "tangents input\nd_a1 is a.1'\nd_b is b.0'\nd_a0 is a.0'\nd_x"
    same = "float32 0" if merged else None
    a, b = group("a", reduce_bytes=4 * KIB, reduces_with=same), group("b", reduces_with=same)
    sizes = (0, 3, 4, 1, 1, 0)
    nodes = tuple(NodeFacts(KIB * size, min(at + 2, 5)) for at, size in enumerate(sizes))
    known = replace(facts(GraphKind.BACKWARD, text), nodes=nodes, packs_in_place=True)
    policy = Policy(costs=cost_model("cpu"), merge_below=64 * KIB if merged else 0)
    memory = plan(known, {each.name: each for each in (a, b)}, policy).memory
    activations = (0, 3, 7, 8, 6, 2) if merged else (0, 0, 4, 0, 1, 1)
    gradients = (0, 0, 0, 8, 12, 12) if merged else (0, 4, 12, 12, 4, 4)
    assert memory.activations == tuple(KIB * size for size in activations)
    assert memory.gradients == tuple(KIB * size for size in gradients)


def test_gradients_that_wait_to_be_reduced_with_others_are_live() -> None:
    small = [replace(group(label), reduces_with="float32 0") for label in ("a", "b", "c")]
    text = "tangents input\nd_c is c.0'\nd_b is b.0'\nd_a is a.0'\nd_x"
    memory = schedule(GraphKind.BACKWARD, text, *small, merge_below=24 * KIB).memory
    assert memory.gradients == tuple(8 * KIB * n for n in (0, 0, 1, 2, 3, 3))


# Size -------------------------------------------------------------------------------------------


def work(run: Callable[[], object]) -> int:
    """How many calls ``run`` makes, of Python functions and of built-in ones."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def model_of(blocks: int, nodes: int = 450) -> tuple[GraphFacts, JointFacts, dict[str, GroupFacts]]:
    """A backward graph and a joint graph of so many blocks of so many nodes."""
    groups = {each.name: each for each in (group(str(n), MIB) for n in range(blocks))}
    size = blocks * nodes
    costs = tuple(NodeFacts(KIB, min(n + 3, size), 1000, "float32", KIB) for n in range(size))
    places = [(name, nodes * n + 7, nodes * n + nodes - 3) for n, name in enumerate(groups)]
    known = GraphFacts(
        GraphKind.BACKWARD,
        tuple(f"n{n}" for n in range(size + 1)),
        1,
        tuple(ParameterUse(name, 0, ("n",), first, last) for name, first, last in places),
        tuple(GradientUse(name, 0, "n", last) for name, _, last in places),
        nodes=(*costs, NodeFacts()),
    )
    reads = [JointRead(name, at, False) for name, first, last in places for at in (first, last)]
    reads += [JointRead(each.group, 2 * size - each.position, True) for each in reversed(reads)]
    joint = JointFacts(2 * size + 1, tuple(reads), {}, (KIB,) * (2 * size + 1), closes=True)
    return known, joint, groups


@pytest.mark.parametrize("budget", ["peak", "unlimited", 60 * MIB])
def test_planning_80_blocks_takes_twice_the_work_of_40(
    budget: int, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy(memory_budget=budget)
    done = []
    for blocks in (40, 80):
        known, joint, groups = model_of(blocks)
        begun = time.perf_counter()
        choose(joint, groups, policy)
        plan(known, groups, policy)
        seconds = time.perf_counter() - begun
        done.append(work(lambda: (choose(joint, groups, policy), plan(known, groups, policy))))  # noqa: B023
        with capsys.disabled():
            print(f"\nplanned {blocks} blocks of 450 nodes in {seconds:.2f} s, {done[-1]} calls")
    assert done[1] <= 2.3 * done[0]
