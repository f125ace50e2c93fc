"""What holds for the schedule of any graph, checked on random ones."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.passes import facts, schedule, steps
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
    Unshard,
    Wait,
    WaitReductions,
)

LABELS = "abcd"
INPUTS = 2


@st.composite
def graphs(draw: st.DrawFn) -> tuple[GraphFacts, dict[str, GroupFacts]]:
    """A backward graph of up to 12 nodes with any nodes as readers and gradients."""
    size = draw(st.integers(3, 12))
    names = tuple(f"n{position}" for position in range(size))
    used = draw(st.sets(st.sampled_from(LABELS))) if size > INPUTS + 1 else set()
    inner = st.integers(INPUTS, size - 2)
    parameters = []
    for label in sorted(used):
        readers = sorted(draw(st.sets(inner, min_size=1, max_size=4)))
        parameters.append(
            ParameterUse(
                label, 0, tuple(names[position] for position in readers), readers[0], readers[-1]
            )
        )
    parameters.sort(key=lambda use: use.first)
    gradients = [
        GradientUse(label, index, names[position], position)
        for label, index, position in draw(
            st.lists(
                st.tuples(st.sampled_from(LABELS), st.integers(0, 2), st.integers(0, size - 2)),
                max_size=8,
            )
        )
    ]
    groups = {
        label: GroupFacts(label, label, 1, 1, finishes_later=draw(st.booleans()))
        for label in draw(st.permutations(LABELS))
    }
    return (
        GraphFacts(GraphKind.BACKWARD, names, INPUTS, tuple(parameters), tuple(gradients)),
        groups,
    )


policies = st.builds(Policy, prefetch=st.integers(0, 3))


def number_of(planned: Schedule, kind: type, group: str) -> int:
    (number,) = [n for n, s in enumerate(planned.steps) if isinstance(s, kind) and s.group == group]
    return number


@given(graphs(), policies)
@settings(max_examples=100, deadline=None)
def test_every_read_lies_between_wait_and_release(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy
) -> None:
    known, groups = graph
    planned = plan(known, groups, policy)
    for use in known.parameters:
        unshard, wait, release = (
            number_of(planned, kind, use.group) for kind in (Unshard, Wait, Release)
        )
        assert unshard < wait < release
        assert planned.steps[wait].anchor <= use.first
        assert use.last < planned.steps[release].anchor


@given(graphs(), policies)
@settings(max_examples=100, deadline=None)
def test_every_gradient_is_there_when_it_is_reduced(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy
) -> None:
    known, groups = graph
    planned = plan(known, groups, policy)
    reduced = [step.group for step in planned.steps if isinstance(step, ReduceInner)]
    assert Counter(reduced) == Counter({use.group for use in known.gradients})
    for use in known.gradients:
        step = planned.steps[number_of(planned, ReduceInner, use.group)]
        assert isinstance(step, ReduceInner)
        assert use.position < step.anchor and use.index in step.indices
        if groups[use.group].finishes_later:
            inner = number_of(planned, ReduceInner, use.group)
            assert inner < number_of(planned, ReduceOuter, use.group)


@given(graphs(), policies)
@settings(max_examples=100, deadline=None)
def test_steps_form_one_chain(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy
) -> None:
    """Following the named steps back from any step leads to all before it; a release is behind
    its group's wait by the buffer that both work on."""
    planned = plan(*graph, policy)
    behind: list[set[int]] = []
    chain: list[int] = []
    for number, step in enumerate(planned.steps):
        assert all(named < number for named in step.after)
        direct = set(step.after) | _by_operand(planned, number)
        behind.append(direct.union(*(behind[named] for named in direct)))
        if isinstance(step, Release | WaitReductions):
            continue
        freed = [n for n, s in enumerate(planned.steps[:number]) if isinstance(s, Release)]
        assert behind[number] >= {*chain, *freed}
        chain.append(number)


def _by_operand(planned: Schedule, number: int) -> set[int]:
    """The steps that a step follows because it works on their result."""
    step = planned.steps[number]
    earlier = {
        Wait: (Unshard,),
        Release: (Unshard, Wait),
        ReduceOuter: (ReduceInner,),
    }.get(type(step), ())
    return {
        n
        for n, s in enumerate(planned.steps[:number])
        if isinstance(s, earlier) and s.group == step.group
    }


@given(graphs(), policies)
@settings(max_examples=100, deadline=None)
def test_anchors_never_decrease_and_lie_behind_the_inputs(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy
) -> None:
    planned = plan(*graph, policy)
    anchors = [step.anchor for step in planned.steps]
    assert all(before <= after for before, after in pairwise(anchors))
    assert all(INPUTS <= anchor <= planned.facts.end for anchor in anchors)


@given(graphs(), policies)
@settings(max_examples=100, deadline=None)
def test_gathers_run_ahead_of_waits_by_the_policy(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy
) -> None:
    """Exactly so many, unless several groups are read first by one node: then all of them, and
    what each prefetches, are issued before the first wait."""
    planned = plan(*graph, policy)
    waits = [step for step in planned.steps if isinstance(step, Wait)]
    apart = len({step.anchor for step in waits}) == len(waits)
    issued = waited = 0
    for step in planned.steps:
        issued += isinstance(step, Unshard)
        if isinstance(step, Wait):
            expected = min(waited + 1 + policy.prefetch, len(waits))
            assert issued == expected if apart else issued >= expected
            waited += 1


@given(graphs(), policies, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_equal_facts_give_equal_schedules(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy, random: object
) -> None:
    known, groups = graph
    names = list(groups)
    random.shuffle(names)  # type: ignore[attr-defined]
    again = plan(known, {name: groups[name] for name in names}, policy)
    assert again == plan(known, groups, policy)
    assert str(again) == str(plan(known, groups, policy))


@pytest.mark.parametrize("module", [facts, steps, schedule])
def test_planning_needs_no_torch(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        if node.level == 0
    }
    assert "torch" not in imported and "compile_fsdp" not in imported
