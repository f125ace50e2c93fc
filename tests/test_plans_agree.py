"""Ranks whose batches differ in shape issue the same communication (see `passes.policy`).

The same program over other data is a graph whose nodes allocate and compute other amounts, and may
have other nodes between the readers of parameters (sizes that are computed, for one).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_fsdp.passes.facts import GraphFacts, GraphKind, GroupFacts, NodeFacts
from compile_fsdp.passes.keep import JointFacts, choose
from compile_fsdp.passes.policy import Policy, parse_policy
from compile_fsdp.passes.schedule import plan
from compile_fsdp.passes.uses import find_uses, group_facts
from tests.passes_support import TwoBlocks, registered, traced
from tests.test_keep_plan import CHAIN, GROUPS, joint
from tests.test_schedule_properties import graphs

POLICIES = [
    Policy(),
    Policy(prefetch=2),
    Policy(memory_budget="unlimited"),
    parse_policy({"cost_model": "h100+ib200"}),
    parse_policy({"memory_budget": 5 << 20, "activation_bytes": 1 << 20}),
]


def on_another_rank(facts: GraphFacts, random: Random) -> GraphFacts:
    """The same reads and gradients among other nodes, which cost something else."""
    names: list[str] = []
    moved: list[int] = []
    for position, name in enumerate(facts.names):
        if position >= facts.start:
            names += [f"size{position}_{n}" for n in range(random.choice([0, 0, 1, 3]))]
        moved.append(len(names))
        names.append(name)
    nodes = tuple(
        NodeFacts(random.randrange(1 << 30), n, random.randrange(1 << 40), "float32", 1 << 20)
        for n in range(len(names))
    )
    parameters = (
        replace(use, first=moved[use.first], last=moved[use.last]) for use in facts.parameters
    )
    gradients = (replace(use, position=moved[use.position]) for use in facts.gradients)
    # What comes first among the nodes that are no inputs may be one of the new ones.
    start = next(n for n, name in enumerate(names) if n >= facts.start)
    return replace(
        facts,
        names=tuple(names),
        start=start,
        parameters=tuple(parameters),
        gradients=tuple(gradients),
        nodes=nodes,
    )


@given(graphs(), st.sampled_from(POLICIES), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_a_schedule_orders_the_same_steps(
    graph: tuple[GraphFacts, dict[str, GroupFacts]], policy: Policy, seed: int
) -> None:
    known, groups = graph
    groups = {
        name: replace(each, gather_bytes=1 << (5 * n), numel=1 << (5 * n), mesh_shape=(16,))
        for n, (name, each) in enumerate(sorted(groups.items()))
    }
    other = on_another_rank(known, Random(seed))
    assert plan(other, groups, policy).sequence == plan(known, groups, policy).sequence


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_the_same_groups_are_kept(policy: Policy) -> None:
    here = joint(CHAIN, live=1)
    stretched = joint(CHAIN.replace(" ", " . . "), live=7 << 20)
    assert choose(stretched, GROUPS, policy).kept == choose(here, GROUPS, policy).kept


def test_a_budget_in_bytes_counts_what_this_rank_has() -> None:
    """The exception, asked for by name: without activation_bytes, shapes must be equal."""
    policy = Policy(memory_budget=6 << 20)
    small, large = joint(CHAIN, live=0), joint(CHAIN, live=1 << 18)
    assert choose(small, GROUPS, policy).kept != choose(large, GROUPS, policy).kept


@pytest.mark.parametrize("kind", [GraphKind.FORWARD, GraphKind.BACKWARD])
def test_traced_with_other_lengths_and_with_symbolic_ones(kind: GraphKind) -> None:
    model = TwoBlocks()
    sequences = []
    with registered(*model.groups) as infos:
        for length, symbolic in ((3, False), (70, False), (9, True)):
            batch = torch.arange(2 * length).remainder(8).view(2, length)
            shards = [group.shard for group in model.groups]
            graph = traced(model, batch, *shards, dynamic=symbolic)[kind].graph
            uses = find_uses(graph, infos, kind)
            assert uses.facts.kept, "the loss ends the forward"
            sequences.append(plan(uses.facts, group_facts(infos), Policy()).sequence)
    assert sequences[0] == sequences[1] == sequences[2]


def test_symbolic_sizes_count_the_same_on_every_rank() -> None:
    model = TwoBlocks()
    seen: list[JointFacts | tuple[NodeFacts, ...]] = []
    with registered(*model.groups) as infos:
        for length in (6, 11):
            batch = torch.arange(2 * length).remainder(8).view(2, length)
            shards = [group.shard for group in model.groups]
            graph = traced(model, batch, *shards, dynamic=True)[GraphKind.FORWARD].graph
            seen.append(find_uses(graph, infos, GraphKind.FORWARD).facts.nodes)
    assert seen[0] == seen[1]
