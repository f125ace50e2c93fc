"""Right graphs, damaged in every small way: the verifier must notice each time.

A mutation drops, copies, swaps or delays one step of a graph, or displaces what it gathers, as a
bug in the planner, in a writer or in a compiler pass would, and repairs what would not even be a
graph: a node that would stand before one it takes as an argument no longer takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
from torch.fx import Graph, Node

from compile_fsdp.passes.aliases import alias_trees
from compile_fsdp.passes.arena import lifetimes
from compile_fsdp.passes.facts import GraphKind
from compile_fsdp.passes.targets import (
    GATHER_TOGETHER,
    REDUCE_INNER,
    REDUCE_OUTER,
    REDUCE_TOGETHER,
    RELEASE,
    UNSHARD,
    WAIT,
    is_communication,
    op_name,
)
from compile_fsdp.passes.verify import VerificationError
from tests.test_passes_verify import Rewritten, rewritten

KINDS = [
    (GraphKind.FORWARD, (2,), 0),
    (GraphKind.BACKWARD, (2,), 0),
    (GraphKind.BACKWARD, (2, 2), 0),
    # Two of the three groups are gathered together, and two reduced.
    (GraphKind.FORWARD, (2,), 600),
    (GraphKind.BACKWARD, (2,), 600),
    (GraphKind.BACKWARD, (2, 2), 600),
]
SEED = 20
NAMING = (GATHER_TOGETHER, UNSHARD, WAIT, REDUCE_INNER, REDUCE_TOGETHER, REDUCE_OUTER)


def drop(right: Rewritten, step: Node, random: Random) -> bool:
    """The step is not there; who needed its result takes that of another, or does without if it
    only followed the step."""
    others = [
        node
        for node in right.graph.nodes
        if node.target is step.target and node is not step and node < step
    ]
    if step.users and not others:
        for user in list(step.users):
            if step in user.args:
                return False
            user.args = tuple(
                [each for each in argument if each is not step]
                if isinstance(argument, list)
                else argument
                for argument in user.args
            )
    elif step.users:
        step.replace_all_uses_with(random.choice(others))
    right.graph.erase_node(step)
    return True


def duplicate(right: Rewritten, step: Node, random: Random) -> bool:
    """The step is there twice."""
    with right.graph.inserting_after(step):
        right.graph.node_copy(step)
    return True


def swap(right: Rewritten, step: Node, random: Random) -> bool:
    """The step and the one behind it change places."""
    steps = [node for node in right.graph.nodes if is_communication(node)]
    number = steps.index(step)
    if number + 1 == len(steps):
        return False
    steps[number + 1].append(step)
    return keeps_topology(right.graph, step)


def delay(right: Rewritten, step: Node, random: Random) -> bool:
    """The step comes up to forty compute nodes later. Views of parameters compute nothing."""
    buffers = [node for node in right.graph.nodes if node.target is UNSHARD]
    views = {view for tree in alias_trees(right.graph, buffers) for view in tree.aliases}
    compute = [
        node
        for node in right.graph.nodes
        if node.op == "call_function" and node > step
        if node.name in right.facts.names and node not in views
    ]
    if not compute:
        return False
    random.choice(compute[:40]).append(step)
    return keeps_topology(right.graph, step)


def keeps_topology(graph: Graph, moved: Node) -> bool:
    """Take ``moved`` out of the order lists of the steps that stand before it now. False: some node
    that stands before it needs it."""
    for user in list(moved.users):
        if user < moved:
            if user.target not in NAMING:
                return False
            if moved in (user.args[0],):
                return False
            named = [node for node in user.args[-1] if node is not moved]  # type: ignore[union-attr]
            user.args = (*user.args[:-1], named)
    return True


def displace(right: Rewritten, step: Node, random: Random) -> bool:
    """The step puts one of its groups where it must not be: at no multiple of the alignment, beyond
    the arena's end, or where another group is at that time; or it says nothing."""
    if not step.kwargs:
        return False
    groups = step.args[1] if isinstance(step.args[1], list) else [step.args[1]]
    number = random.randrange(len(groups))
    where = random.choice([*occupied_by_others(right, step, str(groups[number])), -256, 1, 1 << 20])
    places = step.kwargs.get("offsets", [step.kwargs.get("offset")])
    places = [*places[:number], where, *places[number + 1 :]]  # type: ignore[index]
    if random.random() < 0.1:
        step.kwargs = {}
    elif "offset" in step.kwargs:
        step.kwargs = {**step.kwargs, "offset": where}
    else:
        step.kwargs = {**step.kwargs, "offsets": places}
    return True


def occupied_by_others(right: Rewritten, step: Node, group: str) -> list[int]:
    """The places of the groups that are there when ``group`` is, from the planner."""
    arena = right.schedule.arena
    assert arena is not None
    known = lifetimes(right.schedule.steps, right.facts, right.schedule.groups)
    mine = next(block for block in known if block.name == group)
    others = [block for block in known if block is not mine and block.meets(mine)]
    return [arena.place(block.name) for block in others]


MUTATIONS: list[Callable[[Rewritten, Node, Random], bool]] = [
    drop,
    duplicate,
    swap,
    delay,
    displace,
]


def mutants() -> Iterator[tuple[str, Rewritten]]:
    random = Random(SEED)
    for kind, mesh_shape, merge_below in KINDS:
        right = rewritten(kind, mesh_shape, merge_below)
        names = [node.name for node in right.graph.nodes if is_communication(node)]
        for name in names:
            for mutation in MUTATIONS:
                for _ in range(4 if mutation in (delay, displace) else 1):
                    damaged = rewritten(kind, mesh_shape, merge_below, arena=mutation is displace)
                    step = damaged.node(name)
                    what = f"{mutation.__name__} {op_name(step)}"
                    if mutation(damaged, step, random):
                        damaged.graph.lint()
                        yield f"{what} ({name}, {kind.value}, {mesh_shape}, {merge_below})", damaged


def test_every_mutation_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    tried: Counter[str] = Counter()
    missed = []
    for what, damaged in mutants():
        tried[what.partition(" (")[0]] += 1
        try:
            damaged.verify()
        except VerificationError:
            continue
        missed.append(what)
    with capsys.disabled():
        counts = ", ".join(f"{count} {what}" for what, count in sorted(tried.items()))
        print(f"\n{tried.total()} mutants: {counts}")
    assert not missed, f"{len(missed)} of {tried.total()} went unnoticed:\n" + "\n".join(missed)
    assert tried.total() > 400
    for op in ("gather_together", "reduce_together"):
        assert all(tried[f"{mutation.__name__} {op}"] for mutation in MUTATIONS[:4]), op
    assert tried["displace unshard"] > 50 and tried["displace gather_together"] > 2


def test_the_graphs_that_are_damaged_are_right() -> None:
    for kind, mesh_shape, merge_below in KINDS:
        rewritten(kind, mesh_shape, merge_below).verify()
        rewritten(kind, mesh_shape, merge_below, arena=True).verify()
    assert any(n.target is RELEASE for n in rewritten(GraphKind.BACKWARD).graph.nodes)
