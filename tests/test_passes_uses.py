"""Who reads a parameter, through which views, and which gradients a backward graph holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compile_fsdp.passes.aliases import alias_trees, written_arguments
from compile_fsdp.passes.facts import GraphFacts, GraphKind
from compile_fsdp.passes.gradients import count_gradients
from compile_fsdp.passes.pipeline import rewrite
from compile_fsdp.passes.schedule import Policy
from compile_fsdp.passes.targets import ADD, PARAMETER_GRAD, is_marker
from compile_fsdp.passes.unshard import clone_escaping_views
from compile_fsdp.passes.uses import find_uses
from tests.passes_support import StubGroup, TwoBlocks, registered, tokens, traced

aten = torch.ops.aten


@pytest.fixture
def group() -> Iterator[StubGroup]:
    stub = StubGroup("a", {"weight": torch.randn(4, 6), "bias": torch.randn(6)})
    with registered(stub):
        yield stub


def graph_of(function: Callable[..., object], *inputs: torch.Tensor) -> Graph:
    """``function`` traced op by op, without autograd; placeholders are named as its arguments."""
    graph: Graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph


def facts_of(graph: Graph, group: StubGroup, kind: GraphKind = GraphKind.FORWARD) -> GraphFacts:
    return find_uses(graph, {group.info.name: group.info}, kind).facts


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda w: w,
    "view": lambda w: aten.view(w, [6, 4]),
    "t": lambda w: aten.t(w),
    "permute": lambda w: aten.permute(w, [1, 0]),
    "transpose": lambda w: aten.transpose(w, 0, 1),
    "slice": lambda w: aten.slice(w, 0, 1, 3),
    "select": lambda w: aten.select(w, 0, 1),
    "as_strided": lambda w: aten.as_strided(w, [2, 3], [3, 1], 4),
    "detach": lambda w: aten.detach(w),
    "alias": lambda w: aten.alias(w),
    "expand": lambda w: aten.expand(w, [2, 4, 6]),
    "unsqueeze": lambda w: aten.unsqueeze(w, 0),
    "diagonal": lambda w: aten.diagonal(w),
    "view as another dtype": lambda w: aten.view.dtype(w, torch.int32),
    "split": lambda w: aten.split(w, 2)[1],
    "split_with_sizes": lambda w: aten.split_with_sizes(w, [1, 3])[1],
    "unbind": lambda w: aten.unbind(w)[3],
    "an alias that the schema hides": lambda w: aten._unsafe_view(w, [24]),
    "prims": lambda w: torch.ops.prims.broadcast_in_dim(w, [2, 4, 6], [1, 2]),
    "a chain": lambda w: aten.unsqueeze(aten.t(aten.view(aten.slice(w, 0, 0, 2), [3, 4])), 0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_parameter_is_read_where_its_chain_of_views_ends(
    view: Callable[[torch.Tensor], torch.Tensor], group: StubGroup
) -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = view(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))
        x = aten.exp(aten.exp(x))
        return aten.mul(weight, 2)

    graph = graph_of(function, group.shard, torch.randn(3))
    (use,) = facts_of(graph, group).parameters
    assert use.readers == ("mul",)


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda w: aten._to_copy(w, dtype=torch.bfloat16),
    "prims cast": lambda w: torch.ops.prims.convert_element_type(w, torch.bfloat16),
    "clone": lambda w: aten.clone(w),
    "cat": lambda w: aten.cat([w, w]),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_a_copy_is_the_reader(
    copy: Callable[[torch.Tensor], torch.Tensor], group: StubGroup
) -> None:
    """What reads the copy later does not need the parameter any more."""

    def function(shard: torch.Tensor) -> torch.Tensor:
        copied = copy(aten.t(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0)))
        return aten.mul(copied, 2)

    graph = graph_of(function, group.shard)
    (use,) = facts_of(graph, group).parameters
    (reader,) = use.readers
    assert reader != "mul" and use.first == use.last


def test_a_view_that_is_read_late_extends_the_use(group: StubGroup) -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = torch.ops.compile_fsdp.parameter(shard, group.info.name, 0)
        early, late = aten.select(weight, 0, 0), aten.select(weight, 0, 1)
        y = aten.mul(x, early)
        y = aten.exp(y)
        return aten.div(y, late)

    (use,) = facts_of(graph_of(function, group.shard, torch.randn(6)), group).parameters
    assert use.readers == ("mul", "div")


def test_an_unused_parameter_is_no_use_and_its_marker_goes(group: StubGroup) -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        aten.t(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))
        return aten.mul(x, torch.ops.compile_fsdp.parameter(shard, group.info.name, 1))

    graph = graph_of(function, group.shard, torch.randn(6))
    assert [use.index for use in facts_of(graph, group).parameters] == [1]
    rewrite(graph, {group.info.name: group.info}, Policy())
    assert not any(is_marker(node) or node.target is aten.t.default for node in graph.nodes)


def test_a_group_that_is_not_used_at_all_is_not_gathered(group: StubGroup) -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.ops.compile_fsdp.parameter(shard, group.info.name, 0)
        return aten.exp(x)

    graph = graph_of(function, group.shard, torch.randn(6))
    schedule = rewrite(graph, {group.info.name: group.info}, Policy())
    assert schedule.steps == ()
    assert [node.name for node in graph.nodes] == ["shard_1", "x_1", "exp", "output"]


def test_views_before_the_wait_move_behind_it(group: StubGroup) -> None:
    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = aten.t(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))
        x = aten.exp(x)
        return aten.mm(x, weight)

    graph = graph_of(function, group.shard, torch.randn(2, 6))
    rewrite(graph, {group.info.name: group.info}, Policy())
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["full_a", "exp", "wait_a", "weight", "t", "mm", "release_a"]


@pytest.mark.parametrize("view", [lambda w: w, aten.t, lambda w: aten.t(aten.t(w))])
def test_a_view_that_leaves_the_graph_is_copied_before_the_release(
    view: Callable[[torch.Tensor], torch.Tensor], group: StubGroup
) -> None:
    def function(shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = view(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))
        return weight, aten.exp(weight)

    graph = graph_of(function, group.shard)
    rewrite(graph, {group.info.name: group.info}, Policy())
    names = [node.name for node in graph.nodes]
    copy, exp = graph.output_node().args[0]
    assert names.index("wait_a") < names.index(copy.name) < names.index("release_a")
    assert exp.name == "exp"
    assert copy.meta["val"].stride() == view(torch.empty(4, 6)).stride()


def test_one_view_for_all_reads_of_a_parameter(group: StubGroup) -> None:
    """Markers of one parameter, which differ in nothing, become one view."""

    def function(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = torch.ops.compile_fsdp.parameter(shard, group.info.name, 1)
        x = aten.mul(x, first)
        second = torch.ops.compile_fsdp.parameter(shard, group.info.name, 1)
        return aten.mul(x, second)

    graph = graph_of(function, group.shard, torch.randn(6))
    rewrite(graph, {group.info.name: group.info}, Policy())
    assert sum(node.target is aten.as_strided.default for node in graph.nodes) == 1


def test_writes_are_read_off_the_schema() -> None:
    graph = graph_of(lambda x, y: aten.add_(x, aten.exp(y)), torch.randn(3), torch.randn(3))
    add = next(node for node in graph.nodes if node.target is aten.add_.Tensor)
    assert [node.name for node in written_arguments(add)] == ["x_1"]


def test_a_node_that_views_one_tree_and_reads_another() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return aten.mul(aten.t(x), aten.view(y, [3, 2]))

    graph = graph_of(function, torch.randn(2, 3), torch.randn(6))
    x, y = graph.find_nodes(op="placeholder")
    trees = {tree.root: tree for tree in alias_trees(graph, [x, y])}
    assert [node.name for node in trees[x].aliases] == ["t"]
    assert [node.name for node in trees[y].aliases] == ["view"]
    assert [node.name for node in trees[x].readers] == ["mul"]
    assert [node.name for node in trees[y].readers] == ["mul"]


# Gradients --------------------------------------------------------------------------------------


def backward_graph(
    group: StubGroup, build: Callable[[Graph, list[Node]], object], gradients: int = 3
) -> Graph:
    """A graph with ``gradients`` tangents whose output ``build`` makes of gradient markers."""
    graph = Graph()
    tangents = [graph.placeholder(f"tangents_{number}") for number in range(gradients)]
    for node in tangents:
        node.meta["val"] = torch.empty(6, device="meta")
    parts = [graph.call_function(PARAMETER_GRAD, (node, group.info.name, 1)) for node in tangents]
    graph.output((build(graph, parts),))
    return graph


def add(graph: Graph, *arguments: object, **options: object) -> Node:
    return graph.call_function(ADD, arguments, options)  # type: ignore[arg-type]


def test_gradients_are_summed_in_the_order_in_which_autograd_adds_them(group: StubGroup) -> None:
    graph = backward_graph(group, lambda g, p: add(g, add(g, p[2], p[0]), p[1]))
    facts = facts_of(graph, group, GraphKind.BACKWARD)
    assert [use.gradient for use in facts.gradients] == ["tangents_2", "tangents_0", "tangents_1"]
    assert facts.gradient_outputs == (0,)


def test_a_gradient_that_was_merged_with_an_equal_one_counts_twice(group: StubGroup) -> None:
    """Common subexpression elimination leaves ``add(part, part)`` of two equal gradients."""
    graph = backward_graph(group, lambda g, p: add(g, p[0], p[0]), gradients=1)
    assert count_gradients(graph) == {(group.info.name, 1): 2}
    rewrite(graph, {group.info.name: group.info}, Policy(), kind=GraphKind.BACKWARD)
    (sum_,) = [node for node in graph.nodes if node.target is ADD]
    assert [node.name for node in sum_.all_input_nodes] == ["tangents_0"]
    assert [node.name for node in sum_.args] == ["tangents_0", "tangents_0"]


def test_a_summand_that_is_no_marker_stays(group: StubGroup) -> None:
    """The body of a higher-order op returns a gradient of the flat shard of its own."""

    def build(graph: Graph, parts: list[Node]) -> Node:
        first, second = (part.args[0] for part in parts[:2])
        graph.erase_node(parts[1])
        return add(graph, add(graph, add(graph, first, parts[2]), second), parts[0])

    graph = backward_graph(group, build)
    facts = facts_of(graph, group, GraphKind.BACKWARD)
    assert [use.gradient for use in facts.gradients] == ["tangents_2", "tangents_0"]
    assert facts.gradient_outputs == ()
    rewrite(graph, {group.info.name: group.info}, Policy(), kind=GraphKind.BACKWARD)
    (returned,) = graph.output_node().args[0]
    assert [node.name for node in returned.args] == ["tangents_0", "tangents_1"]


def test_a_sum_of_a_thousand_gradients_needs_no_recursion(group: StubGroup) -> None:
    def build(graph: Graph, parts: list[Node]) -> Node:
        total = parts[0]
        for part in parts[1:]:
            total = add(graph, total, part)
        return total

    graph = backward_graph(group, build, gradients=2000)
    assert len(facts_of(graph, group, GraphKind.BACKWARD).gradients) == 2000


MISUSES: dict[str, tuple[Callable[[Graph, list[Node]], object], str]] = {
    "scaled": (lambda g, p: g.call_function(aten.mul.Tensor, (p[0], 2.0)), "mul"),
    "added with a factor": (lambda g, p: add(g, p[0], p[1], alpha=2), "add"),
    "added to a number": (lambda g, p: add(g, p[0], 1.0), "add"),
    "converted": (lambda g, p: g.call_function(aten._to_copy.default, (p[0],)), "_to_copy"),
    "stacked": (lambda g, p: g.call_function(aten.stack.default, (p,)), "stack"),
}


@pytest.mark.parametrize(("build", "node"), MISUSES.values(), ids=MISUSES.keys())
def test_a_gradient_that_is_used_otherwise_is_an_error_that_names_the_node(
    build: Callable[[Graph, list[Node]], object], node: str, group: StubGroup
) -> None:
    graph = backward_graph(group, build)
    with pytest.raises(RuntimeError, match=rf"node {node}\S* .*'0/a/0'"):
        facts_of(graph, group, GraphKind.BACKWARD)


def test_a_sum_that_is_returned_twice_is_an_error(group: StubGroup) -> None:
    graph = backward_graph(group, lambda g, p: (p[0], p[0]))
    graph.output_node().args = graph.output_node().args[0]
    with pytest.raises(RuntimeError, match=r"gradients of two flat shards"):
        facts_of(graph, group, GraphKind.BACKWARD)


def test_a_gradient_that_is_a_view_of_a_parameter_is_copied(group: StubGroup) -> None:
    """The gradient of a product by one factor can be the other factor itself."""
    graph = backward_graph(group, lambda g, p: p[0], gradients=1)
    (part,) = [node for node in graph.nodes if node.target is PARAMETER_GRAD]
    with graph.inserting_before(part):
        shard = graph.placeholder("shard")
        marker = graph.call_function(
            torch.ops.compile_fsdp.parameter.default, (shard, group.info.name, 1)
        )
    shard.meta["val"] = torch.empty(group.info.local_numel, device="meta")
    marker.meta["val"] = torch.empty(6, device="meta")
    part.replace_input_with(part.args[0], marker)
    rewrite(graph, {group.info.name: group.info}, Policy(), kind=GraphKind.BACKWARD)
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == [
        "full_a",
        "wait_a",
        "bias",
        "parameter_default_copy",
        "release_a",
        "token_a",
        "wait_reductions",
    ]


def test_gradients_of_a_graph_that_is_no_backward_graph_stay(group: StubGroup) -> None:
    """The body of a higher-order op, or a gradient that is taken inside a forward."""
    graph = backward_graph(group, lambda g, p: p[0])
    before = str(graph)
    rewrite(graph, {group.info.name: group.info}, Policy(), kind=GraphKind.FORWARD)
    assert str(graph) == before


# What cannot be ---------------------------------------------------------------------------------


def test_an_unknown_group_is_an_error(group: StubGroup) -> None:
    def function(shard: torch.Tensor) -> torch.Tensor:
        return aten.exp(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))

    graph = graph_of(function, group.shard)
    with pytest.raises(RuntimeError, match=r"names the parameter group '0/a/0'.*groups: none"):
        find_uses(graph, {}, GraphKind.FORWARD)


def test_a_tensor_that_the_group_does_not_have_is_an_error(group: StubGroup) -> None:
    graph = Graph()
    shard = graph.placeholder("shard")
    marker = torch.ops.compile_fsdp.parameter.default
    graph.output(graph.call_function(marker, (shard, group.info.name, 2)))
    with pytest.raises(RuntimeError, match=r"names tensor 2 of .* '0/a/0', which has 2 tensors"):
        find_uses(graph, {group.info.name: group.info}, GraphKind.FORWARD)


def test_a_shard_that_is_no_graph_input_is_an_error(group: StubGroup) -> None:
    def function(shard: torch.Tensor) -> torch.Tensor:
        shard = aten.mul(shard, 2)
        return aten.exp(torch.ops.compile_fsdp.parameter(shard, group.info.name, 0))

    with pytest.raises(RuntimeError, match=r"computed in the graph by node mul"):
        facts_of(graph_of(function, group.shard), group)


# In AOTAutograd's graphs ------------------------------------------------------------------------


def test_one_output_for_each_flat_shard_is_a_sum_of_gradients() -> None:
    model = TwoBlocks()
    with registered(*model.groups) as infos:
        graph = traced(model, tokens(), *(g.shard for g in model.groups))[GraphKind.BACKWARD].graph
        facts = find_uses(graph, infos, GraphKind.BACKWARD).facts
    assert facts.gradient_outputs == (1, 2, 3)
    assert sorted((use.group, use.index) for use in facts.gradients) == sorted(
        (g.info.name, index) for g in model.groups for index in range(len(g.info.shapes))
    )


def test_cloning_nothing_changes_nothing() -> None:
    model = TwoBlocks()
    with registered(*model.groups):
        graph = traced(model, tokens(), *(g.shard for g in model.groups))[GraphKind.FORWARD].graph
        before = str(graph)
        clone_escaping_views(graph)
    assert str(graph) == before
