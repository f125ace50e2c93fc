"""Which gradients a backward graph holds.

The gradient of a group's flat shard, an output of the backward graph, is a sum over the
gradient markers of the group, made by autograd as the gradients arrive:

    add = part_0 + part_1;  return (..., add + part_2, ...)

Those sums are never computed. They say which gradients there are and how often each counts:
common subexpression elimination may have made one part of two equal ones, so that
``add(part, part)`` means twice the gradient. A summand that is no marker is a gradient that was
not made here: the body of a higher-order op (``torch.cond``) reduces its own and returns a flat
one, which the graph goes on to return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch.fx import Graph, Node
from torch.fx.node import Argument

from .targets import ADD, ParameterKey, is_call, is_gradient_marker, parameter_key


@dataclass(frozen=True)
class GradientSum:
    """An output of a backward graph that is the gradient of a group's flat shard.

    Attributes:
        output: its number among the graph's outputs.
        parts: gradient markers in the order in which autograd adds them up, repeated when added
            repeatedly.
        rest: summands that are no markers and stay in the graph.
        nodes: the gradient markers and additions that make up the sum.
    """

    output: int
    parts: tuple[Node, ...]
    rest: tuple[Node, ...]
    nodes: tuple[Node, ...]


def find_gradient_sums(graph: Graph) -> list[GradientSum]:
    """The outputs of a joint or backward graph that are sums over gradient markers.

    Raises:
        RuntimeError: a gradient marker flows into anything but plain additions that are
            returned, so that its value, which no rank has, would be needed.
    """
    in_sum: dict[Node, str] = {}  # node -> group
    for node in graph.nodes:
        inputs = [argument for argument in node.all_input_nodes if argument in in_sum]
        if is_gradient_marker(node):
            _check_unread(node, inputs)
            in_sum[node] = parameter_key(node)[0]
        elif inputs and node.op != "output":
            _check_plain_addition(node, inputs, in_sum)
            in_sum[node] = in_sum[inputs[0]]
    sums = [
        _gradient_sum(number, value, in_sum)
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


def gradients_by_parameter(sums: Sequence[GradientSum]) -> dict[ParameterKey, tuple[Node, ...]]:
    """The nodes that compute the gradients of each parameter, in the order of the sums."""
    gradients: dict[ParameterKey, list[Node]] = {}
    for part in (part for total in sums for part in total.parts):
        gradients.setdefault(parameter_key(part), []).append(marked_gradient(part))
    return {key: tuple(nodes) for key, nodes in gradients.items()}


def marked_gradient(part: Node) -> Node:
    """The full gradient that a gradient marker passes on."""
    return cast(Node, part.args[0])


def graph_outputs(graph: Graph) -> Sequence[Argument]:
    """What ``graph`` returns: nodes, and None for what it does not compute."""
    returned = graph.output_node().args[0]
    return returned if isinstance(returned, tuple | list) else (returned,)


def _gradient_sum(output: int, total: Node, in_sum: Mapping[Node, str]) -> GradientSum:
    """Take a sum apart, leftmost summand first. Autograd adds each gradient that arrives to what
    it has, so that is the order of arrival. No recursion: a group of 1000 tensors is a sum of
    depth 1000."""
    parts: list[Node] = []
    rest: list[Node] = []
    nodes: dict[Node, None] = {}
    stack = [total]
    while stack:
        node = stack.pop()
        if node not in in_sum:
            rest.append(node)
            continue
        nodes[node] = None
        if is_gradient_marker(node):
            parts.append(node)
        else:
            stack.extend(cast(Node, summand) for summand in reversed(node.args))
    return GradientSum(output, tuple(parts), tuple(rest), tuple(nodes))


def _check_plain_addition(node: Node, inputs: Sequence[Node], in_sum: Mapping[Node, str]) -> None:
    plain = (
        is_call(node, ADD)
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(summand, Node) for summand in node.args)
    )
    if plain and len({in_sum[argument] for argument in inputs}) == 1:
        return
    raise RuntimeError(
        f"node {node.name} ({node.format_node()}) uses the gradient of parameter group "
        f"{in_sum[inputs[0]]!r}, which is reduced inside the graph and has no value there; it may "
        "only be added to gradients of its group. A hook on the flat shard, a double backward or "
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
