"""Joint graph: no unsharded parameter is saved for backward.

Backward reads parameters again from the shards. The partitioner, which chooses what to save, is
told so by the mark that activation checkpointing uses; all that depends on a marker alone and
costs no more than a copy of it is marked with it: views, casts, copies.

    parameter -> t -> _to_copy -> mm            marked, marked, marked, left to the partitioner
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from .aliases import is_view_of
from .targets import CLONE, is_call, is_marker, parameter_key

_COPIES = (
    CLONE,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default,
    torch.ops.prims.convert_element_type.default,
)


def mark_recompute(graph: Graph) -> dict[Node, str]:
    """Mark markers, and the views, casts and copies of them, to be recomputed in backward.

    Returns:
        The marked nodes, in graph order, each with the group that it is a parameter of.
    """
    marked: dict[Node, str] = {}
    for node in graph.nodes:
        base = node if is_marker(node) else _copied_or_viewed(node, marked)
        if base is None:
            continue
        marked[node] = parameter_key(node)[0] if base is node else marked[base]
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        # One marker may serve two checkpointed regions; by their numbers the partitioner
        # would take it for a result that the first one passes to the second, and save it.
        node.meta.pop("ac_graph_id", None)
    return marked


def _copied_or_viewed(node: Node, bases: Mapping[Node, str]) -> Node | None:
    """The one of ``bases`` that ``node`` copies or views, if it reads no other tensor."""
    tensors = [argument for argument in node.all_input_nodes if _is_tensor(argument)]
    if len(tensors) != 1 or tensors[0] not in bases:
        return None
    return tensors[0] if is_call(node, *_COPIES) or is_view_of(node, tensors[0]) else None


def _is_tensor(node: Node) -> bool:
    """False for sizes, which views of a parameter may depend on."""
    return not isinstance(node.meta.get("val"), torch.SymInt | int)
