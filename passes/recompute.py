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
from .targets import CLONE, is_call, is_marker

_COPIES = (
    CLONE,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default,
    torch.ops.prims.convert_element_type.default,
)


def mark_recompute(graph: Graph) -> None:
    """Mark markers, and the views, casts and copies of them, to be recomputed in backward."""
    marked: dict[Node, None] = {}
    for node in graph.nodes:
        if is_marker(node) or _is_copy_or_view_of(node, marked):
            marked[node] = None
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            # One marker may serve two checkpointed regions; by their numbers the partitioner
            # would take it for a result that the first one passes to the second, and save it.
            node.meta.pop("ac_graph_id", None)


def _is_copy_or_view_of(node: Node, bases: Mapping[Node, None]) -> bool:
    """Whether ``node`` copies or views one of ``bases`` and reads no other tensor."""
    tensors = [argument for argument in node.all_input_nodes if _is_tensor(argument)]
    if len(tensors) != 1 or tensors[0] not in bases:
        return False
    return is_call(node, *_COPIES) or is_view_of(node, tensors[0])


def _is_tensor(node: Node) -> bool:
    """False for sizes, which views of a parameter may depend on."""
    return not isinstance(node.meta.get("val"), torch.SymInt | int)
