"""Joint graph: which groups stay unsharded between forward and backward, written where both see it.

Forward and backward are compiled apart and cached apart, so what one of them relies on must be in
the text of the other: a marker of a kept group says so in its last argument, and the partitioner
copies markers into both graphs.

    parameter(shard, "blocks.1", 0)   ->   parameter(shard, "blocks.1", 0, True)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch.fx import Graph, Node

from compile_fsdp.runtime.group_info import GroupInfo

from .estimates import Keeping
from .facts import GraphKind
from .gradients import find_gradient_sums, marked_gradient
from .keep import JointFacts, JointRead, choose
from .memory import activations
from .policy import Policy
from .steps import format_bytes
from .targets import has_tangents, is_marker, is_tangent, parameter_key
from .uses import group_facts, held_inputs
from .workload import node_facts

_NOTE = "compile_fsdp_keeping"
log = logging.getLogger("compile_fsdp")


def decide_keeping(
    graph: Graph,
    parameters: Mapping[Node, str],
    groups: Mapping[str, GroupInfo],
    policy: Policy,
    *,
    whole_model: bool,
) -> None:
    """Decide which groups are kept, and write it into their markers.

    Args:
        graph: a joint graph; one without tangents is left alone.
        parameters: for markers, and nodes that are nothing but views and copies of one, the group.
        groups: description of every group that the graph may read, by name.
        policy: what the user asked for.
        whole_model: ``groups`` are all groups of the model.
    """
    if not parameters or not has_tangents(graph):
        return
    joint = joint_facts(graph, parameters, whole_model=whole_model)
    keeping = choose(joint, group_facts(groups), policy)
    if keeping.over_budget:
        log.warning(
            "memory_budget: a step is expected to hold %s, %s more than the budget, with %d of %d "
            "groups kept between forward and backward",
            format_bytes(keeping.peak),
            format_bytes(keeping.over_budget),
            len(keeping.kept),
            len(keeping.reasons),
        )
    for node in parameters:
        if is_marker(node):
            node.meta[_NOTE] = keeping
            group, index = parameter_key(node)
            if group in keeping.kept:
                node.args = (node.args[0], group, index, True)


def keeping_noted(graph: Graph) -> Keeping:
    """What was decided on the joint graph that ``graph`` is a part of; nothing, if it was not."""
    for node in graph.nodes:
        if is_marker(node) and _NOTE in node.meta:
            return node.meta[_NOTE]  # type: ignore[no-any-return]
    return Keeping()


def joint_facts(graph: Graph, parameters: Mapping[Node, str], *, whole_model: bool) -> JointFacts:
    """What `keep.choose` wants to know of a joint graph; arguments as of `decide_keeping`."""
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    backward: dict[Node, None] = {}
    reads: list[JointRead] = []
    tangents = [node for node in nodes if is_tangent(node)]
    for node in nodes:
        if is_tangent(node) or any(argument in backward for argument in node.all_input_nodes):
            backward[node] = None
        if node not in parameters and node.op == "call_function":
            read = (parameters[each] for each in node.all_input_nodes if each in parameters)
            for group in dict.fromkeys(read):
                reads.append(JointRead(group, position[node], node in backward))
    facts = node_facts(nodes, held_inputs(nodes, GraphKind.FORWARD), backward)
    return JointFacts(
        size=len(nodes),
        reads=tuple(reads),
        gradients={
            parameter_key(part)[0]: position[marked_gradient(part)]
            for total in find_gradient_sums(graph)
            for part in sorted(total.parts, key=lambda part: position[marked_gradient(part)])
        },
        live=activations(facts, len(nodes)),
        closes=whole_model or any(_is_scalar(node) for node in tangents),
    )


def _is_scalar(node: Node) -> bool:
    return getattr(node.meta.get("val"), "ndim", None) == 0
