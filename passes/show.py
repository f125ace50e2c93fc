"""Print the communication of a rewritten graph, and what computes in between.

    full_root = unshard(primals_1)
    full_blocks_0 = unshard(primals_3)  after full_root
    wait(full_root)                     after full_blocks_0
        embedding
    full_blocks_1 = unshard(primals_4)  after full_root
    wait(full_blocks_0)                 after full_blocks_1
        native_layer_norm ... addmm_1 (4)
    release(full_blocks_0)

Indented lines stand for the compute nodes between two steps: the first, the last, how many.
Views and graph inputs are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

from torch.fx import Graph, Node

from .aliases import is_view_of
from .steps import NO_PLACE
from .targets import (
    GATHER_TOGETHER,
    KEEP,
    REDUCE_INNER,
    REDUCE_TOGETHER,
    RELEASE,
    UNSHARD,
    WAIT,
    WAIT_REDUCTIONS,
    is_call,
    is_communication,
    op_name,
)


def show(graph: Graph) -> str:
    """The communication of ``graph`` as text, one line for each step and each run of compute."""
    rows: list[tuple[str, str]] = []
    compute: list[Node] = []
    for node in graph.nodes:
        if is_communication(node):
            rows += _compute_rows(compute)
            rows.append((_call(node), ", ".join(earlier.name for earlier in _order(node))))
            compute.clear()
        elif node.op == "call_function" and not _is_view(node):
            compute.append(node)
    rows += _compute_rows(compute)
    width = max((len(call) for call, order in rows if order), default=0)
    return "\n".join(f"{call:<{width}}  after {order}" if order else call for call, order in rows)


def _call(node: Node) -> str:
    operands = [*_operands(node), *_places(node)]
    call = f"{op_name(node)}({', '.join(operands)})"
    return call if is_call(node, WAIT, RELEASE, KEEP, WAIT_REDUCTIONS) else f"{node.name} = {call}"


def _places(node: Node) -> list[str]:
    """Where in the arena a gather puts what it gathers, if its graph has one."""
    if is_call(node, GATHER_TOGETHER) and "offsets" in node.kwargs:
        return [f"at {' '.join(map(str, cast(list[int], node.kwargs['offsets'])))}"]
    if is_call(node, UNSHARD) and node.kwargs.get("offset", NO_PLACE) != NO_PLACE:
        return [f"at {node.kwargs['offset']}"]
    return []


def _order(node: Node) -> list[Node]:
    """What a step names for no other reason than order."""
    if is_call(node, RELEASE, KEEP, WAIT_REDUCTIONS):
        return []
    return cast(list[Node], node.args[-1])


def _operands(node: Node) -> list[str]:
    """What a step works on: gradients for a reduction, else the buffer, shard or token."""
    if is_call(node, REDUCE_INNER):
        gradients, _, indices, _ = cast(tuple[Any, ...], node.args)
        return [f"{i}: {gradient.name}" for i, gradient in zip(indices, gradients, strict=True)]
    if is_call(node, REDUCE_TOGETHER):
        gradients, _, counts, indices, _ = cast(tuple[Any, ...], node.args)
        given = iter(zip(indices, gradients, strict=True))
        parts = [[f"{i}: {each.name}" for i, each in islice(given, count)] for count in counts]
        return [" + ".join(", ".join(part) for part in parts)]
    if is_call(node, GATHER_TOGETHER, WAIT_REDUCTIONS):
        return [token.name for token in cast(list[Node], node.args[0])]
    return [cast(Node, node.args[0]).name]


def _compute_rows(nodes: Sequence[Node]) -> list[tuple[str, str]]:
    if not nodes:
        return []
    if len(nodes) == 1:
        return [(f"    {nodes[0].name}", "")]
    return [(f"    {nodes[0].name} ... {nodes[-1].name} ({len(nodes)})", "")]


def _is_view(node: Node) -> bool:
    return any(is_view_of(node, argument) for argument in node.all_input_nodes)
