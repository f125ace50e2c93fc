"""The verifier accepts what the passes write, and catches every way to break it.

Each test damages a right graph in one way, as a bug in the passes would, and expects the
complaint that names it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from compile_fsdp.passes.emit import write_schedule
from compile_fsdp.passes.facts import GraphFacts, GraphKind
from compile_fsdp.passes.graph_writer import insert_call
from compile_fsdp.passes.joint import keeping_noted
from compile_fsdp.passes.schedule import Policy, plan
from compile_fsdp.passes.steps import Schedule
from compile_fsdp.passes.targets import (
    ADD,
    AS_STRIDED,
    PARAMETER,
    PARAMETER_GRAD,
    REDUCE_INNER,
    REDUCE_OUTER,
    REDUCE_TOGETHER,
    RELEASE,
    UNSHARD,
    WAIT,
    WAIT_REDUCTIONS,
)
from compile_fsdp.passes.uses import find_uses, group_facts
from compile_fsdp.passes.verify import VerificationError, verify
from compile_fsdp.runtime.group_info import GroupInfo
from tests.passes_support import TwoBlocks, registered, tokens, traced

aten = torch.ops.aten


@dataclass
class Rewritten:
    """A right graph, ready to be damaged."""

    graph: Graph
    facts: GraphFacts
    infos: dict[str, GroupInfo]
    schedule: Schedule

    def verify(self) -> None:
        verify(self.graph, self.facts, self.infos, self.schedule)

    def call(self, target: object, group: str | None = None) -> Node:
        """The first call of ``target``, of a group when one is named by its label."""
        return next(
            node
            for node in self.graph.nodes
            if node.target is target and (group is None or f"/{group}/" in str(node.args[1]))
        )

    def node(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def set_arg(self, node: Node, number: int, value: Any) -> None:
        args = list(node.args)
        args[number] = value
        node.args = tuple(args)

    def unname(self, node: Node) -> None:
        """Take ``node`` out of all ``after`` and ``issued`` lists."""
        for user in list(node.users):
            if user.target in (UNSHARD, WAIT, REDUCE_INNER, REDUCE_OUTER):
                self.set_arg(user, -1, [each for each in user.args[-1] if each is not node])  # type: ignore[union-attr]


@functools.cache
def _rewritten_once(
    kind: GraphKind, mesh_shape: tuple[int, ...], merge_below: int, arena: bool
) -> Rewritten:
    model = TwoBlocks(mesh_shape=mesh_shape)
    with registered(*model.groups) as infos:
        graph = traced(model, tokens(), *(group.shard for group in model.groups))[kind].graph
        uses = find_uses(graph, infos, kind)
        policy = Policy(merge_below=merge_below, arena=arena)
        schedule = plan(uses.facts, group_facts(infos), policy, keeping_noted(graph))
        write_schedule(graph, uses, infos, schedule)
    return Rewritten(graph, uses.facts, infos, schedule)


def rewritten(
    kind: GraphKind,
    mesh_shape: tuple[int, ...] = (2,),
    merge_below: int = 0,
    *,
    arena: bool = False,
) -> Rewritten:
    """A copy, to be damaged."""
    right = _rewritten_once(kind, mesh_shape, merge_below, arena)
    graph = Graph()
    graph.output(graph.graph_copy(right.graph, val_map={}))
    return replace(right, graph=graph)


@pytest.fixture
def forward() -> Rewritten:
    return rewritten(GraphKind.FORWARD)


@pytest.fixture
def backward() -> Rewritten:
    return rewritten(GraphKind.BACKWARD)


@pytest.fixture
def two_axes() -> Rewritten:
    return rewritten(GraphKind.BACKWARD, mesh_shape=(2, 2))


def test_right_graphs_pass(forward: Rewritten, backward: Rewritten, two_axes: Rewritten) -> None:
    forward.verify()
    backward.verify()
    two_axes.verify()


# Gathered parameters ----------------------------------------------------------------------------


def test_a_dropped_wait(forward: Rewritten) -> None:
    forward.graph.erase_node(forward.call(WAIT, "blocks.0"))
    with pytest.raises(VerificationError, match=r"full_blocks_0 .*needs one .*wait.*found \[\]"):
        forward.verify()


def test_a_dropped_release(forward: Rewritten) -> None:
    forward.graph.erase_node(forward.call(RELEASE, "blocks.0"))
    with pytest.raises(VerificationError, match=r"full_blocks_0 .*needs one .*release.*found \[\]"):
        forward.verify()


@pytest.mark.parametrize("target", [WAIT, RELEASE])
def test_a_step_that_is_written_twice(target: object, forward: Rewritten) -> None:
    step = forward.call(target, "blocks.0")
    with forward.graph.inserting_after(step):
        forward.graph.node_copy(step)
    with pytest.raises(VerificationError, match=r"full_blocks_0 .*needs one"):
        forward.verify()


def test_a_group_that_is_gathered_twice(forward: Rewritten) -> None:
    forward.set_arg(forward.call(UNSHARD, "blocks.1"), 1, "0/blocks.0/0")
    with pytest.raises(VerificationError, match=r"group '0/blocks.0/0' is gathered 2 times"):
        forward.verify()


def test_a_wait_in_the_name_of_another_group(forward: Rewritten) -> None:
    forward.set_arg(forward.call(WAIT, "blocks.1"), 1, "0/blocks.0/0")
    with pytest.raises(VerificationError, match=r"buffer of group '0/blocks.1/0', but names"):
        forward.verify()


def test_a_release_before_the_last_read(forward: Rewritten) -> None:
    forward.node("mm_1").prepend(forward.call(RELEASE, "blocks.0"))
    message = "node mm_1 reads blocks.0.down.weight outside of wait_blocks_0 .. release_blocks_0"
    with pytest.raises(VerificationError, match=message):
        forward.verify()


def test_a_release_before_the_wait(forward: Rewritten) -> None:
    forward.call(WAIT, "blocks.0").prepend(forward.call(RELEASE, "blocks.0"))
    with pytest.raises(VerificationError, match=r"in this order; found .*release_blocks_0, wait_"):
        forward.verify()


def test_a_wait_after_the_first_read(forward: Rewritten) -> None:
    forward.node("mm").append(forward.call(WAIT, "blocks.0"))
    with pytest.raises(VerificationError, match=r"reads blocks.0.norm.weight outside of"):
        forward.verify()


def test_a_read_after_the_release(forward: Rewritten) -> None:
    late = forward.graph.output_node()
    view = forward.node("blocks_0_norm_weight")
    insert_call(forward.graph, aten.exp.default, (view,), before=late, name="late")
    with pytest.raises(VerificationError, match=r"node late reads blocks.0.norm.weight outside of"):
        forward.verify()


def test_a_reader_of_another_parameter(forward: Rewritten) -> None:
    view = forward.node("blocks_0_up_weight")
    forward.set_arg(view, 3, 0)
    with pytest.raises(
        VerificationError, match=r"node mm read blocks.0.up.weight before .* does not now"
    ):
        forward.verify()


def test_a_reader_that_was_none(forward: Rewritten) -> None:
    view = forward.node("blocks_0_up_weight")
    insert_call(forward.graph, aten.exp.default, (view,), before=forward.node("mm"), name="new")
    with pytest.raises(
        VerificationError, match=r"node new did not read blocks.0.up.weight before .* does now"
    ):
        forward.verify()


def test_a_reader_of_the_whole_buffer(forward: Rewritten) -> None:
    full = forward.call(UNSHARD, "blocks.0")
    insert_call(forward.graph, aten.exp.default, (full,), before=forward.node("mm"), name="new")
    with pytest.raises(VerificationError, match=r"node new uses the gathered buffer .* directly"):
        forward.verify()


def test_a_returned_view(forward: Rewritten) -> None:
    output = forward.graph.output_node()
    view = forward.node("blocks_0_up_weight")
    output.args = ((*output.args[0], view),)  # type: ignore[misc]
    with pytest.raises(
        VerificationError, match=r"returns blocks_0_up_weight, a view of blocks.0.up.weight"
    ):
        forward.verify()


def test_a_write_to_a_parameter(forward: Rewritten) -> None:
    view = forward.node("blocks_0_up_weight")
    insert_call(
        forward.graph, aten._foreach_zero_.default, ([view],), before=forward.node("mm"), name="new"
    )
    with pytest.raises(VerificationError, match=r"node new writes to blocks.0.up.weight"):
        forward.verify()


@pytest.mark.parametrize("target", [PARAMETER, PARAMETER_GRAD])
def test_a_marker_that_is_left(target: Any, backward: Rewritten) -> None:
    place = backward.graph.output_node()
    with backward.graph.inserting_before(place):
        backward.graph.call_function(target, (backward.node("mm"), "0/blocks.0/0", 1))
    with pytest.raises(VerificationError, match=r"marker \w+ of blocks.0.up.weight is left"):
        backward.verify()


# Gradients --------------------------------------------------------------------------------------


def test_a_dropped_gradient(backward: Rewritten) -> None:
    step = backward.call(REDUCE_INNER, "blocks.0")
    gradients, _, indices, _ = step.args
    backward.set_arg(step, 0, list(gradients)[1:])  # type: ignore[arg-type]
    backward.set_arg(step, 2, list(indices)[1:])  # type: ignore[arg-type]
    with pytest.raises(
        VerificationError, match=r"of blocks.0.norm.weight must be reduced 1 times, is reduced 0"
    ):
        backward.verify()


def test_gradients_of_the_wrong_parameters(backward: Rewritten) -> None:
    step = backward.call(REDUCE_INNER, "blocks.0")
    backward.set_arg(step, 2, [0, 2, 1])
    with pytest.raises(VerificationError, match=r"gradient t_\d+ of blocks.0"):
        backward.verify()


def test_a_gradient_that_counts_twice(backward: Rewritten) -> None:
    step = backward.call(REDUCE_INNER, "blocks.0")
    first, *rest = step.args[0]  # type: ignore[misc]
    twice = insert_call(backward.graph, ADD, (first, first), before=step)
    backward.set_arg(step, 0, [twice, *rest])
    with pytest.raises(
        VerificationError, match=r"of blocks.0.norm.weight must be reduced 1 times, is reduced 2"
    ):
        backward.verify()


def test_a_group_that_is_reduced_twice(backward: Rewritten) -> None:
    step = backward.call(REDUCE_INNER, "blocks.0")
    with backward.graph.inserting_after(step):
        backward.graph.node_copy(step)
    with pytest.raises(VerificationError, match=r"group '0/blocks.0/0' is reduced twice"):
        backward.verify()


def test_a_dropped_reduction(backward: Rewritten) -> None:
    step = backward.call(REDUCE_INNER, "blocks.0")
    backward.unname(step)
    wait = backward.call(WAIT_REDUCTIONS)
    tokens_, groups = list(wait.args[0]), list(wait.args[1])  # type: ignore[arg-type]
    tokens_.remove(step)
    groups.remove("0/blocks.0/0")
    wait.args = (tokens_, groups)
    backward.graph.erase_node(step)
    with pytest.raises(VerificationError, match=r"must be reduced 1 times, is reduced 0 times"):
        backward.verify()


def test_a_reduction_that_is_not_waited_for(backward: Rewritten) -> None:
    wait = backward.call(WAIT_REDUCTIONS)
    wait.args = tuple(list(each)[:-1] for each in wait.args)  # type: ignore[arg-type]
    with pytest.raises(
        VerificationError, match=r"reduction of group '0/root/0', is not waited for"
    ):
        backward.verify()


def test_a_dropped_final_wait(backward: Rewritten) -> None:
    backward.graph.erase_node(backward.call(WAIT_REDUCTIONS))
    with pytest.raises(VerificationError, match=r"3 reductions need 1 wait_reductions, found 0"):
        backward.verify()


def test_a_dropped_outer_reduction(two_axes: Rewritten) -> None:
    step = two_axes.call(REDUCE_OUTER, "blocks.0")
    step.replace_all_uses_with(two_axes.call(REDUCE_INNER, "blocks.0"))
    two_axes.graph.erase_node(step)
    with pytest.raises(VerificationError, match=r"'0/blocks.0/0' needs 1 outer reductions"):
        two_axes.verify()


def test_an_outer_reduction_that_is_not_waited_for(two_axes: Rewritten) -> None:
    wait = two_axes.call(WAIT_REDUCTIONS)
    wait.replace_input_with(
        two_axes.call(REDUCE_OUTER, "blocks.0"), two_axes.call(REDUCE_INNER, "blocks.0")
    )
    with pytest.raises(VerificationError, match=r"outer_token_blocks_0, .* is not waited for"):
        two_axes.verify()


def test_a_flat_shard_that_gets_a_gradient(backward: Rewritten) -> None:
    output = backward.graph.output_node()
    first, *rest = output.args[0]  # type: ignore[misc]
    output.args = ((first, backward.node("mm"), *rest[1:]),)
    with pytest.raises(VerificationError, match=r"graph output 1 .* must be None, found mm"):
        backward.verify()


# Order ------------------------------------------------------------------------------------------

SWAPS = {
    "a gather behind the wait it should run ahead of": (UNSHARD, "blocks.0", WAIT, "blocks.1"),
    "a release behind the gather it makes room for": (RELEASE, "root", UNSHARD, "blocks.0"),
}


@pytest.mark.parametrize(("target", "group", "other", "of"), SWAPS.values(), ids=SWAPS.keys())
def test_a_delayed_step(
    target: object, group: str, other: object, of: str, backward: Rewritten
) -> None:
    step, place = backward.call(target, group), backward.call(other, of)
    backward.unname(step)
    place.append(step)
    with pytest.raises(VerificationError, match=r"step \d+ of the schedule is"):
        backward.verify()


def test_gradients_that_are_dealt_to_the_wrong_group() -> None:
    merged = rewritten(GraphKind.BACKWARD, (2, 2), merge_below=600)
    merged.verify()
    step = merged.call(REDUCE_TOGETHER)
    first, second = step.args[2]  # type: ignore[misc]
    merged.set_arg(step, 2, [first, second + 1])
    with pytest.raises(VerificationError, match=r"token_together deals 6 gradients"):
        merged.verify()
    merged.set_arg(step, 2, [first, second])
    merged.set_arg(step, 1, list(reversed(step.args[1])))  # type: ignore[call-overload]
    with pytest.raises(VerificationError, match=r"must be reduced"):
        merged.verify()


def test_an_outer_reduction_that_its_merged_inner_one_lacks() -> None:
    merged = rewritten(GraphKind.BACKWARD, (2, 2), merge_below=600)
    outer = merged.call(REDUCE_OUTER, "blocks.0")
    merged.set_arg(outer, 1, merged.call(REDUCE_OUTER, "blocks.1").args[1])
    with pytest.raises(VerificationError, match=r"needs 1 outer reductions of its group"):
        merged.verify()


def test_two_reductions_in_the_wrong_order(backward: Rewritten) -> None:
    early, late = backward.call(REDUCE_INNER, "blocks.0"), backward.call(REDUCE_INNER, "root")
    backward.unname(early)
    late.append(early)
    with pytest.raises(VerificationError, match=r"step 10 of the schedule is \('reduce_inner'"):
        backward.verify()


ORDERED: list[tuple[str, object, str, str]] = [
    ("a gather", UNSHARD, "blocks.0", "full_blocks_0 .* follows wait_root"),
    ("a wait on a gather", WAIT, "blocks.1", "wait_blocks_1 .* follows full_blocks_0"),
    ("a wait on a reduction", WAIT, "blocks.0", "wait_blocks_0 .* follows token_blocks_1"),
    ("a reduction on a release", REDUCE_INNER, "blocks.0", "token_blocks_0 .* release_blocks_0"),
    ("a reduction on a reduction", REDUCE_INNER, "root", "token_root .* follows token_blocks_0"),
]


@pytest.mark.parametrize(
    ("target", "group", "message"), [row[1:] for row in ORDERED], ids=[row[0] for row in ORDERED]
)
def test_order_that_no_argument_carries(
    target: object, group: str, message: str, backward: Rewritten
) -> None:
    """The nodes stand in the right order, but a compiler would be free to change it."""
    backward.set_arg(backward.call(target, group), -1, [])
    with pytest.raises(VerificationError, match=rf"{message}.*by luck"):
        backward.verify()


def test_an_order_that_a_later_write_carries(backward: Rewritten) -> None:
    """The second gather reads the first buffer, which the wait writes to: it needs no argument."""
    wait = backward.call(WAIT, "root")
    assert [node.name for node in wait.args[-1]] == ["full_blocks_1"]  # type: ignore[union-attr]
    assert [node.name for node in backward.call(UNSHARD, "blocks.1").args[-1]] == ["full_root"]  # type: ignore[union-attr]
    backward.set_arg(wait, -1, [])
    backward.verify()


def test_a_view_of_no_parameter(forward: Rewritten) -> None:
    forward.set_arg(forward.call(AS_STRIDED), 1, [3, 4])
    with pytest.raises(VerificationError, match=r"node embedding"):
        forward.verify()
