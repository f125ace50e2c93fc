"""What is gathered, waited for, released and reduced, when, and what carries the order.

A graph is written down as one line for each node:

    embedding    reads root.0
    mm_3         is blocks.0.1'       (is the gradient of tensor 1 of group blocks.0)
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from compile_fsdp.passes.facts import (
    GradientUse,
    GraphFacts,
    GraphKind,
    GroupFacts,
    ParameterUse,
)
from compile_fsdp.passes.schedule import Policy, plan
from compile_fsdp.passes.steps import (
    ReduceInner,
    ReduceOuter,
    Release,
    Schedule,
    Step,
    Unshard,
    format_bytes,
)

KIB = 1024
DEFAULT = Policy()


def group(label: str, size: int = 4 * KIB, **fields: object) -> GroupFacts:
    facts = GroupFacts(name=f"0/{label}/0", label=label, gather_bytes=size, reduce_bytes=2 * size)
    return replace(facts, **fields)


ROOT, A, B, C = (group(label) for label in ("root", "a", "b", "c"))


def facts(kind: GraphKind, text: str) -> GraphFacts:
    """The facts of a graph that is written as in the module's docstring. Inputs come first and
    say ``input``; the output is added."""
    rows = [line.split() for line in text.strip().splitlines()]
    reads: dict[tuple[str, int], list[int]] = {}
    gradients = []
    for position, (name, *words) in enumerate(rows):
        for word in words:
            if word.endswith("'"):
                gradients.append(GradientUse(*_tensor(word[:-1]), name, position))
            elif word not in ("reads", "is", "input"):
                reads.setdefault(_tensor(word), []).append(position)
    names = (*(row[0] for row in rows), "output")
    parameters = [
        ParameterUse(*tensor, tuple(names[p] for p in positions), positions[0], positions[-1])
        for tensor, positions in reads.items()
    ]
    start = sum("input" in row for row in rows)
    return GraphFacts(kind, names, start, tuple(parameters), tuple(gradients))


def _tensor(word: str) -> tuple[str, int]:
    label, index = word.rsplit(".", 1)
    return f"0/{label}/0", int(index)


def forward(text: str, *groups: GroupFacts, policy: Policy = DEFAULT) -> Schedule:
    return plan(facts(GraphKind.FORWARD, text), {g.name: g for g in groups}, policy)


def backward(text: str, *groups: GroupFacts, policy: Policy = DEFAULT) -> Schedule:
    return plan(facts(GraphKind.BACKWARD, text), {g.name: g for g in groups}, policy)


def sequence(schedule: Schedule) -> str:
    """The steps without places: ``unshard a, wait a, ...``."""
    return ", ".join(_phrase(schedule, step) for step in schedule.steps)


def _phrase(schedule: Schedule, step: Step) -> str:
    names = [step.group] if hasattr(step, "group") else list(getattr(step, "groups", ()))
    return " ".join([step.op, *(schedule.groups[name].label for name in names)])


CHAIN = """
    x        input
    mm_a     reads a.0
    mm_b     reads b.0
    mm_c     reads c.0
"""


def test_forward_of_two_blocks() -> None:
    schedule = forward(
        """
        shards       input
        tokens       input
        embedding    reads root.0
        norm_0       reads a.0
        mm_0         reads a.1
        gelu_0
        mm_1         reads a.2
        add_0
        norm_1       reads b.0
        mm_2         reads b.1
        gelu_1
        mm_3         reads b.2
        add_1
        head         reads root.1
        loss
        """,
        ROOT,
        A,
        B,
    )
    assert_expected_inline(
        str(schedule),
        """\
forward: 3 unshard (12.0 KiB)
#  step     group  where               bytes  names  behind
0  unshard  root   at the start      4.0 KiB
1  unshard  a      before embedding  4.0 KiB  0      root
2  wait     root   before embedding           1
3  unshard  b      before norm_0     4.0 KiB  2      a
4  wait     a      before norm_0              3
5  release  a      after mm_1
6  wait     b      before norm_1              5
7  release  b      after mm_3
8  release  root   after head""",
    )


def test_backward_of_two_blocks() -> None:
    schedule = backward(
        """
        shards       input
        tangents     input
        d_loss
        d_head       is root.1'
        d_x          reads root.1
        d_mm_3       is b.2'
        d_gelu_1     reads b.2
        d_mm_2       is b.1'
        d_norm_1     reads b.1
        d_scale_1    is b.0' reads b.0
        d_mm_1       is a.2'
        d_gelu_0     reads a.2
        d_mm_0       is a.1'
        d_norm_0     reads a.1
        d_scale_0    is a.0' reads a.0
        d_embedding  is root.0'
        """,
        ROOT,
        A,
        B,
    )
    assert_expected_inline(
        str(schedule),
        """\
backward: 3 unshard (12.0 KiB), 3 reduce (24.0 KiB)
 #  step             group  where                bytes  names    behind
 0  unshard          root   at the start       4.0 KiB
 1  unshard          b      before d_x         4.0 KiB  0        root
 2  wait             root   before d_x                  1
 3  release          root   after d_x
 4  unshard          a      before d_gelu_1    4.0 KiB  3        b
 5  wait             b      before d_gelu_1             4
 6  release          b      after d_scale_1
 7  reduce_inner     b      after d_scale_1    8.0 KiB  6
 8  wait             a      before d_gelu_0             7
 9  release          a      after d_scale_0
10  reduce_inner     a      after d_scale_0    8.0 KiB  9
11  reduce_inner     root   after d_embedding  8.0 KiB  10
12  wait_reductions         at the end                  7 10 11""",
    )


def test_without_prefetch_a_gather_is_waited_for_at_once() -> None:
    schedule = forward(CHAIN, A, B, C, policy=Policy(prefetch=0))
    assert sequence(schedule) == (
        "unshard a, wait a, release a, unshard b, wait b, release b, unshard c, wait c, release c"
    )


def test_prefetching_two_groups_ahead() -> None:
    schedule = forward(CHAIN, A, B, C, policy=Policy(prefetch=2))
    assert sequence(schedule) == (
        "unshard a, unshard b, unshard c, wait a, release a, wait b, release b, wait c, release c"
    )


def test_what_a_group_frees_is_freed_before_the_next_gather_and_named_by_it() -> None:
    schedule = forward(CHAIN, A, B, C)
    assert sequence(schedule) == (
        "unshard a, unshard b, wait a, release a, unshard c, wait b, release b, wait c, release c"
    )
    freed = next(n for n, step in enumerate(schedule.steps) if isinstance(step, Release))
    gather = schedule.steps[freed + 1]
    assert isinstance(gather, Unshard) and gather.after == (freed,)


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch must be 0 or more groups, got -1"):
        Policy(prefetch=-1)


def test_two_groups_of_one_module_are_read_by_the_same_node() -> None:
    """bf16 weights and fp32 biases of one module are two groups with one interval."""
    schedule = forward("x input\nlinear reads a.0 b.0\nloss", A, B)
    assert sequence(schedule) == ("unshard a, unshard b, wait a, wait b, release a, release b")


def test_a_group_read_early_and_late_is_held_in_between() -> None:
    schedule = forward("x input\nmm_0 reads a.0\nmm_1 reads b.0\nmm_2 reads a.0", A, B)
    assert sequence(schedule) == ("unshard a, unshard b, wait a, wait b, release b, release a")


def test_gradients_that_arrive_early_and_late_are_reduced_once_after_the_last() -> None:
    """The tied weight of a head and an embedding: first and last gradient of the backward."""
    schedule = backward(
        """
        tangents     input
        d_head       is a.0'
        d_mm         is b.0'
        d_embedding  is a.0'
        """,
        A,
        B,
    )
    reductions = [step for step in schedule.steps if isinstance(step, ReduceInner)]
    assert [(step.group, step.indices) for step in reductions] == [(B.name, (0,)), (A.name, (0,))]
    assert schedule.facts.names[reductions[1].anchor - 1] == "d_embedding"


def test_only_parameters_with_a_gradient_are_reduced() -> None:
    schedule = backward("tangents input\nd_mm is a.2'\nd_norm is a.0'", A)
    (reduction,) = (step for step in schedule.steps if isinstance(step, ReduceInner))
    assert reduction.indices == (0, 2)


def test_the_outer_reduction_goes_along_with_the_next_inner_one() -> None:
    outer = [replace(each, finishes_later=True) for each in (A, B)]
    schedule = backward(
        "tangents input\nd_a is a.0'\nd_b is b.0'\nd_c is c.0'\nd_x",
        *outer,
        C,
    )
    assert_expected_inline(
        str(schedule),
        """\
backward: 3 reduce (24.0 KiB)
#  step             group  where         bytes  names  behind
0  reduce_inner     a      after d_a   8.0 KiB
1  reduce_inner     b      after d_b   8.0 KiB  0
2  reduce_outer     a      after d_b   8.0 KiB  1
3  reduce_inner     c      after d_c   8.0 KiB  2
4  reduce_outer     b      after d_c   8.0 KiB  3
5  wait_reductions         at the end           2 4 3""",
    )


def test_the_last_outer_reduction_is_issued_at_the_end() -> None:
    schedule = backward("tangents input\nd_a is a.0'", replace(A, finishes_later=True))
    assert sequence(schedule) == "reduce_inner a, reduce_outer a, wait_reductions a"
    outer = schedule.steps[1]
    assert isinstance(outer, ReduceOuter) and outer.anchor == schedule.facts.end
    assert outer.after == (), "its own operand, the inner token, carries the order"


def test_a_gradient_that_is_a_graph_input_is_reduced_behind_the_inputs() -> None:
    """A model that returns its parameter: the gradient comes in as a tangent."""
    schedule = backward("tangents input\nshard input\nmm reads b.0\nd is a.0'", A, B)
    early = backward("tangents input is a.0'\nshard input\nmm reads b.0", A, B)
    assert sequence(schedule).endswith("reduce_inner a, wait_reductions a")
    assert sequence(early) == ("unshard b, reduce_inner a, wait b, release b, wait_reductions a")
    assert all(step.anchor >= early.facts.start for step in early.steps)
    assert early.steps[0].after == (), "the first gather of a graph names nothing"


def test_a_frozen_model_gathers_and_reduces_nothing() -> None:
    schedule = backward("tangents input\nd_x reads a.0", A)
    assert sequence(schedule) == "unshard a, wait a, release a"


def test_a_graph_without_parameters_has_no_steps() -> None:
    schedule = forward("x input\nrelu", A)
    assert schedule.steps == ()
    assert str(schedule).startswith("forward: no communication")


def test_a_group_that_nobody_described_is_an_error() -> None:
    with pytest.raises(KeyError, match="0/b/0"):
        forward(CHAIN, A)


def test_the_order_in_which_groups_are_described_changes_nothing() -> None:
    assert forward(CHAIN, A, B, C) == forward(CHAIN, C, B, A)


def test_json_names_every_field_of_every_step() -> None:
    schedule = backward("tangents input\nd_a is a.0'", A)
    found = json.loads(schedule.to_json())
    assert found["kind"] == "backward"
    times = [row.pop("time") for row in found["steps"]]
    assert all(set(time) == {"issued", "start", "end", "exposed"} for time in times)
    assert all(row.pop("reason") for row in found["steps"])
    assert found["steps"] == [
        {"step": "reduce_inner", "anchor": 2, "after": [], "group": A.name, "indices": [0]},
        {"step": "wait_reductions", "anchor": 2, "after": [0], "groups": [A.name]},
    ]
    assert found["memory"]["at_peak"] == {"activations": 0, "gathered": 0, "gradients": 8 * KIB}
    assert found["memory"]["live"] == [0, 0, 8 * KIB]
    assert found["seconds"]["total"] >= found["seconds"]["exposed"] >= 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
