"""What must be known about a graph before its runs can be captured and repeated.

    forward    inputs: parameters, buffers | the batch       outputs: results | saved for backward
    backward   inputs: saved for backward  | tangents        outputs: gradients
                       stay in place         are copied               are copied

Asked before a compiler takes the graph to pieces, from names and schemas alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .facts import GraphKind
from .gradients import graph_outputs
from .targets import is_gradient_marker, is_tangent
from .torch_internals import fixed_inputs_and_results, op_schema

_UNCAPTURABLE_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.cudagraph_unsafe,
)


@dataclass(frozen=True)
class CaptureFacts:
    """What one graph is like.

    Attributes:
        kind: which of AOTAutograd's graphs it is.
        fixed: positions of the inputs that the graph reads and writes where they are: parameters
            and buffers, and in a backward all that a forward has saved.
        results: how many of its outputs, the first ones, the program gets to see; the others are
            saved for the backward.
        refusal: why it must never be captured; "" if it may be.
    """

    kind: GraphKind
    fixed: frozenset[int]
    results: int
    refusal: str = ""


def capture_facts(gm: GraphModule, kind: GraphKind, device_type: str) -> CaptureFacts:
    """Look at a graph that nothing has rewritten yet, while AOTAutograd compiles it.

    ``device_type``: of the parameters.
    """
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    results = len(graph_outputs(gm.graph))
    if kind is GraphKind.BACKWARD:
        fixed = [index for index, node in enumerate(inputs) if not is_tangent(node)]
    else:
        fixed, known = fixed_inputs_and_results()
        if kind is GraphKind.FORWARD:
            results = known
    refusal = _refusal(gm, kind, inputs, device_type)
    copied = {node for index, node in enumerate(inputs) if index not in fixed}
    if copied & _written(gm.graph):
        refusal = "it writes into an input"
    return CaptureFacts(kind, frozenset(fixed), results, refusal)


def _written(graph: Graph) -> set[Node]:
    """The nodes that some op of ``graph`` writes into."""
    written: set[Node] = set()
    for node in graph.nodes:
        schema = op_schema(node.target)
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.update([value] if isinstance(value, Node) else [])
    return written


def _refusal(gm: GraphModule, kind: GraphKind, inputs: list[Node], device_type: str) -> str:
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != device_type:
            return f"it reads a tensor on {value.device.type}"
    for node in _calls(gm):
        if kind is not GraphKind.BACKWARD and is_gradient_marker(node):
            return "it computes gradients within a forward"
        tags = getattr(node.target, "tags", ())
        if any(tag in tags for tag in _UNCAPTURABLE_TAGS):
            return f"the values of tensors decide what {node.target} gives"
    return ""


def _calls(gm: GraphModule) -> Iterator[Node]:
    """Every call in ``gm`` and in the bodies of its higher-order ops."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")
