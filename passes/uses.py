"""Read a graph: which parameters it reads, which gradients it produces. Changes nothing.

Before the passes a graph speaks of parameters in markers:

    weight = parameter(shard, group, index)              a full parameter, from nowhere
    part = parameter_grad(gradient, group, index)        a full gradient, to nowhere

The gradient of a group's flat shard, an output of the backward graph, is the sum of its parts:

    add = part_0 + part_1;  return (..., add + part_2, ...)

Those sums are never computed. They say which gradients there are and how often each counts:
common subexpression elimination may have made one part of two equal ones, so that
``add(part, part)`` means twice the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch.fx import Graph, Node
from torch.fx.node import Argument

from compile_fsdp.runtime.group_info import GroupInfo

from .aliases import AliasTree, alias_trees
from .facts import GradientUse, GraphFacts, GraphKind, GroupFacts, ParameterUse
from .targets import ADD, has_tangents, is_call, is_gradient_marker, is_marker

ParameterKey = tuple[str, int]
"""Group name and index of the tensor in the group."""


@dataclass(frozen=True)
class GraphUses:
    """What the passes found in a graph: facts for the scheduler, nodes for the writers.

    Attributes:
        facts: the plain part.
        nodes: the graph's nodes by position.
        position: the inverse of ``nodes``.
        shards: the graph input that holds a group's flat shard, by group.
        markers: alias trees of the parameter markers in graph order, by group.
        gradients: nodes of the gradients of each parameter, in the order in which autograd adds
            them up; a node may occur twice.
        sums: the gradient markers and the additions over them, in graph order.
    """

    facts: GraphFacts
    nodes: tuple[Node, ...]
    position: Mapping[Node, int]
    shards: Mapping[str, Node]
    markers: Mapping[str, tuple[AliasTree, ...]]
    gradients: Mapping[ParameterKey, tuple[Node, ...]]
    sums: tuple[Node, ...]


def find_uses(graph: Graph, groups: Mapping[str, GroupInfo], kind: GraphKind) -> GraphUses:
    """Find every use of a parameter group in ``graph``.

    Args:
        graph: a forward, backward or inference graph of AOTAutograd's. No view of a marker may
            leave it (see `unshard.clone_escaping_views`).
        groups: description of every group of the model, by name.
        kind: which graph this is.

    Raises:
        RuntimeError: a marker names an unknown group or tensor, its shard is no graph input, or
            a gradient is used for something else than the sum that autograd makes of it.
    """
    nodes = tuple(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    trees = alias_trees(graph, [node for node in nodes if is_marker(node)])
    sums = find_gradient_sums(graph) if kind is GraphKind.BACKWARD else []
    for marker in (*(tree.root for tree in trees), *(part for s in sums for part in s.parts)):
        _check_marker(marker, groups)

    parameters = [_parameter_use(tree, position) for tree in trees if tree.readers]
    gradients = [
        GradientUse(*parameter_key(part), gradient.name, position[gradient])
        for total in sums
        for part in total.parts
        for gradient in (marked_gradient(part),)
    ]
    facts = GraphFacts(
        kind=kind,
        names=tuple(node.name for node in nodes),
        start=next(number for number, node in enumerate(nodes) if node.op != "placeholder"),
        parameters=tuple(sorted(parameters, key=lambda use: use.first)),
        gradients=tuple(gradients),
        gradient_outputs=tuple(total.output for total in sums),
    )
    return GraphUses(
        facts=facts,
        nodes=nodes,
        position=position,
        shards=_shards(trees),
        markers=_by_group(trees),
        gradients=_by_parameter(sums),
        sums=tuple(sorted({n: None for s in sums for n in s.nodes}, key=position.__getitem__)),
    )


def graph_kind(graph: Graph, is_inference: bool) -> GraphKind:
    """Which of AOTAutograd's graphs ``graph`` is."""
    if has_tangents(graph):
        return GraphKind.BACKWARD
    return GraphKind.INFERENCE if is_inference else GraphKind.FORWARD


def group_facts(groups: Mapping[str, GroupInfo]) -> dict[str, GroupFacts]:
    """What a schedule may depend on, of each group."""
    return {
        name: GroupFacts(
            name=name,
            label=info.label,
            gather_bytes=info.full_bytes if info.gathers else 0,
            reduce_bytes=info.full_numel * info.grad_comm_dtype.itemsize,
            finishes_later=info.finishes_later,
        )
        for name, info in groups.items()
    }


def parameter_key(marker: Node) -> ParameterKey:
    """The parameter that a marker, or a gradient marker, stands for."""
    _, group, index = marker.args
    return cast(str, group), cast(int, index)


def marked_gradient(part: Node) -> Node:
    """The full gradient that a gradient marker passes on."""
    return cast(Node, part.args[0])


# Gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientSum:
    """An output of a backward graph that is the gradient of a group's flat shard.

    Attributes:
        output: its number among the graph's outputs.
        parts: gradient markers in the order in which autograd adds them up, repeated when added
            repeatedly.
        nodes: the gradient markers and additions that make up the sum.
    """

    output: int
    parts: tuple[Node, ...]
    nodes: tuple[Node, ...]


def find_gradient_sums(graph: Graph) -> list[GradientSum]:
    """The outputs of a joint or backward graph that are sums of gradient markers.

    Raises:
        RuntimeError: a gradient marker flows into anything but plain additions of its group's
            markers, so that its value, which no rank has, would be needed.
    """
    in_sum: dict[Node, str] = {}  # node -> group
    for node in graph.nodes:
        inputs = [argument for argument in node.all_input_nodes if argument in in_sum]
        if is_gradient_marker(node):
            _check_unread(node, inputs)
            in_sum[node] = parameter_key(node)[0]
        elif inputs and node.op != "output":
            _check_plain_addition(node, in_sum)
            in_sum[node] = in_sum[inputs[0]]
    sums = [
        _gradient_sum(number, value)
        for number, value in enumerate(graph_outputs(graph))
        if isinstance(value, Node) and value in in_sum
    ]
    _check_disjoint(sums)
    return sums


def count_gradients(graph: Graph) -> Counter[ParameterKey]:
    """How many gradients a joint or backward graph has of each parameter."""
    return Counter(
        parameter_key(part) for total in find_gradient_sums(graph) for part in total.parts
    )


def graph_outputs(graph: Graph) -> Sequence[Argument]:
    """What ``graph`` returns: nodes, and None for what it does not compute."""
    returned = graph.output_node().args[0]
    return returned if isinstance(returned, tuple | list) else (returned,)


def _gradient_sum(output: int, total: Node) -> GradientSum:
    """Take a sum apart, leftmost summand first. Autograd adds each gradient that arrives to what
    it has, so that is the order of arrival. No recursion: a group of 1000 tensors is a sum of
    depth 1000."""
    parts: list[Node] = []
    nodes: dict[Node, None] = {}
    stack = [total]
    while stack:
        node = stack.pop()
        nodes[node] = None
        if is_gradient_marker(node):
            parts.append(node)
        else:
            stack.extend(reversed(_summands(node)))
    return GradientSum(output, tuple(parts), tuple(nodes))


def _summands(addition: Node) -> list[Node]:
    return [cast(Node, argument) for argument in addition.args[:2]]


def _check_plain_addition(node: Node, in_sum: Mapping[Node, str]) -> None:
    summands = node.args if is_call(node, ADD) and not node.kwargs else ()
    groups = [in_sum.get(summand) for summand in summands if isinstance(summand, Node)]
    if len(groups) == 2 and groups[0] == groups[1]:
        return
    group = next(in_sum[argument] for argument in node.all_input_nodes if argument in in_sum)
    raise RuntimeError(
        f"node {node.name} ({node.format_node()}) uses the gradient of parameter group "
        f"{group!r}, which is reduced inside the graph and has no value there; only sums of "
        "gradients of one group were expected. A hook on the flat shard, a double backward or "
        'an unknown graph pass can cause this; backend="aot_eager" runs such a model unscheduled'
    )


def _check_disjoint(sums: Sequence[GradientSum]) -> None:
    seen: dict[Node, int] = {}
    for total in sums:
        for node in total.nodes:
            if node in seen:
                raise RuntimeError(
                    f"node {node.name} is part of the gradients of two flat shards, graph "
                    f"outputs {seen[node]} and {total.output}; each flat shard must be an input "
                    "of its own"
                )
            seen[node] = total.output


def _check_unread(part: Node, inputs: Sequence[Node]) -> None:
    if inputs:
        raise RuntimeError(
            f"node {part.name} takes the gradient {inputs[0].name} of a flat shard as the "
            "gradient of a parameter; gradients of gradients are not supported"
        )


def _by_parameter(sums: Sequence[GradientSum]) -> dict[ParameterKey, tuple[Node, ...]]:
    gradients: dict[ParameterKey, tuple[Node, ...]] = {}
    for part in (part for total in sums for part in total.parts):
        key = parameter_key(part)
        gradients[key] = (*gradients.get(key, ()), marked_gradient(part))
    return gradients


# Parameters -------------------------------------------------------------------------------------


def _parameter_use(tree: AliasTree, position: Mapping[Node, int]) -> ParameterUse:
    group, index = parameter_key(tree.root)
    return ParameterUse(
        group=group,
        index=index,
        readers=tuple(reader.name for reader in tree.readers),
        first=position[tree.readers[0]],
        last=position[tree.readers[-1]],
    )


def _shards(trees: Sequence[AliasTree]) -> dict[str, Node]:
    """The flat shard of each group, which must be a graph input: gathers may go anywhere."""
    shards: dict[str, Node] = {}
    for tree in trees:
        group, _ = parameter_key(tree.root)
        shard = cast(Node, tree.root.args[0])
        if shard.op != "placeholder":
            raise RuntimeError(
                f"the flat shard of parameter group {group!r} is computed in the graph by node "
                f"{shard.name} ({shard.format_node()}); it must be a graph input"
            )
        shards.setdefault(group, shard)
    return shards


def _by_group(trees: Sequence[AliasTree]) -> dict[str, tuple[AliasTree, ...]]:
    groups: dict[str, list[AliasTree]] = {}
    for tree in trees:
        groups.setdefault(parameter_key(tree.root)[0], []).append(tree)
    return {group: tuple(members) for group, members in groups.items()}


def _check_marker(marker: Node, groups: Mapping[str, GroupInfo]) -> None:
    group, index = parameter_key(marker)
    if group not in groups:
        known = ", ".join(sorted(groups)) or "none"
        raise RuntimeError(
            f"node {marker.name} names the parameter group {group!r}, which the compiled model "
            f"does not have (groups: {known}); compile the module that was sharded"
        )
    if not 0 <= index < len(groups[group].shapes):
        raise RuntimeError(
            f"node {marker.name} names tensor {index} of parameter group {group!r}, which has "
            f"{len(groups[group].shapes)} tensors; was the model sharded again after compiling?"
        )
